"""What a trace permits beside moves: what can be made again, which updates the host can take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..trace import READ, WRITE, Bools, Trace

FREE, HOSTED = "free", "host step"  # ops of a pager: something dies; the host's in any case
CHAIN = 16  # ops back at which what is dead is made again rather than kept


class Impossible(Exception):  # noqa: N818 (a finding)
    """The tensor cannot be made again there."""

    def __init__(self, tensor: int) -> None:
        super().__init__(tensor)
        self.tensor = tensor


@dataclass(frozen=True)
class Remake:
    """``tensor`` may be discarded after op ``after``, its last use before a long gap, and made
    again by ``maker`` before its next use ``before``. Alone that takes ``us``."""

    tensor: int
    maker: int
    after: int
    before: int
    us: float


@dataclass(frozen=True)
class Unit:
    """The update of a parameter, one op or several slabs: ``ops``.

    ``weights``: persistent, also used by the device, each last by op ``left`` before the update and
    next by ``back`` (≥ ops: in the next iteration), the first of them by ``due``. ``states``:
    persistent, of nobody else.
    ``gradients``: last used on the device by op ``given``. ``shared``: what it only reads.
    ``inside``: what its ops have for themselves, which is never on the device then.
    """

    ops: tuple[int, ...]
    weights: tuple[int, ...]
    states: tuple[int, ...]
    gradients: tuple[int, ...]
    shared: tuple[int, ...]
    inside: tuple[int, ...]
    left: tuple[int, ...]
    back: tuple[int, ...]
    given: int
    host_us: float

    @property
    def due(self) -> int:
        return min(self.back)

    def gaps_begin(self) -> dict[int, tuple[int, ...]]:
        """Of each weight, the ops before the gaps that the update lies in."""
        return {tensor: (left, *self.ops) for tensor, left in zip(self.weights, self.left)}


class Uses:
    """Who reads and writes what, by op and by tensor."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.reads: list[list[int]] = [[] for _ in range(trace.ops)]
        self.writes: list[list[int]] = [[] for _ in range(trace.ops)]
        self.of: list[list[int]] = [[] for _ in range(trace.tensors)]  # ops that use a tensor
        self.writers: list[list[int]] = [[] for _ in range(trace.tensors)]
        whole = trace.access_page_count == trace.pages(trace.page_size)[trace.access_tensor]
        whole |= _frees(trace)[trace.access_op]
        self.partial = set(trace.access_tensor[~whole].tolist())
        columns = trace.access_op, trace.access_tensor, trace.access_mode
        rows = zip(*(column.tolist() for column in columns))
        for op, tensor, mode in rows:
            if not self.of[tensor] or self.of[tensor][-1] != op:
                self.of[tensor].append(op)
            if mode & READ:
                self.reads[op].append(tensor)
            if mode & WRITE:
                self.writes[op].append(tensor)
                if not self.writers[tensor] or self.writers[tensor][-1] != op:
                    self.writers[tensor].append(op)
        self.first = trace.first_op.tolist()
        self.lasting: list[bool] = trace.tensor_persistent.tolist()

    def can_remake(self, tensor: int) -> bool:
        """Whether one op that may run again makes all of it, and nobody changes it."""
        writers = self.writers[tensor]
        return (
            not self.lasting[tensor]
            and len(writers) == 1
            and writers[0] == self.first[tensor]
            and bool(self.trace.op_rerun[writers[0]])
            and tensor not in self.partial
        )

    def unchanged(self, tensor: int, after: int, before: int) -> bool:
        return not any(after < op < before for op in self.writers[tensor])

    def closure(self, tensor: int, before: int) -> list[int]:
        """Ops that make ``tensor`` from what is alive at op ``before``. Raises ``Impossible``."""
        return sorted(self.chain({self.first[tensor]}, before, {}, tensor))

    def chain(self, makers: set[int], before: int, gone: dict[int, int], wanted: int) -> set[int]:
        """Ops to run again for ``makers``; what else they read lives on until then. ``gone``:
        discarded tensors and their makers. Raises ``Impossible`` for ``wanted``."""
        ops: set[int] = set()
        todo = sorted(makers)
        while todo:
            op = todo.pop()
            if op in ops:
                continue
            if not self.trace.op_rerun[op] or len(ops) > CHAIN * 4:
                raise Impossible(wanted)
            ops.add(op)
            for needed in self.reads[op]:
                if self.first[needed] == op and not self.lasting[needed]:
                    continue
                if not self.unchanged(needed, op, before):
                    raise Impossible(wanted)
                if self.lasting[needed]:
                    continue
                if needed in gone:
                    todo.append(gone[needed])
                elif (
                    self.of[needed][-1] < before
                    and self.can_remake(needed)
                    and self.first[needed] >= op - CHAIN
                ):
                    todo.append(self.first[needed])
        return ops


