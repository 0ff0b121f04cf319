"""Small random traces, machines and plans, most of them sensible.

``random_case(rng)`` takes any ``random.Random``; ``cases()`` is the same for hypothesis. A sensible
plan takes pages out after a use and brings them back before the next one; one plan in five is then
spoilt by a random change. Pages have 1,000 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import numpy as np
from hypothesis import strategies as st

from tensorpager.planner.hardware import Hardware
from tensorpager.planner.plan import DISCARD, Deferred, Move, Plan, Recompute, StartRun
from tensorpager.planner.trace import READ, READWRITE, WRITE, Trace

PAGE = 1000
DURATIONS_US = (1.0, 5.0, 10.0, 10.0, 20.0, 33.3, 70.0)
LINK_RATES = (1e8, 1e8, 5e7, 7e7)  # 10 to 20 µs a page
DISK_RATES = (2.5e7, 3e7, 6e7, 1e8, 2e8)


@dataclass(frozen=True)
class Access:
    """Pages [begin, end) of tensor ``tensor``; ``mode`` as in a trace."""

    tensor: int
    begin: int
    end: int
    mode: int


@dataclass(frozen=True)
class Case:
    trace: Trace
    hardware: Hardware
    plan: Plan

    def __repr__(self) -> str:
        """All that is needed to run it again, by hand too."""
        trace = self.trace
        tensors = list(
            zip(
                trace.tensor_ids.tolist(),
                trace.pages(PAGE).tolist(),
                trace.tensor_persistent.tolist(),
            )
        )
        rows = zip(
            trace.access_op.tolist(),
            trace.access_tensor.tolist(),
            *(bound.tolist() for bound in trace.access_ranges(PAGE)),
            trace.access_mode.tolist(),
        )
        return (
            f"\n  tensors (id, pages, persistent) {tensors}"
            f"\n  durations {trace.op_duration_us.tolist()}"
            f"\n  accesses (op, tensor, begin, end, mode) {list(rows)}"
            f"\n  {self.hardware}\n  moves {[tuple(move) for move in self.plan.moves]}"
            f"\n  start {[tuple(run) for run in self.plan.start]}"
            f"\n  rerun {trace.op_rerun.tolist()} host_us {trace.op_host_us.tolist()}"
            f"\n  recompute {[tuple(each) for each in self.plan.recompute]} host_steps "
            f"{self.plan.host_steps} deferred {[tuple(each) for each in self.plan.deferred]}"
        )


def paged_trace(
    tensors: list[tuple[int, bool]], durations_us: list[float], ops: list[list[Access]]
) -> Trace:
    """A trace of ``tensors`` (pages, persistent), all of which some op touches. Tensor
    ``t`` of the list has the number 10 t + 3 in plans."""
    rows = [(op, access) for op, accesses in enumerate(ops) for access in accesses]
    order = sorted(range(len(tensors)), key=lambda t: min(op for op, a in rows if a.tensor == t))
    rank = {tensor: index for index, tensor in enumerate(order)}
    durations = np.array(durations_us, np.float64)
    return Trace(
        page_size=PAGE,
        op_names=[f"op{number}" for number in range(len(ops))],
        op_start_us=np.concatenate([[0.0], np.cumsum(durations)[:-1]]),
        op_duration_us=durations,
        tensor_ids=np.array([10 * t + 3 for t in order], np.int64),
        tensor_names=[None] * len(tensors),
        tensor_bytes=np.array([tensors[t][0] * PAGE for t in order], np.int64),
        tensor_kinds=["parameter" if tensors[t][1] else "activation" for t in order],
        tensor_persistent=np.array([tensors[t][1] for t in order], np.bool_),
        access_op=np.array([op for op, _ in rows], np.int64),
        access_tensor=np.array([rank[a.tensor] for _, a in rows], np.int64),
        access_mode=np.array([a.mode for _, a in rows], np.int8),
        access_first_page=np.array([a.begin for _, a in rows], np.int64),
        access_page_count=np.array([a.end - a.begin for _, a in rows], np.int64),
    )


def with_choices(trace: Trace, rerun: Iterable[int], host_us: dict[int, float]) -> Trace:
    """``trace`` with ops that may run again, and the host's time for others."""
    again, host = np.zeros(trace.ops, np.bool_), np.full(trace.ops, np.nan)
    again[list(rerun)] = True
    for op, us in host_us.items():
        host[op] = us
    return replace(trace, op_rerun=again, op_host_us=host)


