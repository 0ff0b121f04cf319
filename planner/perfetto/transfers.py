"""Transfers as a trace viewer shows them."""

from __future__ import annotations

from collections.abc import Iterable

from ..simulation import Transfer


def merged(transfers: Iterable[Transfer]) -> list[Transfer]:
    """In the order of time, without those that never began; one for what a move's pages do without
    a pause, although the pace may change."""
    found: list[Transfer] = []
    last: dict[tuple[str, bool], int] = {}  # channel → its latest in ``found``
    for part in sorted(transfers, key=lambda part: part.begin_us):
        if part.end_us <= part.begin_us:
            continue
        place = last.get((part.tier, part.is_out))
        if place is not None and _goes_on(found[place], part):
            pages = found[place].page_count + part.page_count
            found[place] = found[place]._replace(page_count=pages, end_us=part.end_us)
        else:
            last[part.tier, part.is_out] = len(found)
            found.append(part)
    return found


def _goes_on(before: Transfer, part: Transfer) -> bool:
    return (
        before.move == part.move
        and before.arrived == part.arrived
        and before.first_page + before.page_count == part.first_page
        and part.begin_us - before.end_us < 1e-3
    )
