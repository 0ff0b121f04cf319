"""``show`` as people read it: the header, the picture, and the tables below it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..hardware import describe
from ..sizes import format_bytes
from .chart import MemoryChart
from .output import output_width
from .summary import View
from .tables import BAR, TEXT_WIDTH, bar, format_share, format_us, layers_table, pairs, short, table


def overview(path: Path, view: View, found: dict[str, Any], top: int) -> list[Any]:
    """What to print of ``found``, the summary of ``view``."""
    by = "groups" in found
    return [
        *_verdict(found["verdict"]),
        *_decided(found["verdict"]["machine"]),
        "",
        pairs([("trace", str(path)), *_facts(view, found)]),
        "",
        _chart(view, found["peak"]),
        "",
        _kinds(found["peak"]),
        *(_groups(found["groups"], "at_peak", "tensors", top) if by else _peak_tensors(found)),
        "",
        *_idle(found["idle"], view),
        *_idle_note(found["idle"], view),
        *(_groups(found["groups"], "hottest", "accesses", top) if by else _hottest(found)),
    ]


def _verdict(found: dict[str, Any]) -> list[str]:
    """Two lines: what it needs, and how it would run."""
    most, least = format_bytes(found["needs_bytes"]), format_bytes(found["smallest_device_bytes"])
    lines = [f"It needs {most}; the smallest device budget is {least}."]
    machine = found["machine"]
    if machine is None:
        return [*lines, "How fast in half of that? --hardware NAME --device-bytes 50% says it."]
    size = machine["device_bytes"]
    where = "This device" if size is None else f"A device of {format_bytes(size)}"
    if machine["percent_of_ideal"] is None:
        return [*lines, f"{where} cannot run it: {short(machine['reason'], 400)}"]
    how = {"lp": "planned", "lru": "on demand"}.get(machine["policy"], "planned")
    how += ", on a CPU" if machine["assumed"] else ""
    return [*lines, f"{where} runs it at {machine['percent_of_ideal']:.1f} % of the speed, {how}."]


def _decided(machine: dict[str, Any] | None) -> list[Any]:
    """What the plan does with which layers, if there is one."""
    layers = machine.get("layers") if machine is not None else None
    if machine is None or not layers:
        return []
    return ["", layers_table(layers, f"what the plan ({short(machine['policy'])}) does")]


def _facts(view: View, found: dict[str, Any]) -> list[tuple[str, str]]:
    peak, need, read_only = found["peak"], found["working_set"], found["read_only"]
    kinds = f", {', '.join(view.kinds)} only," if view.kinds else ""
    rows = [
        ("source", short(found["source"], 64) or "not given"),
        ("device", short(found["device"], 64) or "not given"),
        ("iteration", f"{found['ops']} ops, {format_us(found['ideal_us'])} if nothing waits"),
        (
            "tensors",
            f"{found['tensors']}, {found['persistent_tensors']} of them persistent; "
            f"{found['accesses']} accesses",
        ),
        ("page size", format_bytes(found["page_size"])),
        (
            "peak",
            f"{format_bytes(peak['live_bytes'])} live{kinds} at op {peak['op']} "
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
            f"({100 * read_only['share_of_bytes']:.1f} % of the tensors' bytes)",
        ),
    ]
    if found["choices"] is not None:
        rows.append(("choices", _choices(found["choices"])))
    return rows if view.hardware is None else [*rows, ("hardware", describe(view.hardware))]


def _choices(found: dict[str, Any]) -> str:
    return (
        f"{found['rerun_ops']} ops may run again ({format_us(found['rerun_us'])} in all), the host "
        f"can take {found['host_ops']} ({format_us(found['host_us'])})"
    )


def _chart(view: View, peak: dict[str, Any]) -> MemoryChart:
    starts, end, unit = view.axis
    if view.hardware is None:
        note = f"{format_bytes(peak['live_bytes'])} at op {peak['op']}"
        return MemoryChart(starts, end, view.live_by_kind, note, peak["op_name"], unit=unit)
    levels = view.page_bytes_by_kind  # what a device's size is set against
    total = sum(levels.values(), np.zeros(view.trace.ops, np.int64))
    op = int(total.argmax())
    note = f"{format_bytes(int(total[op]))} in whole pages at op {op}"
    limit = view.hardware.device_bytes
    return MemoryChart(starts, end, levels, note, view.trace.op_names[op], limit, unit)


def _kinds(peak: dict[str, Any]) -> Any:
    rows = [
        (
            kind,
            format_bytes(size),
            format_share(size, peak["live_bytes"]),
            bar(size, peak["live_bytes"], 2 * BAR),
        )
        for kind, size in peak["bytes_by_kind"].items()
    ]
    return table(("<kind", "at the peak", "share", "<"), rows)


def heading(text: str) -> Any:
    """What stands above a table."""
    from rich.text import Text

    return Text(text, style="bold")


def named_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    """A table whose first column of text may be as wide as the others leave room for."""
    named = next(number for number, head in enumerate(columns) if head.startswith("<"))
    taken = sum(
        2 + max(len(cell) for cell in cells)
        for number, cells in enumerate(zip(columns, *rows))
        if number != named
    )
    room = max(TEXT_WIDTH, output_width() - taken)
    result = table(columns, [])
    for row in rows:
        result.add_row(
            *(
                short(cell, room if number == named else TEXT_WIDTH)
                for number, cell in enumerate(row)
            )
        )
    return result


def _peak_tensors(found: dict[str, Any]) -> list[Any]:
    tensors = found["peak_tensors"]
    if not tensors:
        return []
    rows = [
        (
            str(tensor["tensor"]),
            tensor["name"] or f"(by {tensor['first_op_name']})",
            tensor["kind"],
            format_bytes(tensor["nbytes"]),
            f"{100 * tensor['share']:.1f} %",
            "in use" if tensor["in_use"] else format_us(tensor["idle_us"]),
        )
        for tensor in tensors
    ]
    heads = ("tensor", "<name", "<kind", "size", "share", "idle for")
    title = f"Largest tensors at the peak{_of(len(rows), found['peak_tensors_count'])}"
    return ["", heading(title), named_table(heads, rows)]


def _groups(found: dict[str, Any], which: str, what: str, top: int) -> list[Any]:
    """A line for each group: how many, how many bytes, and their share."""
    groups = found[which]
    if not groups:
        return []
    rows = [
        (
            group["group"],
            str(group[what]),
            format_bytes(group["bytes"]),
            f"{100 * group['share']:.1f} %",
            bar(group["share"], 1.0),
        )
        for group in groups[:top]
    ]
    title = {"at_peak": "At the peak", "hottest": "Most bytes accessed"}[which]
    title += f", by {found['by']}{_of(len(rows), len(groups))}"
    return ["", heading(title), named_table((f"<{found['by']}", what, "bytes", "share", "<"), rows)]


def _of(shown: int, there: int) -> str:
    return f" ({shown} of {there}; --top lists more)" if shown < there else ""


def _hottest(found: dict[str, Any]) -> list[Any]:
    if not found["hottest"]:
        return []
    rows = [
        (
            str(tensor["tensor"]),
            tensor["name"] or f"(by {tensor['first_op_name']})",
            tensor["kind"],
            format_bytes(tensor["nbytes"]),
            str(tensor["accesses"]),
            format_bytes(tensor["touched_bytes"]),
        )
        for tensor in found["hottest"]
    ]
    heads = ("tensor", "<name", "<kind", "size", "accesses", "accessed")
    return ["", heading("Hottest tensors (most bytes accessed)"), named_table(heads, rows)]


# --- idle time -------------------------------------------------------------------------------


def _idle(idle: dict[str, Any], view: View) -> list[Any]:
    most = max(line["mean_bytes"] for line in idle["by_length"])
    lines = [(_range(line["from_us"], line["to_us"]), line) for line in idle["by_length"]]
    whole = {**idle, "bytes": sum(line["bytes"] for line in idle["by_length"])}
    rows = [
        (
            name,
            str(line["periods"]),
            format_bytes(line["bytes"]),
            *([] if view.hardware is None else [_hidden(line)]),
            format_bytes(line["mean_bytes"]),
            format_share(line["mean_bytes"], idle["mean_live_bytes"]),
            "" if line is whole else bar(line["mean_bytes"], most),
        )
        for name, line in [*lines, ("all", whole)]
    ]
    mean, live = format_bytes(idle["mean_bytes"]), format_bytes(idle["mean_live_bytes"])
    hidden = [] if view.hardware is None else ["link hides"]
    heads = ("<idle for", "periods", "bytes", *hidden, "at a time", "of live", "<")
    return [heading(f"On average {mean} of {live} live lie idle"), table(heads, rows)]


def _hidden(line: dict[str, Any]) -> str:
    return format_share(line["hideable_bytes"], line["bytes"]) if line["bytes"] else ""


def _idle_note(idle: dict[str, Any], view: View) -> list[str]:
    if view.hardware is None:
        return [
            "--hardware NAME says how much of that its link could hide (show --help lists them)."
        ]
    if idle["link_bytes"] is None:
        return []
    return [
        "'link hides': has time to go to the host and come back, with the link to itself; in an "
        f"iteration it moves at most {format_bytes(idle['link_bytes'])} both ways."
    ]


def _range(lower: float, upper: float | None) -> str:
    if upper is None:
        return f"{format_us(lower)} or more"
    return (
        f"under {format_us(upper)}" if lower == 0 else f"{format_us(lower)} to {format_us(upper)}"
    )
