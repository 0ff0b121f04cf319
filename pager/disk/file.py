"""The disk tier's file: making it, and moving whole buffers to and from it.

Nothing here knows about pages or checksums. Offsets and lengths are bytes.
"""

import errno
import fcntl
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...planner.sizes import format_bytes
from ..errors import PagerError
from .mounts import IN_RAM, mount_of

Bytes = npt.NDArray[np.uint8]

ALIGNMENT = 4096
"""O_DIRECT's unit for addresses, offsets and lengths; no common device needs more."""

_MAX_BUFFERS = min(os.sysconf("SC_IOV_MAX"), 1024)


def aligned_bytes(nbytes: int) -> Bytes:
    """A uint8 array that starts at a page of memory.

    Shared memory, not private: a fork gives private memory that the kernel is reading into a
    second owner, and one of the two would miss the data.
    """
    return np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)


def is_aligned(buffer: Bytes) -> bool:
    return buffer.ctypes.data % ALIGNMENT == 0


def open_unlinked(directory: str, nbytes: int) -> int:
    """Descriptor of a new file of exactly ``nbytes``, allocated on disk, that has no name.

    It vanishes with its last descriptor, however the process ends. Raises PagerError if that
    cannot be had, and then leaves nothing behind.
    """
    if not os.path.isdir(directory):
        what = "is not a directory" if os.path.exists(directory) else "does not exist"
        raise PagerError(f"disk_path={directory!r} {what}; create it, or name another directory")
    refuse_if_too_large(directory, nbytes, have=0)
    try:
        fd = _open_nameless(directory)
    except OSError as error:
        raise PagerError(
            f"disk_path={directory!r}: no file can be created there ({error.strerror}); make the "
            "directory writable for this user, or name another one"
        ) from error
    try:
        os.fchmod(fd, 0o600)
        allocate(fd, directory, 0, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_tmpfile(directory: str | os.PathLike[str], flags: int = 0) -> int | None:
    """A new file without a name, mode 0600; ``None`` if the file system has none. OSError."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            return None
        raise


def _open_nameless(directory: str) -> int:
    found = open_tmpfile(directory, os.O_EXCL)
    if found is not None:
        return found
    fd, path = tempfile.mkstemp(prefix="tensorpager-", dir=directory)
    try:
        os.unlink(path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def refuse_if_too_large(directory: str, nbytes: int, *, have: int, fd: int | None = None) -> None:
    """Raises PagerError if the file system cannot hold ``nbytes``, of which ``have`` are ours.
    ``fd``: of a file there, for when the directory has gone."""
    try:
        status = os.statvfs(directory if fd is None else fd)
    except OSError as error:
        raise PagerError(
            f"disk_path={directory!r} cannot be asked for its free space ({error.strerror}); is "
            "its file system still mounted? Name another directory"
        ) from error
    free = status.f_bavail * status.f_frsize
    if nbytes - have > free:
        missing = format_bytes(nbytes - have - free)
        raise PagerError(
            f"disk_budget={nbytes} ({format_bytes(nbytes)}) does not fit in {directory!r}: "
            f"{free} bytes ({format_bytes(free)}) are free; make room for {missing} more, lower "
            "disk_budget, or set disk_path to a larger disk"
        )


def allocate(fd: int, directory: str, old: int, new: int) -> None:
    """Lengthens the file from ``old`` to ``new`` bytes, all allocated. On failure it is ``old``."""
    try:
        os.posix_fallocate(fd, old, new - old)
    except OSError as error:
        os.ftruncate(fd, old)
        raise PagerError(
            f"disk_budget={new} ({format_bytes(new)}) cannot be reserved in {directory!r} "
            f"({error.strerror}); lower disk_budget, or set disk_path to another disk"
        ) from error


def enable_direct(fd: int, page_size: int, nbytes: int) -> bool:
    """Turns O_DIRECT on if this file system, device and page size work with it.

    Tried by writing and reading the second page, the one with the most awkward offset, from memory
    that is aligned no better than it has to be. Call it before there is anything in the file.
    """
    if page_size % ALIGNMENT:
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    page = aligned_bytes(page_size + ALIGNMENT)[ALIGNMENT:]
    offset = page_size if nbytes >= 2 * page_size else 0
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        if os.pwritev(fd, [page], offset) == os.preadv(fd, [page], offset) == page_size:
            return True
    except OSError:
        pass
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return False


def transfer(
    call: Callable[[int, Sequence[Any], int], int],
    fd: int,
    buffers: Sequence[Any],
    offset: int,
    unit: int = 1,
) -> None:
    """``call`` (``os.pwritev`` or ``os.preadv``) until all ``buffers`` are written or filled, one
    after another. ``unit``: what ends early is resumed at a multiple of this many bytes. OSError if
    the file ends or fails before that."""
    rest = list(buffers)
    while rest:
        try:
            moved = call(fd, rest[:_MAX_BUFFERS], offset)
        except InterruptedError:
            continue
        moved -= moved % unit
        if moved <= 0:
            missing = sum(buffer.nbytes for buffer in rest)
            raise OSError(errno.EIO, f"transfer stopped {missing} bytes early")
        offset += moved
        while rest and moved >= rest[0].nbytes:
            moved -= rest.pop(0).nbytes
        if moved:
            rest[0] = rest[0][moved:]


def open_scratch_files(folder: str | None, nbytes: int) -> Iterator[int]:
    """For bytes that are not to be memory: nameless files in ``folder`` and in that for temporary
    files, all of each allocated; the caller closes them. None for what is too much, and where there
    is no disk."""
    for place in (folder, tempfile.gettempdir()):
        mount = None if place is None else mount_of(place)
        if place is None or (mount is not None and mount.kind in IN_RAM):
            continue
        try:
            descriptor = open_unlinked(place, nbytes)
        except PagerError:
            continue
        yield descriptor


class BounceBuffers(threading.local):
    """One aligned buffer for each thread, made when first asked for."""

    _buffer: Bytes | None = None

    def get(self, nbytes: int) -> Bytes:
        if self._buffer is None or self._buffer.nbytes < nbytes:
            self._buffer = aligned_bytes(nbytes)
        return self._buffer[:nbytes]
