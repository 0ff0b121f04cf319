"""Where a tensor's pages are over time: a picture of pages × time, and what its table says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from ..timeline import COMING, DEVICE, DISK, HOST, LEAVING
from .chart import MIN_WIDTH, prints_blocks, time_axis

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

# Place → colour, character, ASCII character. A leaving or coming page holds a frame.
LOOKS = {
    DEVICE: ("green", "█", "#"),
    LEAVING: ("yellow", "▓", ">"),
    COMING: ("cyan", "▒", "<"),
    HOST: ("blue", "─", "-"),
    DISK: ("magenta", "·", "."),
}
ROWS = 8
USE = ("╵", "'")  # below the picture, at the uses


@dataclass(frozen=True, eq=False)
class PlaceMap:
    """Prints itself as wide as the console. ``spans``: ``residency`` of a life; ``uses``: µs."""

    spans: Sequence[dict[str, Any]]
    pages: int
    end: float
    uses: Sequence[float]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        colour = console.color_system is not None and not console.no_color
        yield from self.lines(options.max_width, colour=colour, blocks=prints_blocks())

    def lines(self, width: int, *, colour: bool, blocks: bool = True) -> Iterator[Text]:
        from rich.text import Text

        rows = min(ROWS, self.pages)
        labels = [f"{self.pages * row // rows}" for row in range(rows)]
        labels[0] = "page 0"
        margin = max(map(len, labels)) + 1
        columns = max(MIN_WIDTH, width - margin - 1)
        bar = "│" if blocks else "|"
        for row, label in enumerate(labels):
            page = (self.pages * row // rows + self.pages * (row + 1) // rows) // 2
            line = Text(f"{label:>{margin}}{bar}")
            for place, run in groupby(self._places(page, columns)):
                style, block, plain = LOOKS.get(place, ("", " ", " "))
                line.append((block if blocks else plain) * len(list(run)), style if colour else "")
            yield line
        if self.uses:
            marks = [" "] * columns
            for use in self.uses:
                marks[_column(use, self.end, columns)] = USE[0 if blocks else 1]
            yield Text(f"{'used':>{margin}}{bar}" + "".join(marks).rstrip())
        for text in time_axis(self.end, "time", columns, blocks=blocks):
            yield Text(" " * (margin - 1) + text)
        legend = Text(" " * (margin + 1))
        there = {span["place"] for span in self.spans}
        for place, (style, block, plain) in LOOKS.items():
            if place in there:
                legend.append(block if blocks else plain, style if colour else "")
                legend.append(f" {place}  ")
        yield legend

    def _places(self, page: int, columns: int) -> list[str]:
        """Where ``page`` is in the middle of each column; nothing where the tensor is not alive."""
        places = [""] * columns
        for span in self.spans:
            if span["first_page"] <= page < span["first_page"] + span["page_count"]:
                begin = _middle_after(span["begin_us"], self.end, columns)
                end = _middle_after(span["end_us"], self.end, columns)
                places[begin:end] = [span["place"]] * (end - begin)
        return places


def _column(time: float, end: float, columns: int) -> int:
    return min(int(time / end * columns), columns - 1) if end else 0


def _middle_after(time: float, end: float, columns: int) -> int:
    """The first column whose middle is not before ``time``."""
    return min(int(time / end * columns + 0.5), columns) if end else columns


class Stay(NamedTuple):
    """Pages that go the same way, one after the other: the first of them is at ``place`` from
    ``begin_us`` on, the last one until ``end_us``."""

    place: str
    first_page: int
    page_count: int
    begin_us: float
    end_us: float


def stays(spans: Sequence[dict[str, Any]]) -> list[Stay]:
    """``residency`` of a life, neighbouring pages put together that are at the same places in the
    same order. Sorted by pages, then by time."""
    runs = [list(run) for _, run in groupby(spans, key=lambda span: int(span["first_page"]))]
    found: list[Stay] = []
    for _, same in groupby(runs, key=lambda run: [span["place"] for span in run]):
        together = list(same)
        first = together[0][0]["first_page"]
        count = sum(run[0]["page_count"] for run in together)
        found += [
            Stay(
                steps[0]["place"],
                first,
                count,
                min(span["begin_us"] for span in steps),
                max(span["end_us"] for span in steps),
            )
            for steps in zip(*together)
        ]
    return found
