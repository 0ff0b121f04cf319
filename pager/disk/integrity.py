"""Whose page each slot holds, which version of it, and a checksum of its bytes.

A *stamp* binds the three together. It is in memory and not in the slot, so a drive that loses,
tears, misplaces or changes a write cannot change the stamp with it: the checksum differs. A mistake
in the page table is found too, because the owner is written down in two places.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import CorruptPage

Bytes = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.integer]

_NOBODY = -1


def page_sums(pages: Bytes) -> Sums:
    """xxh3 of each of ``pages``, C-contiguous uint8 [n, page_size]: uint64 [n]."""
    return np.fromiter((xxhash.xxh3_64_intdigest(page) for page in pages), np.uint64, len(pages))


_streams: dict[Any, Any] = {}
_streams_lock = threading.Lock()


def device_sums(pages: Any, page_size: int) -> Sums:
    """uint64 [n] of ``pages``: n · page_size bytes, a 1-D uint8 tensor or array. Any thread.

    They are those of ``kernels.checksum``, which a GPU computes at the speed of its memory; only
    the sums cross the link. Host memory gives the same numbers, more slowly: for a page that comes
    back elsewhere than it was written from. On an accelerator the work is done on a stream of its
    own (one for all threads: PyTorch's allocator keeps memory for each stream apart), and has been
    when it returns; the caller has waited for whatever writes the pages.
    """
    import torch

    from ...kernels.checksum import page_checksums
    from ..devices.accelerator import on_stream

    memory = torch.from_numpy(pages) if isinstance(pages, np.ndarray) else pages
    memory = memory.reshape(-1)
    stream = None
    if not memory.is_cpu:
        with _streams_lock:
            if memory.device not in _streams:
                _streams[memory.device] = torch.Stream(memory.device)
            stream = _streams[memory.device]
    with nullcontext() if stream is None else on_stream(stream):
        count = memory.numel() // page_size
        frames = torch.arange(count, dtype=torch.int32, device=memory.device)
        sums = page_checksums(memory, frames, page_size).cpu()  # waits for the stream
        return sums.numpy().view(np.uint64)


class Stamps:
    """Of all slots of one tier. Any thread may call; each slot has one user at a time.

    ``tier``: ``"host"`` or ``"disk"``; ``where``: the directory of the disk tier, for messages.
    ``name_of``: what to call a virtual page (``tensor/names.py``).
    """

    def __init__(self, count: int, tier: str, where: str = "") -> None:
        self.name_of: Callable[[int], str] = lambda page: f"page {page}"
        self._name = f"{tier} tier in {where!r}" if where else f"{tier} tier"
        self._tier = tier
        self._lock = threading.Lock()
        self._written = np.zeros(0, np.bool_)
        self._sums = np.zeros(0, np.uint64)
        self._pages = np.zeros(0, np.int64)
        self._versions = np.zeros(0, np.int64)
        self.resize(count)

    def resize(self, count: int) -> None:
        """More slots. What the others hold stays."""
        with self._lock:
            more = count - len(self._written)
            self._written = np.append(self._written, np.zeros(more, np.bool_))
            self._sums = np.append(self._sums, np.zeros(more, np.uint64))
            self._pages = np.append(self._pages, np.full(more, _NOBODY, np.int64))
            self._versions = np.append(self._versions, np.zeros(more, np.int64))

    # -- writing ---------------------------------------------------------------------------------
    def claim(self, slots: Slots, pages: Slots, versions: Slots) -> None:
        """``slots[i]`` is about to be written with that version of ``pages[i]``."""
        with self._lock:
            self._pages[slots] = pages
            self._versions[slots] = versions
            self._written[slots] = False

    def begin(self, slots: Slots) -> None:
        """Bytes of ``slots`` are about to change: what they held cannot be read any more."""
        with self._lock:
            self._written[slots] = False

    def wrote(self, slots: Slots, sums: Sums) -> None:
        """All of ``slots`` were written, with pages of these checksums."""
        with self._lock:
            self._sums[slots] = sums
            self._written[slots] = True

    # -- reading ---------------------------------------------------------------------------------
    def sums(self, slots: Slots) -> Sums:
        """Of what ``slots`` hold. Raises ``CorruptPage`` if one was not written."""
        with self._lock:
            unwritten = slots[~self._written[slots]]
            sums = self._sums[slots]
        if unwritten.size:
            raise self.wrong(int(unwritten[0]), "was never written")
        return sums

    def expect(self, slots: Slots, pages: Slots, versions: Slots) -> None:
        """Raises ``CorruptPage`` unless ``slots[i]`` was written with this version of this page."""
        with self._lock:
            owners, found = self._pages[slots], self._versions[slots]
        for at in np.flatnonzero((owners != pages) | (found != versions))[:1].tolist():
            wanted = f"version {versions[at]} of {self.name_of(int(pages[at]))}"
            raise self.wrong(
                int(slots[at]), f"is version {found[at]} of it, and the page table wants {wanted}"
            )

    def wrong(
        self, slot: int, what: str = "is not what was written (checksum differs)"
    ) -> CorruptPage:
        """The error for the page in ``slot``."""
        page = self.page_of(slot)
        name = None if page == _NOBODY else self.name_of(page)
        remedy = (
            "Check the drive (dmesg, smartctl) and go on from the last checkpoint"
            if self._tier == "disk"
            else "Something wrote into the pager's host memory: test the machine's memory, and go "
            "on from the last checkpoint"
        )
        of = f" ({name})" if name else ""
        return CorruptPage(
            f"the page in slot {slot} of the {self._name}{of} {what}; it was not used. {remedy}",
            tier=self._tier,
            slot=slot,
            page=page,
            tensor=name,
        )

    def page_of(self, slot: int) -> int:
        """Whose page it holds or is about to; −1 for nobody's."""
        return int(self._pages[slot])

    def check_owners(self, slots: Slots, pages: Slots, versions: Slots) -> None:
        """For ``check.py``: the stamps say what the page table says."""
        with self._lock:
            assert (self._pages[slots] == pages).all(), "a stamp names another page"
            assert (self._versions[slots] == versions).all(), "a stamp is of another version"
            assert self._written[slots].all(), "a slot in use has no stamp"
