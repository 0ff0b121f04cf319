"""The planner's trace of an access log.

One op for each access, lasting until the next one begins, because that is where the pager can act.
A run that is born inside and dies long after its last access (a gradient, kept until ``zero_grad``)
must be somewhere until then; a trace can say so only by an access, so an op of no duration is put
in where it died. Its pages need not be brought back for that: ``frees`` says which ops these are.

The runs that a stream goes through are not in the trace, unless others use them whole. Instead each
stream has a tensor of kind "workspace" that all its ops touch, so that a plan keeps frames free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...planner.trace import KINDS, READ, READWRITE, Trace
from .access_log import FIRST_STREAM, AccessLog, StreamAccess

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
    frames: int | None = None,
) -> Recorded:
    """``facts``: of each run's key. ``seconds``: durations of the accesses, instead of the log's
    own. ``frames``: of the device; workspaces are smaller where they would not fit beside what
    their ops pin."""
    durations = list(log.seconds() if seconds is None else seconds)
    written = set(log.writes)
    late = _late_deaths(log)
    index: dict[int, int] = {}
    names: list[str] = []
    position: list[int] = []
    op_us: list[float] = []
    rows: list[tuple[int, int, int]] = []
    tensors: list[tuple[int, RunFacts]] = []  # key, and what is known
    spaces: dict[StreamAccess, int] = {}  # its tensor
    space_pages = _workspaces(log, facts, frames)

    def add_op(name: str, where: int, microseconds: float) -> int:
        names.append(name)
        position.append(where)
        op_us.append(microseconds)
        return len(names) - 1

    def touch_spaces(op: int, where: int, *, between: bool) -> None:
        """``between``: the op is before access ``where``, and not itself."""
        for stream, pages in space_pages.items():
            if stream.begin + between <= where < stream.end:
                if stream not in spaces:
                    spaces[stream] = len(tensors)
                    tensors.append((log.keys[stream.begin][0], RunFacts(pages, "workspace")))
                rows.append((op, spaces[stream], READWRITE))

    frees = set()
    for where in range(len(log.keys) + 1):
        for key in late.get(where, ()):
            op = add_op("free", where, 0.0)
            frees.add(op)
            rows.append((op, index[key], READ))
            touch_spaces(op, where, between=True)
        if where == len(log.keys):
            break
        streams = log.keys[where][:1] >= (FIRST_STREAM,)
        op = add_op("stream" if streams else "access", where, durations[where] * 1e6)
        for key in () if streams else dict.fromkeys(log.keys[where]):
            mode = READWRITE if (where, key) in written else READ
            if key not in index:
                index[key] = len(tensors)
                tensors.append((key, facts[key]))
            rows.append((op, index[key], mode))
        touch_spaces(op, where, between=False)
    keys = [key for key, _ in tensors]
    pages = np.array([fact.pages for _, fact in tensors], np.int64)
    table = np.array(rows, np.int64).reshape(-1, 3)
    lengths = np.array(op_us)
    trace = Trace(
        page_size=page_size,
        op_names=names,
        op_start_us=np.concatenate([[0.0], np.cumsum(lengths)[:-1]]) if len(names) else lengths,
        op_duration_us=lengths,
        tensor_ids=np.arange(len(keys), dtype=np.int64),
        tensor_names=[fact.name for _, fact in tensors],
        tensor_bytes=pages * page_size,
        tensor_kinds=[fact.kind if fact.kind in KINDS else "input" for _, fact in tensors],
        tensor_persistent=np.array([0 < key < FIRST_STREAM for key in keys], np.bool_),
        access_op=table[:, 0].copy(),
        access_tensor=table[:, 1].copy(),
        access_mode=table[:, 2].astype(np.int8),
        access_first_page=np.zeros(len(table), np.int64),
        access_page_count=pages[table[:, 1]] if len(table) else np.zeros(0, np.int64),
        source="tensorpager",
        device=device,
    )
    return Recorded(trace, position, keys, frozenset(frees))


def _workspaces(
    log: AccessLog, facts: dict[int, RunFacts], frames: int | None
) -> dict[StreamAccess, int]:
    """Pages of each stream's workspace, at most what is left of ``frames`` beside the accesses
    during it; without those for which nothing is left."""
    beside = np.zeros(len(log.keys), np.int64)
    for stream in log.streams:
        for where in range(stream.begin, stream.end):
            keys = {key for key in log.keys[where] if key < FIRST_STREAM}
            beside[where] = sum(facts[key].pages for key in keys)
    found = {}
    for stream in log.streams:
        span = slice(stream.begin, stream.end)
        room = stream.frames if frames is None else frames - int(beside[span].max())
        pages = min(stream.frames, room)
        if pages > 0:
            found[stream] = pages
            beside[span] += pages
    return found


def _late_deaths(log: AccessLog) -> dict[int, list[int]]:
    """Position → keys of runs born inside that die there, well after their last access. A run that
    outlives the iteration dies at its end, as far as this iteration knows."""
    last: dict[int, int] = {}
    for where, keys in enumerate(log.keys):
        for key in keys:
            last[key] = where
    died = dict.fromkeys((key for key in last if key < 0), len(log.keys))
    # (Of what only streams went through there is nothing to say.)
    died.update((key, where) for where, key in log.deaths if key in died)
    late: dict[int, list[int]] = {}
    for key, where in died.items():
        if where > last[key] + _SOON:
            late.setdefault(where, []).append(key)
    return late
