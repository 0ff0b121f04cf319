"""What the kernels should reach on an H200, each with the figure that a run found.

A figure is the worst over all sizes of pages that were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

LARGE_BYTES = 256 << 20


@dataclass(frozen=True)
class Found:
    """What a run on a GPU found, as in its JSON file."""

    rows: Sequence[dict[str, Any]]
    link: dict[str, Any] | None


@dataclass(frozen=True)
class Goal:
    """`figure` gives the worst that was measured and where, or None if nothing was."""

    name: str
    least: float
    figure: Callable[[Found], tuple[float, str] | None]

    def judge(self, found: Found) -> dict[str, Any]:
        measured = self.figure(found)
        if measured is None:
            return {"goal": self.name, "least": self.least, "outcome": "not measured"}
        value, where = measured
        outcome = "reached" if value >= self.least else "missed"
        record = {"goal": self.name, "least": self.least, "outcome": outcome}
        return {**record, "figure": value, "where": where}


def _case(name: str, figure: str) -> Callable[[Found], tuple[float, str] | None]:
    def worst(found: Found) -> tuple[float, str] | None:
        return _least(
            [
                (row[figure], f"{row['nbytes'] >> 20} MiB, pages of {row['page_bytes'] >> 10} KiB")
                for row in found.rows
                if row["case"] == name and row["nbytes"] >= LARGE_BYTES and figure in row
            ]
        )

    return worst


def _link(figure: str) -> Callable[[Found], tuple[float, str] | None]:
    def only(found: Found) -> tuple[float, str] | None:
        if found.link is None or figure not in found.link:
            return None
        return found.link[figure], f"pages of {found.link['page_bytes'] >> 10} KiB in random order"

    return only


def _least(figures: list[tuple[float, str]]) -> tuple[float, str] | None:
    return min(figures) if figures else None


GOALS = (
    Goal("gather from 256 MiB on, of the copy rate", 0.90, _case("gather", "share_of_floor")),
    Goal("scatter from 256 MiB on, of the copy rate", 0.90, _case("scatter", "share_of_floor")),
    Goal("AdamW from 256 MiB on, of the copy rate", 0.85, _case("adamw", "share_of_floor")),
    Goal(
        "AdamW from 256 MiB on, whole calls, speed against torch's fused one",
        1.0,
        _case("adamw", "peer_over_call"),
    ),
    Goal("host to device by pages of 2 MiB, of one large copy", 0.95, _link("share_in")),
)


def judge(found: Found) -> list[dict[str, Any]]:
    """Every goal with its outcome: reached, missed or not measured."""
    return [goal.judge(found) for goal in GOALS]
