"""``show --tensor``: one tensor's uses, its idle periods, and what a plan does with it.

Times are in µs since the iteration's begin, of the plan's steady state if there is a plan, else as
if nothing waited. A move that goes on into the next iteration ends after this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from ..errors import PagerError
from ..hardware import Hardware
from ..lifetimes import gap_bytes, gaps, hideable_bytes, idle_us
from ..sizes import format_bytes
from ..timeline import DEVICE, Timeline
from ..trace import ACCESS_NAMES, READ, WRITE, Trace
from .show_overview import heading
from .tables import format_us, pairs, short, table

OFFERED = 5  # names in an error
WIDTH = 60  # of a name


def find_tensor(trace: Trace, text: str, where: str) -> int:
    """Index of the tensor of that number, or called ``text``, or else the only one whose name has
    ``text`` in it; tensors that share pages are one. Raises ``PagerError`` that offers others;
    ``where`` names the trace."""
    numbers: list[int] = trace.tensor_ids.tolist()
    if text.isdecimal() and text.isascii() and len(text) < 19 and int(text) in numbers:
        return numbers.index(int(text))
    names = [(index, name) for index, name in enumerate(trace.tensor_names) if name]
    for number, others in trace.metadata.get("shared", {}).items():
        names += [(numbers.index(int(number)), name) for name in others]
    found = {i: name for i, name in names if name == text}
    found = found or {i: name for i, name in names if text.lower() in name.lower()}
    if len(found) == 1:
        return next(iter(found))
    what = f"{len(found)} tensors match"
    if not found:
        from difflib import get_close_matches

        what = "no tensor matches"
        close = get_close_matches(text, [name for _, name in names], OFFERED, cutoff=0.3)
        found = {i: name for i, name in names if name in close}
    some = [f"{numbers[i]} ({short(name, WIDTH)})" for i, name in list(found.items())[:OFFERED]]
    offer = f": {', '.join(some)}" if some else ""
    raise PagerError(
        f"{where}: {what} '{short(text, WIDTH)}'; give a whole name, or a number as 'show' lists "
        f"them{offer}"
    )


def life(line: Timeline, tensor: int, page_size: int, hardware: Hardware | None) -> dict[str, Any]:
    """Everything ``show --tensor --json`` prints of ``tensor`` (index)."""
    trace = line.trace
    rows = np.flatnonzero(trace.access_tensor == tensor)
    begin, end = line.lifetime_us(tensor)
    return {
        "tensor": int(trace.tensor_ids[tensor]),
        "name": trace.tensor_names[tensor],
        "kind": trace.tensor_kinds[tensor],
        "nbytes": int(trace.tensor_bytes[tensor]),
        "page_size": page_size,
        "pages": int(trace.pages(page_size)[tensor]),
        "persistent": bool(trace.tensor_persistent[tensor]),
        "from_us": begin,
        "to_us": end,
        "iteration_us": line.iteration_us,
        "accesses": _accesses(line, rows, page_size),
        "gaps": _gaps(line, tensor, page_size, hardware),
        "plan": None if line.plan is None else _planned(line, tensor),
    }


def _accesses(line: Timeline, rows: Any, page_size: int) -> list[dict[str, Any]]:
    trace = line.trace
    first, last = trace.access_ranges(page_size)
    return [
        {
            "op": op,
            "op_name": trace.op_names[op],
            "access": ACCESS_NAMES[int(trace.access_mode[row])],
            "first_page": int(first[row]),
            "page_count": int(last[row] - first[row]),
            "start_us": float(line.op_start_us[op]),
            "end_us": float(line.op_end_us[op]),
        }
        for row, op in zip(rows.tolist(), trace.access_op[rows].tolist())
    ]


def _gaps(
    line: Timeline, tensor: int, page_size: int, hardware: Hardware | None
) -> list[dict[str, Any]]:
    """Idle periods of at least one op; ``to_op`` of the one around the iteration's end is of the
    next iteration if it is not above ``from_op``."""
    trace = line.trace
    found = gaps(trace, page_size)
    found = found.pick(found.tensor == tensor)
    size = gap_bytes(trace, found, page_size)
    length = idle_us(trace, found, line.op_start_us, line.op_end_us, line.iteration_us)
    hidden = None if hardware is None else hideable_bytes(size, found.pages, length, hardware)
    return [
        {
            "from_op": int(found.begin[gap]),
            "to_op": int(found.end[gap]) % trace.ops,
            "first_page": int(found.first_page[gap]),
            "page_count": int(found.pages[gap]),
            "begin_us": float(line.op_end_us[found.begin[gap]]),
            "idle_us": float(length[gap]),
            "bytes": int(size[gap]),
            "hideable_bytes": None if hidden is None else int(hidden[gap]),
        }
        for gap in np.lexsort((found.first_page, found.begin)).tolist()
    ]


def _plain(row: Any) -> dict[str, Any]:
    values = row._asdict() if isinstance(row, tuple) else asdict(row)  # type: ignore[attr-defined]
    return {name: value for name, value in values.items() if name != "tensor"}


def _planned(line: Timeline, tensor: int) -> dict[str, Any]:
    assert line.plan is not None
    assert line.simulation is not None
    trace = line.trace

    def runs(those: Iterable[Any], mode: int) -> list[dict[str, Any]]:
        """Those whose op accesses the tensor."""
        rows = np.flatnonzero((trace.access_tensor == tensor) & (trace.access_mode & mode != 0))
        mine = set(trace.access_op[rows].tolist())
        return [{"op_name": trace.op_names[e.op], **_plain(e)} for e in those if e.op in mine]

    moves = []
    for index, move in enumerate(line.plan.moves):
        if move.tensor != trace.tensor_ids[tensor]:
            continue
        parts = [p for p in line.transfers if p.move == index and p.arrived]
        moves.append(
            {
                **_plain(move),
                "queued_us": line.queued_us(move),
                "begin_us": min((part.begin_us for part in parts), default=None),
                "end_us": max((part.end_us for part in parts), default=None),
            }
        )
    spans = line.residency(tensor)
    there = sum((span.end_us - span.begin_us) * span.page_count for span in spans)
    here = sum((s.end_us - s.begin_us) * s.page_count for s in spans if s.place == DEVICE)
    return {
        "policy": line.plan.policy,
        "share_of_time_on_device": here / there if there else 1.0,
        "moves": moves,
        "residency": [_plain(span) for span in spans],
        "stalls": [
            {"op_name": trace.op_names[stall.op], **_plain(stall)}
            for stall in line.stalls
            if stall.tensor == tensor
        ],
        "made_again": runs(line.simulation.reruns, WRITE),
        "host_steps": runs(line.simulation.host_runs, READ | WRITE),
        "deferred": runs(line.plan.deferred, READ | WRITE),
    }


# --- for people ----------------------------------------------------------------------------------

# Of each list: its title, and what of a row stands under which head.
LISTS: dict[str, tuple[str, dict[str, str]]] = {
    "accesses": (
        "Accesses",
        {"op": "op", "<name": "op_name", "<access": "access", "pages": "pages", "from": "start_us"},
    ),
    "gaps": (
        "Idle periods",
        {"after op": "from_op", "until op": "to_op", "pages": "pages", "bytes": "bytes",
         "link hides": "hideable_bytes", "idle": "idle_us"},
    ),
    "moves": (
        "Moves",
        {"<move": "action", "<tier": "tier", "pages": "pages", "at op": "issue_op",
         "queued": "queued_us", "begins": "begin_us", "arrives": "end_us"},
    ),
    "stalls": ("Ops that wait for it", {"op": "op", "<name": "op_name", "waits": "us",
                                        "<for": "channel"}),
    "made_again": (
        "Made again by ops that run again",
        {"op": "op", "<name": "op_name", "before op": "before_op", "begins": "begin_us"},
    ),
    "host_steps": (
        "Steps of the host that use it",
        {"op": "op", "<name": "op_name", "begins": "begin_us", "ends": "end_us"},
    ),
    "deferred": (
        "Run in the next iteration",
        {"op": "op", "<name": "op_name", "before op": "before_op"},
    ),
}  # fmt: skip


def life_tables(path: str, found: dict[str, Any], top: int) -> list[Any]:
    """What to print of ``found``, a tensor's life, with at most ``top`` rows in each table."""
    name, plan = found["name"], found["plan"]
    times = f"{format_us(found['from_us'])} to {format_us(found['to_us'])}"
    facts = [
        ("trace", path),
        ("tensor", f"{found['tensor']} {short(name, WIDTH) if name else '(no name)'}"),
        ("kind", found["kind"]),
        ("size", f"{format_bytes(found['nbytes'])}, {found['pages']} pages"),
        ("lives", "persistent" if found["persistent"] else times),
    ]
    if plan is not None:
        share = f"{100 * plan['share_of_time_on_device']:.1f} % of its time"
        facts.append(("on the device", f"{share} ({short(plan['policy'])})"))
    parts: list[Any] = [pairs(facts)]
    for key, (title, columns) in LISTS.items():
        rows = found.get(key) or (plan or {}).get(key) or []
        if not rows:
            continue
        more = f" ({min(top, len(rows))} of {len(rows)})" if len(rows) > top else ""
        cells = [
            [_cell(row, key, found["pages"]) for key in columns.values()] for row in rows[:top]
        ]
        parts += ["", heading(f"{title}{more}"), table(tuple(columns), cells)]
    return parts


def _cell(row: dict[str, Any], key: str, pages: int) -> str:
    if key == "pages":
        first, count = row["first_page"], row["page_count"]
        return "all" if count == pages else f"{first} to {first + count - 1}"
    value = row[key]
    if value is None:
        return ""
    show: Callable[[Any], str] = str
    if key.endswith("us"):
        show = format_us
    elif key.endswith("bytes"):
        show = format_bytes
    return show(value)
