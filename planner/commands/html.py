"""``tensorpager html``: an iteration, and what a plan does in it, as a page for the browser."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import HardwareError
from ..sizes import format_bytes
from .checks import require_same_pages, require_same_trace, require_working_sets
from .options import Machine, optional_hardware_options, trace_argument
from .output import emit_text, output_path, progress_bar, whole_file

if TYPE_CHECKING:
    from ..plan import Plan


@click.command("html")
@trace_argument
@click.argument("plan_path", metavar="[PLAN]", required=False, type=click.Path(path_type=Path))
@optional_hardware_options
@click.option(
    "--policies",
    metavar="A,B,…",
    help="Also plan with these and compare them. Takes as long as planning takes.",
)
@click.option("--quick", is_flag=True, help="A shorter search for lp and the bound.")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    callback=output_path,
    help="The report, an HTML file.",
)
def html(
    trace_path: Path,
    plan_path: Path | None,
    machine: Machine | None,
    policies: str | None,
    quick: bool,
    output: Path,
) -> None:
    """Draw an iteration as a page for the browser.

    Memory over time, where every tensor is when, what moves over which channel, and which op waits
    for what. One file that needs no network. Without PLAN it shows the memory and what lies idle.

    A PLAN needs --hardware, the machine that it runs on.

    \b
    Example:
      tensorpager html bert-256.parquet plan.json --hardware g10 -o report.html
    """
    from ..plan import read_plan
    from ..report.data import report_data
    from ..report.page import page
    from ..report.payload import encode
    from ..timeline import timeline
    from ..trace_file import read_trace

    plan = None if plan_path is None else read_plan(plan_path)
    if machine is None:
        _require_no_machine_is_needed(plan, plan_path, policies)
    trace = read_trace(trace_path)
    hardware = machine.for_trace(trace) if machine else None
    if plan is not None and plan_path is not None and hardware is not None:
        require_same_trace(plan, plan_path, trace, trace_path)
        require_same_pages(plan, plan_path, hardware)
    with progress_bar() as progress:
        comparison = None
        if policies is not None and hardware is not None:
            from .compare import chosen_policies, compared

            require_working_sets(trace, hardware)
            names = chosen_policies(policies)
            comparison = compared(trace, hardware, names, quick=quick, progress=progress)
        line = timeline(trace, plan, hardware)
        names_of = {"trace": trace_path.name} | ({"plan": plan_path.name} if plan_path else {})
        header, columns = report_data(line, hardware, files=names_of, comparison=comparison)
        content = page(encode(header, columns)).encode()
    with whole_file(output) as part:
        part.write_bytes(content)
    emit_text(f"{output}: {trace.ops} ops, {format_bytes(len(content))}; open it in a browser")


def _require_no_machine_is_needed(
    plan: Plan | None, plan_path: Path | None, policies: str | None
) -> None:
    """Raises ``HardwareError`` if there is something to run on a machine."""
    if plan is not None:
        sizes = " ".join(
            f"--{tier}-bytes {'inf' if math.isinf(size) else int(size)}"
            for tier, size in (
                ("device", plan.device_bytes),
                ("host", plan.host_bytes),
                ("disk", plan.disk_bytes),
            )
        )
        raise HardwareError(
            f"{plan_path} says how large the machine's memories are, not how fast its link and its "
            f"disk; give --hardware NAME|FILE {sizes} --page-size {plan.page_size}"
        )
    if policies is not None:
        raise HardwareError("--policies plans for a machine; name it with --hardware NAME|FILE")
