"""Numbers before and after."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

BYTES, US, COUNT = "bytes", "us", "count"  # what a value is in


class Change(NamedTuple):
    """A value before and after, in bytes, µs or a count."""

    name: str
    unit: str
    a: float
    b: float

    @property
    def delta(self) -> float:
        return self.b - self.a

    @property
    def percent(self) -> float | None:
        """Of ``a``; ``None`` where that is 0."""
        return 100.0 * self.delta / self.a if self.a else None


def most_changed_first(changes: Iterable[Change]) -> list[Change]:
    """By the change as a share of what it was before; equal ones in their order."""

    def share(change: Change) -> float:
        if not change.delta:
            return 0.0
        return abs(change.delta / change.a) if change.a else float("inf")

    return sorted(changes, key=share, reverse=True)


def changes(a: dict[str, tuple[str, float]], b: dict[str, tuple[str, float]]) -> list[Change]:
    """Of what both have."""
    return [Change(name, unit, value, b[name][1]) for name, (unit, value) in a.items() if name in b]
