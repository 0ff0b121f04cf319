"""Plans: which pages move when, what runs again, and what the host steps.

The file format is fixed (JSON). Version 2 has what version 1 has not: pages that are discarded, ops
that run again, host steps and deferred updates. A plan without any is written as version 1.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from .errors import HardwareError, PlanError
from .files import reading
from .hardware import Hardware, from_mapping, to_mapping
from .shown import shown, what_it_is

VERSION = 2  # what is read
TIERS = ("host", "disk")
DEVICE = "device"  # the tier of a ``discard``
ACTIONS = ("out", "in", "drop")
DISCARD = "discard"


class Move(NamedTuple):
    """``page_count`` pages of a tensor (its number in the trace file) from ``first_page`` on,
    queued when op ``issue_op`` may start."""

    tensor: int
    first_page: int
    page_count: int
    tier: str
    action: str
    issue_op: int


class Recompute(NamedTuple):
    """Ops ``first_op`` to ``last_op`` (inclusive) run again before op ``before_op``."""

    first_op: int
    last_op: int
    before_op: int


class Deferred(NamedTuple):
    """Update ``op`` runs in the next iteration, right before ``before_op``."""

    op: int
    before_op: int


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
    recompute_us: float = 0.0  # of what ran again; with the next one in plans of version 2
    host_us: float = 0.0  # of the host's steps

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
    recompute: Sequence[Recompute] = ()
    host_steps: Sequence[int] = ()  # ops, in the order of the host's list
    deferred: Sequence[Deferred] = ()
    hardware: Hardware | None = None  # that it was made for

    @property
    def notes(self) -> list[str]:
        """What whoever reads ``bound`` and ``predicted`` has to know."""
        return [str(note) for note in self.extra.get("notes", ())]

    def bounded(self, least_us: float) -> Plan:
        """The same, ``predicted``, where no plan is faster than that."""
        assert self.predicted is not None
        taken_us = self.predicted.iteration_us
        percent = min(100.0, 100.0 * least_us / taken_us) if taken_us else 100.0
        return replace(self, bound=Bound(least_us, percent))

    @property
    def has_choices(self) -> bool:
        """Whether it does more than move pages: version 2."""
        chosen = self.recompute or self.host_steps or self.deferred
        return bool(chosen) or any(move.action == DISCARD for move in self.moves)


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The file's object; ``inf`` becomes the string "inf", which JSON can hold."""
    choices = {
        "recompute": [list(each) for each in plan.recompute],
        "host_steps": list(plan.host_steps),
        "deferred": [list(each) for each in plan.deferred],
    }
    predicted = asdict(plan.predicted) if plan.predicted else None
    if predicted and not plan.has_choices:
        del predicted["recompute_us"], predicted["host_us"]
    return {
        "version": 2 if plan.has_choices else 1,
        "policy": plan.policy,
        "page_size": plan.page_size,
        **{
            name: _size(getattr(plan, name))
            for name in ("device_bytes", "host_bytes", "disk_bytes")
        },
        **({"hardware": to_mapping(plan.hardware)} if plan.hardware else {}),
        "trace_sha256": plan.trace_sha256,
        "predicted": predicted,
        "bound": asdict(plan.bound) if plan.bound else None,
        "start": [list(run) for run in plan.start],
        "moves": [list(move) for move in plan.moves],
        **(choices if plan.has_choices else {}),
        **({"extra": plan.extra} if plan.extra else {}),
    }


def read_plan(path: Path) -> Plan:
    """Raises ``PlanError`` naming the file, the place and the reason."""
    with reading(path, PlanError, "plan"):
        content = path.read_bytes()
    return decode_plan(content, str(path))