def random_trace(rng: Random, *, partial: bool = True, zero_durations: bool = False) -> Trace:
    """2 to 12 ops on 1 to 8 tensors of 1 to 6 pages; ``partial``: some accesses touch a part."""
    tensors = [(rng.randint(1, 6), rng.random() < 0.4) for _ in range(rng.randint(1, 8))]
    ops: list[list[Access]] = [[] for _ in range(rng.randint(2, 12))]
    for tensor, (pages, _) in enumerate(tensors):
        uses = rng.sample(range(len(ops)), min(len(ops), rng.randint(1, 4)))
        for op in uses:
            begin, end = 0, pages
            if partial and pages > 1 and rng.random() < 0.2:
                begin = rng.randint(0, pages - 1)
                end = rng.randint(begin + 1, pages)
            mode = rng.choice((READ, READ, WRITE, READWRITE))
            ops[op].append(Access(tensor, begin, end, mode))
    choices = (*DURATIONS_US, 0.0) if zero_durations else DURATIONS_US
    return paged_trace(tensors, [rng.choice(choices) for _ in ops], ops)


def working_set_pages(trace: Trace) -> int:
    """Most pages that one op needs: what it touches and what it makes."""
    most = 0
    begins, ends = trace.access_ranges(PAGE)
    sizes = trace.pages(PAGE)
    for op in range(trace.ops):
        needed: dict[int, set[int]] = {}
        for row in np.flatnonzero(trace.access_op == op).tolist():
            tensor = int(trace.access_tensor[row])
            new = not trace.tensor_persistent[tensor] and trace.first_op[tensor] == op
            pages = range(int(sizes[tensor])) if new else range(int(begins[row]), int(ends[row]))
            needed.setdefault(tensor, set()).update(pages)
        most = max(most, sum(len(pages) for pages in needed.values()))
    return most


def random_hardware(rng: Random, trace: Trace) -> Hardware:
    """Device between the largest working set and everything; lower tiers sometimes tight."""
    everything = int(trace.pages(PAGE).sum())
    least = min(working_set_pages(trace), everything)
    device = rng.randint(least, everything) if rng.random() < 0.9 else max(1, least - 1)

    def lower_tier() -> float:
        return float("inf") if rng.random() < 0.6 else rng.randint(0, everything) * PAGE

    return Hardware(
        device_bytes=device * PAGE + rng.choice((0, 0, 999)),
        host_bytes=lower_tier(),
        disk_bytes=lower_tier(),
        d2h_bytes_per_s=rng.choice(LINK_RATES),
        h2d_bytes_per_s=rng.choice(LINK_RATES),
        disk_read_bytes_per_s=rng.choice(DISK_RATES),
        disk_write_bytes_per_s=rng.choice(DISK_RATES),
        transfer_latency_us=rng.choice((0.0, 0.0, 0.0, 7.0, 2.5)),
        page_size=PAGE,
    )


def page_groups(trace: Trace) -> list[tuple[int, int, int, list[int]]]:
    """(tensor, begin, end, ops): neighbouring pages that the same ops touch."""
    begins, ends = trace.access_ranges(PAGE)
    groups = []
    for tensor, pages in enumerate(trace.pages(PAGE).tolist()):
        rows = np.flatnonzero(trace.access_tensor == tensor)
        uses = [
            sorted({int(trace.access_op[r]) for r in rows if begins[r] <= page < ends[r]})
            for page in range(pages)
        ]
        begin = 0
        for page in range(1, pages + 1):
            if page == pages or uses[page] != uses[begin]:
                groups.append((tensor, begin, page, uses[begin]))
                begin = page
    return groups


def random_plan(
    rng: Random, trace: Trace, hardware: Hardware, *, eager: float = 0.6, lapsing: bool = True
) -> Plan:
    """Each gap between two uses is taken with probability ``eager``; ins come when they are needed
    or earlier. ``lapsing``: also takes out pages that are not used again before their tensor dies.
    """
    queued: list[tuple[float, Move]] = []  # sorted by issue op plus a random fraction
    start: list[StartRun] = []
    for tensor, begin, end, uses in page_groups(trace):
        persistent = bool(trace.tensor_persistent[tensor])
        for after, before in _gaps(trace, tensor, uses):
            if rng.random() > eager:
                continue
            first = rng.randint(begin, end - 1) if rng.random() < 0.3 else begin
            span = (int(trace.tensor_ids[tensor]), first, rng.randint(first + 1, end) - first)
            tier = rng.choice(("host", "host", "disk"))
            out_at = min(before, after + 1 + (rng.randint(0, 2) if rng.random() < 0.2 else 0))
            in_at = rng.randint(max(out_at, before - 2), before)
            key_out, key_in, key_drop = sorted(rng.random() for _ in range(3))
            ops = trace.ops
            queued.append((out_at % ops + key_out, Move(*span, tier, "out", out_at % ops)))
            queued.append((in_at % ops + key_in, Move(*span, tier, "in", in_at % ops)))
            if out_at < ops <= in_at:
                start.append(StartRun(*span, tier))
            if rng.random() < 0.2:
                queued.append((in_at % ops + key_drop, Move(*span, tier, "drop", in_at % ops)))
        dies = int(trace.last_op[tensor])
        if lapsing and uses and not persistent and uses[-1] < dies and rng.random() < 0.3:
            span = (int(trace.tensor_ids[tensor]), begin, end - begin)
            at = rng.randint(uses[-1] + 1, dies)
            queued.append((at + rng.random(), Move(*span, rng.choice(("host", "disk")), "out", at)))
    moves = [move for _, move in sorted(queued, key=lambda item: item[0])]
    return plan_of(hardware, moves, start)


