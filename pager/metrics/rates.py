"""What changes over time, from the snapshots that a reader has seen; all of it as plain data."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from .reader import CHANNELS, COUNTERS, TIER_KEYS, TIERS, TIMES, Snapshot, Training

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
    """The snapshots of one training over the last seconds."""

    def __init__(self, first: Snapshot) -> None:
        self._snapshots = deque([first])

    def add(self, snapshot: Snapshot) -> None:
        """Keeps as many as rates need, and at least two."""
        kept = self._snapshots
        if kept[-1]["clock"] >= snapshot["clock"]:
            return
        kept.append(snapshot)
        while len(kept) > 2 and snapshot["clock"] - kept[1]["clock"] >= _WINDOW_SECONDS:
            kept.popleft()

    @property
    def span_seconds(self) -> float:
        """From the first snapshot that is kept to the last."""
        return float(self._snapshots[-1]["clock"] - self._snapshots[0]["clock"])

    def rates(self) -> Rates:
        first, last, seconds = self._snapshots[0], self._snapshots[-1], self.span_seconds

        def rate(now: float | None, before: float | None) -> float | None:
            return max(0.0, (now or 0) - (before or 0)) / seconds if seconds > 0 else None

        stalled = rate(last["stall_us"], first["stall_us"])
        channels = last["channel_bytes"], first["channel_bytes"]
        return Rates(
            {name: rate(*(each[name] for each in channels)) for name in CHANNELS},
            rate(last["faults"], first["faults"]),
            None if stalled is None else min(1.0, stalled / 1e6),
            _iteration_rate(first, last, seconds),
        )


def _iteration_rate(first: Snapshot, last: Snapshot, seconds: float) -> float | None:
    """From iterations that were seen to end; where these are too few, from their durations."""
    done = last["iterations"] - first["iterations"]
    if done >= 10 and seconds > 0:
        return float(done / seconds)
    recent = last["recent_iteration_us"][-10:]
    return float(len(recent) / sum(recent) * 1e6) if sum(recent) > 0 else None


def hit_rate(snapshot: Snapshot) -> float | None:
    """Share of prefetches that came in time, from 0 to 1."""
    prefetches, hits = snapshot["prefetches"], snapshot["prefetch_hits"]
    return min(1.0, float(hits / prefetches)) if prefetches else None


def age_seconds(snapshot: Snapshot) -> float:
    """How old it is. The clock is the machine's, so this is true across processes."""
    return max(0.0, time.monotonic() - float(snapshot["clock"]))


def state(training: Training) -> str:
    """``"training"`` (in an iteration), ``"idle"`` (between two), ``"silent"`` (lives, and has not
    published for seconds: stopped, or in one very long call) or ``"ended"``."""
    if training.ended:
        return "ended"
    if age_seconds(training.latest) > SILENT_SECONDS:
        return "silent"
    return "training" if training.latest["began"] else "idle"


def description(training: Training, history: History) -> dict[str, Any]:
    """One training for ``--json``. Bytes, µs, seconds since the epoch; ``null``: not known."""
    found, rates = training.latest, history.rates()
    kept = ("script", "device", "mode", "started", "updated", "recent_iteration_us")
    return {
        "pid": training.pid,
        "name": training.name,
        "state": state(training),
        "age_s": age_seconds(found),
        **{name: found[name] for name in (*kept, *COUNTERS, *TIMES)},
        "tiers": {tier: {key: found[key][tier] for key in TIER_KEYS} for tier in TIERS},
        "channels": {
            name: {"bytes": nbytes, "bytes_per_s": rates.bytes_per_s[name]}
            for name, nbytes in found["channel_bytes"].items()
        },
        "rates_over_s": history.span_seconds,
        "faults_per_s": rates.faults_per_s,
        "stall_share": rates.stall_share,
        "iterations_per_s": rates.iterations_per_s,
        "prefetch_hit_share": hit_rate(found),
        "logged": {name: v if math.isfinite(v) else None for name, v in found["logged"].items()},
    }
