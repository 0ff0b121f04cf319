"""The planner's trace of an access log.

One op for each access, lasting until the next one begins, because that is where the pager can act.
A run that is born inside and dies long after its last access (a gradient, kept until ``zero_grad``)
must be somewhere until then; a trace can say so only by an access, so an op of no duration is put
in where it died. Its pages need not be brought back for that: ``frees`` says which ops these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..planner.trace import KINDS, READ, READWRITE, Trace
from .access_log import AccessLog

_SOON = 3  # accesses after the last one in which a death is as good as at once


@dataclass(frozen=True)
class Recorded:
    """``trace``, and how its numbers are read: ``position[op]`` is the access that the op is, or
    comes before (for ops in ``frees``); ``keys[tensor]`` the run's key."""

    trace: Trace
    position: list[int]
    keys: list[int]
    frees: frozenset[int]


@dataclass(frozen=True)
class RunFacts:
    """What a trace says of a run."""

    pages: int
    kind: str
    name: str | None = None


def make_recorded(
    log: AccessLog,
    facts: dict[int, RunFacts],
    page_size: int,
    seconds: Sequence[float] | None = None,
    device: str = "",
) -> Recorded:
    """``facts``: of each key. ``seconds``: durations of the accesses, instead of the log's own."""
    durations = list(log.seconds() if seconds is None else seconds)
    written = set(log.writes)
    late = _late_deaths(log)
    index: dict[int, int] = {}
    names: list[str] = []
    position: list[int] = []
    op_us: list[float] = []
    rows: list[tuple[int, int, int]] = []

    def add_op(name: str, where: int, microseconds: float) -> int:
        names.append(name)
        position.append(where)
        op_us.append(microseconds)
        return len(names) - 1

    frees = set()
    for where in range(len(log.keys) + 1):
        for key in late.get(where, ()):
            op = add_op("free", where, 0.0)
            frees.add(op)
            rows.append((op, index[key], READ))
        if where == len(log.keys):
            break
        op = add_op("access", where, durations[where] * 1e6)
        for key in dict.fromkeys(log.keys[where]):
            mode = READWRITE if (where, key) in written else READ
            rows.append((op, index.setdefault(key, len(index)), mode))
    keys = list(index)
    pages = np.array([facts[key].pages for key in keys], np.int64)
    table = np.array(rows, np.int64).reshape(-1, 3)
    lengths = np.array(op_us)
    trace = Trace(
        page_size=page_size,
        op_names=names,
        op_start_us=np.concatenate([[0.0], np.cumsum(lengths)[:-1]]) if len(names) else lengths,
        op_duration_us=lengths,
        tensor_ids=np.arange(len(keys), dtype=np.int64),
        tensor_names=[facts[key].name for key in keys],
        tensor_bytes=pages * page_size,
        tensor_kinds=[k if (k := facts[key].kind) in KINDS else "input" for key in keys],
        tensor_persistent=np.array([key > 0 for key in keys], np.bool_),
        access_op=table[:, 0].copy(),
        access_tensor=table[:, 1].copy(),
        access_mode=table[:, 2].astype(np.int8),
        access_first_page=np.zeros(len(table), np.int64),
        access_page_count=pages[table[:, 1]] if len(table) else np.zeros(0, np.int64),
        source="tensorpager",
        device=device,
    )
    return Recorded(trace, position, keys, frozenset(frees))


def _late_deaths(log: AccessLog) -> dict[int, list[int]]:
    """Position → keys of runs born inside that die there, well after their last access. A run that
    outlives the iteration dies at its end, as far as this iteration knows."""
    last: dict[int, int] = {}
    for where, keys in enumerate(log.keys):
        for key in keys:
            last[key] = where
    died = dict.fromkeys((key for key in last if key < 0), len(log.keys))
    died.update((key, where) for where, key in log.deaths if key < 0)
    late: dict[int, list[int]] = {}
    for key, where in died.items():
        if where > last[key] + _SOON:
            late.setdefault(where, []).append(key)
    return late
