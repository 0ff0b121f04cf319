"""Debug lanes that make every mistake about residency show at once. For tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..core import Core
from ..memory.frame_pool import merge

_NAN_BYTE = 0xFF  # every float dtype reads these bytes as NaN


@contextmanager
def chaos(pager: Core) -> Iterator[None]:
    """After each paged op every unpinned run is evicted and its frames are filled with NaN."""
    before, pager.after_op = pager.after_op, lambda: scramble(pager)
    try:
        yield
    finally:
        pager.after_op = before


@contextmanager
def scattered(pager: Core) -> Iterator[None]:
    """No run of two pages or more gets consecutive frames: everything is gathered and scattered."""
    residency = pager.residency
    residency.scattered = True
    try:
        yield
    finally:
        residency.scattered = False


def scramble(pager: Core) -> None:
    """Evict everything that is not pinned and poison the frames that it was in."""
    with pager.quiet():
        pager.residency.collect()
        for run in list(pager.space.runs.values()):
            if run.pins:
                continue
            frames = pager.residency.evict_run(run)
            if len(frames):
                pager.residency.reach(frames)
                arena, size = pager.residency.arena, pager.page_size
                with pager.backend.on_compute():
                    for first, _, count in merge(frames, frames):
                        arena[first * size : (first + count) * size].fill_(_NAN_BYTE)
