"""``--sweep NAME=LOW:HIGH:STEPS``: the machines that a sweep looks at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from ..sizes import format_bytes
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
    label: Callable[[float], str]
    example: str  # what comes after "NAME="
    may_be_zero: bool = False


@dataclass(frozen=True)
class Axis:
    """One ``--sweep``: ``values`` in the order given, each with a label."""

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
    name, _, values = (part.strip() for part in text.partition("="))
    if name not in KINDS:
        known = ", ".join(KINDS)
        _bad(text, f"there is no '{name}' to sweep; NAME is one of {known}")
    kind = KINDS[name]
    if ":" in values:
        found = _range(text, kind, [part.strip() for part in values.split(":")])
    else:
        found = [_value(text, kind, part.strip()) for part in values.split(",") if part.strip()]
    distinct = tuple(dict.fromkeys(found))
    if not 0 < len(distinct) <= MOST_STEPS:
        how = f"{len(distinct)} values; at most {MOST_STEPS} can be looked at"
        _bad(text, how if distinct else f"no values; write for example '{name}={kind.example}'")
    return Axis(name, kind.fields, distinct, tuple(_label(value, kind) for value in distinct))


def check_together(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """The axes, if no two set the same thing."""
    setter: dict[str, str] = {}
    found = tuple(axes)
    for axis in found:
        for field in axis.fields:
            if field in setter:
                raise click.BadParameter(
                    f"{setter[field]} and {axis.name}: both set {field}; give all its values in "
                    "one --sweep."
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
    if not isinstance(value, Share) and LARGEST < value < math.inf:
        _bad(text, f"{part[:20]}… is more than any machine has")
    if value == 0 and not kind.may_be_zero:
        _bad(text, "0 is too little; the smallest value must be more")
    return value


def _range(text: str, kind: _Kind, parts: list[str]) -> list[Value]:
    if len(parts) != 3 or not parts[2].isdecimal() or not 2 <= int(parts[2]) <= MOST_STEPS:
        _bad(text, f"a range is LOW:HIGH:STEPS with 2 to {MOST_STEPS} STEPS, as '{kind.example}'")
    low, high = (_value(text, kind, part) for part in parts[:2])
    if isinstance(low, Share) != isinstance(high, Share):
        _bad(text, "LOW and HIGH are a share and a size; write both in % or both in bytes")
    first, last = (v.of_peak if isinstance(v, Share) else v for v in (low, high))
    if not first < last < math.inf:
        _bad(text, f"LOW {parts[0]} is not below HIGH {parts[1]}, or HIGH has no end")
    places = [n / (int(parts[2]) - 1) for n in range(int(parts[2]))]
    if isinstance(low, Share):
        return [Share(first + (last - first) * place) for place in places]
    if first > 0 and last / first > FAR_APART:
        found = [first * (last / first) ** place for place in places]
    else:
        found = [first + (last - first) * place for place in places]
    return list(found) if kind.label is _latency_label else [round(value) for value in found]


def _label(value: Value, kind: _Kind) -> str:
    return f"{100 * value.of_peak:g} %" if isinstance(value, Share) else kind.label(value)


def _size_label(value: float) -> str:
    return "no limit" if math.isinf(value) else format_bytes(value)


def _rate_label(value: float) -> str:
    return f"{value / 1e9:.3g} GB/s"


def _latency_label(value: float) -> str:
    return f"{value:g} µs"


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
    "device": _Kind(("device_bytes",), limit_or_share, _size_label, "20%:100%:9"),
    "host": _Kind(("host_bytes",), limit, _size_label, "0:128GiB:5", True),
    "disk": _Kind(("disk_bytes",), limit, _size_label, "0,256GiB,inf", True),
    "h2d": _rates("h2d", example="8GB:64GB:8"),
    "d2h": _rates("d2h", example="8GB:64GB:8"),
    "link": _rates("d2h", "h2d", example="8GB:64GB:8"),
    "disk-read": _rates("disk_read", example="1GB:16GB:5"),
    "disk-write": _rates("disk_write", example="1GB:16GB:5"),
    "latency-us": _Kind(("transfer_latency_us",), _latency, _latency_label, "0,5,10,50", True),
    "page-size": _Kind(("page_size",), page, _size_label, "64KiB:16MiB:9"),
}
