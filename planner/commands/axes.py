"""``--sweep NAME=LOW:HIGH:STEPS``: the machines that a sweep looks at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from .options import Machine, Share, limit, limit_or_share, page, rate

if TYPE_CHECKING:
    from ..hardware import Hardware
    from ..trace import Trace

MOST_STEPS = 1000
FAR_APART = 8  # HIGH over LOW from which sizes and rates are spaced by equal factors

LARGEST = 1 << 80  # bytes, or bytes per second: beyond it is a slip of the hand

Value = float | Share


class _Kind(NamedTuple):
    fields: tuple[str, ...]  # of Hardware
    parse: Callable[[str], Value]
    label: Callable[[float, int], str]  # of a value, with so many digits
    example: str  # what comes after "NAME="
    by_factors: bool = True
    may_be_zero: bool = False


@dataclass(frozen=True)
class Axis:
    """One ``--sweep``: ``values`` in the order given, ``labels`` that tell them apart."""

    name: str
    fields: tuple[str, ...]
    values: tuple[Value, ...]
    labels: tuple[str, ...]


class Point(NamedTuple):
    """One machine of the grid, and the label of each axis' value."""

    labels: tuple[str, ...]
    hardware: Hardware


def grid(axes: Sequence[Axis], machine: Machine, trace: Trace) -> list[Point]:
    """Every combination, the last axis changing fastest. Shares are of the trace's peak in pages of
    the point's size."""
    points = []
    for places in product(*(range(len(axis.values)) for axis in axes)):
        share = machine.share
        changes: dict[str, Any] = {}
        for axis, place in zip(axes, places):
            value = axis.values[place]
            if axis.name == "device":
                share = value if isinstance(value, Share) else None
            if not isinstance(value, Share):
                changes |= dict.fromkeys(axis.fields, value)
        hardware = Machine(machine.base.with_(**changes), share).for_trace(trace)
        labels = tuple(axis.labels[place] for axis, place in zip(axes, places))
        points.append(Point(labels, hardware))
    return points


def parse_axis(text: str) -> Axis:
    """The axis in ``NAME=LOW:HIGH:STEPS`` or ``NAME=a,b,c``; ``click.BadParameter`` for others."""
    name, equals, values = (part.strip() for part in text.partition("="))
    if name not in KINDS:
        known = ", ".join(KINDS)
        _bad(text, f"there is no '{name}' to sweep; NAME is one of {known}")
    kind = KINDS[name]
    if not equals or not values:
        _bad(text, f"no values; write for example '{name}={kind.example}'")
    if ":" in values:
        found = _range(text, name, kind, [part.strip() for part in values.split(":")])
    else:
        parts = [part.strip() for part in values.split(",")]
        found = [_value(text, kind, part) for part in parts if part]
    distinct = tuple(dict.fromkeys(found))
    if len(distinct) > MOST_STEPS:
        _bad(text, f"{len(distinct)} values; at most {MOST_STEPS} can be looked at")
    if not distinct:
        _bad(text, f"no values; write for example '{name}={kind.example}'")
    return Axis(name, kind.fields, distinct, _labels(distinct, kind))


