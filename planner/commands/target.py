"""``tensorpager simulate --target``: how little device memory is enough."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..hardware import describe
from ..sizes import format_bytes
from .failures import CheckFailed
from .output import Progress, emit, emit_json, progress_bar
from .plan import checked
from .sweep import Asked, row, write_csv
from .tables import (
    bar,
    format_percent,
    format_share,
    format_us,
    pairs,
    predicted_json,
    short,
    table,
)

if TYPE_CHECKING:
    from ..sweep import Outcome
    from ..target import Answer


def percent(text: str) -> float:
    """``95%`` or ``95``: above 0, at most 100."""
    bare = text.strip().removesuffix("%").strip()
    try:
        value = float(bare)
    except ValueError:
        value = math.nan
    if not 0 < value <= 100:
        raise click.BadParameter(
            f"{text!r} is no share of the ideal speed above 0 and up to 100 %; write for example "
            "'95%'."
        )
    if value <= 1 and not text.strip().endswith("%"):
        raise click.BadParameter(f"{text!r}: write '{100 * value:g}%', or '{value:g}%' if meant.")
    return value


def run_target(asked: Asked, target: float, csv_path: Path | None, as_json: bool) -> None:
    """Prints an answer for each policy. Raises ``CheckFailed``, after all is printed, if none of
    them reaches the target at any budget."""
    from ..sweep import Evaluator
    from ..target import least_memory

    answers = []
    with progress_bar() as progress, Evaluator(asked.trace, asked.jobs) as evaluator:
        for number, policy in enumerate(asked.policies):
            tell = _told(progress, policy, number / len(asked.policies), 1 / len(asked.policies))
            answers.append(
                least_memory(
                    evaluator, policy, asked.machine.base, target, quick=asked.quick, done=tell
                )
            )
    for answer in answers:
        _verify(asked, answer)
    if csv_path is not None:
        write_csv(csv_path, [row(outcome) for answer in answers for outcome in answer.tried])
    if as_json:
        emit_json(_json(asked, target, answers))
    else:
        _print(asked, target, answers, csv_path)
    if not any(answer.enough for answer in answers):
        raise CheckFailed(
            f"{', '.join(asked.policies)}: no device budget reaches {target:g} % of the ideal speed"
        )


def _told(progress: Progress | None, policy: str, begin: float, share: float) -> Any:
    """A callback that shows the last budget tried. How many there will be is not known before: each
    brings the bar closer to its end."""
    if progress is None:
        return None
    progress(f"{policy}: smallest and largest budget", begin)
    left = share

    def done(outcome: Outcome) -> None:
        nonlocal left
        left *= 0.85
        speed = f"{outcome.predicted.percent_of_ideal:.1f} %" if outcome.predicted else "no plan"
        size = format_bytes(outcome.hardware.device_bytes)
        progress(f"{policy}: {size} gives {speed}", begin + share - left)

    return done


def _verify(asked: Asked, answer: Answer) -> None:
    """The answer's plan run by simulator and validator; ``CheckFailed`` if they do not agree."""
    if answer.enough is None:
        return
    assert answer.plan is not None
    checked(asked.trace, answer.enough.hardware, answer.plan)


# --- JSON ----------------------------------------------------------------------------------------


def _json(asked: Asked, target: float, answers: list[Answer]) -> dict[str, Any]:
    return {
        "ideal_us": asked.trace.ideal_us,
        "peak_bytes": answers[0].peak_bytes,
        "page_size": asked.machine.base.page_size,
        "target_percent": target,
        "policies": [_answer_json(answer) for answer in answers],
    }


def _answer_json(answer: Answer) -> dict[str, Any]:
    enough = answer.enough
    return {
        "policy": answer.policy,
        "reached": enough is not None,
        "device_bytes": _device_bytes(enough),
        "predicted": predicted_json(enough.predicted if enough else None),
        "checked_by": ["simulator", "validator"] if enough else [],
        "next_smaller_tried_bytes": _device_bytes(answer.below),
        "found_to_bytes": answer.step_bytes,
        "no_plan_reaches_it_at_bytes": answer.hopeless_bytes,
        "smallest_feasible_bytes": _device_bytes(answer.smallest),
        "fastest_tried_bytes": _device_bytes(answer.fastest),
        "points": [row(outcome) for outcome in answer.tried],
    }


