"""Bytes that a plan holds in host memory and on disk over the steady iteration.

A slot is taken when the transfer of its page begins, and given back when the page is written, when
it is dropped, or when its tensor dies. In between the page may come back to the device: a clean
copy keeps its slot.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .plan import TIERS
from .simulation import Transfer
from .timeline import Timeline, instants
from .trace import WRITE, Floats, Ints

# At one instant, in this order: slots go back before others are taken.
_FREE, _HOLD, _TAKE = 0, 1, 2


class _Change(NamedTuple):
    """What happens to the copies of a run of pages: of its first page at ``at_us``, of each next
    one ``step_us`` later. ``_HOLD`` only tells that they are there."""

    at_us: float
    what: int
    step_us: float = 0.0


def tier_usage(line: Timeline) -> dict[str, tuple[Floats, Ints]]:
    """Per tier, times in µs (the first is 0) and the bytes in use from each of them on. Tiers that
    are never used, and all of a timeline without a plan, are left out."""
    found: dict[str, tuple[Floats, Ints]] = {}
    for tier in TIERS:
        held = 0
        times: list[Floats] = [np.zeros(1)]
        pages: list[Ints] = [np.zeros(1, np.int64)]
        for first, last, changes in _runs(line, tier):
            count = last - first
            lasting = bool(changes) and changes[-1].what != _FREE
            here = lasting  # whether a copy is there; what is left at the end is there at the begin
            held += count * here
            for change in changes:
                if change.what != _HOLD and (change.what == _TAKE) != here:
                    here = not here
                    later = np.arange(count, dtype=np.float64) * change.step_us
                    times.append(change.at_us + later)
                    pages.append(np.full(count, 1 if here else -1))
        if held or len(times) > 1:
            found[tier] = _curve(np.concatenate(times), np.concatenate(pages), held, line.page_size)
    return found


def _curve(times: Floats, pages: Ints, held: int, page_size: int) -> tuple[Floats, Ints]:
    times = instants(times)
    order = np.lexsort((pages, times))  # at one instant slots go back before others are taken
    times, level = times[order], held + np.cumsum(pages[order])
    last = np.append(np.diff(times) > 0, True)
    return times[last], level[last] * page_size


def _runs(line: Timeline, tier: str) -> Iterator[tuple[int, int, list[_Change]]]:
    """Pages that always share their fate in ``tier``, from first to last (exclusive), and what
    becomes of their copies, in the order of the iteration."""
    if line.plan is None:
        return
    first_page, end_page = line.trace.access_ranges(line.page_size)
    writes = np.flatnonzero(line.trace.access_mode & WRITE)
    by_tensor = writes[np.argsort(line.trace.access_tensor[writes], kind="stable")]
    tensors = line.trace.access_tensor[by_tensor]
    index = {int(number): i for i, number in enumerate(line.trace.tensor_ids)}
    moves_of: defaultdict[int, list[int]] = defaultdict(list)
    for number, move in enumerate(line.plan.moves):
        moves_of[index[move.tensor]].append(number)
    transfers: defaultdict[int, list[Transfer]] = defaultdict(list)
    for transfer in line.transfers:
        transfers[transfer.move].append(transfer)
    for tensor, moves in moves_of.items():
        if not any(line.plan.moves[move].tier == tier for move in moves):
            continue
        mine = by_tensor[slice(*np.searchsorted(tensors, (tensor, tensor + 1)))].tolist()
        written = [(int(first_page[row]), int(end_page[row])) for row in mine]
        started = line.op_start_us[line.trace.access_op[mine]].tolist() if mine else []
        mine_moved = {number: transfers[number] for number in moves}
        part = _Tensor(line, tier, tensor, mine_moved, list(zip(started, written)))
        for first, last in itertools.pairwise(part.cuts()):
            yield first, last, part.changes(first, last)


class _Tensor:
    """One tensor that has moves to or from the tier; ``transfers``: of each of its moves;
    ``writes``: when, pages from and to."""

    def __init__(
        self,
        line: Timeline,
        tier: str,
        tensor: int,
        transfers: dict[int, list[Transfer]],
        writes: list[tuple[float, tuple[int, int]]],
    ) -> None:
        assert line.plan is not None
        self.line, self.tier, self.tensor = line, tier, tensor
        self.writes = writes
        self.transfers = {
            index: sorted(parts, key=lambda part: part.first_page)
            for index, parts in transfers.items()
        }
        self.moves = [(index, line.plan.moves[index]) for index in transfers]
        self.persistent = bool(line.trace.tensor_persistent[tensor])

    def cuts(self) -> list[int]:
        """Where a move, a transfer or a write begins or ends, or the iteration ends under a
        transfer."""
        found = {0, int(-(-self.line.trace.tensor_bytes[self.tensor] // self.line.page_size))}
        for _, (begin, end) in self.writes:
            found |= {begin, end}
        for index, move in self.moves:
            found |= {move.first_page, move.first_page + move.page_count}
            for part in self.transfers[index]:
                found |= {part.first_page, part.first_page + part.page_count}
                for edge in (part.begin_us, part.begin_us + _page_us(part)):
                    late = math.ceil((self.line.iteration_us - edge) / (_page_us(part) or 1.0))
                    if 0 < late < part.page_count:
                        found.add(part.first_page + late)
        return sorted(found)

    def changes(self, first: int, last: int) -> list[_Change]:
        """Of pages ``first`` to ``last``, by the moves and writes of one iteration."""
        found = [
            _Change(at, _FREE) for at, (begin, end) in self.writes if begin <= first and last <= end
        ]
        for index, move in self.moves:
            if not (move.first_page <= first and last <= move.first_page + move.page_count):
                continue
            if move.tier == self.tier and move.action == "drop":
                found.append(self._drop(index, first))
            elif move.tier == self.tier:
                part = self._transfer(index, first)
                if move.action == "out" and part is None:
                    found.append(_Change(self.line.queued_us(move), _HOLD))
                # One whose tensor died before it began never took a slot.
                elif move.action == "out" and part is not None and part.end_us > part.begin_us:
                    found.append(_Change(_begin_us(part, first), _TAKE, _page_us(part)))
        born, dead = self.line.lifetime_us(self.tensor)
        if not self.persistent:
            found = [change for change in found if born < change.at_us < dead]
            return [*sorted(found), _Change(dead, _FREE)]
        return sorted(self._wrapped(change) for change in found)

    def _wrapped(self, change: _Change) -> _Change:
        late = change.at_us >= self.line.iteration_us
        return change._replace(at_us=change.at_us - late * self.line.iteration_us)

    def _transfer(self, move: int, page: int) -> Transfer | None:
        """The one in which the move takes the page; each is in one at most."""
        parts = self.transfers[move]
        place = bisect_right(parts, page, key=lambda part: part.first_page) - 1
        found = place >= 0 and page < parts[place].first_page + parts[place].page_count
        return parts[place] if found else None

    def _drop(self, number: int, first: int) -> _Change:
        """At once, or when what was queued before it has arrived."""
        assert self.line.plan is not None
        this = self.line.plan.moves[number]
        drop = _Change(self.line.queued_us(this), _FREE)
        for index, move in self.moves:
            if (part := self._transfer(index, first)) is not None:
                before = (move.issue_op, index) < (this.issue_op, number)
                shift = 0.0 if before else self.line.iteration_us
                at = _begin_us(part, first) + _page_us(part) - shift
                if at > drop.at_us:
                    drop = _Change(at, _FREE, _page_us(part))
        return drop


def _page_us(part: Transfer) -> float:
    return (part.end_us - part.begin_us) / part.page_count


def _begin_us(part: Transfer, page: int) -> float:
    return part.begin_us + (page - part.first_page) * _page_us(part)
