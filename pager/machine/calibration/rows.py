"""From how many bytes of a page on it is faster to copy the page than to read its rows in place.

Rows in the host tier can be fetched one by one (``host_rows.py``), or their pages copied to the
device. What is measured is the bytes' way, host time included: ``kernels/zero_copy.py`` against one
copy for each page. What else bringing a page costs, ``host_rows.py`` sees while training.
Remembered as the other rates are, for each size of row. Takes a tenth of a second or so, and
scratch memory of at most 12 MiB or two pages, a third of it, or one page, on the device.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ....kernels.zero_copy import calibrate_crossover, fetch_blocks, row_blocks_of
from ...devices.device import Bytes, Device
from . import cache
from .measure import scratch, scratch_room
from .timing import median_seconds, since

LEAST_ROW_BYTES = 16
_REPEATS = 3
_MOST_PAGES = 64  # in one measurement


class Border(NamedTuple):
    """most_bytes : of a page, that are faster to read in place; 0 if none, half a page at most.
    page_us : what copying a page takes."""

    most_bytes: int
    page_us: float


NEVER = Border(0, 1.0)


def row_size(row_bytes: int, page_size: int) -> int:
    """The size of row whose crossover is used for rows of ``row_bytes``: a power of two, no larger
    than they are or than half a page."""
    most = max(LEAST_ROW_BYTES, min(row_bytes, page_size // 2))
    return 1 << (most.bit_length() - 1)


def calibrate_rows(*, backend: Device, page_size: int, row_bytes: int) -> Border:
    """For rows of ``row_bytes`` (``row_size`` gives it); ``NEVER`` where the device has no room to
    measure.

    No more than half a page: one of which more is wanted is likely to be wanted again, so it should
    come. From this machine's cache, or measured and put there.
    """
    key = cache.machine_key(backend.device, None, page_size) | {"row_bytes": row_bytes}
    known = _checked(cache.load(key), page_size)
    if known is not None:
        return known
    try:
        found = measure_rows(backend, page_size, row_bytes)
    except torch.OutOfMemoryError:
        return NEVER
    cache.store(key, found._asdict())
    return found


def _checked(values: dict[str, Any] | None, page_size: int) -> Border | None:
    """What the cache has, if it can be what was put there."""
    if values is None or values.keys() != set(Border._fields):
        return None
    most, page_us = values["most_bytes"], values["page_us"]
    if type(most) is not int or type(page_us) is not float:
        return None
    return Border(most, page_us) if 0 <= most <= page_size // 2 and 0 < page_us < 1e9 else None


def measure_rows(backend: Device, page_size: int, row_bytes: int) -> Border:
    """As :func:`calibrate_rows`, measured now. Any thread; nothing of the pager is touched."""
    count = min(max(1, scratch_room(backend) // page_size), _MOST_PAGES)
    sizes = [row_bytes]
    while 2 * sizes[-1] <= page_size // 2:
        sizes.append(2 * sizes[-1])
    with scratch(backend, count * page_size) as memory:
        lookups = _Lookups(backend, memory, page_size, row_bytes)
        for way in ("kernel", "engine"):  # memory that was never used, a kernel never compiled
            lookups.seconds(way, sizes[-1], count)
        most = calibrate_crossover(lookups.seconds, count, _REPEATS, sizes).block_bytes
        seconds = median_seconds(lambda: lookups.seconds("engine", sizes[-1], count))
        return Border(most, seconds / count * 1e6)


class _Lookups:
    """Rows of pages in ``memory``, which is like the host tier's, fetched in both ways."""

    def __init__(self, backend: Device, memory: Bytes, page_size: int, row_bytes: int) -> None:
        self._device = backend.device
        self._memory = memory
        self._page_size, self._row_bytes = page_size, row_bytes
        self._pages = np.split(memory, len(memory) // page_size)
        memory[:] = 1  # pages of their own for all of it
        room = max(page_size, len(memory) // 2)
        self._here = torch.empty(room, dtype=torch.uint8, device=backend.device)
        base = backend.seen_at(memory)
        assert base is not None, "nothing can be read in place"
        self._addresses = base + np.arange(len(self._pages), dtype=np.int64) * page_size
        self._rows: dict[tuple[int, int], npt.NDArray[np.int64]] = {}

    def seconds(self, way: Literal["kernel", "engine"], nbytes: int, count: int) -> float:
        """To have ``nbytes`` of each of ``count`` pages on the device."""
        rows = self._rows_of(nbytes // self._row_bytes, count)
        self._wait()
        began = time.perf_counter()
        if way == "kernel":
            size, here = self._row_bytes, self._here.data_ptr()
            blocks = row_blocks_of(rows, size, self._page_size, self._addresses, here)
            fetch_blocks(blocks.to(self._device))
        else:
            for page in self._pages[:count]:
                self._copy(page)
        self._wait()
        return since(began)

    def _copy(self, page: Bytes) -> None:
        if self._device.type == "cpu":  # as the backend does
            ctypes.memmove(self._here.data_ptr(), page.ctypes.data, len(page))
        else:
            self._here[: len(page)].copy_(torch.from_numpy(page), non_blocking=True)

    def _rows_of(self, each: int, count: int) -> npt.NDArray[np.int64]:
        """``each`` rows of each page, anywhere in it, ascending; the same whenever asked for."""
        if (each, count) not in self._rows:
            chance = np.random.default_rng(each)
            in_page = self._page_size // self._row_bytes
            some = [np.sort(chance.choice(in_page, each, replace=False)) for _ in range(count)]
            self._rows[each, count] = np.concatenate(
                [page * in_page + rows for page, rows in enumerate(some)]
            )
        return self._rows[each, count]

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.current_stream(self._device).synchronize()
