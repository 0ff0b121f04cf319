"""The tables and verdicts that ``bench_train.py`` prints."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tensorpager.planner.sizes import format_bytes

from .measure import Case
from .options import parse_options
from .summary import IDENTICAL

WIDTH = 150  # where the output is no terminal
NONE = "–"


def show(record: dict[str, Any]) -> None:
    """What ``bench_train.py --json`` writes, for people."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(speed_table(record))
    if any("per_step" in summary for summary in record["summaries"]):
        console.print(paging_table(record))
    words = {True: "yes", False: "NO", None: "n/a"}
    for verdict in record["verdicts"]:
        print(f"{words[verdict['holds']]:5}{verdict['claim']}")


def speed_table(record: dict[str, Any]) -> Table:
    """Speeds in % of plain's. ``device``: its peak, from outside; ``counted``: by the pager, whose
    ``budget`` it is; ``process``: its growth where the device is a GPU; ``host``: reserved by the
    pager, or page-locked by PyTorch."""
    options = parse_options([*record["flags"], "--no-pager"])
    cuda = options.device == "cuda"
    title = (
        f"{options.preset}, {options.dtype}, batch {options.batch}, seq {options.seq}, "
        f"{options.device}: needs {format_bytes(record['needed_bytes'])}; "
        f"medians of {record['rounds']} × {record['steps']} steps"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    memory = ("device", "counted", "budget", *(["process"] if cuda else []), "host", "disk file")
    for heading in ("step s", "speed %", "tokens/s", *memory):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("losses")
    for summary in record["summaries"]:
        name = Case(**summary["case"]).name
        error = escape(summary.get("error", ""))
        if "step_seconds" not in summary:
            table.add_row(name, *[NONE] * (3 + len(memory)), error or "not run yet")
            continue
        peaks, budget = summary["peak_bytes"], summary.get("budget_bytes", {})
        sizes = [peaks["device"], summary.get("counted_peak_bytes", {}).get("device", 0)]
        sizes += [budget.get("device", 0), *([peaks["process"]] if cuda else [])]
        sizes += [budget.get("host") or peaks.get("pinned", 0), summary.get("disk_file_bytes", 0)]
        table.add_row(
            name,
            f"{summary['step_seconds']:.4f}",
            _number(summary["speed_percent"]),
            f"{options.batch * options.seq / summary['step_seconds']:,.0f}",
            *(_size(nbytes) for nbytes in sizes),
            _losses(summary) + (f"; then {error}" if error else ""),
        )
    return table


def _losses(summary: dict[str, Any]) -> str:
    if summary["losses_identical"]:
        return "identical"
    return "DIFFER" if summary["case"]["mode"] in IDENTICAL else "differ"


def paging_table(record: dict[str, Any]) -> Table:
    """What our modes did, per step."""
    table = Table(title="paging, per step", title_justify="left")
    table.add_column("", no_wrap=True)
    milliseconds = ("stall ms", "predicted ms", "measured ms", "bound ms")
    for heading in (*milliseconds, "% of bound", "in time %"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("moved")
    for summary in record["summaries"]:
        if "per_step" not in summary:
            continue
        times = [summary[name] for name in ("predicted_us", "measured_us", "bound_us")]
        table.add_row(
            Case(**summary["case"]).name,
            _number(summary["per_step"]["stall_us"] / 1e3),
            *(_number(None if us is None else us / 1e3) for us in times),
            _number(summary["percent_of_bound"]),
            _number(summary["prefetch_hit_percent"]),
            escape("; ".join([_moved(summary), *summary["notes"]])),
        )
    return table


def _moved(summary: dict[str, Any]) -> str:
    channels = summary["channel_bytes"].items()
    moved = [f"{format_bytes(nbytes)} {channel}" for channel, nbytes in channels if nbytes]
    return ", ".join(moved) or "nothing"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f}"


def _size(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else NONE
