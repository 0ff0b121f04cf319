"""How many threads a disk is read and written by: what ``tensorpager bench-io`` found to be best.

It is remembered for a week as measured rates are (cache.py), for each disk of this machine.
KvikIO's pool is made as large as the tier's threads together need (disk/kvikio.py): it follows.
"""

from __future__ import annotations

import os

from ...disk.batch import THREADS
from . import cache

MOST = 64  # that a file of ours may ask for


def threads_for(folder: str | os.PathLike[str]) -> int:
    """For reads, and as many again for writes, in ``folder``; ``THREADS`` where nothing was
    measured. Never raises."""
    key = _key(folder)
    found = cache.load(key) if key is not None else None
    threads = found.get("threads") if found is not None else None
    return threads if type(threads) is int and 1 <= threads <= MOST else THREADS


def remember_threads(folder: str | os.PathLike[str], threads: int) -> bool:
    """Makes ``threads_for`` give ``threads`` for the disk of ``folder``; whether that was kept."""
    key = _key(folder)
    if key is None:
        return False
    values = {"threads": threads}
    cache.store(key, values)
    return cache.load(key) == values


def _key(folder: str | os.PathLike[str]) -> cache.Key | None:
    try:
        return {**cache.host_key(), "what": "disk threads", **cache.folder_key(folder)}
    except OSError:
        return None