def _gaps(trace: Trace, tensor: int, uses: list[int]) -> list[tuple[int, int]]:
    """(op, next op) of successive uses; for a persistent tensor the one that wraps around too, its
    second number counted on into the next iteration."""
    gaps = list(pairwise(uses))
    if trace.tensor_persistent[tensor] and uses:
        gaps.append((uses[-1], uses[0] + trace.ops))
    return [(after, before) for after, before in gaps if before > after + 1]


def plan_of(hardware: Hardware, moves: list[Move], start: list[StartRun]) -> Plan:
    return Plan(
        policy="random",
        page_size=PAGE,
        device_bytes=hardware.device_bytes,
        host_bytes=hardware.host_bytes,
        disk_bytes=hardware.disk_bytes,
        moves=moves,
        start=start,
    )


def spoil(rng: Random, trace: Trace, plan: Plan) -> Plan:
    """One random change: a move more, less, twice, elsewhere, later, in another order."""
    moves, start = list(plan.moves), list(plan.start)
    change = rng.randint(0, 7)
    at = rng.randint(0, len(moves) - 1) if moves else 0
    if change == 0 or not moves:
        tensor = rng.randint(0, trace.tensors - 1)
        first = rng.randint(0, int(trace.pages(PAGE)[tensor]) - 1)
        move = Move(
            int(trace.tensor_ids[tensor]),
            first,
            1,
            rng.choice(("host", "disk")),
            rng.choice(("out", "in", "drop")),
            rng.randint(0, trace.ops - 1),
        )
        moves.insert(at, move)
    elif change == 1:
        del moves[at]
    elif change == 2:
        moves.insert(at, moves[at])
    elif change == 3:
        moves[at] = moves[at]._replace(tier="disk" if moves[at].tier == "host" else "host")
    elif change == 4:
        moves[at] = moves[at]._replace(issue_op=moves[at].issue_op + rng.choice((-1, 1)))
    elif change == 5:
        moves[at] = moves[at]._replace(page_count=moves[at].page_count + rng.choice((-1, 1)))
    elif change == 6:
        rng.shuffle(moves)
    elif start:
        start.pop()
    return replace(plan, moves=moves, start=start)


def random_case(
    rng: Random, *, partial: bool = True, zero_durations: bool = False, spoilt: float = 0.2
) -> Case:
    trace = random_trace(rng, partial=partial, zero_durations=zero_durations)
    hardware = random_hardware(rng, trace)
    plan = random_plan(rng, trace, hardware, eager=rng.choice((0.3, 0.6, 0.9)), lapsing=partial)
    if rng.random() < spoilt:
        plan = spoil(rng, trace, plan)
    return Case(trace, hardware, plan)


def case_of(seed: int) -> Case:
    return random_case(Random(seed))


# -- recomputation, host steps, deferred updates -------------------------------------------------
def random_choices(rng: Random, trace: Trace) -> Trace:
    """Most ops that write nothing lasting may run again, many of the others on the host."""
    rerun, host = [], {}
    for op in range(trace.ops):
        rows = trace.access_op == op
        writes = rows & (trace.access_mode & WRITE != 0)
        if trace.tensor_persistent[trace.access_tensor[writes]].any():
            if rng.random() < 0.7:
                host[op] = rng.choice((*DURATIONS_US, 0.0))
        elif rng.random() < 0.85:
            rerun.append(op)
    return with_choices(trace, rerun, host)


