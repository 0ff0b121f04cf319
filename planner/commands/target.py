"""``tensorpager simulate --target``: how little device memory is enough."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from ..hardware import describe
from ..sizes import format_bytes
from .failures import CheckFailed
from .output import Progress, emit, emit_json, progress_bar
from .plan import checked
from .sweep import Asked, row
from .tables import bar, format_share, format_us, pairs, predicted_json, short, table

if TYPE_CHECKING:
    from ..sweep import Outcome
    from ..target import Answer


def percent(text: str) -> float:
    """``95%``: above 0, at most 100."""
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 < value <= 100 or not text.strip().endswith("%"):
        raise click.BadParameter(
            f"{text!r} is no share of the ideal speed, up to 100 %; write for example '95%'."
        )
    return value


def run_target(asked: Asked, target: float, as_json: bool) -> None:
    """Prints an answer for each policy, whose plan simulator and validator have run. Raises
    ``CheckFailed``, after all is printed, if none of them reaches the target at any budget."""
    from ..target import least_memory

    base = asked.machine.base
    answers = []
    with progress_bar() as progress:
        for number, policy in enumerate(asked.policies):
            tell = _told(progress, policy, number / len(asked.policies))
            answers.append(
                least_memory(asked.trace, policy, base, target, quick=asked.quick, done=tell)
            )
    for answer in answers:
        if answer.enough is not None and answer.plan is not None:
            checked(asked.trace, answer.enough.hardware, answer.plan)
    if as_json:
        emit_json(
            {
                "ideal_us": asked.trace.ideal_us,
                "peak_bytes": answers[0].peak_bytes,
                "page_size": base.page_size,
                "target_percent": target,
                "policies": [_json(answer) for answer in answers],
            }
        )
    else:
        trace = f"{asked.trace_path}, {asked.trace.ops} ops in {format_us(asked.trace.ideal_us)}"
        below = describe(base).partition(", ")[2]  # the device plays no part
        peak = f"{format_bytes(answers[0].peak_bytes)}, with which nothing has to move"
        emit(pairs([("trace", trace), ("hardware", below), ("peak", peak)]))
        for answer in answers:
            emit("", *_answer(answer, target))
    if not any(answer.enough for answer in answers):
        raise CheckFailed(
            f"{', '.join(asked.policies)}: no device budget reaches {target:g} % of the ideal speed"
        )


def _told(progress: Progress | None, policy: str, share: float) -> Any:
    """A callback that shows the last budget tried; how many there will be is not known before."""
    if progress is None:
        return None
    return lambda outcome: progress(
        f"{policy}: {format_bytes(outcome.hardware.device_bytes)} gives {_speed(outcome)}", share
    )


def _speed(outcome: Outcome) -> str:
    predicted = outcome.predicted
    return "no plan" if predicted is None else f"{predicted.percent_of_ideal:.2f} %"


def _json(answer: Answer) -> dict[str, Any]:
    enough = answer.enough
    return {
        "policy": answer.policy,
        "reached": enough is not None,
        "device_bytes": None if enough is None else int(enough.hardware.device_bytes),
        "predicted": predicted_json(enough.predicted if enough else None),
        "points": [row(outcome) for outcome in answer.tried],
    }


def _answer(answer: Answer, target: float) -> list[Any]:
    goal = f"{target:g} % of the ideal speed"
    line = f"{answer.policy}: no device budget reaches {goal}"
    if answer.enough is not None:
        size = answer.enough.hardware.device_bytes
        share = format_share(size, answer.peak_bytes)
        line = f"{answer.policy}: {format_bytes(size)} is enough for {goal} ({share} of the peak)"
    elif not any(outcome.predicted for outcome in answer.tried):
        line = f"{answer.policy}: no plan at all: {short(answer.tried[-1].reason, 400)}"
    rows = [
        (
            format_bytes(outcome.hardware.device_bytes),
            format_share(outcome.hardware.device_bytes, answer.peak_bytes),
            _speed(outcome),
            "" if outcome.predicted is None else bar(outcome.predicted.percent_of_ideal, 100),
        )
        for outcome in answer.tried
    ]
    return [line, table(("budget", "of peak", "of the ideal", "<"), rows)]
