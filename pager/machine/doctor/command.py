"""``tensorpager doctor``: what this machine can do, how fast, and what to change."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import click

from ....planner.commands.options import json_option
from ....planner.commands.output import emit_json, emit_text, output_width
from .finding import Finding

_COLORS = {"ok": "green", "warning": "yellow", "problem": "red"}


@click.command()
@click.option(
    "--disk-path",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder that a paging file would be in (default: the current one).",
)
@json_option
@click.pass_context
def doctor(
    context: click.Context,
    disk_path: Path,
    as_json: bool,
) -> None:
    """Say what this machine can do for tensorpager, how fast pages move on it, and what to change.

    The rates are measured now, in a second or two, with a file of 64 MiB or less that is gone
    afterwards. Runs with the default page size use them for a week.

    Each line is ok, a warning (it works, but slower or with less) or a problem (it will not work),
    the latter two with a remedy.

    \b
    Example:
      tensorpager doctor --disk-path /nvme

    Exits with 1 if there is a problem.
    """
    findings = examine(disk_path)
    if as_json:
        emit_json([asdict(finding) for finding in findings])
    else:
        _print(findings)
    if any(finding.state == "problem" for finding in findings):
        context.exit(1)


def examine(disk_path: Path) -> list[Finding]:
    from .finding import Finding

    try:
        import torch
    except ImportError as error:
        remedy = "pip install torch; pytorch.org says which build is for your GPU"
        return [Finding("PyTorch", "problem", f"cannot be imported: {error}", remedy)]

    from .disk import disk_findings, endurance
    from .gds import gds_findings
    from .gpu import gpu_findings
    from .memory import allocator_finding, memory_findings
    from .rates import measure_rates

    on_gpu = torch.cuda.is_available()
    disk = disk_findings(disk_path)
    usable = disk[0].state != "problem"
    rates = measure_rates(disk_path if usable else None)
    return [
        *gpu_findings(),
        *gds_findings(disk_path, on_gpu=on_gpu),
        *memory_findings(on_gpu=on_gpu),
        allocator_finding(),
        *disk,
        *rates.findings,
        *(endurance(disk_path, rates.write_bytes_per_s) if usable else []),
    ]


def _print(findings: list[Finding]) -> None:
    from .finding import lines_of

    width = output_width()
    for finding in findings:
        first, *rest = lines_of(finding, width)
        state = click.style(finding.state, fg=_COLORS[finding.state])
        emit_text(state + first[len(finding.state) :])
        for line in rest:
            emit_text(line)
    count = Counter(finding.state for finding in findings)
    summary = [f"{count[state]} {state}{'s' if state != 'ok' and count[state] != 1 else ''}"
               for state in ("ok", "warning", "problem")]  # fmt: skip
    emit_text("\n" + ", ".join(summary))
