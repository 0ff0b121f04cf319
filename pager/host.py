"""The host tier: one arena of exactly ``host_budget`` bytes, split into page slots."""

import numpy as np
import numpy.typing as npt

from .frame_pool import FramePool
from .memory import Region


class HostTier:
    """``slots`` (a pool of page slots) over one private range; on CUDA it is page-locked.

    PyTorch's own page-locked allocator rounds sizes up to powers of two, so the range is mapped
    here and registered with ``backend.register_host``. The last partial page of a budget is unused.
    """

    def __init__(self, capacity_bytes: int, page_size: int) -> None:
        self.page_size = page_size
        self.slots = FramePool(capacity_bytes // page_size)
        self._region = Region(self.capacity_bytes, self.capacity_bytes)
        self.bytes: npt.NDArray[np.uint8] = self._region.array()
        self.address = self._region.address

    @property
    def capacity_bytes(self) -> int:
        return self.slots.count * self.page_size

    @property
    def used_slots(self) -> int:
        return self.slots.count - self.slots.free_count

    def view(self, slot: int, count: int) -> npt.NDArray[np.uint8]:
        """Bytes of ``count`` slots from ``slot`` on."""
        return self.bytes[slot * self.page_size : (slot + count) * self.page_size]

    def grow(self, capacity_bytes: int) -> None:
        """Enlarge to ``capacity_bytes``. Contents and slot numbers stay; the address changes.

        Takes the old and the new arena at once for as long as the copy lasts (only slots in use
        are touched); nothing is lost if that fails.
        """
        slots = capacity_bytes // self.page_size
        region = Region(slots * self.page_size, slots * self.page_size)
        fresh = region.array()
        free: set[int] = set()
        for start, length in self.slots.runs():
            free.update(range(start, start + length))
        for slot in range(self.slots.count):
            if slot not in free:
                rows = slice(slot * self.page_size, (slot + 1) * self.page_size)
                fresh[rows] = self.bytes[rows]
        self.slots.resize(slots)
        self.bytes, old = fresh, self._region
        self._region, self.address = region, region.address
        old.close()

    def close(self) -> None:
        self.bytes = np.empty(0, np.uint8)
        self._region.close()
