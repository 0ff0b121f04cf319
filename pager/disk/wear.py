"""How fast a training wears its disk out: bytes written a day, and a limit for them."""

from __future__ import annotations

import time
from typing import Any

from ...planner.sizes import DAY_SECONDS, format_bytes, wear, years_of_drive
from ..errors import DiskWriteLimit
from .tier import DiskTier


class Wear:
    """Of the paging file of one pager. A day is one of 24 hours since its first iteration;
    ``limit_bytes``: what may be written in one, ``None`` for no limit."""

    def __init__(self, disk: DiskTier | None, limit_bytes: int | None) -> None:
        self._disk, self._limit_bytes = disk, limit_bytes
        self._began: tuple[float, int] | None = None  # when, and what had been written
        self._day = 0
        self._written_before = 0  # this day began with

    def check(self) -> None:
        """Called when an iteration begins. Raises ``DiskWriteLimit`` where that would be one more
        after the limit has been reached: nothing has begun, and all is where it was."""
        now, written = time.monotonic(), self._written
        if self._began is None:
            self._began, self._written_before = (now, written), written
        day, passed = divmod(now - self._began[0], DAY_SECONDS)
        if day != self._day:
            self._day, self._written_before = int(day), written
        today = written - self._written_before
        if self._limit_bytes is not None and today >= self._limit_bytes:
            raise DiskWriteLimit(
                f"disk_write_limit={self._limit_bytes} ({format_bytes(self._limit_bytes)}) a day "
                f"is reached: {format_bytes(today)} were written to the paging file, and the next "
                f"day begins in {(DAY_SECONDS - passed) / 3600:.1f} hours; no iteration was begun. "
                "Save a checkpoint and go on with a larger host_budget, so that less goes to disk, "
                "or with a higher disk_write_limit"
            )

    @property
    def _written(self) -> int:
        disk = self._disk
        return disk.bytes_written + disk.bytes_measured if disk is not None else 0

    def figures(self) -> dict[str, Any]:
        """``bytes_a_day``: at the rate since the first iteration began, ``None`` until then.
        ``years``: in which a drive rated for 600 TB of writes has had them, ``None`` for ever.
        ``written_today``, ``limit``: bytes of the day that runs, ``None`` without a limit."""
        a_day = None
        if self._began is not None:
            seconds = max(time.monotonic() - self._began[0], 1e-3)
            a_day = (self._written - self._began[1]) / seconds * DAY_SECONDS
        return {
            "bytes_a_day": a_day,
            "years": years_of_drive(a_day),
            "written_today": self._written - self._written_before,
            "limit": self._limit_bytes,
        }

    def in_words(self) -> str:
        """For people; empty where nothing is written."""
        return wear(self.figures()["bytes_a_day"])