def choice_plan(rng: Random, trace: Trace, hardware: Hardware) -> Plan:
    """Moves of tensors that no host step uses, as in ``random_plan``; and what version 2 adds."""
    able = np.flatnonzero(~np.isnan(trace.op_host_us)).tolist()
    steps = [op for op in able if rng.random() < 0.6]
    plan = random_plan(rng, trace, hardware, eager=rng.choice((0.0, 0.3, 0.6)), lapsing=False)
    stepped = set(trace.access_tensor[np.isin(trace.access_op, steps)].tolist())
    mine = {int(trace.tensor_ids[tensor]) for tensor in stepped}
    queued = [(m.issue_op + rng.random(), m) for m in plan.moves if m.tensor not in mine]
    start = [run for run in plan.start if run.tensor not in mine]
    for tensor in sorted(stepped):
        _to_and_from_host(rng, trace, tensor, set(steps), queued, start)
    recompute: list[Recompute] = []
    for tensor in range(trace.tensors):
        if not trace.tensor_persistent[tensor] and tensor not in stepped:
            _discard(rng, trace, tensor, queued, recompute)
    discarded = {m.tensor for _, m in queued if m.action == DISCARD}
    queued = [(at, m) for at, m in queued if m.action == DISCARD or m.tensor not in discarded]
    if rng.random() < 0.4:
        rng.shuffle(steps)
    updates = [op for op in range(1, trace.ops) if op not in steps and not trace.op_rerun[op]]
    deferred = [
        Deferred(op, rng.randint(0, rng.randint(0, op))) for op in updates if rng.random() < 0.15
    ]
    moves = [move for _, move in sorted(queued, key=lambda item: item[0])]
    return replace(
        plan_of(hardware, moves, start),
        recompute=recompute,
        host_steps=steps,
        deferred=deferred,
    )


def _to_and_from_host(
    rng: Random,
    trace: Trace,
    tensor: int,
    steps: set[int],
    queued: list[tuple[float, Move]],
    start: list[StartRun],
) -> None:
    """Out before each host step that follows a device op, in before each op that follows a step."""
    uses = sorted(set(trace.access_op[trace.access_tensor == tensor].tolist()))
    span = (int(trace.tensor_ids[tensor]), 0, int(trace.pages(PAGE)[tensor]))
    pairs = list(pairwise(uses))
    lasting = bool(trace.tensor_persistent[tensor])
    if lasting:
        pairs.append((uses[-1], uses[0] + trace.ops))
    if set(uses) <= steps:
        start.extend([StartRun(*span, "host")] if lasting else [])
        return
    below = None  # since when, if it begins or ends below
    for after, before in pairs:
        ops = trace.ops
        if after not in steps and before % ops in steps:
            out_at = rng.randint(after + 1, before)
            queued.append((out_at % ops + rng.random(), Move(*span, "host", "out", out_at % ops)))
            below = out_at
        if after in steps and before % ops not in steps:
            in_at = rng.randint(after + 1, before)
            queued.append((in_at % ops + rng.random(), Move(*span, "host", "in", in_at % ops)))
            if lasting and (in_at >= ops or below is None) and (below is None or below < ops):
                start.append(StartRun(*span, "host"))


def _discard(
    rng: Random,
    trace: Trace,
    tensor: int,
    queued: list[tuple[float, Move]],
    recompute: list[Recompute],
) -> None:
    """Some gaps begin with a discard, and end with its writers running again."""
    rows = trace.access_tensor == tensor
    uses = sorted(set(trace.access_op[rows].tolist()))
    for after, before in pairwise(uses):
        if before <= after + 1 or rng.random() < 0.4:
            continue
        writers = sorted(set(trace.access_op[rows & (trace.access_mode & WRITE != 0)].tolist()))
        writers = [op for op in writers if op <= after]
        begin = rng.choice(writers) if writers and rng.random() < 0.2 else uses[0]
        if rng.random() < 0.3:
            begin = max(0, begin - 1)
        ops = range(begin, max([op for op in writers if op >= begin], default=begin) + 1)
        possible = bool(writers) and trace.op_rerun[list(ops)].all()
        if not possible and rng.random() < 0.9:
            continue
        count = int(trace.pages(PAGE)[tensor])
        first = rng.randint(0, count - 1) if rng.random() < 0.2 else 0
        at = rng.randint(after + 1, before)
        move = Move(int(trace.tensor_ids[tensor]), first, count - first, "device", DISCARD, at)
        queued.append((at + rng.random(), move))
        if possible and rng.random() < 0.95:
            recompute.append(Recompute(ops[0], ops[-1], before))


def choice_case_of(seed: int) -> Case:
    rng = Random(seed)
    trace = random_trace(rng, partial=rng.random() < 0.3, zero_durations=rng.random() < 0.2)
    trace = random_choices(rng, trace)
    hardware = random_hardware(rng, trace)
    everything = int(trace.pages(PAGE).sum()) + 6
    if rng.random() < 0.7:
        device = rng.randint(int(hardware.device_pages), everything)
        hardware = hardware.with_(device_bytes=device * PAGE, host_bytes=float("inf"))
    plan = choice_plan(rng, trace, hardware)
    if rng.random() < 0.15:
        plan = spoil(rng, trace, plan)
    return Case(trace, hardware, plan)


def choice_cases() -> st.SearchStrategy[Case]:
    return st.builds(choice_case_of, seed=st.integers(0, 2**32 - 1))


def cases() -> st.SearchStrategy[Case]:
    """By seed, so that a failure names the seed and costs no minutes of shrinking."""
    return st.builds(case_of, seed=st.integers(0, 2**32 - 1))
