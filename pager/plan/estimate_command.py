"""``tensorpager estimate``: what a training will need and how fast it can be, before it is run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...planner.commands.failures import CheckFailed
from ...planner.commands.options import F, Machine, hardware_options, json_option
from ...planner.commands.output import emit, emit_json, output_path, progress_bar
from ...planner.commands.ranks import Fleet, network_options
from ...planner.commands.tables import format_percent, format_us, pairs, table
from ...planner.errors import PagerError
from ...planner.files import whole_file
from ...planner.hardware import describe, load_compute
from ...planner.sizes import format_bytes

if TYPE_CHECKING:
    from ...planner.hardware import Hardware
    from ...planner.joint.policy import Best
    from ...planner.outlook import Outlook
    from ...planner.trace import Trace
    from .estimate import Iteration, Training

DTYPES = {name: name for name in ("bfloat16", "float16", "float32", "autocast")}
DTYPES |= {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
OPTIMIZERS = ("adamw", "adam", "sgd", "sgd-momentum")
PLANNED_OPS = 1200  # of a trace that --plan plans, if it has more
PAGE_SIZE = 2 << 20
BATCHES = 3  # that are recorded if gradients are added up: the later ones are alike


def _file(name: str, help_text: str) -> Callable[[F], F]:
    kind = click.Path(path_type=Path)
    return click.option(
        f"--{name}", f"{name}_path", type=kind, callback=output_path, help=help_text
    )


@click.command()
@click.argument("function", required=False, metavar="[FILE.py:function]")
@click.option("--hf", type=click.Path(path_type=Path), help="A Hugging Face model's config.json.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--seq", type=click.IntRange(min=1), help="Tokens of a sequence.  [default: 2048 with --hf]"
)
@click.option(
    "--accumulate",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Gradients of so many batches are added up before each step.",
)
@click.option(
    "--dtype",
    type=click.Choice(tuple(DTYPES)),
    help="Of the parameters (default: what the model says); autocast: float32, computed in "
    "bfloat16.",
)
@click.option("--optimizer", type=click.Choice(OPTIMIZERS), default="adamw", show_default=True)
@click.option(
    "--overlap", is_flag=True, help="Update in the backward pass, as pager.optimizer(overlap=True)."
)
@click.option(
    "--speeds/--no-speeds",
    default=True,
    help="How fast it can be: linear programs, which take minutes for a large model.",
)
@click.option("--clip", is_flag=True, help="Gradients are clipped by their norm before the step.")
@hardware_options
@network_options
@_file("out", "Write the iteration as a trace, for the other commands.")
@_file("plan", "Plan for --hardware too, which takes a minute or two; needs --out.")
@_file("html", "Write what is printed as a page for the browser.")
@json_option
def estimate(
    function: str | None,
    hf: Path | None,
    batch: int,
    seq: int | None,
    accumulate: int,
    dtype: str | None,
    optimizer: str,
    overlap: bool,
    speeds: bool,
    clip: bool,
    machine: Machine,
    out_path: Path | None,
    plan_path: Path | None,
    html_path: Path | None,
    fleet: Fleet | None,
    as_json: bool,
) -> None:
    """Say what training a model needs and how fast it can be, before it is run.

    The model need not fit into this machine: nothing is computed, and no memory is taken. It is the
    model of tokens of a Hugging Face configuration, or what a function of yours returns: a module
    on the meta device, or the module and a tuple or dict of its inputs.

    An iteration is recorded with tensors that have shapes only. Times are a roofline of the device,
    speeds are bounds: no plan with these budgets is faster (with `--accumulate`, by more than what
    a step takes). A trace from `--out` has the ops of a recorded one; with `--plan` neighbouring
    ops are joined if there are more than 1200. A training starts from the plan with
    `tp.Pager(plan=…)`.

    With `--ranks` it is one of N devices that train together by FSDP2, each on `--batch`: what it
    holds, gathers and waits for the network. `--hardware` is a node then, whose ranks share host
    memory and disk; tokens are those of all ranks.

    \b
    Example:
      tensorpager estimate --hf config.json --seq 4096 --hardware rtx4090
      tensorpager estimate model.py:make --batch 8 --hardware h100 --out t.parquet

    Exits with 1 if some op alone needs more than the device has.
    """
    if (function is None) == (hf is None):
        raise click.UsageError(
            "name a model: --hf CONFIG.json or FILE.py:function, one of the two."
        )
    if overlap and clip:
        raise click.UsageError(
            "--overlap updates before all gradients are there, --clip needs all of them first: "
            "leave out one of the two."
        )
    if accumulate > 1 and overlap:
        raise click.UsageError(
            "--overlap updates before the gradients of other batches are there, --accumulate needs "
            "them first: leave out one of the two."
        )
    if accumulate > 1 and fleet is not None:
        raise click.UsageError(
            "what ranks gather and reduce is known of one batch before a step: leave out "
            "--accumulate or --ranks."
        )
    if plan_path is not None and out_path is None:
        raise click.UsageError("--plan is for a trace: add --out TRACE.")
    compute = load_compute(machine.name)
    with progress_bar() as progress:
        if progress is not None:
            progress("an iteration without values", 0.0)
        from ...planner.outlook import outlook
        from ...planner.repeats import find_repeats
        from .estimate import fake, fake_iteration, training_of_function, training_of_hf

        with fake():
            dtype = dtype and DTYPES[dtype]
            kind = "float32" if dtype == "autocast" else dtype
            if hf is not None:
                training = training_of_hf(hf, batch, seq or 2048, kind)
            else:
                training = training_of_function(str(function), batch, seq, kind)
            iteration = fake_iteration(
                training,
                optimizer,
                compute,
                machine.base.host_adam_bytes_per_s,
                autocast=dtype == "autocast",
                overlap=overlap,
                clip=clip,
                batches=1 if accumulate == 1 else BATCHES,
            )
        repeats = None
        if accumulate > 1:
            repeats = find_repeats(iteration.trace, BATCHES - 1)
            if repeats is None:
                raise PagerError(
                    f"{training.name} does not do the same ops for each batch; estimate it without "
                    "--accumulate"
                )
            flops = iteration.flops * accumulate // BATCHES
            iteration = replace(iteration, flops=flops)
            training = replace(training, tokens=training.tokens * accumulate)
        hardware = _hardware(machine, iteration.trace)
        if fleet is not None:
            from ...planner.ranks import rank_trace

            cluster = fleet.cluster(fleet.ranks)
            hardware = cluster.part_of(hardware)
            rank = rank_trace(iteration.trace, cluster, hardware.page_size)
            iteration = replace(iteration, trace=rank)
            training = replace(training, tokens=training.tokens * fleet.ranks)
        trace = iteration.trace
        found = outlook(
            trace, hardware, progress, speeds=speeds, repeats=repeats, batches=accumulate
        )
    made = _written(trace, hardware, out_path, plan_path, accumulate)
    answer = _answer(training, iteration, hardware, found)
    answer["ops"] += (accumulate - BATCHES) * repeats.period if repeats is not None else 0
    answer |= {"plan": made} if made else {}
    parts = _parts(training, optimizer, answer, hardware, found)
    if html_path is not None:
        from ...planner.report.page import still_page

        with whole_file(html_path) as file:
            file.write_text(still_page(f"Estimate of {training.name}", parts), encoding="utf-8")
        parts += ["", f"{html_path}: open it in a browser"]
    if as_json:
        emit_json(answer)
    else:
        emit(*parts)
    if found.smallest_bytes > hardware.device_bytes:
        raise CheckFailed(
            f"op '{found.smallest_op}' alone needs {format_bytes(found.smallest_bytes)}, more than "
            f"the device's {format_bytes(hardware.device_bytes)}; lower --batch or --seq"
        )


def _hardware(machine: Machine, trace: Trace) -> Hardware:
    """Small models have small pages, unless others were asked for."""
    base = machine.base
    if base.page_size == PAGE_SIZE:
        base = base.with_(page_size=trace.page_size)
    return Machine(base, machine.share, machine.name).for_trace(trace)


def _written(
    trace: Trace, hardware: Hardware, out_path: Path | None, plan_path: Path | None, batches: int
) -> dict[str, Any] | None:
    """Trace and plan, if they are wanted, of so many batches; what the machine model says of the
    plan."""
    import json

    from ...planner.buckets import shortened
    from ...planner.commands.plan import checked
    from ...planner.commands.tables import predicted_json
    from ...planner.plan import plan_to_json
    from ...planner.registry import make_plan
    from ...planner.repeats import find_repeats
    from ...planner.trace_file import write_trace
    from .starting import uses_by_name

    if out_path is None:
        return None
    if plan_path is not None:
        trace = shortened(trace, PLANNED_OPS)
    if batches > 1:
        repeats = find_repeats(trace, BATCHES - 1)
        if repeats is None:
            raise PagerError(
                f"batches are not alike in the {trace.ops} ops that are planned; write the trace "
                "without --plan"
            )
        more = batches - BATCHES
        trace = repeats.more(more) if more > 0 else repeats.fewer(batches - 1).trace
    trace = write_trace(out_path, trace)
    if plan_path is None:
        return None
    with progress_bar() as progress:
        plan = checked(trace, hardware, make_plan("joint", trace, hardware, progress=progress))
    plan.extra["accesses"] = uses_by_name(trace)
    with whole_file(plan_path) as part:
        part.write_text(json.dumps(plan_to_json(plan), allow_nan=False) + "\n")
    return predicted_json(plan.predicted)


# -- the answer ----------------------------------------------------------------------------------
def _answer(
    training: Training, iteration: Iteration, hardware: Hardware, found: Outlook
) -> dict[str, Any]:
    trace = iteration.trace

    def speed(best: Best | None) -> dict[str, Any]:
        if best is None:
            return dict.fromkeys(("iteration_us", "percent_of_ideal", "per_second"))
        return {
            "iteration_us": best.iteration_us,
            "percent_of_ideal": 100 * found.ideal_us / best.iteration_us,
            "per_second": 1e6 * training.tokens / best.iteration_us,
            "recompute_us": best.recompute_us,
            "host_us": best.host_us,
        }

    points = [*found.points, *([found.with_disk] if found.with_disk else [])]
    return {
        "model": training.name,
        "parameters": sum(p.numel() for p in training.module.parameters()),
        "ops": trace.ops,
        "flops": iteration.flops,
        "ideal_us": found.ideal_us,
        training.unit: training.tokens,
        "need_bytes": found.need_bytes,
        "peak_bytes": found.peak_bytes,
        "fits": found.fits,
        "smallest_device_bytes": found.smallest_bytes,
        "speeds": [
            {
                "device_bytes": int(point.hardware.device_bytes),
                "host_bytes": _whole(point.hardware.host_bytes),
                "disk_bytes": _whole(point.hardware.disk_bytes),
                **speed(point.best),
            }
            for point in points
        ],
        "mechanisms": {name: speed(best) for name, best in found.mechanisms.items()},
        "best_choice": _best_choice(found),
        "pager": {f"{tier}_budget": _size(nbytes, tier) for tier, nbytes in found.budgets.items()},
        "unknown_workspaces": iteration.unknown,
        "taken_false": iteration.taken_false,
    }


def _whole(nbytes: float) -> int | None:
    return None if math.isinf(nbytes) else int(nbytes)


def _best_choice(found: Outlook) -> str | None:
    """Of the mechanisms one at a time the one that does most; the first within a thousandth."""
    times = {
        name: best.iteration_us
        for name, best in found.mechanisms.items()
        if best is not None and name != "all three"
    }
    least = min(times.values(), default=0.0)
    return next((name for name, us in times.items() if us <= 1.001 * least), None)


def _size(nbytes: int, tier: str) -> str:
    """As ``Pager`` takes it: the device's rounded down, the others up."""
    unit, name = (1 << 30, "GiB") if nbytes >= 1 << 34 else (1 << 20, "MiB")
    count = nbytes / unit * (10 if name == "GiB" else 1)
    whole = math.floor(count) if tier == "device" else math.ceil(count)
    return f"{whole / 10:g}GiB" if name == "GiB" else f"{whole}MiB"


