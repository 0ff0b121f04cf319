"""Runs cases: each is checked, and only then timed against its floor and torch's own op."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tensorpager.planner.sizes import format_bytes

from .case import Case, Job, Rates, ResultError, Setting
from .clock import LEAST_REPETITIONS, Clock, take_turns

Row = dict[str, Any]
Now = Callable[[], float]


@dataclass(frozen=True)
class Sizes:
    """Which settings a run tries: all pairs, but pages larger than the operand."""

    nbytes: Sequence[int]
    page_bytes: Sequence[int]

    def pairs(self) -> list[tuple[int, int]]:
        return [(n, page) for n in self.nbytes for page in self.page_bytes if page <= n]


@dataclass
class Bench:
    """One run over cases.

    seconds : for timing one case in one setting, but for `least` repetitions.
    deadline : of `now`, after which nothing starts.
    peers : whether torch's ops are timed beside.
    rows : what was found so far.
    """

    clock: Clock
    rates: Rates
    seconds: float
    deadline: float
    now: Now
    peers: bool = True
    least: int = LEAST_REPETITIONS
    rows: list[Row] = field(default_factory=list)
    broke_device: bool = False

    def run(self, cases: Sequence[Case], sizes: Sizes, after_each: Callable[[Row], None]) -> None:
        for case in cases:
            for nbytes, page_bytes in sizes.pairs():
                row: Row = {
                    "case": case.name,
                    "peer_name": case.peer if self.peers else "",
                    "nbytes": nbytes,
                    "page_bytes": page_bytes,
                }
                row.update(self._measure(case, Setting(self.clock.device, nbytes, page_bytes)))
                self.rows.append(row)
                after_each(row)
                if row["status"] != "right":  # what an error held on to
                    gc.collect()
                    if self.clock.device == "cuda" and not self.broke_device:
                        torch.cuda.empty_cache()

    def _measure(self, case: Case, setting: Setting) -> Row:
        if self.now() >= self.deadline:
            return {"status": "not run", "why": "--minutes are over"}
        if self.broke_device:
            return {"status": "not run", "why": "a kernel before broke the device; see --only"}
        try:
            job = case.make(setting)
            job.check()
            return self._time(job)
        except torch.OutOfMemoryError:
            why = f"{format_bytes(setting.nbytes)} with its rivals does not fit"
            return {"status": "not run", "why": why}
        except ResultError as error:
            return {"status": "wrong", "why": str(error)}
        except Exception as error:  # one broken kernel must not hide the others
            self.broke_device = self._lost()
            return {"status": "broken", "why": f"{type(error).__name__}: {error}"}

    def _time(self, job: Job) -> Row:
        contenders = {
            "call": lambda: self.clock.call(job.run),
            "kernels": lambda: self.clock.kernels(job.run),
        }
        peer = job.peer
        if peer is not None and self.peers:
            contenders["peer"] = lambda: self.clock.call(peer)
        times = take_turns(contenders, self.seconds, self.least)
        floor = self.rates.floor_seconds(job.work)
        ours = times.get("kernels", times["call"]).median
        row: Row = {"status": "right", "floor_ms": floor * 1e3, "share_of_floor": floor / ours}
        if "peer" in times:
            row["peer_over_call"] = times["peer"].median / times["call"].median
        row["fits_in_l2"] = job.work.memory_bytes <= self.clock.l2_bytes  # it is flushed first
        return row | {name: one.record() for name, one in times.items()}

    def _lost(self) -> bool:
        """Whether a kernel broke the device, so that no other can run in this process."""
        if self.clock.device != "cuda":
            return False
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False


def check_all(cases: Sequence[Case], settings: Sequence[Setting]) -> list[Row]:
    """Only whether each computes what it should, on fresh operands in each setting."""
    rows = []
    for case in cases:
        for setting in settings:
            row: Row = {"case": case.name, "nbytes": setting.nbytes}
            row |= {"page_bytes": setting.page_bytes, "status": "right"}
            try:
                case.make(setting).check()
            except ResultError as error:
                row |= {"status": "wrong", "why": str(error)}
            except Exception as error:  # one broken reference must not hide the others
                row |= {"status": "broken", "why": f"{type(error).__name__}: {error}"}
            rows.append(row)
    return rows
