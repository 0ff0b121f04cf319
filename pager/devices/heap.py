"""The C heap's habits, which decide how much of freed dense memory goes back at once.

By default glibc keeps freed blocks of up to 32 MiB for reuse: fast, but what tensors no longer use
then still counts in RSS and against RLIMIT_DATA (135 MB of 740 in a run with a budget of 224 MB).
Under a tight budget large blocks are mapped one by one and unmapped when freed.
"""

import ctypes
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
TIGHT_BYTES = 128 << 10
ROOMY_BYTES = 32 << 20

_libc: Any = ctypes.CDLL(None)


def map_blocks_from(nbytes: int) -> None:
    """Process-wide: blocks of at least ``nbytes`` are mapped one by one, and given back when they
    are freed. A C library that has no such setting is left alone."""
    if not hasattr(_libc, "mallopt"):
        return
    _libc.mallopt(_M_MMAP_THRESHOLD, nbytes)
    _libc.mallopt(_M_TRIM_THRESHOLD, 2 * max(nbytes, TIGHT_BYTES))
    if nbytes < ROOMY_BYTES:
        give_back_idle()


def give_back_idle() -> None:
    """To the system: whole pages that the C heap has and nobody uses."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
