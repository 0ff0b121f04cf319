"""What changes over time, from the records that a reader has seen; and all of it as plain data."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from .format import Record
from .reader import Training

SILENT_SECONDS = 5.0  # ten times what a training takes between two records
_WINDOW_SECONDS = 5.0


@dataclass(frozen=True)
class Rates:
    """Between two records; ``None`` for what they do not tell. Shares are from 0 to 1."""

    bytes_per_s: dict[str, float | None]
    faults_per_s: float | None
    stall_share: float | None
    iterations_per_s: float | None


class History:
    """The records of one training over the last seconds."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque()

    def add(self, record: Record) -> None:
        """Keeps as many as rates need, and at least two."""
        records = self._records
        if records and records[-1].monotonic_ns >= record.monotonic_ns:
            return
        records.append(record)
        while len(records) > 2 and _seconds(records[1], record) >= _WINDOW_SECONDS:
            records.popleft()

    @property
    def span_seconds(self) -> float:
        """From the first record that is kept to the last."""
        return _seconds(self._records[0], self._records[-1]) if self._records else 0.0

    def rates(self) -> Rates:
        last = self._records[-1]
        first = self._records[0]
        seconds = self.span_seconds

        def rate(now: float, before: float) -> float | None:
            return max(0.0, now - before) / seconds if seconds > 0 else None

        stalled = rate(last.times_us["stall_us"] or 0.0, first.times_us["stall_us"] or 0.0)
        return Rates(
            {
                name: rate(now, first.channel_bytes[name])
                for name, now in last.channel_bytes.items()
            },
            rate(last.counters["faults"], first.counters["faults"]),
            None if stalled is None else min(1.0, stalled / 1e6),
            _iteration_rate(first, last, seconds),
        )


def _seconds(first: Record, last: Record) -> float:
    return (last.monotonic_ns - first.monotonic_ns) / 1e9


def _iteration_rate(first: Record, last: Record, seconds: float) -> float | None:
    """From iterations that were seen to end; where these are too few, from their durations."""
    done = last.counters["iterations"] - first.counters["iterations"]
    if done >= 10 and seconds > 0:
        return done / seconds
    recent = last.recent_s[-10:]
    return len(recent) / sum(recent) if sum(recent) > 0 else None


def hit_rate(record: Record) -> float | None:
    """Share of prefetches that came in time, from 0 to 1."""
    counters = record.counters
    if not counters["prefetches"]:
        return None
    return min(1.0, counters["prefetch_hits"] / counters["prefetches"])


def age_seconds(record: Record) -> float:
    """How old a record is. The clock is the machine's, so this is true across processes."""
    return max(0.0, (time.monotonic_ns() - record.monotonic_ns) / 1e9)


def state(training: Training) -> str:
    """``"training"`` (in an iteration), ``"idle"`` (between two), ``"silent"`` (lives, and has not
    published for seconds: stopped, or in one very long call) or ``"ended"``."""
    if training.ended:
        return "ended"
    if age_seconds(training.record) > SILENT_SECONDS:
        return "silent"
    return "training" if training.record.began_ns else "idle"


def description(training: Training, history: History) -> dict[str, Any]:
    """One training for ``--json``. Bytes, µs, seconds since the epoch; ``null``: not known."""
    record, rates = training.record, history.rates()
    return {
        "pid": training.pid,
        "name": training.name,
        "script": record.script,
        "device": record.device,
        "state": state(training),
        "mode": record.mode,
        "started": record.started_ns / 1e9,
        "updated": record.updated_ns / 1e9,
        "age_s": age_seconds(record),
        "tiers": {
            name: {
                "used_bytes": tier.used,
                "peak_bytes": tier.peak,
                "budget_bytes": tier.budget,
            }
            for name, tier in record.tiers.items()
        },
        "channels": {
            name: {"bytes": nbytes, "bytes_per_s": rates.bytes_per_s[name]}
            for name, nbytes in record.channel_bytes.items()
        },
        **record.counters,
        **record.times_us,
        "rates_over_s": history.span_seconds,
        "faults_per_s": rates.faults_per_s,
        "stall_share": rates.stall_share,
        "iterations_per_s": rates.iterations_per_s,
        "prefetch_hit_share": hit_rate(record),
        "recent_iteration_us": [seconds * 1e6 for seconds in record.recent_s],
        "logged": {
            name: value if math.isfinite(value) else None for name, value in record.logged.items()
        },
    }
