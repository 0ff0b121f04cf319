"""What commands look at before they begin: does the plan belong to the trace, can the budget do?"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import PlanError
from ..hardware import COMPUTE, describe
from .tables import short

if TYPE_CHECKING:
    from ..hardware import Hardware
    from ..plan import Plan
    from ..timeline import Timeline
    from ..trace import Trace
    from .options import Machine


def read_plan_for(path: Path, trace: Trace, trace_path: Path, hardware: Hardware) -> Plan:
    """The plan in ``path``. Raises ``PlanError`` if it is for another trace, or counts in pages of
    another size than the hardware."""
    from ..plan import read_plan

    plan = read_plan(path)
    require_same_trace(plan, path, trace, trace_path)
    if plan.page_size != hardware.page_size:
        raise PlanError(
            f"{path} has pages of {plan.page_size} bytes, the hardware of "
            f"{hardware.page_size}; give --page-size {plan.page_size}, or plan again"
        )
    warn_of_machine(plan, path, hardware)
    return plan


def require_machine(plan_path: Path | None, machine: Machine | None) -> None:
    """Raises ``UsageError`` for a plan that does not say what it was made for."""
    if plan_path is not None and machine is None:
        raise click.UsageError(
            f"{plan_path} does not say what it was made for; give --hardware too."
        )


def timeline_of(
    trace: Trace, trace_path: Path, plan_path: Path | None, machine: Machine | None
) -> Timeline:
    """Of a plan on a machine, or of the trace alone. Raises ``PlanError`` if the plan is infeasible
    there."""
    from ..timeline import timeline

    require_machine(plan_path, machine)
    if machine is None:
        return timeline(trace)
    warn_of_durations(trace, machine)
    hardware = machine.for_trace(trace)
    if plan_path is None:
        return replace(timeline(trace), hardware=hardware)
    plan = read_plan_for(plan_path, trace, trace_path, hardware)
    try:
        return timeline(trace, plan, hardware)
    except PlanError as error:
        raise PlanError(f"{plan_path}: {error}") from error


def require_same_trace(plan: Plan, plan_path: Path, trace: Trace, trace_path: Path) -> None:
    """Raises ``PlanError`` for a plan that was made for another trace, or names tensors that this
    one has not. A plan that says nothing of its trace is taken at its word."""
    if plan.trace_sha256 and plan.trace_sha256 != trace.sha256:
        raise PlanError(
            f"{plan_path} is a plan for another trace (sha256 {plan.trace_sha256[:12]}…) than "
            f"{trace_path} ({trace.sha256[:12]}…); plan again"
        )
    known = set(trace.tensor_ids.tolist())
    rows = [("moves", index, move.tensor) for index, move in enumerate(plan.moves)]
    rows += [("start", index, run.tensor) for index, run in enumerate(plan.start)]
    for name, index, tensor in rows:
        if tensor not in known:
            raise PlanError(
                f"{plan_path}: {name}[{index}] names tensor {tensor}, which {trace_path} has not; "
                "plan again"
            )


def warn_of_durations(trace: Trace, machine: Machine) -> None:
    """Says so on stderr where the ops' durations are of another machine than the preset, and how
    many times as fast that computes by data sheets, in 16 and in 32 bits."""
    recorded = trace.device.strip()
    if machine.name not in COMPUTE or not recorded:
        return
    there, here = COMPUTE[machine.name], COMPUTE.get(_preset_of(recorded) or "")
    if here is None:  # some GPU
        if machine.name != "cpu" and recorded.lower() != "cpu":
            return
        how = "ops are slower there" if machine.name == "cpu" else "its link hides less"
    elif here == there:
        return
    else:
        slow, fast = sorted(
            (there.flops_per_s / here.flops_per_s, there.flops_32_per_s / here.flops_32_per_s)
        )
        ratio = f"{slow:.3g}" if fast < 1.05 * slow else f"{slow:.3g} to {fast:.3g}"
        how = f"that computes {ratio} times as fast by data sheet, so its link hides "
        how += "more" if fast < 1 else "less"
    warn(f"durations are as recorded on {short(recorded)}, not on {machine.name}: {how}")


def warn_of_machine(plan: Plan, path: Path, hardware: Hardware) -> None:
    """Says so on stderr where the plan was made for another machine."""
    if plan.hardware not in (None, hardware):
        warn(f"{path} was made for another machine: {describe(plan.hardware)}")


def warn(text: str) -> None:
    click.echo(f"tensorpager: warning: {text}", err=True)


def _preset_of(device: str) -> str | None:
    """The preset that a device's name speaks of: ``NVIDIA GeForce RTX 4090`` is ``rtx4090``."""
    name = re.sub(r"[^a-z0-9]", "", device.lower())
    known = [preset for preset in COMPUTE if preset in name and (preset != "cpu" or name == "cpu")]
    return max(known, key=len, default=None)
