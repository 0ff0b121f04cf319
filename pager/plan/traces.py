"""The two traces that are made of what a recorder wrote down.

*Of a kind of iteration*, for the planner (:func:`trace_of_accesses`). One op for each access,
lasting until the next one begins, because that is where the pager can act. A run that is born
inside and dies long after its last access (a gradient, kept until ``zero_grad``) must be somewhere
until then; a trace can say so only by an access, so an op of no duration is put in where it died,
which uses one page of it: the others may stay below. Nor need that one be brought back: ``frees``
says which ops these are. Accesses in which an optional parameter is are ops of no pages. The runs
that a stream goes through are not in the trace, unless others use them whole. Instead each stream
has a tensor of kind "workspace" that all its ops touch, so that a plan keeps frames free.

*Of one iteration op by op*, for a trace file (:func:`trace_of_ops`). Runs that replace each other
from iteration to iteration (an optimizer that makes its states anew) are one tensor. Dense memory
is one tensor of kind "workspace" per stretch of ops with the same level, in whole pages, and each
op of the stretch touches it: what is not in pages cannot leave the device, and no plan may count on
that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ...planner.joint.options import FREE, HOSTED
from ...planner.trace import KINDS, READ, READWRITE, WRITE, Floats, Segment, Trace
from ...planner.trace_check import number_by_appearance
from ..core import Core
from ..memory.space import TRANSIENT_KINDS, Extent
from ..tensor.names import named_models, named_runs, shared_name
from .access_log import FIRST_STREAM, AccessLog, StreamAccess, is_optional
from .op_log import Mark, OpLog

SOURCE = "tensorpager"
USER_KIND = "input"  # the nearest to what the user paged by hand
STEP = "step"  # an op that the host may take
_SOON = 3  # accesses after the last one in which a death is as good as at once


@dataclass(eq=False)
class _Tensor:
    """One of a trace."""

    kind: str
    nbytes: int
    persistent: bool
    names: list[str] = field(default_factory=list)
    shared: bool = False
    key: int = 0


Uses = dict[tuple[int, _Tensor], int]  # (op, tensor) → mode


def _assemble(
    uses: Uses, names: list[str], us: Floats, page_size: int, device: str
) -> tuple[Trace, list[_Tensor]]:
    """The trace, and its tensors in the order of their numbers: by first use. ``us``: how long each
    op takes. One that is called ``FREE`` uses one page of what it does not write."""
    numbers: dict[_Tensor, int] = {}
    rows = [(op, numbers.setdefault(t, len(numbers)), mode) for (op, t), mode in uses.items()]
    rows.sort()
    table = np.array(rows, np.int64).reshape(-1, 3)
    index, first = number_by_appearance(table[:, 1])
    known = list(numbers)
    tensors = [known[number] for number in table[first, 1].tolist()]
    nbytes = np.array([tensor.nbytes for tensor in tensors], np.int64)
    frees = np.array([name == FREE for name in names], np.bool_)
    ends = frees[table[:, 0]] & (table[:, 2] == READ)
    trace = Trace(
        page_size=page_size,
        op_names=names,
        op_start_us=np.concatenate([[0.0], np.cumsum(us)[:-1]]) if len(us) else us,
        op_duration_us=us,
        tensor_ids=np.arange(len(tensors), dtype=np.int64),
        tensor_names=[shared_name(tensor.names) for tensor in tensors],
        tensor_bytes=nbytes,
        tensor_kinds=[t.kind if t.kind in KINDS else USER_KIND for t in tensors],
        tensor_persistent=np.array([tensor.persistent for tensor in tensors], np.bool_),
        access_op=table[:, 0].copy(),
        access_tensor=index,
        access_mode=table[:, 2].astype(np.int8),
        access_first_page=np.zeros(len(table), np.int64),
        access_page_count=np.where(ends, 1, -(-nbytes // page_size)[index]),
        source=SOURCE,
        device=device,
    )
    return trace, tensors


# -- a kind of iteration -------------------------------------------------------------------------
@dataclass(frozen=True)
class Recorded:
    """``trace``, and how its numbers are read: ``position[op]`` is the access that the op is, or
    comes before (for ops in ``frees``); ``keys[tensor]`` the run's key."""

    trace: Trace
    position: list[int]
    keys: list[int]
    frees: frozenset[int]