def check_together(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """The axes, if no two set the same thing."""
    setter: dict[str, str] = {}
    found = tuple(axes)
    for axis in found:
        for field in axis.fields:
            if field in setter:
                both = (
                    f"{axis.name} twice"
                    if setter[field] == axis.name
                    else f"{setter[field]} and {axis.name}"
                )
                raise click.BadParameter(
                    f"{both}: both set {field}; give all its values in one --sweep."
                )
            setter[field] = axis.name
    return found


def _bad(text: str, why: str) -> NoReturn:
    raise click.BadParameter(f"{text!r}: {why}.")


def _value(text: str, kind: _Kind, part: str) -> Value:
    try:
        value = kind.parse(part)
    except click.BadParameter as error:
        _bad(text, error.message.rstrip("."))
    if not isinstance(value, Share) and value > LARGEST and value != math.inf:
        _bad(text, f"{part[:20]}… is more than any machine has")
    if value == 0 and not kind.may_be_zero:
        _bad(text, "0 is too little; the smallest value must be more")
    return value


def _range(text: str, name: str, kind: _Kind, parts: list[str]) -> list[Value]:
    powers = name == "page-size"
    if len(parts) == 2 and powers:
        parts = [*parts, str(MOST_STEPS)]  # every power of two between
    if len(parts) != 3 or not all(parts):
        _bad(text, f"a range is LOW:HIGH:STEPS; write for example '{name}={kind.example}'")
    low, high = (_value(text, kind, part) for part in parts[:2])
    if not parts[2].isdecimal() or not 2 <= int(parts[2]) <= MOST_STEPS:
        _bad(text, f"STEPS is '{parts[2]}'; it is a whole number from 2 to {MOST_STEPS}")
    steps = int(parts[2])
    if isinstance(low, Share) != isinstance(high, Share):
        _bad(text, "LOW and HIGH are a share and a size; write both in % or both in bytes")
    first, last = _number(low), _number(high)
    if math.isinf(first) or math.isinf(last):
        _bad(text, "a range has no end at inf; give a list, such as 'host=64GiB,inf'")
    if first >= last:
        _bad(text, f"LOW {parts[0]} is not below HIGH {parts[1]}; turn them around")
    if isinstance(low, Share):
        return [Share(share) for share in _evenly(first, last, steps)]
    if powers:
        return [1 << n for n in _powers(text, int(first), int(last), steps)]
    if kind.by_factors and first > 0 and last / first > FAR_APART:
        found = [first * (last / first) ** (n / (steps - 1)) for n in range(steps)]
    else:
        found = _evenly(first, last, steps)
    if kind.by_factors:  # bytes, or bytes per second
        return [round(value) for value in found[:-1]] + [int(last)]
    return list(found)


def _number(value: Value) -> float:
    return value.of_peak if isinstance(value, Share) else value


def _evenly(first: float, last: float, steps: int) -> list[float]:
    return [(first * (steps - 1 - n) + last * n) / (steps - 1) for n in range(steps)]


def _powers(text: str, first: int, last: int, steps: int) -> list[int]:
    """Exponents of ``steps`` powers of two, or of all there are."""
    for size in (first, last):
        if size & (size - 1):
            _bad(text, f"a page of {size} bytes is no power of two; {1 << size.bit_length()} is")
    low, high = first.bit_length() - 1, last.bit_length() - 1
    steps = min(steps, high - low + 1)
    return [low + round((high - low) * n / (steps - 1)) for n in range(steps)]


# --- labels --------------------------------------------------------------------------------------


def _labels(values: Sequence[Value], kind: _Kind) -> tuple[str, ...]:
    """As short as tells them apart."""
    for digits in range(3, 16):
        found = tuple(
            f"{_digits(100 * value.of_peak, digits)} %"
            if isinstance(value, Share)
            else kind.label(value, digits)
            for value in values
        )
        if len(set(found)) == len(values):
            break
    return found


def _digits(value: float, digits: int) -> str:
    """At least ``digits`` of them, and no exponent."""
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e+" in text else text


def _scaled(value: float, digits: int, step: int, units: Sequence[str]) -> str:
    for unit in units:
        if value < step or unit == units[-1]:
            return f"{_digits(value, digits)} {unit}"
        value /= step
    raise AssertionError("unreachable")


def size_label(value: float, digits: int = 3) -> str:
    """Bytes, shortly: ``11.3 GiB``."""
    if math.isinf(value):
        return "no limit"
    return _scaled(value, digits, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _rate_label(value: float, digits: int) -> str:
    return _scaled(value, digits, 1000, ("B/s", "kB/s", "MB/s", "GB/s"))


def _latency_label(value: float, digits: int) -> str:
    return f"{_digits(value, digits)} µs"


def _latency(text: str) -> float:
    try:
        us = float(text)
    except ValueError:
        us = math.nan
    if not 0 <= us < math.inf:
        raise click.BadParameter(f"{text!r} is no number of µs ≥ 0, such as '10'.")
    return us


def _rates(*names: str, example: str) -> _Kind:
    return _Kind(tuple(f"{name}_bytes_per_s" for name in names), rate, _rate_label, example)


KINDS = {
    "device": _Kind(("device_bytes",), limit_or_share, size_label, "20%:100%:9"),
    "host": _Kind(("host_bytes",), limit, size_label, "0:128GiB:5", may_be_zero=True),
    "disk": _Kind(("disk_bytes",), limit, size_label, "0,256GiB,inf", may_be_zero=True),
    "h2d": _rates("h2d", example="8GB:64GB:8"),
    "d2h": _rates("d2h", example="8GB:64GB:8"),
    "link": _rates("d2h", "h2d", example="8GB:64GB:8"),
    "disk-read": _rates("disk_read", example="1GB:16GB:5"),
    "disk-write": _rates("disk_write", example="1GB:16GB:5"),
    "latency-us": _Kind(
        ("transfer_latency_us",), _latency, _latency_label, "0,5,10,50", False, True
    ),
    "page-size": _Kind(("page_size",), page, size_label, "64KiB:16MiB:9"),
}
