"""Numbers for people, and the tables that several commands print. 80 columns are enough."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..sizes import format_bytes
from ..sizes import format_us as format_us  # for all who print tables

if TYPE_CHECKING:
    from rich.table import Table

    from ..plan import Bound, Predicted


TEXT_WIDTH = 22
BAR = 8  # columns of a bar in a table
PREDICTED = (
    "iteration_us",
    "percent_of_ideal",
    "stall_us",
    "peak_device_bytes",
    "peak_host_bytes",
    "peak_disk_bytes",
    "bytes_out",
    "bytes_in",
    "disk_bytes_written",
)


def format_percent(value: float | None) -> str:
    return "" if value is None else f"{round(value, 2) + 0.0:.2f} %"


def format_share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0.0 %"


def short(text: str, width: int = TEXT_WIDTH) -> str:
    """Names as files give them, fit for a terminal: no control characters, the middle cut out."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    if len(text) <= width:
        return text
    tail = (width - 1) * 2 // 3  # names differ at their ends
    return f"{text[: width - 1 - tail]}…{text[-tail:]}"


def bar(part: float, whole: float, columns: int = BAR) -> str:
    """``part`` of ``whole``; what is not nothing shows."""
    eighths = math.ceil(8 * columns * part / whole - 1e-9) if whole else 0
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> Table:
    """Columns whose head begins with ``<`` are text, to the left, cut to ``TEXT_WIDTH``; the others
    are numbers."""
    from rich import box
    from rich.table import Table

    result = Table(
        box=box.SIMPLE_HEAD,
        title=title or None,
        title_justify="left",
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    text = [head.startswith("<") for head in columns]
    for head, is_text in zip(columns, text):
        result.add_column(head.lstrip("<"), justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        result.add_row(*(short(cell) if is_text else cell for cell, is_text in zip(row, text)))
    return result


def pairs(rows: Iterable[tuple[str, str]]) -> Table:
    """What on the left, how much on the right of it."""
    from rich.table import Table

    result = Table.grid(padding=(0, 2))
    result.add_column(no_wrap=True)
    result.add_column(overflow="fold")
    for row in rows:
        result.add_row(*row)
    return result


def layers_table(layers: Iterable[Mapping[str, Any]], title: str) -> Table:
    """What was decided for which layers: ``joint.layers.Layer`` as dicts."""
    heads = ("<layers", "come back", "discarded", "run again", "host steps")
    rows = [
        (
            "–".join(dict.fromkeys(layer["names"])),
            format_bytes(layer["in_bytes"]),
            format_bytes(layer["discarded_bytes"]),
            format_us(layer["recompute_us"]),
            str(layer["host_steps"]),
        )
        for layer in layers
    ]
    return table(heads, rows, title=title)


def predicted_json(predicted: Predicted | None) -> dict[str, Any] | None:
    if predicted is None:
        return None
    return {**asdict(predicted), "percent_of_ideal": predicted.percent_of_ideal}


def predicted_table(predicted: Predicted, bound: Bound | None = None) -> Table:
    """What the machine model says of a plan, and how close to the bound that is."""
    rows = [
        (
            "iteration",
            f"{format_us(predicted.iteration_us)} (ideal {format_us(predicted.ideal_us)})",
        ),
        ("speed", f"{format_percent(predicted.percent_of_ideal)} of the ideal"),
    ]
    if bound:
        at_best = f"no plan is faster than {format_us(bound.iteration_us)}"
        rows.append(("", f"{format_percent(bound.percent_of_bound)} of the bound; {at_best}"))
    rows += [
        ("stalls", format_us(predicted.stall_us)),
        *([("run again", format_us(predicted.recompute_us))] if predicted.recompute_us else []),
        *([("host steps", format_us(predicted.host_us))] if predicted.host_us else []),
        ("peak on the device", format_bytes(predicted.peak_device_bytes)),
        ("peak in host memory", format_bytes(predicted.peak_host_bytes)),
        ("peak on disk", format_bytes(predicted.peak_disk_bytes)),
        (
            "moved out, in",
            f"{format_bytes(predicted.bytes_out)}, {format_bytes(predicted.bytes_in)}",
        ),
        ("written to disk", format_bytes(predicted.disk_bytes_written)),
    ]
    return pairs(rows)
