"""Rows of ``diff``: a value before and after, and the change, with a sign and a colour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..difference.change import BYTES, COUNT, Change
from ..sizes import format_bytes
from .tables import format_us, table

# More or less of these is neither better nor worse.
NEUTRAL = frozenset({"tensors", "ops", "accesses", "moves", "tensors moved", "ideal", "bound"})


@dataclass(frozen=True)
class Report:
    """What is printed, what ``--json`` has, and the values before and after of a metric, for the
    thresholds."""

    content: dict[str, Any]
    parts: Sequence[Any]
    value: Callable[[str], tuple[float, float]]


def measure_table(found: list[Change], ordered: list[Change]) -> list[Any]:
    """Those that changed; the others in a line."""
    changed = [change for change in ordered if change.delta]
    same = [f"{change.name} {shown(change.a, change.unit)}" for change in found if not change.delta]
    parts: list[Any] = []
    if changed:
        parts.append(table(("<", "A", "B", "change", ""), [cells(change) for change in changed]))
    if same:
        parts += ([""] if changed else []) + [f"Unchanged: {', '.join(same)}"]
    return parts


def cells(change: Change) -> tuple[Any, ...]:
    values = (shown(change.a, change.unit), shown(change.b, change.unit))
    return change.name, *values, delta(change), percent(change)


def shown(value: float, unit: str) -> str:
    if unit == COUNT:
        return str(int(value))
    return format_bytes(value) if unit == BYTES else format_us(value)


def delta(change: Change) -> Any:
    """With a sign, red where it got worse and green where it got better."""
    sign = "+" if change.delta > 0 else ""
    text = f"{sign}{shown(change.delta, change.unit)}" if change.delta else "0"
    return _coloured(text, change)


def percent(change: Change) -> Any:
    if change.percent is None or not change.delta:
        return ""
    digits = ".1f" if abs(change.percent) >= 0.05 else ".1g"
    return _coloured(f"{change.percent:+{digits}} %", change)


def _coloured(text: str, change: Change) -> Any:
    from rich.text import Text

    if not change.delta or change.name in NEUTRAL:
        return Text(text)
    return Text(text, style="red" if change.delta > 0 else "green")


def pair(a: str, b: str) -> str:
    return a if a == b else f"{a} → {b}"


def change_json(change: Change) -> dict[str, Any]:
    return {**change._asdict(), "change": change.delta, "percent": change.percent}
