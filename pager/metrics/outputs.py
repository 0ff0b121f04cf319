"""Where records go: memory that ends with the process, and a file if one was asked for.

Note: why nothing is left behind
--------------------------------
The memory is a ``memfd`` by the name ``NAME``. It is in no folder; readers of the same user find it
as ``/proc/PID/fd/N``. However the process ends, it is gone.

A file with a name of the user's choice is for readers that cannot look into ``/proc`` (another
container). It is removed by ``close``, and at exit. After a kill there is nobody to do it. Such a
file is known by its lock: writers hold one (``flock``) that the kernel drops with the process. The
next training of that name takes its place, and ``tensorpager top`` removes it.

Records are written by ``pwrite``, never through a mapping: a file that somebody truncates, or a
full disk, is then an error and not a signal that ends the training.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .format import MAGIC, RECORD_BYTES, MetricsError

NAME = "tensorpager-metrics"
_MFD_CLOEXEC, _MFD_NOEXEC_SEAL = 1, 8
_LOCK_TRIES, _LOCK_SECONDS = 10, 0.01  # a reader that looks holds the lock for an instant


class _Output(NamedTuple):
    fd: int
    path: Path | None  # None: the memory


class Outputs:
    """Of one Pager. Any thread may write and close."""

    def __init__(self, path: Path | None) -> None:
        """Raises ``MetricsError`` if ``path`` cannot be had; nothing is left open then."""
        self._lock = threading.RLock()
        self._outputs = [_Output(_memory(), None)]
        if path is not None:
            try:
                self._outputs.append(_Output(_claim(path), path.absolute()))
            except BaseException:
                self.close()
                raise

    def write(self, record: bytes) -> None:
        """To all of them. An output that fails is given up, with a warning; never raises."""
        with self._lock:
            for output in self._outputs:
                try:
                    os.pwrite(output.fd, record, 0)
                except OSError as error:
                    self._outputs = [other for other in self._outputs if other is not output]
                    _release(output)
                    where = output.path or "memory"
                    warnings.warn(
                        f"metrics are no longer written to {where}: {error.strerror}", stacklevel=2
                    )

    def close(self) -> None:
        """Give them back; the file is removed. Idempotent."""
        with self._lock:
            outputs, self._outputs = self._outputs, []
            for output in outputs:
                _release(output)

    def forget(self) -> None:
        """In a forked child: they are the parent's."""
        self._lock = threading.RLock()  # the other may be held by a thread that is not here
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            with suppress(OSError):
                os.close(output.fd)


def _memory() -> int:
    if not hasattr(os, "memfd_create"):
        raise MetricsError("metrics need memfd_create, which only Linux has; use metrics=None")
    try:
        return os.memfd_create(NAME, _MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError:  # before Linux 6.3 there is no such flag
        return os.memfd_create(NAME, _MFD_CLOEXEC)


def _release(output: _Output) -> None:
    with suppress(OSError):
        if output.path is not None:
            remove_if_same(output.path, output.fd)
        os.close(output.fd)


def remove_if_same(path: Path, fd: int) -> None:
    """Remove ``path`` if it is still the file that ``fd`` is open on."""
    mine = os.fstat(fd)
    with suppress(FileNotFoundError):
        found = os.stat(path, follow_symlinks=False)
        if (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino):
            os.unlink(path)


def is_locked(fd: int) -> bool:
    """Whether the writer of this file lives."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def open_own(path: Path, flags: int) -> int:
    """Open a regular file of this user; links are not followed. Raises ``MetricsError``."""
    safe = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        fd = os.open(path, flags | safe)
    except OSError as error:
        what = "it is a symbolic link" if path.is_symlink() else error.strerror
        raise MetricsError(f"{path} cannot be opened: {what}") from error
    facts = os.fstat(fd)
    reason = ""
    if not stat.S_ISREG(facts.st_mode):
        reason = "is not a regular file"
    elif facts.st_uid != os.geteuid():
        reason = f"belongs to user {facts.st_uid} and you are {os.geteuid()}"
    if reason:
        os.close(fd)
        raise MetricsError(f"{path} {reason}; only your own metrics files are read")
    return fd


def _claim(path: Path) -> int:
    """A new, locked file of mode 0600 at ``path``. One that a killed training left is replaced."""
    with suppress(FileNotFoundError):
        _remove_stale(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise MetricsError(
            f"metrics={os.fspath(path)!r} cannot be made: {error.strerror}; name a file in a "
            "folder that you can write to, or pass metrics=True"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.unlink(path)
        os.close(fd)
        raise MetricsError(
            f"metrics={os.fspath(path)!r}: this file system has no locks ({error.strerror}); "
            "name a file on another one, such as /dev/shm"
        ) from error
    return fd


def _remove_stale(path: Path) -> None:
    """Make way at ``path``, but for nothing else than a metrics file that nobody writes."""
    os.stat(path, follow_symlinks=False)
    fd = open_own(path, os.O_RDONLY)
    try:
        found = os.pread(fd, RECORD_BYTES, 0)
        if found[: len(MAGIC)] != MAGIC:
            raise MetricsError(
                f"metrics={os.fspath(path)!r} exists and is not a metrics file; name another one"
            )
        for _ in range(_LOCK_TRIES):
            if not is_locked(fd):
                remove_if_same(path, fd)
                return
            time.sleep(_LOCK_SECONDS)
    finally:
        os.close(fd)
    raise MetricsError(
        f"metrics={os.fspath(path)!r} is being written by another training; name another file"
    )
