"""Plans: which pages move when. The file format is fixed (JSON, version 1)."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from .errors import PlanError
from .shown import shown

VERSION = 1
TIERS = ("host", "disk")
ACTIONS = ("out", "in", "drop")


class Move(NamedTuple):
    """``page_count`` pages of a tensor (its number in the trace file) from ``first_page`` on,
    queued when op ``issue_op`` may start."""

    tensor: int
    first_page: int
    page_count: int
    tier: str
    action: str
    issue_op: int


class StartRun(NamedTuple):
    """Pages of a persistent tensor that are off the device when an iteration begins."""

    tensor: int
    first_page: int
    page_count: int
    tier: str


@dataclass(frozen=True)
class Predicted:
    """What the machine model says of a plan, in its steady state."""

    iteration_us: float
    ideal_us: float
    stall_us: float
    peak_device_bytes: int
    peak_host_bytes: int
    peak_disk_bytes: int
    bytes_out: int
    bytes_in: int
    disk_bytes_written: int

    @property
    def percent_of_ideal(self) -> float:
        return 100.0 * self.ideal_us / self.iteration_us if self.iteration_us else 100.0


@dataclass(frozen=True)
class Bound:
    """No plan is faster than ``iteration_us``; ``percent_of_bound``: how close this one is."""

    iteration_us: float
    percent_of_bound: float


@dataclass(frozen=True)
class Plan:
    """Moves in the order they are queued; ``start`` as they leave it at the iteration's end."""

    policy: str
    page_size: int
    device_bytes: float
    host_bytes: float
    disk_bytes: float
    moves: Sequence[Move]
    start: Sequence[StartRun] = ()
    trace_sha256: str = ""
    predicted: Predicted | None = None
    bound: Bound | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # free keys, such as settings of the search


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The file's object; ``inf`` becomes the string "inf", which JSON can hold."""
    return {
        "version": VERSION,
        "policy": plan.policy,
        "page_size": plan.page_size,
        **{
            name: _size(getattr(plan, name))
            for name in ("device_bytes", "host_bytes", "disk_bytes")
        },
        "trace_sha256": plan.trace_sha256,
        "predicted": asdict(plan.predicted) if plan.predicted else None,
        "bound": asdict(plan.bound) if plan.bound else None,
        "start": [list(run) for run in plan.start],
        "moves": [list(move) for move in plan.moves],
        **({"extra": plan.extra} if plan.extra else {}),
    }


def read_plan(path: Path) -> Plan:
    """Raises ``PlanError`` naming the file, the place and the reason."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PlanError(f"{path}: cannot be read as a plan: {error.strerror}") from error
    return decode_plan(content, str(path))


def decode_plan(content: bytes, where: str) -> Plan:
    """The plan in a file's bytes, as :func:`read_plan`; ``where`` names it in errors."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError
        raise PlanError(f"{where}: cannot be read as a plan: {error}") from error
    try:
        return plan_from_json(document)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error


def plan_from_json(content: Any) -> Plan:
    """Checks form and types; whether the moves make sense is for simulator and validator."""
    if not isinstance(content, dict):
        raise PlanError(f"a plan is a JSON object, this is {type(content).__name__}")
    if content.get("version") != VERSION:
        raise PlanError(
            f"version {shown(content.get('version'))} is not {VERSION}; "
            "plan again with this tensorpager"
        )
    for name in ("policy", "page_size", "device_bytes", "moves", "start"):
        if name not in content:
            raise PlanError(f"'{name}' is missing")
    page_size = content["page_size"]
    if not _is_whole(page_size) or page_size == 0:
        raise PlanError(f"page_size {shown(page_size)} is not a whole number above 0")
    for name, kind in (("policy", str), ("trace_sha256", str), ("extra", dict)):
        if not isinstance(content.get(name, kind()), kind):
            what = "a string" if kind is str else "an object"
            raise PlanError(f"{name} {shown(content[name])} is not {what}")
    moves = [Move(*_row(row, 6, f"moves[{i}]")) for i, row in _rows(content, "moves")]
    for index, move in enumerate(moves):
        if move.action not in ACTIONS:
            raise PlanError(f"moves[{index}]: {shown(move.action)} is none of {', '.join(ACTIONS)}")
    start = [StartRun(*_row(row, 4, f"start[{i}]")) for i, row in _rows(content, "start")]
    return Plan(
        policy=content["policy"],
        page_size=page_size,
        **{n: _size_of(content, n) for n in ("device_bytes", "host_bytes", "disk_bytes")},
        moves=moves,
        start=start,
        trace_sha256=content.get("trace_sha256", ""),
        predicted=_part(Predicted, content, "predicted"),
        bound=_part(Bound, content, "bound"),
        extra=content.get("extra", {}),
    )


def _rows(content: dict[str, Any], name: str) -> enumerate[Any]:
    if not isinstance(content[name], list):
        raise PlanError(f"'{name}' is not a list")
    return enumerate(content[name])


def _row(row: Any, length: int, where: str) -> list[Any]:
    """[tensor, first_page, page_count, tier, (action, issue_op)] with the right types."""
    if not isinstance(row, list) or len(row) != length:
        raise PlanError(f"{where} is not a list of {length} values: {shown(row)}")
    for position in (0, 1, 2, 5)[: 4 if length == 6 else 3]:
        if not _is_whole(row[position]):
            raise PlanError(f"{where}: {shown(row[position])} is not a whole number ≥ 0")
    if row[2] < 1:
        raise PlanError(f"{where}: pages {row[1]} to {row[1] + row[2]} are not a range of pages")
    if row[3] not in TIERS:
        raise PlanError(f"{where}: {shown(row[3])} is none of {', '.join(TIERS)}")
    return row


def _size(value: float) -> int | str:
    return "inf" if math.isinf(value) else int(value)


def _size_of(content: dict[str, Any], name: str) -> float:
    value = content.get(name, 0)
    if value == "inf":
        return math.inf
    if value != math.inf and not _is_number(value):
        raise PlanError(f"{name} {shown(value)} is not a size in bytes")
    return float(value) if value == math.inf else value


def _is_whole(value: object) -> bool:
    """An integer ≥ 0 that an int64 holds (``true`` is none)."""
    return type(value) is int and 0 <= value < 1 << 63


def _is_number(value: object) -> bool:
    """A finite number ≥ 0 that a float holds."""
    return type(value) in (int, float) and 0 <= value <= sys.float_info.max  # type: ignore[operator]


def _part(kind: Any, content: dict[str, Any], name: str) -> Any:
    value = content.get(name)
    if value is None:
        return None
    keys = [item.name for item in fields(kind)]
    if not isinstance(value, dict) or sorted(value) != sorted(keys):
        raise PlanError(f"{name} is not an object with {', '.join(keys)}; plan again")
    for key, number in value.items():
        if not _is_number(number):
            raise PlanError(f"{name}: {key} = {shown(number)} is not a finite number ≥ 0")
    return kind(**value)
