"""Memory over time as a picture of characters: kinds stacked, in colour where there is colour.

With colour a row shows eighths of itself. Without, each kind has a character of its own; a single
kind still shows eighths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..trace import Floats, Ints
from .tables import format_us, short

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

# From the bottom up: what stays all the time first. Kind → colour, character.
KIND_LOOKS = {
    "parameter": ("blue", "█"),
    "optimizer": ("magenta", "▓"),
    "gradient": ("yellow", "▒"),
    "input": ("cyan", "+"),
    "activation": ("green", "░"),
    "workspace": ("red", "·"),
}
EIGHTHS = " ▁▂▃▄▅▆▇█"
DEVICE = "device"  # label of the limit
MIN_WIDTH = 24  # of the picture; narrower terminals wrap it


class Samples(NamedTuple):
    """What a curve is at the fullest moment of each of equally long pieces of time."""

    at: Ints  # [pieces], index of the moment in the curve
    levels: dict[str, Ints]  # kind → bytes, [pieces]


def fullest(starts: Floats, end: float, levels: dict[str, Ints], pieces: int) -> Samples:
    """``levels`` hold from ``starts[i]`` to ``starts[i + 1]``, the last to ``end``. Moments that
    take no time count too, so the peak is never lost."""
    total = sum(levels.values(), np.zeros(len(starts), np.int64))
    ends = np.append(starts[1:], end)
    edges = np.linspace(0.0, end, pieces + 1)
    first = np.minimum(np.searchsorted(starts, edges), np.searchsorted(ends, edges, "right"))
    first = np.minimum(first[:-1], len(starts) - 1)
    last = np.append(np.searchsorted(starts, edges[1:-1]), len(starts))
    at = np.array([a + int(total[a : max(b, a + 1)].argmax()) for a, b in zip(first, last)])
    return Samples(at, {kind: level[at] for kind, level in levels.items()})


@dataclass(frozen=True, eq=False)
class MemoryChart:
    """Prints itself as wide as the console. ``note`` stands at the highest column, and ``name``
    behind it, shortened if need be. A device of ``limit_bytes`` is a line across, if it is not far
    above all else. Time is in µs, or in ops where there is none.
    """

    starts: Floats
    end: float
    levels: dict[str, Ints]
    note: str = ""
    name: str = ""
    limit_bytes: float = math.inf
    unit: str = "time"  # or "ops"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        colour = console.color_system is not None and not console.no_color
        yield from self.lines(options.max_width, colour=colour)

    def lines(self, width: int, *, colour: bool) -> Iterator[Text]:
        """The picture's lines, none longer than ``width`` if that is enough for an axis and
        ``MIN_WIDTH``."""
        from rich.text import Text

        kinds = [kind for kind in KIND_LOOKS if kind in self.levels]
        most = sum((self.levels[kind] for kind in kinds), np.zeros(len(self.starts), np.int64))
        peak = int(most.max(initial=0))
        scale = _Scale.up_to(peak)
        margin = max(len(label) for label in (*scale.labels, DEVICE)) + 1
        columns = max(MIN_WIDTH, width - margin - 1)
        piece = fullest(self.starts, self.end, self.levels, columns)
        stack = np.array([piece.levels[kind] for kind in kinds], np.int64).reshape(-1, columns)
        place = int(stack.sum(axis=0).argmax())
        for text in _pointer(self, place, columns):
            yield Text(" " * (margin + 1) + text)
        looks = _Looks(kinds, colour)
        tops = np.rint(np.cumsum(stack, axis=0) / max(scale.top, 1) * scale.rows * 8)
        stacks: list[list[int]] = tops.astype(int).T.tolist()
        limit = self.limit_bytes / max(scale.top, 1) * scale.rows
        for row in range(scale.rows - 1, -1, -1):
            crossed = row < limit <= row + 1
            label = DEVICE if crossed else scale.at_row.get(row + 1, "")
            line = Text(f"{label:>{margin}}{'┤' if label else '│'}")
            cell = looks.line if crossed else looks.cell
            cells = [cell([top - row * 8 for top in tops_of]) for tops_of in stacks]
            for style, run in groupby(cells, key=lambda cell: cell[1]):
                line.append("".join(glyph for glyph, _ in run), style)
            yield line
        yield from (
            Text(" " * (margin - 1) + text) for text in _time_axis(self.end, self.unit, columns)
        )
        yield from looks.legend(margin + 1, margin + 1 + columns)


class _Looks:
    """What a cell of the picture looks like."""

    def __init__(self, kinds: list[str], colour: bool) -> None:
        self.kinds = kinds
        self.eighths = colour or len(kinds) == 1
        self.style = [KIND_LOOKS[kind][0] if colour else "" for kind in kinds]
        full = "█" if self.eighths else ""
        self.glyph = [full or KIND_LOOKS[kind][1] for kind in kinds]

    def line(self, tops: list[int]) -> tuple[str, str]:
        """As ``cell``, with a line across it."""
        _, style = self.cell(tops)
        return "─", f"white on {style.split()[0]}" if style else ""

    def cell(self, tops: list[int]) -> tuple[str, str]:
        """Character and style. ``tops``: where each kind ends, in eighths of the cell."""
        sizes, filled = [], 0
        for top in tops:
            edge = min(max(top, filled), 8)
            sizes.append(edge - filled)
            filled = edge
        if not filled:
            return " ", ""
        order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
        largest, second = order[0], order[1] if len(order) > 1 else order[0]
        if not self.eighths:
            return (self.glyph[largest] if filled >= 4 else " "), ""
        if filled < 8 or not sizes[second] or largest == second:
            return EIGHTHS[filled], self.style[largest]
        lower, upper = sorted((largest, second))
        share = round(8 * sizes[lower] / (sizes[lower] + sizes[upper]))
        return EIGHTHS[share], f"{self.style[lower]} on {self.style[upper]}"

    def legend(self, indent: int, width: int) -> Iterator[Text]:
        from rich.text import Text

        line = Text(" " * indent)
        for kind, style, glyph in zip(self.kinds, self.style, self.glyph):
            if len(line) > indent and len(line) + len(kind) + 2 > width:
                yield line
                line = Text(" " * indent)
            line.append(glyph, style).append(f" {kind}  ")
        line.rstrip()
        yield line


@dataclass(frozen=True)
class _Scale:
    """A vertical axis of ``rows`` rows from 0 to ``top`` bytes, with a label at some of them."""

    top: float
    rows: int
    at_row: dict[int, str]

    @property
    def labels(self) -> list[str]:
        return list(self.at_row.values())

    @staticmethod
    def up_to(peak: int) -> _Scale:
        """The lowest top ≥ ``peak`` of 3 to 6 round steps of bytes."""
        unit = min(4, max(0, (max(peak, 1).bit_length() - 1) // 10))
        size = 1024**unit
        best = min(
            (step * count, abs(count - 4), step, count)
            for power in range(4)
            for digit in (0.5, 1, 2, 2.5, 4, 5)
            for step in (digit * 10**power,)
            for count in range(3, 7)
            if step * count * size >= peak and (unit or step == int(step))
        )
        top, _, step, count = best
        each = {3: 4, 4: 3, 5: 2, 6: 2}[count]
        name = ("B", "KiB", "MiB", "GiB", "TiB")[unit]
        labels = {i * each: f"{i * step:g} {name}" for i in range(1, count + 1)}
        return _Scale(top * size, count * each, labels)


def _pointer(chart: MemoryChart, place: int, columns: int) -> list[str]:
    """``▼ note`` at column ``place``, or ``note ▼``; in two lines where neither has room."""
    room = columns - len(chart.note) - 3
    name = f" '{short(chart.name, room)}'" if chart.name and room > 3 else ""
    text = short(chart.note, columns) + name
    if place + 2 + len(text) <= columns:
        return [" " * place + f"▼ {text}"]
    if len(text) < place:
        return [f"{text:>{place - 1}} ▼"]
    begin = max(0, min(place - len(text) // 2, columns - len(text)))
    return [" " * begin + text, " " * place + "▼"]


def _time_axis(end: float, unit: str, columns: int) -> Iterator[str]:
    """The line below a picture and its labels, from 0 to ``end`` µs, or ops if that is ``unit``.
    Both begin one column left of the corner."""
    step = _round_step(end, max(2, columns // 14), whole=unit == "ops")
    line = ["─"] * (columns + 1)
    line[0] = "└"
    labels = [" "] * (columns + 2)
    free = 0
    for number in range(int(end / step + 1e-9) + 1 if end else 1):
        value = number * step
        text = f"op {value:.0f}" if unit == "ops" else format_us(value) if value else "0"
        place = round(value / end * columns) if end else 0
        line[place] = line[place] if not place else "┴"
        begin = min(max(0, place + 1 - len(text) // 2), len(labels) - len(text))
        if begin >= free:
            labels[begin : begin + len(text)] = text
            free = begin + len(text) + 1
    yield "0" + "".join(line)
    yield "".join(labels).rstrip()


def _round_step(end: float, most: int, *, whole: bool) -> float:
    """1, 2 or 5 times a power of ten, so that at most ``most`` steps make ``end``."""
    if end <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(end / most))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit * most >= end)
    return max(step, 1.0) if whole else step
