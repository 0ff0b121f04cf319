"""Memory of any accelerator that PyTorch knows, with nothing but what PyTorch offers for all.

There is no address range to map memory into, so the arena is one tensor. Its border stays where it
is until the end of the first iteration, when its size is known: then it is made anew in that size.
Host memory is page-locked by PyTorch, whose allocators may round sizes up to powers of two, so it
comes in pieces of such sizes, which together are what was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import PagerError
from .device import Bytes, HostMemory, fill_by_torch

_STATISTICS = ("allocated_bytes.all.peak", "reserved_bytes.all.peak")


class PlainMemory:
    """Implements :class:`~.accelerator.Kit`."""

    name = "plain"
    granularity = 1
    can_unmap = caps_dense = takes_drives = batches_copies = False

    def __init__(self, device: torch.device, reserved_bytes: int, committed_bytes: int) -> None:
        self._device = device
        self.reserved_bytes = reserved_bytes
        self.arena = self._allocate(committed_bytes)
        self.knows_dense = has_statistics(device)

    @staticmethod
    def lacking(device: torch.device) -> list[str]:
        found = [
            "virtual memory (the arena is one allocation, made anew after the first iteration)",
            "a cap on dense memory (what tensors take is seen between ops, and too much is refused "
            "where a step begins or an iteration ends; PyTorch's allocator may keep more)",
        ]
        if not has_statistics(device):
            found.append("memory statistics (dense_reserve= has to be given)")
        if not can_page_lock():
            found.append("page-locked host memory (copies block)")
        return found

    @property
    def address(self) -> int:
        return self.arena.data_ptr()

    @property
    def counted_bytes(self) -> int:
        return self.arena.numel()

    def _allocate(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise PagerError(
                f"no {nbytes} bytes are free on {self._device} for the arena ({error}); lower "
                "device_budget, or free device memory that other processes hold"
            ) from error

    # -- the border ------------------------------------------------------------------------------
    def commit(self, nbytes: int) -> None:
        assert nbytes <= self.arena.numel(), "an arena of this kit is made anew to grow"

    def remake(self, nbytes: int, *, empty: bool) -> bool:
        if empty:
            self._replace(nbytes)
            return True
        if self._in_use() + nbytes > self.reserved_bytes:
            return False
        try:
            arena = self._allocate(nbytes)
        except PagerError:
            return False
        keep = min(nbytes, self.arena.numel())
        arena[:keep].copy_(self.arena[:keep])
        torch.accelerator.synchronize(self._device)  # the old one may be memory of another stream
        self.arena = arena
        return True

    def _replace(self, nbytes: int) -> None:
        size = self.arena.numel()
        self.arena = torch.empty(0, dtype=torch.uint8, device=self._device)
        torch.accelerator.empty_cache()
        try:
            self.arena = self._allocate(nbytes)
        except PagerError:
            self.arena = self._allocate(size)
            raise

    def _in_use(self) -> int:
        """Of tensors, the arena included."""
        if not self.knows_dense:
            return self.arena.numel()
        return int(torch.accelerator.memory_allocated(self._device))

    def fill(self, offset: int, memory: torch.UntypedStorage, start: int, nbytes: int) -> None:
        fill_by_torch(self.arena, offset, memory, start, nbytes)

    # -- page-locked host memory -----------------------------------------------------------------
    def host_memory(self, nbytes: int) -> list[HostMemory]:
        pieces = []
        while nbytes:
            size = 1 << (nbytes.bit_length() - 1)
            pieces.append(_page_locked(size))
            nbytes -= size
        return pieces

    def register_host(self, memory: Bytes) -> None:
        pass  # PyTorch page-locks only what it allocates

    def unregister_host(self, memory: Bytes) -> None:
        pass

    def batch(self, copies: Sequence[tuple[int, int, int]]) -> Any:
        raise NotImplementedError("batches_copies says that this cannot be")

    def copy_batch(self, batch: Any, stream: torch.Stream) -> None:
        raise NotImplementedError("batches_copies says that this cannot be")

    # -- dense memory ----------------------------------------------------------------------------
    def limit_dense(self, nbytes: int | None) -> None:
        pass

    def close(self) -> None:
        self.arena = torch.empty(0, dtype=torch.uint8, device=self._device)


def _page_locked(nbytes: int) -> HostMemory:
    try:
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except (RuntimeError, NotImplementedError):  # this device cannot: its copies are slower
        memory = torch.empty(nbytes, dtype=torch.uint8)
    array: Bytes = memory.numpy()  # keeps the tensor alive
    return HostMemory(array, lambda: None)


def has_statistics(device: torch.device) -> bool:
    """Whether PyTorch's allocator for ``device`` says how much is in use, and was at the peak."""
    try:
        torch.empty(1, device=device)
        known: dict[str, Any] = torch.accelerator.memory_stats(device)
        torch.accelerator.reset_peak_memory_stats(device)
    except (RuntimeError, NotImplementedError):
        return False
    return all(name in known for name in _STATISTICS)


def can_page_lock() -> bool:
    try:
        return bool(torch.from_numpy(np.empty(1, np.uint8)).pin_memory().is_pinned())
    except (RuntimeError, NotImplementedError):
        return False
