"""When tensors are used, when they are idle, and how much is live.

A *segment* is a range of a tensor's pages that every access touches whole or not at all; most
tensors are one. A *gap* (inactive period) is the time between two uses of a segment with at least
one op in between. A *version* is what lies between two writes: within it a copy made below the
device stays good. Op numbers are positions in the iteration; a gap that ends at op ``b`` of the
next iteration has ``end = ops + b``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import InfeasibleBudget
from .hardware import Hardware
from .sizes import format_bytes
from .trace import KINDS, WRITE, Bools, Floats, Ints, Trace

# Kinds of gaps. Of what the host updates, KEPT: a copy in host is good for ever. RETURN: that, and
# all of it comes back from the host's step. LAST: all of it goes to the host, and dies there at the
# end. OUTLIVED: of pages that nobody uses any more, until the last use of others of their tensor:
# they have to be somewhere, and do not come back. FREE: of all others.
FREE, KEPT, RETURN, LAST, OUTLIVED = range(5)
DYING = LAST, OUTLIVED


@dataclass(frozen=True, eq=False)
class Segments:
    """Pages ``first_page`` to ``first_page + pages`` of ``tensor`` (index), per segment."""

    tensor: Ints
    first_page: Ints
    pages: Ints


@dataclass(frozen=True, eq=False)
class Uses:
    """Uses of segments, sorted by segment and op, one per segment and op."""

    segment: Ints
    op: Ints
    writes: Bools


@dataclass(frozen=True, eq=False)
class Gaps:
    """Sorted by version, and in the order of time within a version.

    ``begin``: op of the last use before; ``end``: op of the next use after, ≥ ops if it is in the
    next iteration. ``version``: number that gaps of one version share. ``lasting``: the version has
    no write at all (a persistent segment that is only read), so a copy is good for ever. ``kind``:
    what must be off, see below. ``number``: the place among all gaps of the trace.
    """

    segment: Ints
    tensor: Ints
    first_page: Ints
    pages: Ints
    begin: Ints
    end: Ints
    version: Ints
    lasting: Bools
    kind: Ints = None  # type: ignore[assignment]  # FREE for all if not given
    number: Ints = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.kind is None:
            object.__setattr__(self, "kind", np.zeros(len(self.begin), np.int64))
        if self.number is None:
            object.__setattr__(self, "number", np.arange(len(self.begin)))

    def __len__(self) -> int:
        return len(self.begin)

    def pick(self, which: npt.NDArray[np.bool_]) -> Gaps:
        """Those where ``which`` is true."""
        return Gaps(*(getattr(self, name)[which] for name in self.__dataclass_fields__))


def segments(trace: Trace, page_size: int) -> tuple[Segments, Uses]:
    """Cut tensors where accesses begin and end, and say which segments each op uses."""
    first, last = trace.access_ranges(page_size)
    count, tensor = trace.pages(page_size), trace.access_tensor
    late, early = first > 0, last < count[tensor]
    if not late.any() and not early.any():  # as in most traces
        whole = Segments(np.arange(trace.tensors), np.zeros(trace.tensors, np.int64), count)
        return whole, _merge(tensor, trace.access_op, trace.access_mode, trace.ops)
    # Places: the pages of all tensors one after another, and one between each two tensors.
    base = np.cumsum(count + 1) - (count + 1)
    begin, end = base[tensor] + first, base[tensor] + last
    edges = np.unique(np.concatenate([base, base + count, begin[late], end[early]]))
    begins, ends = np.searchsorted(edges, base), np.searchsorted(edges, base + count)
    tensor_of = np.repeat(np.arange(trace.tensors), ends - begins)
    first_page = np.delete(edges, ends) - base[tensor_of]
    pages = np.delete(np.diff(edges), ends[:-1])
    # Each tensor before has one edge more than segments.
    low, high = np.searchsorted(edges, begin) - tensor, np.searchsorted(edges, end) - tensor
    row = np.repeat(np.arange(len(tensor)), high - low)
    nth = np.arange(len(row)) - np.searchsorted(row, row)
    uses = _merge(low[row] + nth, trace.access_op[row], trace.access_mode[row], trace.ops)
    return Segments(tensor_of, first_page, pages), uses


def _merge(segment: Ints, op: Ints, mode: npt.NDArray[np.int8], ops: int) -> Uses:
    """Sort, and make one use of several in the same op."""
    key = segment * max(ops, 1) + op
    order = np.argsort(key, kind="stable")
    key, writes = key[order], (mode[order] & WRITE) != 0
    begins = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]])) if len(key) else key
    merged = np.logical_or.reduceat(writes, begins) if len(key) else writes
    return Uses(segment[order][begins], op[order][begins], merged)


def gaps(trace: Trace, page_size: int, *, outlived: bool = False) -> Gaps:
    """All gaps of a trace; of persistent segments also the one around the iteration's end.
    ``outlived``: and those of that kind."""
    cut, uses = segments(trace, page_size)
    total = len(cut.tensor)
    begins = np.searchsorted(uses.segment, np.arange(total))
    ends = np.searchsorted(uses.segment, np.arange(total), "right")
    persistent = trace.tensor_persistent[cut.tensor]
    after = np.concatenate([uses.op[1:], [0]]) if len(uses.op) else uses.op
    is_last = np.zeros(len(uses.op), bool)
    used = ends > begins
    is_last[ends[used] - 1] = True
    wraps = is_last & persistent[uses.segment]
    after = np.where(wraps, uses.op[begins[uses.segment]] + trace.ops, after)
    ends_later = np.zeros(len(uses.op), bool)
    if outlived:
        death = trace.last_op[cut.tensor[uses.segment]]
        ends_later = is_last & ~wraps & (death > uses.op)
        after = np.where(ends_later, death, after)
    # Writes before and at each use, within its segment.
    counted = np.cumsum(uses.writes)
    before = np.concatenate([[0], counted])[begins]
    number = counted - before[uses.segment]
    total_writes = np.concatenate([[0], counted])[ends] - before
    of_segment = total_writes[uses.segment]
    cyclic = persistent[uses.segment] & (number == of_segment)
    version = (
        np.where(cyclic, 0, number) + (np.cumsum(total_writes + 1) - total_writes - 1)[uses.segment]
    )
    # In the version that wraps, what follows the last write comes before the iteration's begin.
    late = cyclic & (of_segment > 0)
    place = uses.op + np.where(persistent[uses.segment] & ~late, trace.ops, 0)
    kept = np.flatnonzero((~is_last | wraps | ends_later) & (after > uses.op + 1))
    kept = kept[np.lexsort((place[kept], version[kept]))]
    segment = uses.segment[kept]
    return Gaps(
        segment=segment,
        tensor=cut.tensor[segment],
        first_page=cut.first_page[segment],
        pages=cut.pages[segment],
        begin=uses.op[kept],
        end=after[kept],
        version=version[kept],
        lasting=persistent[segment] & (of_segment[kept] == 0),
        kind=np.where(ends_later[kept], OUTLIVED, FREE),
    )


def live_pages(trace: Trace, page_size: int, chosen: Bools | None = None) -> Ints:
    """Pages of the (chosen) tensors that exist while each op runs, [ops]: all persistent tensors,
    and the others from the first op that touches them to the last one."""
    count = trace.pages(page_size)
    chosen = np.ones(trace.tensors, np.bool_) if chosen is None else chosen
    change = np.zeros(trace.ops + 1, np.int64)
    passing = chosen & ~trace.tensor_persistent
    np.add.at(change, trace.first_op[passing], count[passing])
    np.add.at(change, trace.last_op[passing] + 1, -count[passing])
    return np.cumsum(change[:-1]) + int(count[chosen & trace.tensor_persistent].sum())


def live_bytes_by_kind(
    trace: Trace, page_size: int, kinds: Sequence[str] = KINDS
) -> dict[str, Ints]:
    """The same in bytes of whole pages, for those of ``kinds`` of which there are tensors."""
    of_kind = np.array(trace.tensor_kinds, np.str_)
    return {
        kind: live_pages(trace, page_size, of_kind == kind) * page_size
        for kind in kinds
        if (of_kind == kind).any()
    }


def working_set_pages(trace: Trace, page_size: int) -> Ints:
    """Pages that each op needs on the device at once, [ops]: what it accesses, and the tensors
    that it is the first to touch whole."""
    cut, uses = segments(trace, page_size)
    need = np.bincount(uses.op, weights=cut.pages[uses.segment], minlength=trace.ops)
    # A new tensor takes frames for all its pages, also those that the op does not touch.
    tensor = cut.tensor[uses.segment]
    new = (trace.first_op[tensor] == uses.op) & ~trace.tensor_persistent[tensor]
    touched = np.bincount(
        tensor[new], weights=cut.pages[uses.segment][new], minlength=trace.tensors
    )
    passing = np.flatnonzero(~trace.tensor_persistent)
    rest = trace.pages(page_size)[passing] - touched[passing]
    np.add.at(need, trace.first_op[passing], rest)
    return need.astype(np.int64)


def idle_us(trace: Trace, found: Gaps, starts: Floats, ends: Floats, iteration_us: float) -> Floats:
    """How long each gap is, from the end of the use before to the start of the one after, [gaps],
    for ops that run from ``starts`` to ``ends`` µs."""
    around = found.end >= trace.ops
    after: Floats = starts[found.end % trace.ops] + around * iteration_us
    return np.maximum(after - ends[found.begin], 0.0)


def gap_bytes(trace: Trace, found: Gaps, page_size: int) -> Ints:
    """Bytes that are idle in each gap, without the rest of a last page, [gaps]."""
    begin = found.first_page * page_size
    end = begin + found.pages * page_size
    size: Ints = np.minimum(end, trace.tensor_bytes[found.tensor]) - begin
    return size


def require_working_sets(trace: Trace, hardware: Hardware) -> None:
    """Raises ``InfeasibleBudget`` if some op needs more at once than the device holds: no plan of
    any policy could help."""
    need = working_set_pages(trace, hardware.page_size)
    if need.max(initial=0) > hardware.device_pages:
        op = int(need.argmax())
        minimum = int(need[op]) * hardware.page_size
        raise InfeasibleBudget(
            f"op {op} '{trace.op_names[op]}' alone needs {format_bytes(minimum)}", minimum=minimum
        )


def hideable_bytes(size: Ints, pages: Ints, idle: Floats, hardware: Hardware) -> Ints:
    """Of ``size`` bytes in ``pages`` pages, idle for ``idle`` µs: those of whole pages that go out
    over the link, one after the other, and then come back before they are needed. Each gap has the
    link for itself."""
    page_us = hardware.page_us("host", "out") + hardware.page_us("host", "in")
    time = np.maximum(idle - 2 * hardware.transfer_latency_us, 0.0)
    fitting = np.floor(time / page_us + 1e-9) if page_us else np.where(time > 0, np.inf, 0.0)
    moved = np.minimum(fitting, pages).astype(np.int64)
    return np.minimum(moved * hardware.page_size, size)
