"""``tensorpager show``: what is in a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..sizes import format_bytes
from .options import json_option, page_size_option, trace_argument
from .output import emit, emit_json
from .tables import format_share, format_us, pairs, short, table


@click.command()
@trace_argument
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="How many of the largest and of the hottest tensors to list.",
)
@page_size_option(None, "Count in pages of this size (default: the trace's).")
@json_option
def show(trace_path: Path, top: int, page_size: int | None, as_json: bool) -> None:
    """Say what a trace holds.

    Peak memory and what it is made of, what lies idle for how long, which tensors matter.

    \b
    Example:
      tensorpager show bert-256.parquet --top 10
    """
    from ..trace_file import read_trace
    from .summary import summary

    trace = read_trace(trace_path)
    found = summary(trace, page_size or trace.page_size, top)
    if as_json:
        emit_json(found)
        return
    emit(
        pairs([("trace", str(trace_path)), *_facts(found)]),
        "",
        _kinds(found["peak"]),
        "",
        _idle(found["idle"]),
        *_tensors("Largest tensors", found["largest"]),
        *_tensors("Hottest tensors (most bytes accessed)", found["hottest"]),
    )


def _facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    peak, need, read_only = found["peak"], found["working_set"], found["read_only"]
    return [
        ("source", short(found["source"], 64) or "not given"),
        ("device", short(found["device"], 64) or "not given"),
        ("iteration", f"{found['ops']} ops, {format_us(found['ideal_us'])} if nothing waits"),
        ("tensors", f"{found['tensors']}, {found['persistent_tensors']} of them persistent"),
        ("page size", format_bytes(found["page_size"])),
        (
            "peak",
            f"{format_bytes(peak['live_bytes'])} live at op {peak['op']} "
            f"'{short(peak['op_name'])}' "
            f"({format_bytes(peak['live_page_bytes'])} at most in whole pages)",
        ),
        (
            "working set",
            f"{format_bytes(need['page_bytes'])} in pages at most, op {need['op']} "
            f"'{short(need['op_name'])}': no smaller device budget works",
        ),
        (
            "read only",
            f"{read_only['tensors']} tensors, {format_bytes(read_only['bytes'])} "
            f"({100 * read_only['share_of_bytes']:.1f} % of all tensors' bytes)",
        ),
    ]


def _kinds(peak: dict[str, Any]) -> Any:
    rows = [
        (kind, format_bytes(size), format_share(size, peak["live_bytes"]))
        for kind, size in peak["bytes_by_kind"].items()
    ]
    return table(("<kind", "at the peak", "share"), rows)


def _idle(idle: dict[str, Any]) -> Any:
    rows = [
        (
            _range(line["from_us"], line["to_us"]),
            str(line["periods"]),
            format_bytes(line["bytes"]),
            format_bytes(line["mean_bytes"]),
            format_share(line["mean_bytes"], idle["mean_live_bytes"]),
        )
        for line in idle["by_length"]
    ]
    mean, live = format_bytes(idle["mean_bytes"]), format_bytes(idle["mean_live_bytes"])
    rows.append(
        (
            "all",
            str(idle["periods"]),
            format_bytes(sum(line["bytes"] for line in idle["by_length"])),
            mean,
            format_share(idle["mean_bytes"], idle["mean_live_bytes"]),
        )
    )
    heads = ("<idle for", "periods", "bytes", "idle at a time", "of live")
    return table(heads, rows, title=f"On average {mean} of {live} live lie idle")


def _range(lower: float, upper: float | None) -> str:
    if upper is None:
        return f"{format_us(lower)} or more"
    return (
        f"under {format_us(upper)}" if lower == 0 else f"{format_us(lower)} to {format_us(upper)}"
    )


def _tensors(title: str, tensors: list[dict[str, Any]]) -> list[Any]:
    if not tensors:
        return []
    rows = [
        (
            str(tensor["tensor"]),
            tensor["name"] or "",
            tensor["kind"],
            format_bytes(tensor["nbytes"]),
            str(tensor["accesses"]),
            format_bytes(tensor["touched_bytes"]),
        )
        for tensor in tensors
    ]
    heads = ("tensor", "<name", "<kind", "size", "accesses", "accessed")
    return ["", table(heads, rows, title=title)]
