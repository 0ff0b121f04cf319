"""What commands look at before they begin: does the plan belong to the trace, can the budget do?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PlanError
from ..hardware import PRESETS

if TYPE_CHECKING:
    from ..hardware import Hardware
    from ..plan import Plan
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
    return plan


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


def durations_row(trace: Trace, machine: Machine) -> list[tuple[str, str]]:
    """For a heading: whether the ops' durations are of another kind of machine than the preset."""
    computes = {name: "cpu" if name == "cpu" else "gpu" for name in PRESETS}.get(machine.name)
    recorded = trace.device.partition(":")[0].lower()
    if computes is None or not recorded or (recorded == "cpu") == (computes == "cpu"):
        return []
    other = (
        "ops are faster there, and its link hides less"
        if computes == "gpu"
        else "ops are slower there"
    )
    return [("durations", f"as recorded on {recorded}, not on {machine.name}: {other}")]