def _device_bytes(outcome: Outcome | None) -> int | None:
    return None if outcome is None else int(outcome.hardware.device_bytes)


# --- for people ----------------------------------------------------------------------------------


def _print(asked: Asked, target: float, answers: list[Answer], csv_path: Path | None) -> None:
    trace, peak = asked.trace, answers[0].peak_bytes
    below = describe(asked.machine.base).partition(", ")[2]  # the device plays no part
    facts = [
        ("trace", f"{asked.trace_path}, {trace.ops} ops in {format_us(trace.ideal_us)}"),
        ("hardware", below),
        ("peak", f"{format_bytes(peak)}, with which nothing has to move"),
    ]
    parts: list[Any] = [pairs(facts)]
    for answer in answers:
        parts += ["", *_answer(answer)]
    for answer in answers:
        parts += ["", _table(answer)]
    if csv_path is not None:
        parts += ["", f"written to {csv_path}"]
    emit(*parts)


def _percent(outcome: Outcome) -> float | None:
    return outcome.predicted.percent_of_ideal if outcome.predicted else None


def _answer(answer: Answer) -> list[str]:
    return [_first_line(answer), *(f"  {line}" for line in _more(answer))]


def _first_line(answer: Answer) -> str:
    goal = f"{answer.target_percent:g} % of the ideal speed"
    if answer.enough is None:
        return f"{answer.policy}: no device budget reaches {goal}"
    size = answer.enough.hardware.device_bytes
    share = format_share(size, answer.peak_bytes)
    return f"{answer.policy}: {format_bytes(size)} is enough for {goal} ({share} of the peak)"


def _more(answer: Answer) -> list[str]:
    lines = []
    enough, below, smallest = answer.enough, answer.below, answer.smallest
    if enough is not None and enough.predicted is not None:
        lines.append(
            f"its plan takes {format_us(enough.predicted.iteration_us)}, "
            f"{format_percent(enough.predicted.percent_of_ideal)}; "
            "checked by the simulator and the validator"
        )
        if below is None:
            lines.append("it is the largest working set: with less nothing runs at all")
        else:
            lines.append(
                f"{format_bytes(below.hardware.device_bytes)}, the next smaller size tried, "
                + (f"gives {format_percent(_percent(below))}" if below.predicted else "has no plan")
            )
    elif (fastest := answer.fastest) is not None:
        lines.append(
            f"the fastest tried is {format_percent(_percent(fastest))}, at "
            f"{format_bytes(fastest.hardware.device_bytes)} of at most "
            f"{format_bytes(answer.peak_bytes)}"
        )
    else:
        lines.append(f"it has no plan at all: {short(answer.tried[-1].reason, 400)}")
    if answer.hopeless_bytes is not None:
        lines.append(
            f"{format_bytes(answer.hopeless_bytes)} or less is too little for any plan (lp's bound)"
        )
    if smallest is not None and smallest is not enough:
        lines.append(
            f"the smallest budget that runs is {format_bytes(smallest.hardware.device_bytes)}, "
            f"at {format_percent(_percent(smallest))}"
        )
    return lines


def _table(answer: Answer) -> Any:
    rows = [
        (
            format_bytes(outcome.hardware.device_bytes),
            format_share(outcome.hardware.device_bytes, answer.peak_bytes),
            *_speed(outcome),
        )
        for outcome in answer.tried
    ]
    heads = ("budget", "of peak", "time", "% ideal", "stall", "out", "in", "<")
    return table(heads, rows, title=f"{answer.policy}: budgets tried")


def _speed(outcome: Outcome) -> tuple[str, ...]:
    predicted = outcome.predicted
    if predicted is None:
        return ("no plan", "", "", "", "", "")
    return (
        format_us(predicted.iteration_us),
        f"{predicted.percent_of_ideal:.2f}",
        format_us(predicted.stall_us),
        format_bytes(predicted.bytes_out),
        format_bytes(predicted.bytes_in),
        bar(predicted.percent_of_ideal, 100),
    )
