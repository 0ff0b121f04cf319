"""Threads that move pages, as OpenMP counts threads.

The threads of an op wait for each other, and then for the next op, by spinning: 3 ms and more. That
is right where each has a core. Where a thread of ours has taken one, the part of the op that
belongs there does not go on while the others spin, and between ops a core spins that a thread of
ours could have. GNU's OpenMP hardly spins where it manages more threads than there are cores, but
it knows of none that it has not made. So each of ours becomes the master of a team of two that has
nothing to do. How many threads an op has, and so its bits, stays as it is.
"""

from __future__ import annotations

import ctypes
import os

_GNU = "libgomp.so.1"
_FEW_CORES = 4  # on more it takes longer to wake all threads of an op than what ours take from one


def count_this_thread() -> None:
    """OpenMP counts the calling thread as one that needs a core, until it ends. Nothing happens on
    many cores, and where PyTorch has loaded another OpenMP than GNU's."""
    if len(os.sched_getaffinity(0)) > _FEW_CORES:
        return
    try:
        openmp = ctypes.CDLL(_GNU, os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return
    # What the team runs: a function of C that takes what it is given and changes nothing.
    nothing = ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p)
    parallel = openmp.GOMP_parallel
    parallel.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
    parallel.restype = None
    parallel(nothing, None, 2, 0)
