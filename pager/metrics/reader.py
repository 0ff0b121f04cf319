"""Finds trainings that publish metrics and reads what they say, without torch and out of their way.

A training keeps its latest snapshot, one JSON object, in memory that is in no folder
(``publisher.py``). Who may look into the process finds it as ``/proc/PID/fd/N``. What is read may
be anything that a process of this user has named like ours, so every value is checked.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...planner.errors import PagerError

NAME, VERSION = "tensorpager-metrics", 2
LINK = f"/memfd:{NAME} (deleted)"
TIERS = ("device", "host", "disk")
TIER_KEYS = ("used_bytes", "peak_bytes", "budget_bytes")
CHANNELS = ("host-out", "disk-out", "host-in", "disk-in")
COUNTERS = (
    "iterations", "faults", "gathers", "compactions", "prefetches", "prefetch_hits",
    "planned_iterations", "departures", "bytes_out", "bytes_in", "disk_bytes_written",
    "overlap_updates", "arena_bytes", "dense_peak_bytes", "live_bytes", "page_size",
)  # fmt: skip
# µs. Since start: waiting for pages; in iterations. Of one iteration: the latest one, and what it
# waited; by the plan; no plan is faster; in plain PyTorch; our own; median of the latest planned.
TIMES = (
    "stall_us", "iterations_us", "iteration_us", "iteration_stall_us",
    "predicted_us", "bound_us", "ideal_us", "overhead_us", "measured_us",
)  # fmt: skip
CLOCKS = ("started", "updated", "clock", "began")  # s: two since the epoch, two monotonic
TEXTS = ("script", "device", "mode")
_MOST_BYTES = 1 << 20
_PROC = Path("/proc")

Snapshot = dict[str, Any]


class MetricsError(PagerError):
    """There is nothing to read, or it is no snapshot of a training."""


class NoSuchProcess(MetricsError):  # noqa: N818 (an answer, not a fault)
    """There is no process of that PID: it has ended, or never was."""


@dataclass
class Training:
    """One Pager of a process. ``name`` is what the command line calls it: the PID, with ``.2`` for
    the second Pager. ``latest``: what was read last, which stays when the training has ended."""

    pid: int
    name: str
    latest: Snapshot
    ended: bool = False

    def read(self) -> Snapshot:
        """What is published now."""
        found: list[Snapshot] = []
        with suppress(OSError):
            found = _snapshots(self.pid)
        mine = [each for each in found if each["started"] == self.latest["started"]]
        self.ended = not mine
        # One that was seen before it took its place is newer than what is in that place still.
        self.latest = max([self.latest, *mine], key=lambda each: float(each["clock"]))
        return self.latest


def find_trainings() -> list[Training]:
    """All of this user, oldest first. What cannot be read is left out."""
    found = []
    for entry in os.scandir(_PROC):
        if entry.name.isdecimal():
            with suppress(OSError):
                if entry.stat().st_uid == os.geteuid():
                    found += _trainings(int(entry.name))
    return sorted(found, key=lambda training: float(training.latest["started"]))


def open_training(target: str) -> Training:
    """By PID: ``"1234"``, or ``"1234.2"`` for its second Pager.

    Raises ``NoSuchProcess`` for a PID that is not there (any more), and ``MetricsError``.
    """
    pid, dot, number = target.partition(".")
    if not pid.isdecimal() or (dot and not number.isdecimal()):
        raise MetricsError(f"{target!r} is no PID; write for example 1234, or 1234.2")
    try:
        found = _trainings(int(pid))
    except FileNotFoundError as error:
        raise NoSuchProcess(
            f"there is no process {pid}: it has ended, or never was; 'tensorpager top' lists those "
            "that there are"
        ) from error
    except OSError as error:
        raise MetricsError(
            f"process {pid} cannot be looked into ({error.strerror}); run tensorpager top as its "
            "user"
        ) from error
    if not found:
        raise MetricsError(
            f"process {pid} publishes no metrics; make its Pager with metrics=True (train_lm.py: "
            "--metrics)"
        )
    index = int(number) - 1 if dot else 0
    if not 0 <= index < len(found):
        raise MetricsError(f"process {pid} has {len(found)} Pagers; there is no {target}")
    return found[index]


def _trainings(pid: int) -> list[Training]:
    """The Pagers of a process in the order in which they were made. Raises ``OSError``."""
    return [
        Training(pid, str(pid) if number == 1 else f"{pid}.{number}", snapshot)
        for number, snapshot in enumerate(_snapshots(pid), 1)
    ]


def _snapshots(pid: int) -> list[Snapshot]:
    """The latest of each Pager, the oldest Pager first. Raises ``OSError``."""
    found: dict[float, Snapshot] = {}
    for entry in (_PROC / str(pid) / "fd").iterdir():
        with suppress(FileNotFoundError, ValueError):  # replaced just now, or written just now
            if os.readlink(entry) != LINK:
                continue
            with open(os.open(entry, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
                snapshot = checked(file.read(_MOST_BYTES))
            other = found.setdefault(snapshot["started"], snapshot)
            if other["clock"] < snapshot["clock"]:
                found[snapshot["started"]] = snapshot
    return [found[started] for started in sorted(found)]


def checked(data: bytes) -> Snapshot:
    """The snapshot in ``data``. Raises ``ValueError`` for what no training of this version wrote,
    so that nothing in it makes readers fail later."""
    try:
        values = json.loads(data)
        sound = (
            _is_number(values["version"])
            and values["version"] == VERSION
            and isinstance(values["recent_iteration_us"], list)
            and all(_is_number(values[name]) for name in (*COUNTERS, *CLOCKS))
            and all(values[name] is None or _is_number(values[name]) for name in TIMES)
            and all(isinstance(values[name], str) for name in TEXTS)
            and all(_is_number(values["channel_bytes"][name]) for name in CHANNELS)
            and all(_is_number(values[key][t]) for key in TIER_KEYS for t in TIERS)
            and all(_is_number(us) for us in values["recent_iteration_us"])
            and all(isinstance(value, (int, float)) for value in values["logged"].values())
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("is no snapshot of a training") from error
    if not sound:
        raise ValueError("is no snapshot of a training")
    for name in TEXTS:
        values[name] = _printable(values[name])
    values["logged"] = {_printable(name): float(v) for name, v in values["logged"].items()}
    return dict(values)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e300  # type: ignore[operator]


def _printable(text: str) -> str:
    """No control characters reach the terminal, whatever was written."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