def decode_plan(content: bytes, where: str) -> Plan:
    """The plan in a file's bytes, as :func:`read_plan`; ``where`` names it in errors."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError
        if content.lstrip()[:1] == b"{":
            raise PlanError(f"{where}: not whole JSON ({error}); plan again") from error
        raise PlanError(
            f"{where}: {what_it_is(content)}, not a plan; 'tensorpager plan' makes plans"
        ) from error
    try:
        return plan_from_json(document)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error


def plan_from_json(content: Any) -> Plan:
    """Checks form and types; whether the moves make sense is for simulator and validator."""
    if not isinstance(content, dict):
        raise PlanError(f"a plan is a JSON object, this is {type(content).__name__}")
    version = content.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        if type(version) is int and version > VERSION:
            raise PlanError(
                f"version {version}, but this program reads up to version {VERSION}; update it, or "
                "plan again with it"
            )
        raise PlanError(
            f"version {shown(version)} is none of 1 to {VERSION}: not a plan of tensorpager"
        )
    needed = ("policy", "page_size", "device_bytes", "moves", "start")
    for name in (*needed, *(("hardware",) if version > 1 else ())):
        if name not in content:
            raise PlanError(f"'{name}' is missing")
    page_size = content["page_size"]
    if not _is_whole(page_size) or page_size == 0:
        raise PlanError(f"page_size {shown(page_size)} is not a whole number above 0")
    for name, kind in (("policy", str), ("trace_sha256", str), ("extra", dict)):
        if not isinstance(content.get(name, kind()), kind):
            what = "a string" if kind is str else "an object"
            raise PlanError(f"{name} {shown(content[name])} is not {what}")
    discards = version > 1
    moves = [Move(*_row(row, 6, f"moves[{i}]", discards)) for i, row in _rows(content, "moves")]
    actions = (*ACTIONS, DISCARD) if discards else ACTIONS
    for index, move in enumerate(moves):
        if move.action not in actions:
            raise PlanError(f"moves[{index}]: {shown(move.action)} is none of {', '.join(actions)}")
        if (move.action == DISCARD) != (move.tier == DEVICE):
            raise PlanError(
                f"moves[{index}]: '{move.action}' with tier '{move.tier}'; the tier of a discard, "
                f"and of nothing else, is '{DEVICE}'"
            )
    start = [StartRun(*_row(row, 4, f"start[{i}]")) for i, row in _rows(content, "start")]
    sizes: dict[str, Any] = {
        name: _size_of(content, name) for name in ("device_bytes", "host_bytes", "disk_bytes")
    }
    return Plan(
        policy=content["policy"],
        page_size=page_size,
        **sizes,
        moves=moves,
        start=start,
        trace_sha256=content.get("trace_sha256", ""),
        predicted=_part(Predicted, content, "predicted"),
        bound=_part(Bound, content, "bound"),
        extra=content.get("extra", {}),
        **(_choices(content) if version > 1 else {}),
        hardware=_hardware(content),
    )


def _choices(content: dict[str, Any]) -> dict[str, Any]:
    """What version 2 adds; a key that is missing is an empty list."""
    content = {"recompute": [], "host_steps": [], "deferred": [], **content}
    steps = [op for _, op in _rows(content, "host_steps")]
    for index, op in enumerate(steps):
        if not _is_whole(op):
            raise PlanError(f"host_steps[{index}]: {shown(op)} is not the number of an op")
    return {
        "recompute": [
            Recompute(*_numbers(row, 3, f"recompute[{i}]"))
            for i, row in _rows(content, "recompute")
        ],
        "host_steps": steps,
        "deferred": [
            Deferred(*_numbers(row, 2, f"deferred[{i}]")) for i, row in _rows(content, "deferred")
        ],
    }


def _numbers(row: Any, length: int, where: str) -> list[int]:
    if not isinstance(row, list) or len(row) != length or not all(map(_is_whole, row)):
        raise PlanError(f"{where} is not a list of {length} numbers of ops: {shown(row)}")
    return row


def _hardware(content: dict[str, Any]) -> Hardware | None:
    value = content.get("hardware")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise PlanError(f"hardware {shown(value)} is not an object")
    try:
        return from_mapping(value, "hardware")
    except HardwareError as error:
        raise PlanError(str(error)) from error


CHOSEN_US = {"recompute_us", "host_us"}  # in ``predicted`` of version 2 only


def _rows(content: dict[str, Any], name: str) -> enumerate[Any]:
    if not isinstance(content[name], list):
        raise PlanError(f"'{name}' is not a list")
    return enumerate(content[name])


def _row(row: Any, length: int, where: str, discards: bool = False) -> list[Any]:
    """[tensor, first_page, page_count, tier, (action, issue_op)] with the right types."""
    if not isinstance(row, list) or len(row) != length:
        raise PlanError(f"{where} is not a list of {length} values: {shown(row)}")
    for position in (0, 1, 2, 5)[: 4 if length == 6 else 3]:
        if not _is_whole(row[position]):
            raise PlanError(f"{where}: {shown(row[position])} is not a whole number ≥ 0")
    if row[2] < 1:
        raise PlanError(f"{where}: pages {row[1]} to {row[1] + row[2]} are not a range of pages")
    tiers = (*TIERS, DEVICE) if discards else TIERS
    if row[3] not in tiers:
        raise PlanError(f"{where}: {shown(row[3])} is none of {', '.join(tiers)}")
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
    if not isinstance(value, dict) or set(value) not in (set(keys), set(keys) - CHOSEN_US):
        raise PlanError(f"{name} is not an object with {', '.join(keys)}; plan again")
    for key, number in value.items():
        if not _is_number(number):
            raise PlanError(f"{name}: {key} = {shown(number)} is not a finite number ≥ 0")
    return kind(**value)
