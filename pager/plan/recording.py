"""From what a recorder wrote down to the planner's trace.

A run of pages is a tensor of the trace. Runs that replace each other from iteration to iteration
(an optimizer that makes its states anew) are one. Dense memory is one tensor of kind ``workspace``
per stretch of ops with the same level, in whole pages, and each op of the stretch touches it: what
is not in pages cannot leave the device, and no plan may count on that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ...planner.trace import KINDS, READ, READWRITE, WRITE, Floats, Ints, Trace
from ...planner.trace_check import number_by_appearance
from ..memory.space import TRANSIENT_KINDS, Extent
from ..tensor.names import named_models, named_runs, shared_name

if TYPE_CHECKING:
    from ..budget.dense_levels import Levels
    from ..core import Core
    from .op_clock import OpClock

SOURCE = "tensorpager"
USER_KIND = "input"  # the nearest to what the user paged by hand


class Mark(NamedTuple):
    """Where an op begins. Ops of several threads may be appended out of order."""

    op: int
    what: Any  # the OpOverload, or a name
    when: Any  # of the clock
    stall_us: float
    dense_bytes: int


@dataclass
class Log:
    """What was appended. Runs are kept alive, so that they can be told apart by identity."""

    marks: list[Mark] = field(default_factory=list)
    accesses: list[tuple[int, Sequence[Extent]]] = field(default_factory=list)  # (op, runs)
    writes: list[tuple[int, Extent]] = field(default_factory=list)
    saved: list[tuple[Extent, str]] = field(default_factory=list)  # and the module that ran
    before: list[Extent] = field(default_factory=list)  # alive when the iteration began
    names: list[tuple[Extent, str]] = field(default_factory=list)


@dataclass
class _Tensor:
    """One of the trace. Tensors are equal only to themselves."""

    kind: str
    nbytes: int
    persistent: bool
    names: list[str] = field(default_factory=list)
    shared: bool = False

    __hash__ = object.__hash__
    __eq__ = object.__eq__


Uses = dict[tuple[int, _Tensor], int]  # (op, tensor) → mode, in the order of ops


def make_trace(
    pager: Core, log: Log, clock: OpClock, levels: Levels, span: tuple[Mark, Mark]
) -> Trace:
    """The trace of ``log``, whose marks are in order; ``span``: start and end of the iteration."""
    began, ended = span
    marks = [began, *log.marks[1:], ended]  # what comes before the first op is part of it
    stalls = np.array([mark.stall_us for mark in marks])
    durations = clock.durations([mark.when for mark in marks], stalls - stalls[0])
    ops = len(durations)
    uses = _uses(_tensors(pager, log), log)
    samples = np.array([mark.dense_bytes for mark in marks[:-1]], np.int64)
    times = np.array([mark.when if isinstance(mark.when, float) else 0.0 for mark in marks[:-1]])
    dense = levels.levels(times, samples)
    dense = dense + max(pager.budget.dense_baseline, -int(dense.min()))
    uses |= _workspace(dense, pager.page_size)
    return _assemble(pager, log, durations, uses, _facts(pager, stalls, levels, ops))


def _facts(pager: Core, stalls: Floats, levels: Levels, ops: int) -> dict[str, Any]:
    """Free metadata."""
    return {
        "models": [type(model).__name__ for _, model in named_models(pager)],
        "torch": torch.__version__,
        "stall_us": float(stalls[-1] - stalls[0]),
        "dense_from": levels.source,
        "budget_bytes": dict(pager.budget_bytes),
        "recorded_ops": ops,
    }


# -- tensors -------------------------------------------------------------------------------------
def _tensors(pager: Core, log: Log) -> dict[Extent, _Tensor]:
    """The tensor that each run which was used belongs to."""
    used = dict.fromkeys(run for _, runs in log.accesses for run in runs)
    with pager.lock:
        pager.residency.collect()
        after = {run for run in used if pager.space.runs.get(run.id) is run}
    before = set(log.before)
    names = _names(pager, log)
    tensors = {}
    for run in used:
        lasting = run in before or (run in after and run.kind not in TRANSIENT_KINDS)
        kind = run.kind if run.kind in KINDS else USER_KIND
        tensors[run] = _Tensor(kind, run.nbytes, lasting, names.get(run, []), run.small is not None)
    _join_heirs(tensors, before, after, log)
    _name_copies(tensors, log)
    return tensors


def _names(pager: Core, log: Log) -> dict[Extent, list[str]]:
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
    tensors: dict[Extent, _Tensor], before: set[Extent], after: set[Extent], log: Log
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


def _name_copies(tensors: dict[Extent, _Tensor], log: Log) -> None:
    """Copies of parameters that an op made (autocast) are called after them."""
    for _, runs in log.accesses:
        nameless = [tensors[run] for run in runs if not tensors[run].names]
        named = [tensors[run] for run in runs if tensors[run].kind == "parameter"]
        if nameless and named and named[0].names:
            for tensor in nameless:
                if tensor.kind == "activation":
                    tensor.names.append(f"{named[0].names[0]}:copy")


# -- uses ----------------------------------------------------------------------------------------
def _uses(tensors: dict[Extent, _Tensor], log: Log) -> Uses:
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


def _workspace(dense: Ints, page_size: int) -> Uses:
    """Dense memory: a tensor for each stretch of ops with the same number of pages, if any."""
    pages = -(-dense // page_size)
    edges = np.flatnonzero(np.diff(pages)) + 1
    uses: Uses = {}
    for stretch in np.split(np.arange(len(pages)), edges):
        count = int(pages[stretch[0]])
        if count:
            tensor = _Tensor("workspace", count * page_size, persistent=False, names=["dense"])
            uses |= {(op, tensor): READWRITE for op in stretch.tolist()}
            uses[int(stretch[0]), tensor] = WRITE
    return uses


# -- the trace -----------------------------------------------------------------------------------
def _assemble(
    pager: Core, log: Log, durations: Floats, uses: Uses, metadata: dict[str, Any]
) -> Trace:
    numbers: dict[_Tensor, int] = {}
    rows = [(op, numbers.setdefault(t, len(numbers)), mode) for (op, t), mode in uses.items()]
    rows.sort()
    table = np.array(rows, np.int64).reshape(-1, 3)
    index, first = number_by_appearance(table[:, 1])
    known = list(numbers)
    tensors = [known[number] for number in table[first, 1].tolist()]
    nbytes = np.array([tensor.nbytes for tensor in tensors], np.int64)
    members = {str(number): t.names for number, t in enumerate(tensors) if t.shared}
    return Trace(
        page_size=pager.page_size,
        op_names=_op_names(log),
        op_start_us=np.concatenate([[0.0], np.cumsum(durations)[:-1]]),
        op_duration_us=durations,
        tensor_ids=np.arange(len(tensors), dtype=np.int64),
        tensor_names=[shared_name(tensor.names) for tensor in tensors],
        tensor_bytes=nbytes,
        tensor_kinds=[tensor.kind for tensor in tensors],
        tensor_persistent=np.array([tensor.persistent for tensor in tensors], np.bool_),
        access_op=table[:, 0].copy(),
        access_tensor=index,
        access_mode=table[:, 2].astype(np.int8),
        access_first_page=np.zeros(len(table), np.int64),
        access_page_count=-(-nbytes // pager.page_size)[index],
        source=SOURCE,
        device=str(pager.device),
        metadata={**metadata, "shared": members},
    )


def _op_names(log: Log) -> list[str]:
    known: dict[Any, str] = {}
    for mark in log.marks:
        if mark.what not in known:
            known[mark.what] = _name_of(mark.what)
    return [known[mark.what] for mark in log.marks]


def _name_of(what: Any) -> str:
    """``aten::mm`` of an op; names of ours, and of higher-order operators, as they are."""
    if isinstance(what, str):
        return what
    schema = getattr(what, "_schema", None)
    return str(schema.name) if schema is not None else str(what)
