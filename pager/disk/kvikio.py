"""The disk tier's engine on NVIDIA's KvikIO, which moves device memory as well as host memory.

With GPUDirect Storage (GDS) bytes go between drive and GPU without passing host memory; without it
KvikIO copies through page-locked buffers of its own ("compatibility mode"). What it leaves to its
callers, and where that is done:

1. A future keeps neither its buffer nor its file alive: both calls below hold them until every
   future of theirs is done, whatever happens meanwhile.
2. It does not wait for anybody's stream. Who passes device memory has waited (disk/engine.py).
3. It has one pool of threads in the process, for all files and both directions. It is made large
   enough that no caller queues behind another, and never smaller. Their page-locked buffers hold a
   task each (``batch.TASK_BYTES``) instead of 16 MiB, because no budget counts them.
4. It opens the file by a path, twice (with O_DIRECT and without). Ours has no name, so the path is
   that of its descriptor, and what was opened is checked to be that file. A forked child closes
   both at once, because a file without a name takes up space while any process has it open.
5. Its threads do not exist in a forked child, where whoever waited for them would wait for ever:
   a child has no such engine (``auto`` is ``posix`` there), and ends without KvikIO's destructors.
6. It gives up on EINTR, and its errors are ``RuntimeError`` with a text: ``_translated``.
7. cuFile copies device memory that was not registered through buffers of its own on the GPU.

Settings are of the whole process, other users of KvikIO included: an engine with O_DIRECT turns
``auto_direct_io_*`` on for good, one without it turns them off while it opens its own file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

from ..errors import PagerError

_DIRECT = ("auto_direct_io_read", "auto_direct_io_write")
_LIBRARY = "libcuda.so.1"
_MAPPED_BYTES = 2 << 20
"""Device memory of the arena is mapped in pieces of this many bytes, at multiples of it. What is
handed to cuFile stays inside one, because it is told the allocation that a pointer belongs to."""

_settings = threading.Lock()
_used = False  # so KvikIO has threads
_lost_threads = False
_codes = {os.strerror(code): code for code in errno.errorcode}


def _kvikio() -> Any:
    """KvikIO with its settings, loaded when first needed. Raises whatever its import raises."""
    kvikio = import_module("kvikio")
    import_module("kvikio.defaults")
    return kvikio


def why_not() -> str | None:
    """Why KvikIO cannot be used in this process, with the remedy; ``None`` if it can."""
    if _lost_threads:
        return (
            "KvikIO's threads did not come along when this process was forked; start "
            "processes with 'spawn'"
        )
    try:
        _kvikio()
    except Exception as error:  # without its cuFile library it raises RuntimeError
        return (
            f"KvikIO cannot be imported ({type(error).__name__}: {error}); "
            "pip install 'tensorpager[gds]'"
        )
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return (
            f"there is no CUDA driver ({_LIBRARY}), and KvikIO does nothing without one; install "
            "NVIDIA's driver"
        )
    return None


def has_gds() -> bool:
    """Whether cuFile says that GPUDirect Storage works here, and KvikIO is not told to do without
    (``KVIKIO_COMPAT_MODE``); KvikIO must be usable."""
    try:
        driver = import_module("kvikio.cufile_driver")
        compat = import_module("kvikio.defaults").is_compat_mode_preferred()
        return bool(driver.get("is_gds_available")) and not compat
    except Exception:  # no cuFile library, no driver, or none that can be asked
        return False


class KvikioEngine:
    """Implements :class:`~.io_engine.Engine` on the file of ``fd``, which stays its owner's.

    ``direct``: whether to bypass the page cache; the attribute says whether that could be had.
    ``callers``: how many threads call at once. ``task_bytes``: the largest piece that one of
    KvikIO's threads moves.

    Raises PagerError, and leaves nothing open, if KvikIO cannot be used on the file.
    """

    name = "kvikio"

    def __init__(
        self, fd: int, *, direct: bool, callers: int, task_bytes: int, takes_device: bool
    ) -> None:
        reason = why_not()
        if reason is not None:
            raise PagerError(f"io_engine='kvikio': {reason}, or pass io_engine='posix'")
        kvikio = _kvikio()
        self.takes_device = takes_device
        self._task_bytes = task_bytes
        global _used
        with _settings, _direct_io(direct):
            _used = True
            if kvikio.defaults.get("num_threads") < callers:
                kvikio.defaults.set("num_threads", callers)
            if "KVIKIO_BOUNCE_BUFFER_SIZE" not in os.environ:
                kvikio.defaults.set("bounce_buffer_size", task_bytes)
            try:
                self._file = kvikio.CuFile(f"/proc/self/fd/{fd}", "r+")
            except RuntimeError as error:
                raise PagerError(
                    f"io_engine='kvikio': the paging file cannot be opened ({error}); is /proc "
                    "mounted? Or pass io_engine='posix'"
                ) from error
        try:
            self._descriptors = _check_same_file(self._file.fileno(), fd)
            self.direct = direct and bool(self._file.is_direct_io_supported())
        except BaseException:
            self._file.close()
            raise
        _engines.add(self)

    def write(self, buffers: Sequence[Any], offset: int) -> None:
        self._transfer(self._file.pwrite, buffers, offset)

    def read(self, buffers: Sequence[Any], offset: int) -> None:
        self._transfer(self._file.pread, buffers, offset)

    def close(self) -> None:
        _engines.discard(self)
        self._file.close()

    def _transfer(self, submit: Callable[..., Any], buffers: Sequence[Any], offset: int) -> None:
        pieces: list[tuple[Any, int]] = []
        for buffer in buffers:
            for piece in _unmixed(buffer):
                pieces.append((piece, offset))
                offset += piece.nbytes
        while pieces:
            pieces = self._once(submit, pieces)

    def _once(
        self, submit: Callable[..., Any], pieces: Sequence[tuple[Any, int]]
    ) -> list[tuple[Any, int]]:
        """Moves all ``pieces``, and returns those that were interrupted."""
        again: list[tuple[Any, int]] = []
        failure: BaseException | None = None
        futures: list[tuple[Any, tuple[Any, int]]] = []
        try:
            for piece in pieces:
                future = submit(piece[0], piece[0].nbytes, piece[1], self._task_bytes)
                futures.append((future, piece))
        except BaseException as error:
            failure = _translated(error)
        for future, piece in futures:  # all of them: none may use a buffer after this
            try:
                moved = future.get()
                if moved != piece[0].nbytes:
                    missing = piece[0].nbytes - moved
                    raise OSError(errno.EIO, f"transfer stopped {missing} bytes early")
            except BaseException as error:
                error = _translated(error)
                if isinstance(error, InterruptedError):
                    again.append(piece)
                else:
                    failure = failure or error
        if failure is not None:
            raise failure
        return again

    def _forget_in_child(self) -> None:
        for descriptor in self._descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        # Its destructor would close the same numbers again, which may be other files' by then.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._file))


def _unmixed(buffer: Any) -> Iterator[Any]:
    """Device memory, which is a tensor, in pieces that do not cross a mapping; host memory, an
    array, as it is."""
    if not hasattr(buffer, "data_ptr"):
        yield buffer
        return
    start = 0
    while start < buffer.nbytes:
        room = _MAPPED_BYTES - (buffer.data_ptr() + start) % _MAPPED_BYTES
        yield buffer[start : start + room]
        start += room


def _translated(error: BaseException) -> BaseException:
    """KvikIO's ``RuntimeError`` as the ``OSError`` that its text ends with."""
    if not isinstance(error, RuntimeError):
        return error
    text = str(error)
    reason = text.rpartition(": ")[2]
    if text.endswith("POSIX error: Operation not permitted"):  # what it says for EBADF
        code = errno.EBADF
    elif reason == "EOF":
        return OSError(errno.EIO, "the file ended early")
    else:
        code = _codes.get(reason, 0)
    translated = OSError(code, reason) if code else OSError(errno.EIO, f"KvikIO: {reason}")
    translated.__cause__ = error
    return translated


