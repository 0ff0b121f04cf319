"""``--fail-if peak+5%``: how much a measure may change before a check fails."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import click

from ..difference.change import BYTES, COUNT, US
from ..sizes import format_bytes, parse_bytes
from .tables import format_us

TRACES, PLANS = "traces", "plans"
METRICS = {
    TRACES: {"peak": BYTES, "time": US, "working-set": BYTES, "tensors": COUNT, "ops": COUNT},
    PLANS: {
        "time": US,
        "stall": US,
        "peak-device": BYTES,
        "peak-host": BYTES,
        "peak-disk": BYTES,
        "bytes-out": BYTES,
        "bytes-in": BYTES,
        "disk-written": BYTES,
    },
}
_UNITS = {name: unit for metrics in METRICS.values() for name, unit in metrics.items()}
_SECONDS = {"": 1, "us": 1, "µs": 1, "ms": 1000, "s": 1_000_000}
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(\S*)")


class Threshold(NamedTuple):
    """``b`` may be at most (``sign`` is 1) or at least (−1) ``amount`` away from ``a``: a share of
    it, or in the metric's unit."""

    text: str
    metric: str
    sign: int
    amount: Fraction
    is_share: bool

    def limit(self, a: float) -> Fraction:
        """The last value that passes."""
        before = Fraction(a)
        return before + self.sign * (before * self.amount if self.is_share else self.amount)

    def passed(self, a: float, b: float) -> bool:
        """Whether the change is more than allowed. Times may be off by a rounding error."""
        slack = abs(self.limit(a)) / 10**12 if _UNITS[self.metric] == US else 0
        return self.sign * (Fraction(b) - self.limit(a)) > slack

    def message(self, a: float, b: float) -> str:
        unit = _UNITS[self.metric]
        most = "most" if self.sign > 0 else "least"
        return (
            f"{self.metric} was {_exact(a, unit)} and is {_exact(b, unit)}; "
            f"--fail-if {self.text} allows at {most} {_exact(float(self.limit(a)), unit)}"
        )


def parse(text: str) -> Threshold:
    """Raises ``click.BadParameter`` for what is no threshold of a known metric."""
    for metric in sorted(_UNITS, key=len, reverse=True):
        rest = text.strip().removeprefix(metric)
        if rest != text.strip() and rest[:1] in ("+", "-"):
            sign = 1 if rest[0] == "+" else -1
            return Threshold(text, metric, sign, *_amount(rest[1:].strip(), text, _UNITS[metric]))
    names = (f"{', '.join(metrics)} ({kind})" for kind, metrics in METRICS.items())
    raise click.BadParameter(
        f"{text!r} is not METRIC+X% or METRIC-SIZE; metrics are {'; '.join(names)}."
    )


def _amount(given: str, text: str, unit: str) -> tuple[Fraction, bool]:
    example = {BYTES: "5% or 200MiB", US: "5% or 10ms", COUNT: "5% or 100"}[unit]
    error = click.BadParameter(f"{text!r}: {given!r} is no amount; write for example {example}.")
    match = _NUMBER.fullmatch(given)
    if match is None:
        raise error
    number, suffix = Fraction(match[1]), match[2]
    if suffix == "%":
        return number / 100, True
    if unit == US and suffix in _SECONDS:
        return number * _SECONDS[suffix], False
    if unit == COUNT and not suffix:
        return number, False
    if unit == BYTES:
        try:
            return Fraction(parse_bytes(given)), False
        except ValueError:
            raise error from None
    raise error


def _exact(value: float, unit: str) -> str:
    """For people, and so that a small difference is seen."""
    if unit == BYTES:
        return f"{format_bytes(value)} ({math.floor(value)} bytes)"
    if unit == US:
        return f"{format_us(value)} ({value:.3f} µs)"
    return f"{value:g}"


def failures(
    thresholds: Sequence[Threshold],
    kind: str,
    value: Callable[[str], tuple[float, float]],
) -> list[str]:
    """What does not hold of ``value(metric)``, before and after, one message each. Raises
    ``click.BadOptionUsage`` for a metric of the other kind of file."""
    found = []
    for threshold in thresholds:
        if threshold.metric not in METRICS[kind]:
            raise click.BadOptionUsage(
                "fail_if",
                f"--fail-if {threshold.text}: {kind} have no '{threshold.metric}', but "
                f"{', '.join(METRICS[kind])}.",
            )
        a, b = value(threshold.metric)
        if threshold.passed(a, b):
            found.append(threshold.message(a, b))
    return found


def fail_if_option(
    context: click.Context, option: click.Parameter, values: Sequence[str]
) -> list[Threshold]:
    """A click callback."""
    return [parse(value) for value in values]


def metrics_help() -> str:
    lists = (f"{', '.join(metrics)} of {kind}" for kind, metrics in METRICS.items())
    return "; ".join(lists)