def find_remakes(trace: Trace, uses: Uses) -> list[Remake]:
    """One for each tensor that can be made again, over its longest gap."""
    found = []
    for tensor in range(trace.tensors):
        ops = uses.of[tensor]
        if len(ops) < 2 or not uses.can_remake(tensor):
            continue
        length, place = max((ops[i + 1] - ops[i], -i) for i in range(len(ops) - 1))
        after, before = ops[-place], ops[1 - place]
        if length < 2:
            continue
        try:
            chain = uses.closure(tensor, before)
        except Impossible:
            continue
        us = float(trace.op_duration_us[chain].sum())
        found.append(Remake(tensor, uses.first[tensor], after, before, us))
    return found


def find_units(trace: Trace, uses: Uses) -> list[Unit]:
    """Updates that the host can take, in the order of the trace."""
    able = [op for op in range(trace.ops) if not np.isnan(trace.op_host_us[op])]
    leader: dict[int, int] = {}  # persistent tensor that is written → first op of its unit
    members: defaultdict[int, list[int]] = defaultdict(list)
    for op in able:
        mine = [tensor for tensor in uses.writes[op] if uses.lasting[tensor]]
        known = {leader[tensor] for tensor in mine if tensor in leader}
        first = min(known, default=op)
        for other in known - {first}:
            members[first] += members.pop(other)
            leader.update({t: first for t, at in leader.items() if at == other})
        leader.update(dict.fromkeys(mine, first))
        members[first].append(op)
    steps = set(able)
    units = [_unit(trace, uses, tuple(sorted(ops)), steps) for ops in members.values()]
    return sorted((unit for unit in units if unit), key=lambda unit: unit.ops)


def _unit(trace: Trace, uses: Uses, ops: tuple[int, ...], steps: set[int]) -> Unit | None:
    """``None`` if the host cannot take it. ``steps``: all ops that it could take."""
    mine = set(ops)
    weights, states, gradients, shared, inside = [], [], [], [], []
    left, back, given = [], [], -1
    written = {tensor for op in ops for tensor in uses.writes[op]}
    for tensor in sorted({t for op in ops for t in (*uses.reads[op], *uses.writes[op])}):
        others = [op for op in uses.of[tensor] if op not in mine]
        if not others:
            if uses.lasting[tensor]:
                states.append(tensor)
            elif len(uses.of[tensor]) > 1:
                return None  # what only the steps touch may be touched by one of them
            else:
                inside.append(tensor)
        elif uses.lasting[tensor] and tensor in written:
            earlier = [op for op in others if op < ops[0]]
            later = [op for op in others if op > ops[-1]]
            device_writes = [op for op in uses.writers[tensor] if op not in mine]
            if not earlier or device_writes or len(earlier) + len(later) < len(others):
                return None
            weights.append(tensor)
            left.append(earlier[-1])
            back.append(later[0] if later else others[0] + trace.ops)
        elif uses.lasting[tensor] or others[-1] > ops[0] or not steps.isdisjoint(others):
            if tensor in written:
                return None
            shared.append(tensor)
        elif uses.first[tensor] in mine:
            return None
        else:
            gradients.append(tensor)
            given = max(given, others[-1])
    if not weights or min(back) > ops[0] + trace.ops:
        return None
    us = float(trace.op_host_us[list(ops)].sum())
    return Unit(
        ops, tuple(weights), tuple(states), tuple(gradients), tuple(shared), tuple(inside),
        tuple(left), tuple(back), given, us,
    )  # fmt: skip


def _frees(trace: Trace) -> Bools:
    """Ops at which something dies."""
    return np.array([name == FREE for name in trace.op_names], np.bool_)


def without_ends(trace: Trace, steps: Sequence[int]) -> Trace:
    """A pager's trace without the accesses at which what ``steps`` only read dies."""
    of_steps = np.isin(trace.access_op, steps)
    read = trace.access_tensor[of_steps & (trace.access_mode == READ)]
    ends = _frees(trace)[trace.access_op] & np.isin(trace.access_tensor, read)
    ends &= ~trace.tensor_persistent[trace.access_tensor]
    columns = ("op", "tensor", "mode", "first_page", "page_count")
    kept = {f"access_{c}": getattr(trace, f"access_{c}")[~ends] for c in columns}
    return replace(trace, **kept)
