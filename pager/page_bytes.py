"""The bytes of a paged tensor from wherever its pages are, without moving one.

For when no page can leave the device any more, because the disk fails: reading in the usual way
takes frames, and these would have to be written out first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .paged_tensor import PagedTensor


def unmoved_chunks(flat: PagedTensor, most_bytes: int) -> Iterator[memoryview]:
    """The elements of ``flat``, one-dimensional and without gaps, as bytes, in pieces of about
    ``most_bytes`` that are valid until the next one is asked for. Raises what the disk raises."""
    storage = flat._storage
    pager, run, size = storage.pager, storage.run, storage.pager.page_size
    begin = storage.offset + int(flat.storage_offset()) * flat.element_size()
    end = begin + flat.numel() * flat.element_size()
    step = max(1, most_bytes // size)
    buffer = np.empty(min(step, -(-end // size)) * size, np.uint8)
    for first in range(begin // size, -(-end // size), step):
        count = min(step, -(-end // size) - first)
        pages = np.arange(run.first + first, run.first + first + count, dtype=np.int32)
        with pager.quiet():
            pager.migration.copy_of(pages, buffer[: count * size])
        start, stop = max(begin, first * size), min(end, (first + count) * size)
        yield memoryview(buffer[start - first * size : stop - first * size])
