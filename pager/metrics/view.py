"""One frame of ``tensorpager top``: lines of text that fit the terminal, from 40 columns on.

A bar shows a tier against its budget::

    ████████▓▓▓░░░|░░░      █ pages now  ▓ dense memory (its peak)  | most so far  ░ free
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from ...planner.commands.tables import format_us, short, table
from ...planner.sizes import format_bytes
from .rates import History, Rates, age_seconds, hit_rate, state
from .reader import TEXTS, TIER_KEYS, TIERS, Snapshot, Training

_BLOCKS = "▁▂▃▄▅▆▇█"
_STATES = {"training": "green", "idle": "yellow", "silent": "red", "ended": "red"}
_WAYS = {
    "host-out": "to host",
    "disk-out": "to disk",
    "host-in": "from host",
    "disk-in": "from disk",
}
_LEAST_WIDTH, _WIDE, _MOST_WIDTH = 40, 64, 120
Tier = tuple[int, ...]  # bytes: used by pages now; at most so far; budget


@dataclass(frozen=True)
class Screen:
    """What frames are drawn on. ``height``: of a terminal, whose frames must fit; ``None`` where
    there is no end below."""

    width: int
    height: int | None = None

    @property
    def columns(self) -> int:
        return max(_LEAST_WIDTH, min(self.width, _MOST_WIDTH))


def frame(training: Training, history: History, screen: Screen) -> Text:
    """The whole view."""
    record, rates = training.latest, history.rates()
    lines: list[Text] = [_head(training), _where(record), Text()]
    lines += _tiers(record, screen)
    lines += [Text(), *_traffic(record, rates)]
    lines += [Text(), *_waits(record, rates)]
    lines += [Text(), *_iterations(record, rates, screen)]
    if record["logged"]:
        told = (f"{name} {number(value)}" for name, value in record["logged"].items())
        lines += [Text(), Text("  ".join(told))]
    height = screen.height
    if height is not None and len(lines) > height:  # no empty lines then; the last one stays
        full = [line for line in lines if line.plain]
        lines = [*full[: height - 1], full[-1]] if len(full) > height else full
    for line in lines:
        line.truncate(screen.columns, overflow="ellipsis")
        line.no_wrap = True
    return Text("\n").join(lines)


def _head(training: Training) -> Text:
    record, now = training.latest, state(training)
    text = Text.assemble(
        (short(record["script"], 30), "bold"), f"  pid {training.name}  {record['device']}  ",
        (record["mode"], "bold"), "  ", (now, _STATES[now]),
    )  # fmt: skip
    if now == "silent":
        text.append(f" for {format_duration(age_seconds(record))}", style="red")
    return text


def _where(record: Snapshot) -> Text:
    runs = format_duration(record["updated"] - record["started"])
    done = f"{record['iterations']:,} iteration{'s' * (record['iterations'] != 1)}"
    if record["planned_iterations"]:
        done += f", {record['planned_iterations']:,} of them planned"
    pages = format_bytes(record["page_size"])
    return Text(f"runs for {runs}, {done}, pages of {pages}", style="dim")


# -- tiers ---------------------------------------------------------------------------------------
def _tiers(record: Snapshot, screen: Screen) -> Iterator[Text]:
    for name in TIERS:
        tier = tuple(record[key][name] for key in TIER_KEYS)
        if tier[-1]:
            dense = record["dense_peak_bytes"] if name == "device" else 0
            used, peak, budget = map(format_bytes, tier)
            amounts = f" {used:>11} of {budget:>11}"
            if screen.columns >= _WIDE:
                amounts += f", peak {peak:>11}"
            width = max(8, screen.columns - 7 - len(amounts))
            cells = bar(tier, dense, width)
            yield Text.assemble(f"{name:<7}", cells, amounts)
    arena = format_bytes(record["arena_bytes"])
    beside = format_bytes(record["dense_peak_bytes"])
    legend = f"█ pages (arena {arena})  ▓ dense, {beside} at most  | peak"
    if screen.columns < _WIDE:
        legend = f"█ pages  ▓ dense, {beside} at most  | peak"
    yield Text(f"       {legend}", style="dim")


def bar(tier: Tier, dense: int, width: int) -> Text:
    """``width`` cells for the budget."""
    used_bytes, peak_bytes, budget_bytes = tier
    full, rest, free, mark = "█▓░|"

    def cells(nbytes: float) -> int:
        return max(0, min(width, round(width * nbytes / budget_bytes)))

    used = cells(used_bytes)
    both = cells(used_bytes + dense)
    peak = min(width - 1, max(0, math.ceil(width * min(1.0, peak_bytes / budget_bytes)) - 1))
    text = Text.assemble((full * used, "cyan"), (rest * (both - used), "blue"))
    if not peak_bytes or peak < both:
        return text.append(free * (width - both), "dim")
    text.append(free * (peak - both), "dim").append(mark, "bold")
    return text.append(free * (width - 1 - peak), "dim")


# -- what moves and what waits -------------------------------------------------------------------
def _traffic(record: Snapshot, rates: Rates) -> Iterator[Text]:
    for name, nbytes in record["channel_bytes"].items():
        tier = name.partition("-")[0]
        if not record["budget_bytes"][tier]:
            continue
        rate = rates.bytes_per_s[name]
        now = f"{format_bytes(rate)}/s" if rate is not None else "-"
        yield Text(f"{_WAYS[name]:<10} {now:>13}   {format_bytes(nbytes):>11} in all")


def _waits(record: Snapshot, rates: Rates) -> Iterator[Text]:
    share = rates.stall_share
    stalled = "stalled    " + (f"{share:>11.1%}" if share is not None else f"{'-':>11}")
    total = format_us(record["stall_us"] or 0.0)
    style = "red" if share is not None and share > 0.25 else ""
    yield Text.assemble((stalled, style), f"     {total:>11} in all")
    hits = hit_rate(record)
    if hits is not None:
        count = f"{record['prefetches']:,}"
        yield Text(f"in time    {hits:>11.1%}     of {count} prefetches")
    faults = rates.faults_per_s
    now = f"{faults:.1f}/s" if faults is not None else "-"
    yield Text(f"faults     {now:>11}     {record['faults']:>11,} in all")


def _iterations(record: Snapshot, rates: Rates, screen: Screen) -> Iterator[Text]:
    latest, running = record["iteration_us"], _running(record)
    if latest is None:
        yield Text(f"iteration  the first one runs{running}" if running else "no iteration yet")
        return
    text = f"iteration  {format_us(latest):>11}"
    if rates.iterations_per_s is not None:
        text += f"     {rates.iterations_per_s:.3g} per second"
    yield Text(text + (f", the next runs{running}" if running else ""))
    names = {"plan": "predicted_us"} | {
        what: f"{what}_us" for what in ("bound", "ideal", "overhead")
    }
    known = [(what, record[key]) for what, key in names.items()]
    told = [f"{what} {format_us(us)}" for what, us in known if us is not None]
    if told:
        yield Text("           " + ", ".join(told), style="dim")
    recent = record["recent_iteration_us"][-(screen.columns - 11) :]
    if len(recent) > 1:
        yield Text("           " + sparkline(recent), style="cyan")
        low, high = format_us(min(recent)), format_us(max(recent))
        yield Text(f"           last {len(recent)}: {low} to {high}", style="dim")


def _running(record: Snapshot) -> str:
    """How long the iteration has run that runs, where that is long enough to be of interest."""
    seconds = record["clock"] - record["began"]
    return f" for {format_duration(seconds)}" if record["began"] and seconds >= 1 else ""


def sparkline(values: Sequence[float]) -> str:
    """From 0 to the largest value: heights can be compared."""
    top = max(values)
    if top <= 0:
        return _BLOCKS[0] * len(values)
    return "".join(_BLOCKS[min(7, int(8 * max(0.0, value) / top))] for value in values)


def number(value: float) -> str:
    """Such as ``4.531``, ``12,345``, ``1.2e-05``."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """Such as ``4 s``, ``3 min 20 s``, ``2 h 05 min``, ``3 d 4 h``."""
    whole = max(0, int(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


# -- several trainings ---------------------------------------------------------------------------
def listing(trainings: Sequence[Training]) -> Table:
    """One line for each, to choose from."""
    rows = []
    for training in trainings:
        record = training.latest
        rows.append(
            (
                training.name,
                *(record[name] for name in TEXTS),
                f"{record['iterations']:,}",
                format_us(record["iteration_us"] or 0.0),
                format_bytes(record["budget_bytes"]["device"]),
            )
        )
    heads = ("PID", "<script", "<device", "<mode", "iterations", "latest", "budget")
    return table(heads, rows)
