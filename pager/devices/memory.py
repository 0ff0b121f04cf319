"""Private anonymous address ranges, reserved once and committed from the front.

::

    address                committed                          reserved
    |-- readable, writable --|-- PROT_NONE: costs no memory, no RLIMIT_DATA --|

The border between the two moves with :meth:`Region.commit`; what lies behind it goes back to the
operating system at once. Ranges are not inherited by forked children (``MADV_DONTFORK``): a child
that wrote to a page under direct I/O would race with it.
"""

import ctypes
import mmap
import os

import numpy as np
import numpy.typing as npt

from ..errors import PagerError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
for _name in ("mprotect", "madvise"):
    getattr(_libc, _name).argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_PROT_NONE = 0
_ALIGNMENT = 2 << 20  # a transparent huge page; pages of any size up to that are aligned to it too


def _check(result: int, what: str, nbytes: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise PagerError(
            f"{what} of {nbytes} bytes failed: {os.strerror(code)}; lower the budget, or raise the "
            "limit that the process runs under (ulimit -v, ulimit -d, the container's memory limit)"
        )


def map_memory(nbytes: int, *, at: int | None = None, file: int | None = None) -> int:
    """Map ``nbytes`` and return the address.

    By default nothing is there, and reading or writing crashes. ``at``: an address mapped here
    before, whose pages this replaces at once. ``file``: a descriptor, whose bytes are there to be
    read. Raises ``PagerError``.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    protection = _PROT_NONE
    if file is not None:
        flags, protection = mmap.MAP_SHARED, mmap.PROT_READ
    if at is not None:
        flags |= _MAP_FIXED
    handle = -1 if file is None else file
    address = _libc.mmap(at, nbytes, protection, flags, handle, 0)
    if address is None or address == _MAP_FAILED:
        _check(-1, "reserving address space", nbytes)
    assert isinstance(address, int)
    return address


def map_bytes(nbytes: int, at: int) -> npt.NDArray[np.uint8]:
    """Private memory at ``at``, as :func:`map_memory` has mapped it before, to be filled."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    _check(_libc.mprotect(at, nbytes, protection), "committing memory", nbytes)
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(at), dtype=np.uint8)


def make_read_only(nbytes: int, at: int) -> None:
    """What lies there can be read from now on, and not be written."""
    _check(_libc.mprotect(at, nbytes, mmap.PROT_READ), "protecting memory", nbytes)


def unmap_memory(address: int, nbytes: int) -> None:
    """Undo :func:`map_memory`."""
    _libc.munmap(address, nbytes)


class Region:
    """``reserved_bytes`` of address space of which the first ``committed_bytes`` may be used."""

    def __init__(self, reserved_bytes: int, committed_bytes: int):
        self.reserved_bytes = reserved_bytes
        self.committed_bytes = 0
        self._span = reserved_bytes + _ALIGNMENT
        self._process = os.getpid()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        base = _libc.mmap(None, self._span, _PROT_NONE, flags, -1, 0)
        if base is None or base == _MAP_FAILED:
            self._base: int | None = None
            _check(-1, "reserving address space", reserved_bytes)
        self._base = base
        assert base is not None
        self.address: int = -(-base // _ALIGNMENT) * _ALIGNMENT
        self._advise(mmap.MADV_DONTFORK, reserved_bytes)
        self._advise(mmap.MADV_HUGEPAGE, reserved_bytes)
        try:
            self.commit(committed_bytes)
        except BaseException:
            self.close()
            raise

    def _advise(self, advice: int, nbytes: int) -> None:
        if nbytes:  # advice may be unknown to this kernel (huge pages); nothing depends on it
            _libc.madvise(self.address, nbytes, advice)

    def commit(self, nbytes: int) -> None:
        """Move the border to ``nbytes``. Bytes behind it are lost and given back at once."""
        assert 0 <= nbytes <= self.reserved_bytes, (nbytes, self.reserved_bytes)
        page = mmap.PAGESIZE
        new, old = -(-nbytes // page) * page, -(-self.committed_bytes // page) * page
        if new > old:
            result = _libc.mprotect(self.address + old, new - old, mmap.PROT_READ | mmap.PROT_WRITE)
            _check(result, "committing memory", new - old)
        elif new < old:
            start, length = self.address + new, old - new
            _check(_libc.madvise(start, length, mmap.MADV_DONTNEED), "giving back memory", length)
            _check(_libc.mprotect(start, length, _PROT_NONE), "giving back memory", length)
        self.committed_bytes = nbytes

    def discard(self, start: int, nbytes: int) -> None:
        """Committed bytes, whole pages of the system, are lost and take no memory until written."""
        result = _libc.madvise(self.address + start, nbytes, mmap.MADV_DONTNEED)
        _check(result, "giving back memory", nbytes)

    def array(self) -> npt.NDArray[np.uint8]:
        """The whole reserved range as bytes; only what is committed may be touched."""
        if self.reserved_bytes == 0:
            return np.empty(0, dtype=np.uint8)
        raw = (ctypes.c_uint8 * self.reserved_bytes).from_address(self.address)
        return np.frombuffer(raw, dtype=np.uint8)

    def close(self) -> None:
        """Give the range back. Idempotent; arrays made before must not be touched any more.

        In a forked child the range does not exist and its addresses may be somebody else's.
        """
        if self._base is not None:
            if self._process == os.getpid():
                _libc.munmap(self._base, self._span)
            self._base = None

    def __del__(self) -> None:
        if getattr(self, "_base", None) is not None:
            self.close()
