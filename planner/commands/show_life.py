"""``show --tensor`` as people read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..sizes import format_bytes
from .show_overview import heading
from .tables import bar, format_share, format_us, pairs, short, table

LONGEST_NAME = 64


def life_tables(path: str, found: dict[str, Any], top: int) -> list[Any]:
    """What to print of ``found``, a tensor's life, with at most ``top`` rows in each table."""
    parts: list[Any] = [
        pairs([("trace", path), *_facts(found)]),
        *_cut("Accesses", found["accesses"], top, lambda rows: _accesses(found, rows)),
        *_cut("Idle periods", found["gaps"], top, lambda rows: _gaps(found, rows)),
    ]
    if any(gap["hideable_bytes"] is None for gap in found["gaps"]):
        parts.append("--hardware says how much of that its link could hide.")
    plan = found["plan"]
    if plan is None:
        return parts
    policy = short(plan["policy"])
    if not plan["moves"]:
        parts += ["", f"The plan ({policy}) never moves it."]
    parts += _cut(f"Moves ({policy})", plan["moves"], top, lambda rows: _moves(found, rows))
    parts += _cut("Made again by ops that run again", plan["made_again"], top, _runs)
    parts += _cut("Steps of the host that use it", plan["host_steps"], top, _runs)
    parts += [
        f"Op {row['op']} runs in the next iteration, before op {row['before_op']}."
        for row in plan["deferred"]
    ]
    if not plan["stalls"]:
        return [*parts, "", "No op waits for it."]
    title = f"Ops that wait for it, {format_us(plan['stall_us'])} in all"
    return [*parts, *_cut(title, plan["stalls"], top, _stalls)]


def _facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    name = found["name"]
    lives = f"op {found['from_op']} to {found['to_op']}, "
    lives += f"{format_us(found['from_us'])} to {format_us(found['to_us'])}"
    rows = [
        ("tensor", f"{found['tensor']} {short(name, LONGEST_NAME) if name else '(no name)'}"),
        ("kind", found["kind"]),
        *([("module", short(found["module"], LONGEST_NAME))] if name else []),
        (
            "size",
            f"{format_bytes(found['nbytes'])} ({found['nbytes']} bytes), "
            f"{found['pages']} pages of {format_bytes(found['page_size'])}",
        ),
        (
            "lives",
            "persistent: from one iteration to the next"
            if found["persistent"]
            else f"{lives} of {format_us(found['iteration_us'])}",
        ),
        ("used", f"{len(found['accesses'])} accesses: {found['reads']} read, "
                 f"{found['writes']} write"),
    ]  # fmt: skip
    if found["shared_with"]:
        rows.insert(1, ("shared with", short(", ".join(found["shared_with"]), 4 * LONGEST_NAME)))
    if found["plan"] is not None:
        share = found["plan"]["share_of_time_on_device"]
        rows.append(
            ("on the device", f"{100 * share:.1f} % of its time ({short(found['plan']['policy'])})")
        )
    return rows


def _cut(title: str, rows: Sequence[Any], top: int, draw: Any) -> list[Any]:
    """``draw`` of the first ``top`` rows, under ``title``; a note says how many more there are."""
    if not rows:
        return []
    shown = rows[:top]
    parts: list[Any] = ["", heading(title)]
    if shown:
        parts.append(draw(shown))
    if len(shown) < len(rows):
        parts.append(f"… {len(rows) - len(shown)} more of {len(rows)}; --top {len(rows)} lists all")
    return parts


def _pages(found: dict[str, Any], row: dict[str, Any]) -> str:
    first, count = row["first_page"], row["page_count"]
    if count == found["pages"]:
        return "all"
    return str(first) if count == 1 else f"{first} to {first + count - 1}"


def _accesses(found: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Any:
    return table(
        ("op", "<name", "<access", "pages", "from", "for"),
        [
            (
                str(row["op"]),
                row["op_name"],
                row["access"],
                _pages(found, row),
                format_us(row["start_us"]),
                format_us(row["end_us"] - row["start_us"]),
            )
            for row in rows
        ],
    )


def _gaps(found: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Any:
    most = max(gap["idle_us"] for gap in found["gaps"])
    hidden = rows[0]["hideable_bytes"] is not None
    return table(
        (
            "after op",
            "until op",
            "pages",
            "bytes",
            *(["link hides"] if hidden else []),
            "idle",
            "<",
        ),
        [
            (
                str(row["from_op"]),
                f"{row['to_op']}{' next' if row['to_op'] <= row['from_op'] else ''}",
                _pages(found, row),
                format_bytes(row["bytes"]),
                *([format_share(row["hideable_bytes"], row["bytes"])] if hidden else []),
                format_us(row["idle_us"]),
                bar(row["idle_us"], most),
            )
            for row in rows
        ],
    )


def _moves(found: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Any:
    def time(us: float | None) -> str:
        return "" if us is None else format_us(us)

    return table(
        ("<move", "<tier", "pages", "at op", "queued", "begins", "arrives"),
        [
            (
                row["action"],
                row["tier"],
                _pages(found, row),
                str(row["issue_op"]),
                time(row["queued_us"]),
                "nothing to move" if row["begin_us"] is None else time(row["begin_us"]),
                time(row["end_us"]),
            )
            for row in rows
        ],
    )


def _runs(rows: Sequence[dict[str, Any]]) -> Any:
    return table(
        ("op", "<name", "before op", "begins", "for"),
        [
            (
                str(row["op"]),
                row["op_name"],
                str(row.get("before_op", "")),
                format_us(row["begin_us"]),
                format_us(row["end_us"] - row["begin_us"]),
            )
            for row in rows
        ],
    )


def _stalls(rows: Sequence[dict[str, Any]]) -> Any:
    return table(
        ("op", "<name", "waits", "<for"),
        [(str(r["op"]), r["op_name"], format_us(r["us"]), r["channel"]) for r in rows],
    )
