"""The log of a queue in the simulator: which pages of a move went when."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..simulation import EPSILON_US, Transfer
from .pages import Pages, Range

SAME_US = 1e-7  # what two equal times may differ by in floating point


class Logged(NamedTuple):
    """Pages ``first`` to ``last`` of move ``move`` went one after another, each in equal time.
    Not ``arrived``: their tensor died at ``end_us``; ``begin_us`` is the same if they never began.
    """

    move: int
    first: int
    last: int
    begin_us: float
    end_us: float
    arrived: bool


Log = list[Logged]


def note(log: Log, move: int, first: int, last: int, begin_us: float, end_us: float) -> None:
    """Pages ``first`` to ``last`` took from ``begin_us`` to ``end_us``; one note with those before
    them if they went on at the same pace."""
    if log:
        before = log[-1]
        if before.move == move and before.last == first and before.arrived:
            pages, earlier = last - first, first - before.first
            change_us = (end_us - begin_us) / pages - (before.end_us - before.begin_us) / earlier
            goes_on = abs(begin_us - before.end_us) <= EPSILON_US
            if goes_on and abs(change_us) * pages < SAME_US:
                log[-1] = Logged(move, before.first, last, before.begin_us, end_us, True)
                return
    log.append(Logged(move, first, last, begin_us, end_us, True))


def note_cancelled(log: Log, move: int, left: Iterable[Range], now: float) -> None:
    """Pages of ``left`` never began, and never will."""
    log.extend(Logged(move, first, last, now, now, False) for first, last in left if first < last)


def transfers(log: Log, pages: Pages) -> list[Transfer]:
    """The log as others read it: pages counted within their tensor."""
    found = []
    for noted in log:
        move = pages.moves[noted.move]
        found.append(
            Transfer(
                noted.move,
                move.action == "out",
                move.tier,
                move.tensor,
                noted.first - int(pages.base[move.tensor]),
                noted.last - noted.first,
                noted.begin_us,
                noted.end_us,
                noted.arrived,
            )
        )
    return found
