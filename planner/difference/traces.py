"""What changed from one recorded iteration to another: measures, kinds, ops by name, tensors."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from ..lifetimes import gap_bytes, gaps, idle_us, live_pages, working_set_pages
from ..trace import KINDS, Trace
from .change import BYTES, COUNT, US

# --- measures --------------------------------------------------------------------------------


class Peak(NamedTuple):
    """The op at which most bytes are live, and what they are."""

    op: int
    op_name: str
    nbytes: int
    by_kind: dict[str, int]


def peak_of(trace: Trace) -> Peak:
    live = live_pages(trace, 1)  # pages of one byte: bytes
    op = int(live.argmax())
    kinds = np.array(trace.tensor_kinds)
    by_kind = {kind: int(live_pages(trace, 1, kinds == kind)[op]) for kind in KINDS}
    return Peak(op, trace.op_names[op], int(live[op]), by_kind)


def measures(trace: Trace) -> dict[str, tuple[str, float]]:
    """Unit and value of each, by the names that thresholds use; sizes are the tensors' own, but the
    working set is in whole pages."""
    need = int(working_set_pages(trace, trace.page_size).max()) * trace.page_size
    return {
        "peak": (BYTES, peak_of(trace).nbytes),
        "time": (US, trace.ideal_us),
        "working-set": (BYTES, need),
        "idle": (BYTES, idle_bytes(trace)),
        "tensor-bytes": (BYTES, int(trace.tensor_bytes.sum())),
        "tensors": (COUNT, trace.tensors),
        "ops": (COUNT, trace.ops),
        "accesses": (COUNT, len(trace.access_op)),
    }


def idle_bytes(trace: Trace) -> float:
    """How many bytes lie between two uses with an op in between, on average over the iteration."""
    if not trace.ideal_us:
        return 0.0
    found = gaps(trace, trace.page_size)
    ends = np.cumsum(trace.op_duration_us)
    length = idle_us(trace, found, ends - trace.op_duration_us, ends, trace.ideal_us)
    return float(gap_bytes(trace, found, trace.page_size) @ length) / trace.ideal_us


# --- ops -------------------------------------------------------------------------------------


class OpChange(NamedTuple):
    """All ops of one name: how many, and their time in µs."""

    name: str
    a_count: int
    b_count: int
    a_us: float
    b_us: float

    @property
    def status(self) -> str:
        same = (self.a_count, self.a_us) == (self.b_count, self.b_us)
        return _status(self.a_count, self.b_count, same)


def op_changes(a: Trace, b: Trace) -> list[OpChange]:
    """One for each name, most changed time first."""
    sums: defaultdict[str, list[Any]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
    for side, trace in enumerate((a, b)):
        for name, us in zip(trace.op_names, trace.op_duration_us.tolist()):
            row = sums[name]
            row[side] += 1
            row[2 + side] += us
    found = [OpChange(name, *row) for name, row in sums.items()]
    return sorted(found, key=lambda op: (-abs(op.b_us - op.a_us), -abs(op.b_count - op.a_count)))


# --- tensors ---------------------------------------------------------------------------------


class TensorChange(NamedTuple):
    """A tensor and what became of it; numbers are those of the files, ``None`` where it is not."""

    name: str
    kind: str
    a: int | None
    b: int | None
    a_bytes: int
    b_bytes: int

    @property
    def status(self) -> str:
        if self.a is not None and self.b is not None and self.a_bytes != self.b_bytes:
            return "grown" if self.b_bytes > self.a_bytes else "shrunk"
        return _status(self.a is not None, self.b is not None, True)


def tensor_changes(a: Trace, b: Trace) -> list[TensorChange]:
    """One for each tensor of either, most changed bytes first.

    Tensors are the same if name and kind are; a tensor without a name goes by that of the op that
    touches it first. Several with one name are matched in their order; if there are more of them in
    one trace, those of the same size first.
    """
    groups: defaultdict[Hashable, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side, trace in enumerate((a, b)):
        for tensor, key in enumerate(_keys(trace)):
            groups[key][side].append(tensor)
    found = []
    for mine, theirs in groups.values():
        for one, other in _matched(a, mine, b, theirs):
            found.append(
                TensorChange(
                    *(_label(b, other) if one is None else _label(a, one)),
                    None if one is None else int(a.tensor_ids[one]),
                    None if other is None else int(b.tensor_ids[other]),
                    0 if one is None else int(a.tensor_bytes[one]),
                    0 if other is None else int(b.tensor_bytes[other]),
                )
            )
    return sorted(found, key=lambda tensor: -abs(tensor.b_bytes - tensor.a_bytes))


def _keys(trace: Trace) -> Iterable[Hashable]:
    for tensor, (name, kind) in enumerate(zip(trace.tensor_names, trace.tensor_kinds)):
        yield (name, kind, "" if name else trace.op_names[trace.first_op[tensor]])


def _label(trace: Trace, tensor: int | None) -> tuple[str, str]:
    """Name and kind."""
    assert tensor is not None
    name = trace.tensor_names[tensor] or f"of {trace.op_names[trace.first_op[tensor]]}"
    return name, trace.tensor_kinds[tensor]


def _matched(
    a: Trace, mine: list[int], b: Trace, theirs: list[int]
) -> list[tuple[int | None, int | None]]:
    if len(mine) == len(theirs):
        return list(zip(mine, theirs))
    waiting: defaultdict[int, deque[int]] = defaultdict(deque)
    for other in theirs:
        waiting[int(b.tensor_bytes[other])].append(other)
    pairs: list[tuple[int | None, int | None]] = []
    left: deque[int] = deque()
    for one in mine:
        same_size = waiting[int(a.tensor_bytes[one])]
        if same_size:
            pairs.append((one, same_size.popleft()))
        else:
            left.append(one)
    rest = deque(sorted(other for others in waiting.values() for other in others))
    while left and rest:
        pairs.append((left.popleft(), rest.popleft()))
    return [*pairs, *((one, None) for one in left), *((None, other) for other in rest)]


def _status(in_a: int | bool, in_b: int | bool, same: bool) -> str:
    if not in_a or not in_b:
        return "new" if in_b else "gone"
    return "same" if same else "changed"


# --- the same --------------------------------------------------------------------------------


def differing(a: Trace, b: Trace) -> list[str]:
    """What of the two iterations is not equal, as field names; where they come from and what is in
    their free keys does not count."""
    ignored = {"source", "sha256", "device", "metadata"}
    found = []
    for item in fields(a):
        one, other = getattr(a, item.name), getattr(b, item.name)
        if isinstance(one, np.ndarray):  # NaN, where the host cannot run an op, is itself
            same = np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
        else:
            same = one == other
        if item.name not in ignored and not same:
            found.append(item.name)
    return found