def _parts(
    training: Training,
    optimizer: str,
    answer: dict[str, Any],
    hardware: Hardware,
    found: Outlook,
) -> list[Any]:
    ideal, unit = found.ideal_us, training.unit
    heading = [
        ("model", f"{training.name}, {_count(answer['parameters'])} parameters"),
        ("iteration", f"{training.tokens} {unit}, {answer['ops']} ops, {optimizer}"),
        ("hardware", describe(hardware)),
        (
            "ideal",
            f"{format_us(ideal)}, {1e6 * training.tokens / ideal:,.0f} {unit}/s, if it fitted"
            if ideal
            else "no time at all",
        ),
    ]
    need = [(kind, format_bytes(nbytes)) for kind, nbytes in found.need_bytes.items()]
    parts: list[Any] = [
        pairs(heading),
        "",
        table(("<kind", "most at once"), [*need, ("all", format_bytes(found.peak_bytes))]),
        "",
        f"smallest device budget: {format_bytes(found.smallest_bytes)} ({found.smallest_op})",
    ]
    if found.fits:
        parts.append("all of it fits on the device: nothing has to move")
    if answer["speeds"]:
        rows = [_row(speed) for speed in answer["speeds"]]
        heads = ("device", "host", "disk", "% ideal", f"{unit}/s", "run again", "host steps")
        parts += ["", table(heads, rows, title="speed, at best")]
        rows = [
            (name, format_percent(one["percent_of_ideal"]), _rate(one))
            for name, one in answer["mechanisms"].items()
        ]
        largest = format_bytes(answer["speeds"][0]["device_bytes"])
        title = f"what does how much, with {largest}"
        parts += ["", table(("<allowed", "% ideal", f"{unit}/s"), rows, title=title)]
        parts.append(f"best single choice: {answer['best_choice']}")
    if found.smallest_bytes <= hardware.device_bytes:
        arguments = ", ".join(
            f'{name}="{size}"'
            for name, size in answer["pager"].items()
            if not size.startswith("0M")
        )
        more = ', disk_path="…"' if found.budgets["disk"] else ""
        parts += ["", f"tp.Pager({arguments}{more})"]
    if "plan" in answer:
        plan = answer["plan"]
        parts.append(
            f"planned: {format_us(plan['iteration_us'])}, "
            f"{format_percent(plan['percent_of_ideal'])} of the ideal"
        )
    if answer["unknown_workspaces"]:
        names = ", ".join(sorted(answer["unknown_workspaces"]))
        parts += ["", f"not known what these allocate inside: {names}"]
    if answer["taken_false"]:
        names = ", ".join(name or "the loss" for name in answer["taken_false"])
        parts += ["", f"these look at values, and go on as if what they ask were false: {names}"]
    return parts


def _count(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def _row(speed: dict[str, Any]) -> tuple[str, ...]:
    sizes = (speed[f"{tier}_bytes"] for tier in ("device", "host", "disk"))
    return (
        *("no limit" if size is None else format_bytes(size) for size in sizes),
        "no plan" if speed["iteration_us"] is None else f"{speed['percent_of_ideal']:.1f}",
        _rate(speed),
        format_us(speed.get("recompute_us") or 0.0),
        format_us(speed.get("host_us") or 0.0),
    )


def _rate(speed: dict[str, Any]) -> str:
    return "" if speed["per_second"] is None else f"{speed['per_second']:,.0f}"
