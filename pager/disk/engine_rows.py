"""Stamps of pages that are in device memory, made where the pages are.

The row is that of ``integrity.page_rows`` with another checksum in front, ``kernels.checksum``'s,
which a GPU computes at the speed of its memory; only the rows cross the link. Host memory gives the
same numbers, more slowly: for a page that comes back elsewhere than it was written from.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from ...kernels.checksum import page_checksums
from ..devices.accelerator import on_stream
from .integrity import Rows, word_starts

_lock = threading.Lock()
_streams: dict[torch.device, torch.Stream] = {}


def device_rows(pages: Any, page_size: int) -> Rows:
    """Rows, uint64 [n, ROW], of ``pages``: n · page_size bytes, a 1-D uint8 tensor or array.

    On an accelerator the work is done on a stream of its own, and has been when it returns; the
    caller has waited for whatever writes the pages. Any thread.
    """
    memory = torch.from_numpy(pages) if isinstance(pages, np.ndarray) else pages
    memory = memory.reshape(-1)
    if memory.is_cpu:
        return _rows(memory, page_size)
    with on_stream(_stream(memory.device)):
        return _rows(memory, page_size)


def _rows(memory: torch.Tensor, page_size: int) -> Rows:
    count = memory.numel() // page_size
    frames = torch.arange(count, dtype=torch.int32, device=memory.device)
    sums = page_checksums(memory, frames, page_size)
    starts = torch.from_numpy(word_starts(page_size)).to(memory.device)
    places = (starts[:, None] + torch.arange(8, device=memory.device)).reshape(-1)
    words = memory.view(count, page_size)[:, places].contiguous().view(torch.int64)
    rows = torch.cat([sums[:, None], words], 1).cpu()  # waits for the stream
    return rows.numpy().view(np.uint64)


def _stream(device: torch.device) -> torch.Stream:
    """One for all threads: PyTorch's allocator keeps memory for each stream apart."""
    with _lock:
        if device not in _streams:
            _streams[device] = torch.Stream(device)
        return _streams[device]
