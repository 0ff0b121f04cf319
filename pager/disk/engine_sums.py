"""Checksums of pages that are in device memory, made where the pages are.

They are those of ``kernels.checksum``, which a GPU computes at the speed of its memory; only the
sums cross the link. Host memory gives the same numbers, more slowly: for a page that comes back
elsewhere than it was written from.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from ...kernels.checksum import page_checksums
from ..devices.accelerator import on_stream
from .integrity import Sums

_lock = threading.Lock()
_streams: dict[torch.device, torch.Stream] = {}


def device_sums(pages: Any, page_size: int) -> Sums:
    """uint64 [n] of ``pages``: n · page_size bytes, a 1-D uint8 tensor or array.

    On an accelerator the work is done on a stream of its own, and has been when it returns; the
    caller has waited for whatever writes the pages. Any thread.
    """
    memory = torch.from_numpy(pages) if isinstance(pages, np.ndarray) else pages
    memory = memory.reshape(-1)
    with nullcontext() if memory.is_cpu else on_stream(_stream(memory.device)):
        count = memory.numel() // page_size
        frames = torch.arange(count, dtype=torch.int32, device=memory.device)
        sums = page_checksums(memory, frames, page_size).cpu()  # waits for the stream
        return sums.numpy().view(np.uint64)


def _stream(device: torch.device) -> torch.Stream:
    """One for all threads: PyTorch's allocator keeps memory for each stream apart."""
    with _lock:
        if device not in _streams:
            _streams[device] = torch.Stream(device)
        return _streams[device]
