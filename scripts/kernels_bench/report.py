"""What a run prints: a line for each row as it comes, tables of the sweeps, goals at the end."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tensorpager.planner.sizes import format_bytes

from .case import Rates

HEAD = (
    f"{'case':20} {'operand':>9} {'page':>7} {'kernels':>10} {'call':>10} {'floor':>10} "
    f"{'of floor':>8}  against torch"
)


def rates_text(rates: Rates) -> str:
    parts = [f"copy {rates.memory / 1e9:,.0f} GB/s (read plus written)"]
    parts.append(f"from page-locked memory {rates.link / 1e9:,.1f} GB/s")
    return ", ".join(parts)


def row_text(row: dict[str, Any]) -> str:
    """One line under HEAD; ``*`` where all would fit in L2."""
    name, size = row["case"], format_bytes(row["nbytes"])
    begin = f"{name:20} {size:>9} {format_bytes(row['page_bytes']):>7} "
    if row["status"] != "right":
        return f"{begin}{row['status'].upper()}: {row['why']}"
    floor = f"{row['floor_ms']:.4f} ms"
    kernels, call = _ms(row.get("kernels")), _ms(row["call"])
    star = "*" if row["fits_in_l2"] else ""
    text = f"{begin}{kernels:>10} {call:>10} {floor:>10} {row['share_of_floor']:>7.1%}{star:1} "
    if "peer" in row:
        ratio = row["peer_over_call"]
        return f"{text} {ratio:.2f} x the speed of {row['peer_name']}"
    return text.rstrip()


def _ms(times: dict[str, Any] | None) -> str:
    return "" if times is None else f"{times['median_ms']:.4f} ms"


def print_link(link: dict[str, Any]) -> None:
    size = format_bytes(link["nbytes"])
    for way in ("in", "out"):
        rates = [
            link["nbytes"] / link[f"{kind} {way}"]["median_ms"] / 1e6
            for kind in ("one copy", "pages")
        ]
        print(
            f"copies {way:3} {size}: at once {rates[0]:.1f} GB/s, by pages of "
            f"{format_bytes(link['page_bytes'])} {rates[1]:.1f} GB/s ({link[f'share_{way}']:.1%})"
        )


def print_goals(goals: Sequence[dict[str, Any]]) -> None:
    table = Table("goal", "at least", "figure", "", "where", title="goals", title_justify="left")
    for goal in goals:
        figure = f"{goal['figure']:.1%}" if "figure" in goal else ""
        where = goal.get("where", "")
        table.add_row(goal["goal"], f"{goal['least']:.0%}", figure, goal["outcome"], where)
    _console().print(table)


def reference_text(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines about CPU references: none of these figures is a kernel's."""
    lines = []
    for row in rows:
        times = f"{row['call']['median_ms']:.3f} ms" if "call" in row else row["why"]
        share = f"{row['share_of_floor']:.1%} of a dense copy's rate" if "call" in row else ""
        lines.append(f"CPU reference of {row['case']:20} {times:>12}  {share}".rstrip())
    return lines


def counts(rows: Sequence[dict[str, Any]]) -> str:
    """Such as ``"50 right, 1 wrong"``."""
    found = [row["status"] for row in rows]
    known = dict.fromkeys(("right", "wrong", "broken", "not run"))
    return ", ".join(f"{found.count(status)} {status}" for status in known if status in found)


def median_share(rows: Sequence[dict[str, Any]]) -> float | None:
    shares = [row["share_of_floor"] for row in rows if "share_of_floor" in row]
    return statistics.median(shares) if shares else None


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=120)