@contextlib.contextmanager
def _direct_io(on: bool) -> Iterator[None]:
    """KvikIO's settings for the file that is opened inside; those for O_DIRECT stay on after it."""
    kvikio = _kvikio()
    before = {name: kvikio.defaults.get(name) for name in _DIRECT}
    kvikio.defaults.set(dict.fromkeys(_DIRECT, on))
    try:
        yield
    finally:
        if not on:
            kvikio.defaults.set(before)


def _check_same_file(opened: int, fd: int) -> list[int]:
    """Refuses anything but the private, nameless file of ``fd``; KvikIO's descriptors of it."""
    wanted, status = os.fstat(fd), os.fstat(opened)
    same = (wanted.st_dev, wanted.st_ino) == (status.st_dev, status.st_ino)
    if not same or status.st_nlink or stat.S_IMODE(status.st_mode) != 0o600:
        raise PagerError(
            "io_engine='kvikio': what was opened is not the paging file (0600, without a name); "
            "is /proc mounted? Or pass io_engine='posix'"
        )
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists the folder is gone
            other = os.fstat(int(entry))
            if (other.st_dev, other.st_ino) == (status.st_dev, status.st_ino):
                found.append(int(entry))
    return [number for number in found if number != fd]


_engines: weakref.WeakSet[KvikioEngine] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    global _lost_threads
    for engine in list(_engines):
        engine._forget_in_child()
    _engines.clear()
    if not _used or _lost_threads:
        return
    _lost_threads = True
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # glibc; last in, first out: before KvikIO's destructors
        libc.on_exit(libc._exit, None)  # called with the exit status
        libc.on_exit(libc.fcloseall, None)


os.register_at_fork(after_in_child=_after_fork_in_child)