def trace_of_accesses(
    log: AccessLog,
    seconds: Sequence[float],
    page_size: int,
    device: str,
    frames: int,
    *,
    fixed: Collection[str] = (),
    step_us: Callable[[int, float], float] | None = None,
) -> Recorded:
    """``seconds``: of each access. ``frames``: of the device; workspaces are smaller where they
    would not fit beside what their ops pin. ``fixed``: blocks that may not run again; calls of the
    others are the trace's segments, whose first ops use their inputs. ``step_us``: what the host
    takes for a step on so many bytes that takes the device so long; without it, it takes none.
    """
    written = set(log.writes)
    late = _late_deaths(log)
    spaces = {
        stream: _Tensor("workspace", pages * page_size, False, key=log.keys[stream.begin][0])
        for stream, pages in _workspaces(log, frames).items()
    }
    tensors: dict[int, _Tensor] = {}
    ops: list[tuple[str, int, float]] = []  # name, position, µs
    uses: Uses = {}

    def add_op(name: str, where: int, us: float) -> int:
        """Streams that began before it go on."""
        op = len(ops)
        ops.append((name, where, us))
        for stream, space in spaces.items():
            if stream.begin + (name == FREE) <= where < stream.end:
                uses[op, space] = READWRITE
        return op

    frees = set()
    steps: dict[int, float] = {}
    for where, keys in enumerate([*log.keys, ()]):
        for key in late.get(where, ()):
            if key not in tensors:  # of an optional part
                continue
            op = add_op(FREE, where, 0.0)
            frees.add(op)
            uses[op, tensors[key]] = READ
        if where == len(log.keys):
            break
        is_stream = keys[:1] >= (FIRST_STREAM,)
        keys = () if is_stream or is_optional(keys) else keys
        name = "stream" if is_stream else log.collectives.get(where, "access")
        if step_us is not None and keys and set(log.steps.get(where, ())) == set(keys):
            name = HOSTED if where in log.hosted else STEP
        op = add_op(name, where, seconds[where] * 1e6)
        if name in (HOSTED, STEP):
            assert step_us is not None
            pages = sum(log.facts[key].pages for key in keys)
            steps[op] = step_us(pages * page_size, seconds[where] * 1e6)
        for key in keys:
            if key not in tensors:
                pages, kind = log.facts[key]
                tensors[key] = _Tensor(kind, pages * page_size, key > 0, key=key)
            only_read = op in steps and tensors[key].kind == "gradient"
            writes = (where, key) in written and not only_read
            uses[op, tensors[key]] = READWRITE if writes else READ
    op_at = {where: op for op, (name, where, _) in enumerate(ops) if name != FREE}
    segments = []
    for block, begin, end, inputs in log.calls:
        if block in fixed or end <= begin:
            continue
        segments.append(Segment(op_at[begin], op_at[end - 1], block))
        for key in inputs:
            if key in tensors:
                uses.setdefault((op_at[begin], tensors[key]), READ)
    us = np.array([us for _, _, us in ops])
    trace, found = _assemble(uses, [name for name, _, _ in ops], us, page_size, device)
    trace = replace(trace, segments=tuple(segments)) if segments else trace
    if steps:
        host_us = np.full(trace.ops, np.nan)
        host_us[list(steps)] = list(steps.values())
        trace = replace(trace, op_host_us=host_us)
    return Recorded(
        trace, [where for _, where, _ in ops], [tensor.key for tensor in found], frozenset(frees)
    )


def _workspaces(log: AccessLog, frames: int) -> dict[StreamAccess, int]:
    """Pages of each stream's workspace, at most what is left of ``frames`` beside the accesses
    during it; without those for which nothing is left."""
    beside = np.zeros(len(log.keys), np.int64)
    for stream in log.streams:
        for where in range(stream.begin, stream.end):
            keys = {key for key in log.keys[where] if key < FIRST_STREAM}
            beside[where] = sum(log.facts[key].pages for key in keys)
    found = {}
    for stream in log.streams:
        span = slice(stream.begin, stream.end)
        pages = min(stream.frames, frames - int(beside[span].max()))
        if pages > 0:
            found[stream] = pages
            beside[span] += pages
    return found


def _late_deaths(log: AccessLog) -> dict[int, list[int]]:
    """Position → keys of runs born inside that die there, well after their last access. A run that
    outlives the iteration dies at its end, as far as this iteration knows."""
    last = {key: where for where, keys in enumerate(log.keys) for key in keys}
    died = dict.fromkeys((key for key in last if key < 0), len(log.keys))
    # (Of what only streams went through there is nothing to say.)
    died.update((key, where) for where, key in log.deaths if key in died)
    late: dict[int, list[int]] = {}
    for key, where in died.items():
        if where > last[key] + _SOON:
            late.setdefault(where, []).append(key)
    return late


# -- an iteration op by op -----------------------------------------------------------------------
def trace_of_ops(pager: Core, log: OpLog, ended: Mark) -> Trace:
    """``ended``: the end of the iteration."""
    ops = sorted(log.marks, key=lambda mark: mark[0])
    marks = [log.started, *ops[1:], ended]  # what comes before the first op is part of it
    us = np.array([log.seconds(a, b) * 1e6 for (_, _, a, _), (_, _, b, _) in pairwise(marks)])
    waited_us = 0.0
    for op, wait in log.waits:
        wait_us = wait.seconds(pager.backend) * 1e6
        us[op] -= wait_us
        waited_us += wait_us
    uses = _uses(_tensors(pager, log), log) | _workspace(pager, log, marks[:-1])
    known = {what: _name_of(what) for _, what, *_ in ops}
    names = [known[what] for _, what, *_ in ops]
    us = np.maximum(us, 0.0)
    trace, tensors = _assemble(uses, names, us, pager.page_size, str(pager.device))
    trace.metadata.update(
        {
            "models": [type(model).__name__ for _, model in named_models(pager)],
            "torch": torch.__version__,
            "stall_us": waited_us,
            "dense_from": log.levels.source,
            "budget_bytes": dict(pager.budget_bytes),
            "recorded_ops": len(ops),
            "shared": {str(number): t.names for number, t in enumerate(tensors) if t.shared},
        }
    )
    return trace


