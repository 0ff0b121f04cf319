"""Files that appear whole or not at all, and files that are read by mapping them.

Saving, all in the folder of the file that is written::

    file without a name (O_TMPFILE) -- bytes, fsync --> linked as .NAME.saving-… --> renamed to NAME
    (where the file system has none: .NAME.saving-… is made at once, O_EXCL)

A reader of NAME sees the older file or the new one. An error leaves the older one and nothing else,
and so does a kill at almost any moment: a name is there only between the last two system calls.
What a kill leaves in there, or where there is no O_TMPFILE, the next save of NAME removes. It knows
by the lock: who writes holds one (flock), and the kernel drops it when the process ends.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import torch

from ..disk.file import open_tmpfile
from ..errors import PagerError

_NO_LINK = {errno.EOPNOTSUPP, errno.EPERM, errno.ENOENT, errno.EXDEV}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A new file, mode 0600, that becomes ``path`` when the block ends well.

    ``path`` as a symbolic link is replaced itself. Raises ``OSError``, with an older file untouched
    and no other left.
    """
    folder = path.absolute().parent
    remove_stale(path)
    name: Path | None = None
    descriptor = open_tmpfile(folder)
    if descriptor is None:
        descriptor, name = _open_named(path)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            file.flush()
            os.fsync(descriptor)
            if name is None:
                name = _link(descriptor, path)
            os.replace(name, path)
            name = None
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise OSError(
                error.errno,
                f"{error.strerror}: nothing was saved, an older file is as it was; make room in "
                f"{folder}, or save to another folder",
                os.fspath(path),
            ) from error
        raise
    finally:
        if name is not None:
            with suppress(FileNotFoundError):
                os.unlink(name)
    sync_folder(folder)


def reserve(file: BinaryIO, nbytes: int) -> None:
    """``OSError`` now rather than later, if the file system has no room for ``nbytes``."""
    if nbytes:
        os.posix_fallocate(file.fileno(), 0, nbytes)


def remove_stale(path: Path) -> None:
    """Delete what a killed process left of saving ``path``; not what a living one is writing."""
    folder = path.absolute().parent
    for found in sorted(folder.glob(f"{glob.escape(_prefix(path))}*")):
        with suppress(OSError):  # another's file, or another has just removed it
            descriptor = os.open(found, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(found)
            finally:
                os.close(descriptor)


def _prefix(path: Path) -> str:
    return f".{path.name}.saving-"


def _temporary(path: Path) -> Path:
    return path.absolute().parent / f"{_prefix(path)}{secrets.token_hex(8)}"


def _open_named(path: Path) -> tuple[int, Path]:
    name = _temporary(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o600), name


def _link(descriptor: int, path: Path) -> Path:
    """A name for the nameless file. Where /proc is missing the bytes are copied to a named one."""
    name = _temporary(path)
    try:
        os.link(f"/proc/self/fd/{descriptor}", name, follow_symlinks=True)
        return name
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
    named, name = _open_named(path)
    try:
        offset, size = 0, os.fstat(descriptor).st_size
        while offset < size:
            offset += os.sendfile(named, descriptor, offset, size - offset)
        os.fsync(named)
    except BaseException:
        os.unlink(name)
        raise
    finally:
        os.close(named)
    return name


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class MappedFile:
    """A file whose tensors are read when they are used, and lie in no memory of the process's own.

    ``size``: its bytes. The mapping lasts as long as its tensors do. Writes to these stay in the
    process. The file must not be shortened meanwhile (replacing it, as saves here do, is fine).
    """

    def __init__(self, descriptor: int, what: str) -> None:
        self.what = what
        self.size = os.fstat(descriptor).st_size
        self._map = (
            mmap.mmap(
                descriptor,
                self.size,
                flags=mmap.MAP_PRIVATE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
            if self.size
            else None
        )

    @classmethod
    def open(cls, path: Path) -> MappedFile:
        """Raises ``OSError``; ``PagerError`` for what is no ordinary file."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not os.path.isfile(path):
                raise PagerError(f"{path} is not a file; name a checkpoint")
            return cls(descriptor, os.fspath(path))
        finally:
            os.close(descriptor)

    def bytes(self, offset: int, count: int) -> bytes:
        """Raises ``PagerError`` if the file ends before."""
        self._check(offset, count)
        return b"" if self._map is None else self._map[offset : offset + count]

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """``numel`` elements from byte ``offset`` on, one-dimensional. Raises as :meth:`bytes`."""
        self._check(offset, numel * dtype.itemsize)
        if not numel or self._map is None:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)

    def drop(self) -> None:
        """Memory that caches what was read so far is given back. What was written is lost."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def _check(self, offset: int, count: int) -> None:
        if offset < 0 or count < 0 or offset + count > self.size:
            raise PagerError(
                f"{self.what} is cut off: it has {self.size} bytes, and bytes {offset} to "
                f"{offset + count} are wanted; copy or save it again"
            )
