"""Curves for the terminal: one letter for each, so that they can be told apart without colour."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

MARKERS = "ox+*#@%$"
SEVERAL = "&"  # where curves have a point in common
COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red", "bright_cyan", "bright_yellow")
HEIGHT, MOST_WIDTH, LEFT, RIGHT = 14, 100, 9, 4

Cell = tuple[str, str]  # a letter and its style
Grid = dict[tuple[int, int], Cell]  # by row, from the top, and column


@dataclass(frozen=True)
class Series:
    """Points by rising x; a y of ``None`` is a gap in the curve."""

    name: str
    points: Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Curves:
    """Something that rich prints: percentages (y) against something (x), from 0 or more to 100.

    At most ``len(MARKERS)`` series. ``ticks`` are labels below the x axis, as many as there is room
    for; ``level`` is a percentage marked by a dashed line. ``logarithmic``: equal factors of x are
    equally far apart; all xs are above 0 then.
    """

    title: str
    series: Sequence[Series]
    ticks: Sequence[tuple[float, str]]
    level: float | None = None
    logarithmic: bool = False

    @property
    def drawable(self) -> bool:
        """There are points at two xs; nothing is printed otherwise."""
        xs = {x for series in self.series for x, y in series.points if y is not None}
        return len(xs) > 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        width = min(options.max_width, MOST_WIDTH) - LEFT - RIGHT
        xs = [x for series in self.series for x, y in series.points if y is not None]
        if width < 10 or not self.drawable:
            return
        column = _scale(xs, width, self.logarithmic)
        low, high, step = _y_range(
            [y for series in self.series for _, y in series.points if y is not None]
            + ([] if self.level is None else [self.level])
        )

        def row(y: float) -> int:
            return round((HEIGHT - 1) * (high - y) / (high - low))

        grid = self._drawn(column, row, width)
        several = any(cell[0] == SEVERAL for cell in grid.values())
        yield from self._legend(several, options.max_width)
        labels = {
            row(low + n * step): low + n * step for n in range(round((high - low) / step) + 1)
        }
        for place in range(HEIGHT):
            label = f"{labels[place]:g} %" if place in labels else ""
            line = Text(f"{label:>{LEFT - 2}} {'┤' if label else '│'}")
            for across in range(width):
                letter, style = grid.get((place, across), (" ", ""))
                line.append(letter, style)
            yield line
        marked, below = _x_axis([(column(x), label) for x, label in self.ticks], width)
        yield Text(
            " " * (LEFT - 1) + "└" + "".join("┬" if n in marked else "─" for n in range(width))
        )
        yield Text(below)

    def _legend(self, several: bool, width: int) -> Iterator[Text]:
        from rich.text import Text

        entries = [
            (f"{marker} {series.name}", colour)
            for marker, colour, series in zip(MARKERS, COLOURS, self.series)
        ]
        line = Text(f"{self.title}:")
        for entry, colour in [*entries, *([(f"{SEVERAL} several", "bold")] if several else [])]:
            if len(line) + 3 + len(entry) > width:
                yield line
                line = Text()
            line.append("   ")
            line.append(entry, colour)
        yield line

    def _drawn(
        self, column: Callable[[float], int], row: Callable[[float], int], width: int
    ) -> Grid:
        grid: Grid = {}
        if self.level is not None:
            grid |= {(row(self.level), across): ("-", "dim") for across in range(0, width, 2)}
        placed: list[tuple[list[tuple[int, int] | None], Cell]] = []
        for marker, colour, series in zip(MARKERS, COLOURS, self.series):
            cells = [None if y is None else (row(y), column(x)) for x, y in series.points]
            placed.append((cells, (marker, colour)))
        for cells, (_, colour) in placed:
            for one, other in pairwise(cells):
                if one is not None and other is not None:
                    grid |= dict.fromkeys(_line(one, other), (".", colour))
        marks: Grid = {}
        for cells, mark in placed:
            for cell in dict.fromkeys(cells):
                if cell is not None:
                    marks[cell] = (SEVERAL, "bold") if cell in marks else mark
        return grid | marks


def _scale(xs: Sequence[float], width: int, logarithmic: bool) -> Callable[[float], int]:
    """x to a column."""
    grow: Callable[[float], float] = math.log if logarithmic else float
    low, high = grow(min(xs)), grow(max(xs))
    return lambda x: round((width - 1) * (grow(x) - low) / (high - low))


def _y_range(ys: Sequence[float]) -> tuple[float, float, float]:
    """Lowest and highest tick, and the distance of ticks: two to five of these."""
    low, high = min(ys), max(ys)
    span = max(high - low, 1.0)  # of 100; no flat curve is blown up
    step = next(
        unit * 10**power
        for power in range(-3, 3)
        for unit in (1, 2, 5)
        if unit * 10**power * 5 >= span
    )
    bottom, top = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    if bottom == top:
        bottom -= 5 * step
    return round(bottom, 6), round(top, 6), step


def _line(one: tuple[int, int], other: tuple[int, int]) -> list[tuple[int, int]]:
    """The cells between two."""
    steps = max(abs(other[0] - one[0]), abs(other[1] - one[1]))
    return [
        (
            round(one[0] + (other[0] - one[0]) * n / steps),
            round(one[1] + (other[1] - one[1]) * n / steps),
        )
        for n in range(1, steps)
    ]


def _x_axis(labels: Sequence[tuple[int, str]], width: int) -> tuple[set[int], str]:
    """Columns of the ticks, and the line below them: every label, or every second, third …, so that
    all of them have room. They may reach into the margins."""
    line: list[str] = []
    chosen: list[tuple[int, str]] = []
    for every in range(1, len(labels) + 1):
        line = [" "] * (LEFT + width + RIGHT)
        chosen = [(place, label) for place, label in labels[::every] if 0 <= place < width]
        if all(_write(line, LEFT + place, label) for place, label in chosen):
            break
    return {place for place, _ in chosen}, "".join(line).rstrip()


def _write(line: list[str], middle: int, label: str) -> bool:
    """Whether ``label`` has room around column ``middle``; it is there then."""
    begin = max(0, min(middle - len(label) // 2, len(line) - len(label)))
    if any(letter != " " for letter in line[max(0, begin - 2) : begin + len(label) + 2]):
        return False
    line[begin : begin + len(label)] = label
    return True


def even_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers of bytes from ``low`` to ``high``, equally far apart: at most ``most``."""
    unit = max(1024 ** int(math.log(max(high, 1), 1024)), 1)
    step = next(
        factor * unit / 1024
        for power in range(-3, 12)
        for factor in (4.0**power, 2 * 4.0**power)
        if high - low <= (most - 1) * factor * unit / 1024
    )
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]
