"""``tensorpager simulate --ranks``: speed and cost against the number of devices."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from ..hardware import describe
from ..sizes import format_bytes
from .failures import CheckFailed
from .options import F, limit, rate
from .output import emit, emit_json, progress_bar
from .sweep import Asked
from .tables import format_us, pairs, table

if TYPE_CHECKING:
    from ..hardware import Hardware
    from ..ranks import Cluster
    from ..trace import Trace

UNPAGED = "without paging"
PLANNED_OPS = 400  # of each rank's trace, if it has more


@dataclass(frozen=True)
class Fleet:
    """Up to ``ranks`` devices on up to ``nodes`` nodes, and what connects them; see
    ``planner.ranks.Cluster``. ``pager_us``: what a rank's pager does by itself in an iteration.
    ``tokens`` of the trace's iteration and ``price`` of a device's hour, if they are known."""

    ranks: int
    nodes: int
    fabric: float
    network: float
    latency_us: float
    host: float
    spread: float
    pager_us: float = 0.0
    tokens: int | None = None
    price: float | None = None

    def cluster(self, ranks: int) -> Cluster:
        """``ranks`` of them, on as few nodes as they fit."""
        from ..ranks import Cluster

        nodes = -(-ranks // (self.ranks // self.nodes))
        return Cluster(
            ranks, nodes, self.fabric, self.network, self.latency_us, self.host, self.spread / 100
        )

    @property
    def counts(self) -> list[int]:
        """1, 2, 4, … and all: those that full nodes, or a part of one, have."""
        each = self.ranks // self.nodes
        counts = {1 << power for power in range(self.ranks.bit_length())} | {each, self.ranks}
        return sorted(n for n in counts if n <= each or (n <= self.ranks and n % each == 0))


_NETWORK = [
    click.option(
        "--nodes", type=click.IntRange(min=1), default=1, help="Nodes that --ranks are on."
    ),
    click.option(
        "--fabric", type=rate, metavar="RATE", default="300GB", help="Device to device in a node."
    ),
    click.option(
        "--network", type=rate, metavar="RATE", default="50GB", help="Node to node, each way."
    ),
    click.option(
        "--network-latency-us",
        "latency_us",
        type=click.FloatRange(min=0),
        metavar="US",
        default=10.0,
        help="Of each step of a collective.",
    ),
    click.option(
        "--host-rate",
        "host",
        type=limit,
        metavar="RATE",
        default="inf",
        help="What all links of a node move together (default: no limit).",
    ),
    click.option(
        "--spread",
        type=click.FloatRange(min=0),
        metavar="%",
        default=0.0,
        help="How much devices differ: standard deviation of what they take for the same ops.",
    ),
]
_PAGER = click.option(
    "--pager-us",
    type=click.FloatRange(min=0),
    metavar="US",
    default=0.0,
    help="What paging takes by itself in an iteration: stats()['overhead_us'] of a paged one.",
)
_COST = [
    click.option(
        "--tokens", type=click.IntRange(min=1), help="Of TRACE's iteration, for tokens/s."
    ),
    click.option(
        "--price", type=click.FloatRange(min=0), help="Of a device's hour, for the cost of tokens."
    ),
]


def ranks_option(help_text: str) -> Callable[[F], F]:
    return click.option("--ranks", type=click.IntRange(min=1), metavar="N", help=help_text)


def fleet_options(command: F) -> F:
    """``--ranks`` and what goes with it; the command gets a ``Fleet`` as ``fleet``, or ``None``."""
    return _with_fleet(
        command, [*_NETWORK, _PAGER, *_COST], "Devices that train together, up to this many."
    )


def network_options(command: F) -> F:
    """The same without costs, for one number of ranks."""
    return _with_fleet(command, _NETWORK, "Devices that train together, by FSDP2.")


def _with_fleet(command: F, options: list[Callable[[Any], Any]], help_text: str) -> F:
    names = ("nodes", "fabric", "network", "latency_us", "host", "spread", "pager_us", "tokens",
             "price")  # fmt: skip

    @wraps(command)
    def with_fleet(ranks: int | None, **values: Any) -> Any:
        given = {name: values.pop(name) for name in names if name in values}
        if ranks is None:
            source = click.get_current_context().get_parameter_source
            changed = [n for n in given if source(n) is click.core.ParameterSource.COMMANDLINE]
            if changed:
                shown = {"latency_us": "network-latency-us", "host": "host-rate",
                         "pager_us": "pager-us"}  # fmt: skip
                name = shown.get(changed[0], changed[0])
                raise click.UsageError(
                    f"--{name} is of several devices; say how many with --ranks."
                )
            return command(fleet=None, **values)
        fleet = Fleet(ranks, **given)
        if fleet.ranks % fleet.nodes:
            raise click.UsageError(
                f"--ranks {ranks} cannot be spread evenly over --nodes {fleet.nodes}; give a "
                "multiple of it."
            )
        return command(fleet=fleet, **values)

    wrapped: Any = with_fleet
    for option in reversed([ranks_option(help_text), *options]):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[no-any-return]


def run_ranks(asked: Asked, fleet: Fleet, as_json: bool) -> None:
    """Plan one rank's iteration for each number of ranks, and print what all of them reach.

    Raises ``CheckFailed``, after all is printed, if no number of devices can run it."""
    node = asked.machine.for_trace(asked.trace)
    rows = []
    with progress_bar() as progress:
        for done, count in enumerate(fleet.counts):
            if progress is not None:
                progress(f"{count} ranks", done / len(fleet.counts))
            rows += _rows(asked, fleet, count, node)
    if as_json:
        emit_json({"trace": str(asked.trace_path), "points": rows})
    else:
        _print(asked, fleet, node, rows)
    if all(row["iteration_us"] is None for row in rows):
        raise CheckFailed(f"no number of devices up to {fleet.ranks} runs it: {rows[0]['reason']}")


def _rows(asked: Asked, fleet: Fleet, count: int, node: Hardware) -> list[dict[str, Any]]:
    """Without paging, and with each policy."""
    from ..buckets import bucketed
    from ..lifetimes import live_pages
    from ..ranks import margin, rank_trace
    from ..sweep import Task, evaluate

    cluster = fleet.cluster(count)
    hardware = cluster.part_of(node)
    page = hardware.page_size
    trace = rank_trace(asked.trace, cluster, page)
    ideal = trace.ideal_us
    need = int(live_pages(trace, page).max(initial=0)) * page
    fits = need <= hardware.device_bytes
    paged = hardware.with_(device_bytes=max(0, hardware.device_bytes - margin(trace)))

    def row(
        policy: str, us: float | None, reason: str = "", blocks: int | None = None
    ) -> dict[str, Any]:
        return {
            "ranks": count,
            "nodes": cluster.nodes,
            "policy": policy,
            "blocks_again": blocks,
            "need_bytes": need,
            "device_bytes": _number(hardware.device_bytes),
            "host_bytes": _number(hardware.host_bytes),
            "disk_bytes": _number(hardware.disk_bytes),
            "ideal_us": ideal,
            "iteration_us": us,
            "percent_of_ideal": 100 * ideal / us if us else None,
            "times_one_device": count * asked.trace.ideal_us / us if us else None,
            "cost": us / asked.trace.ideal_us if us and asked.trace.ideal_us else None,
            "tokens_per_s": 1e6 * count * fleet.tokens / us if us and fleet.tokens else None,
            "price_per_million_tokens": _price(fleet, us),
            "reason": reason,
        }

    reason = "" if fits else f"it needs {format_bytes(need)} of each device"
    found = [row(UNPAGED, ideal if fits else None, reason)]
    if fits:
        return [*found, *(row(policy, ideal) for policy in asked.policies)]
    joined = bucketed(trace, PLANNED_OPS) if trace.ops > PLANNED_OPS else trace
    if joined.segments:
        found.append(row(UNPAGED, *_blocks_again(joined, hardware)))
    trace, joined = (_with_work(one, fleet.pager_us) for one in (trace, joined))
    quick = asked.quick or joined.ops < trace.ops
    for policy in asked.policies:
        if policy == "joint" and joined.segments:
            found.append(row(policy, *_jointly(joined, paged)))
            continue
        outcome = evaluate(joined, Task(policy, paged, quick))
        if outcome.predicted is None and joined.ops < trace.ops:  # for one joined op, perhaps
            outcome = evaluate(trace, Task(policy, paged, quick))
        predicted = outcome.predicted
        us = predicted.iteration_us if predicted else None
        if predicted and policy == "lru":  # in training what leaves has left before others come
            out, back = hardware.d2h_bytes_per_s, hardware.h2d_bytes_per_s
            moving = predicted.bytes_out / out + predicted.bytes_in / back
            us = max(predicted.iteration_us, predicted.ideal_us + 1e6 * moving)
        found.append(row(policy, us, outcome.reason))
    return found


def _with_work(trace: Trace, us: float) -> Trace:
    """The same with as long an iteration as it takes with ``us`` of the pager's own work, which is
    done at accesses."""
    if not us:
        return trace
    import numpy as np

    accesses = np.bincount(trace.access_op, minlength=trace.ops)
    taken = trace.op_duration_us + us * accesses / max(1, accesses.sum())
    starts = np.concatenate([[0.0], np.cumsum(taken)[:-1]])
    return replace(trace, op_start_us=starts, op_duration_us=taken)


def _blocks_again(trace: Trace, hardware: Hardware) -> tuple[float | None, str, int]:
    """Without paging, with as few blocks as will do run again in the backward pass: µs of an
    iteration, or why there is none; and how many blocks."""
    from ..joint.segments import again, spread
    from ..lifetimes import live_pages

    blocks = len({segment.name for segment in trace.segments})

    def fits(count: int) -> bool:
        pages = live_pages(again(trace, spread(trace, count)), hardware.page_size)
        return bool(pages.max(initial=0) <= hardware.device_pages)

    count = 1 + bisect_left(range(1, blocks + 1), True, key=fits)
    if count > blocks:
        return None, "it does not fit with all blocks run again", blocks
    return again(trace, spread(trace, count)).ideal_us, "", count


def _jointly(trace: Trace, hardware: Hardware) -> tuple[float | None, str, int]:
    """The same with paging, as training with policy "joint" is planned: blocks that run again, if
    that is faster than by moves alone can be, steps of the host, and moves."""
    from ..errors import InfeasibleBudget, PolicyRefusal
    from ..joint.segments import choose, least_us, plan_steps

    refusals = InfeasibleBudget, PolicyRefusal
    us = None
    try:
        chosen = choose(trace, hardware, least_us(trace, hardware))
        if chosen is None:
            _, plan = plan_steps(trace, hardware, quick=True)
            assert plan.predicted is not None
            us = plan.predicted.iteration_us
            chosen = choose(trace, hardware, us)
    except refusals as refusal:
        chosen, reason = choose(trace, hardware, math.inf), str(refusal)
        if chosen is None:
            return None, reason, 0
    return (us, "", 0) if chosen is None else (chosen.iteration_us, "", len(chosen.blocks))


def _curve(rows: list[dict[str, Any]]) -> list[str]:
    """Of each number of devices the best % of the ideal speed, with paging and without."""
    best: dict[tuple[int, bool], float] = {}
    for row in rows:
        key = row["ranks"], row["policy"] != UNPAGED
        best[key] = max(best.get(key, 0.0), row["percent_of_ideal"] or 0.0)
    lines = ["% of the ideal speed (█ with paging, ░ without)"]
    for (ranks, paged), share in best.items():
        bar = ("█" if paged else "░") * round(share / 2)
        lines.append(f"{'' if paged else ranks:>7} {bar} {share:.0f}")
    return lines


def _number(nbytes: float) -> float | str:
    return "inf" if math.isinf(nbytes) else int(nbytes)


def _price(fleet: Fleet, us: float | None) -> float | None:
    if us is None or fleet.price is None or fleet.tokens is None:
        return None
    return fleet.price * us / 3.6e9 / fleet.tokens * 1e6


def _print(
    asked: Asked,
    fleet: Fleet,
    node: Hardware,
    rows: list[dict[str, Any]],
) -> None:
    ideal = asked.trace.ideal_us
    emit(
        pairs(
            [
                ("trace", f"{asked.trace_path}, {asked.trace.ops} ops, {format_us(ideal)}"),
                ("a node", describe(node)),
                (
                    "network",
                    f"{fleet.fabric / 1e9:g} GB/s in a node, {fleet.network / 1e9:g} GB/s between "
                    f"nodes, {fleet.latency_us:g} µs a step"
                    + (f"; devices differ by {fleet.spread:g} %" if fleet.spread else ""),
                ),
            ]
        ),
        "",
    )
    per_token = fleet.tokens is not None
    priced = per_token and fleet.price is not None
    heads = ["devices", "each needs", "<paging", "iteration", "% ideal"]
    heads += ["tokens/s" if per_token else "speed", "price/1M" if priced else "cost"]
    cells = []
    for row in rows:
        us, paged = row["iteration_us"], row["policy"] != UNPAGED
        line = [str(row["ranks"]), format_bytes(row["need_bytes"])]
        name = row["policy"] if paged else "no"
        line.append(f"{name}, {row['blocks_again']} again" if row["blocks_again"] else name)
        if us is None:
            line += ["no plan" if paged else "does not fit", "", "", ""]
        else:
            line += [format_us(us), f"{row['percent_of_ideal']:.1f}"]
            rate, price = row["tokens_per_s"], row["price_per_million_tokens"]
            line.append(f"{rate:,.0f}" if per_token else f"{row['times_one_device']:.2f} ×")
            line.append(f"{price:.4f}" if priced else f"{row['cost']:.2f}")
        cells.append(line)
    emit(table(heads, cells, title="speed and cost by number of devices"))
    if any(row["blocks_again"] is not None for row in rows):
        emit("", "again: blocks that run again in the backward pass, and store less for it")
    emit("", *_curve(rows))
    if not priced:
        emit(
            "",
            "speed: times one device that everything fits on; cost: device time for the same work, "
            "by that of this one",
        )