def _tensors(pager: Core, log: OpLog) -> dict[Extent, _Tensor]:
    """The tensor that each run which was used belongs to."""
    used = dict.fromkeys(run for _, runs in log.accesses for run in runs)
    with pager.lock:
        pager.residency.collect()
        after = {run for run in used if pager.space.runs.get(run.id) is run}
    before = {run for run in used if run.born < log.births}
    names = _names(pager, log)
    tensors = {}
    for run in used:
        lasting = run in before or (run in after and run.kind not in TRANSIENT_KINDS)
        shared = run.small is not None
        tensors[run] = _Tensor(run.kind, run.nbytes, lasting, names.get(run, []), shared)
    _join_heirs(tensors, before, after, log)
    _name_copies(tensors, log)
    return tensors


def _names(pager: Core, log: OpLog) -> dict[Extent, list[str]]:
    """All names of each run, in the order in which they were met."""
    found: dict[Extent, dict[str, None]] = {}
    saved: Counter[str] = Counter()
    for run, name in log.names:
        found.setdefault(run, {})[name] = None
    for run, module in log.saved:
        found.setdefault(run, {})[f"{module}:saved.{saved[module]}"] = None
        saved[module] += 1
    for run, name in named_runs(pager):
        found.setdefault(run, {})[name] = None
    return {run: list(names) for run, names in found.items()}


def _join_heirs(
    tensors: dict[Extent, _Tensor], before: set[Extent], after: set[Extent], log: OpLog
) -> None:
    """A run from before the iteration that died in it, and one of the same name that lives on, are
    one tensor if the first was last used when the second first was, or earlier."""
    first: dict[Extent, int] = {}
    last: dict[Extent, int] = {}
    for op, runs in log.accesses:
        for run in runs:
            first[run] = min(first.get(run, op), op)
            last[run] = max(last.get(run, op), op)
    heirs = {_identity(tensors[run]): run for run in tensors if run in after and run not in before}
    for run in [run for run in tensors if run in before and run not in after]:
        tensor = tensors[run]
        heir = heirs.get(_identity(tensor)) if tensor.names else None
        if heir is not None and last[run] <= first[heir]:
            tensors[heir] = tensor


def _identity(tensor: _Tensor) -> tuple[Any, ...]:
    return tensor.kind, tensor.nbytes, tuple(tensor.names)


def _name_copies(tensors: dict[Extent, _Tensor], log: OpLog) -> None:
    """Copies of parameters that an op made (autocast) are called after them."""
    for _, runs in log.accesses:
        nameless = [tensors[run] for run in runs if not tensors[run].names]
        named = [tensors[run] for run in runs if tensors[run].kind == "parameter"]
        if nameless and named and named[0].names:
            for tensor in nameless:
                if tensor.kind == "activation":
                    tensor.names.append(f"{named[0].names[0]}:copy")


def _uses(tensors: dict[Extent, _Tensor], log: OpLog) -> Uses:
    """The first use of a tensor that is written there writes it; later ones may keep some of what
    was there, so they read it too."""
    written = {(op, tensors[run]) for op, run in log.writes}
    uses: Uses = {}
    met: set[_Tensor] = set()
    for op, runs in sorted(log.accesses, key=lambda access: access[0]):
        for run in runs:
            tensor = tensors[run]
            new = tensor not in met and not tensor.persistent
            if (op, tensor) in uses:
                continue
            met.add(tensor)
            writes = (op, tensor) in written
            uses[op, tensor] = (WRITE if new else READWRITE) if writes else READ
    return uses


def _workspace(pager: Core, log: OpLog, marks: Sequence[Mark]) -> Uses:
    """Dense memory: a tensor for each stretch of ops with the same number of pages, if any."""
    times = np.array([when if isinstance(when, float) else 0.0 for _, _, when, _ in marks])
    dense = log.levels.levels(times, np.array([sample for *_, sample in marks], np.int64))
    dense = dense + max(pager.budget.dense_baseline, -int(dense.min()))
    pages = -(-dense // pager.page_size)
    edges = np.flatnonzero(np.diff(pages)) + 1
    uses: Uses = {}
    for stretch in np.split(np.arange(len(pages)), edges):
        count = int(pages[stretch[0]])
        if count:
            tensor = _Tensor("workspace", count * pager.page_size, False, ["dense"])
            uses |= {(op, tensor): READWRITE for op in stretch.tolist()}
            uses[int(stretch[0]), tensor] = WRITE
    return uses


def _name_of(what: Any) -> str:
    """``aten::mm`` of an op; names of ours, and of higher-order operators, as they are."""
    if isinstance(what, str):
        return what
    schema = getattr(what, "_schema", None)
    return str(schema.name) if schema is not None else str(what)
