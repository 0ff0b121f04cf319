"""Small random traces, machines and plans, most of them sensible.

``random_case(rng)`` takes any ``random.Random``; ``cases()`` is the same for hypothesis. A sensible
plan takes pages out after a use and brings them back before the next one; one plan in five is then
spoilt by a random change. Pages have 1,000 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import numpy as np
from hypothesis import strategies as st

from tensorpager.planner.hardware import Hardware
from tensorpager.planner.plan import Move, Plan, StartRun
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


def cases() -> st.SearchStrategy[Case]:
    """By seed, so that a failure names the seed and costs no minutes of shrinking."""
    return st.builds(case_of, seed=st.integers(0, 2**32 - 1))
