"""Ranks that plan together: all follow plans from the same iteration on, or none does.

::

    rank 0   iteration | exchange | begin: demand | … | exchange | begin: planned | …
    rank 1   iteration | exchange | begin: demand | … | exchange | begin: planned | …
                           plan ready? no                 yes, on all

Ranks meet in the collectives of each iteration, so the slowest of them decides how long it takes: a
plan that one follows alone gains nothing. So at the end of an iteration in which they have met they
exchange a few numbers, and draw the same conclusions from them:

* Plans that have been made are taken when no rank is planning any more.
* Plans are followed when no rank is left that waits for one. A rank that has none to wait for
  (everything fits, or paging on demand is as good) holds nobody up.
* A rank that leaves its plan for good, because iterations that follow it take longer or a planned
  move has failed, takes the others with it.
* What one rank plans anew, the others do too. A rank that is late is given a quick plan.
* The channels of a node are measured while all its ranks use them, so each finds its real part.
* A collective has taken what it took the last rank to come. The others have waited for that one: a
  plan that hid moves in this time would count on the other rank to be late again.

An iteration in which a rank has met no other (an evaluation on the first rank, a pass that only
accumulates under DDP) is none of the others', and ends without an exchange: nobody waits in vain.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import PagerError

if TYPE_CHECKING:
    from ..core import Core
    from ..plan.follower import Follower
    from ..plan.signatures import StepSignature

LATE = 10  # iterations in which others wait for a rank's plan

_known: weakref.WeakKeyDictionary[Core, Agreement] = weakref.WeakKeyDictionary()


def plan_together(pager: Core, ranks: Iterable[int], timeout: timedelta | None) -> None:
    """From now on ``pager`` plans with those of the other ``ranks``, which all say so. ``timeout``:
    of an exchange. Ranks that are not always the same plan each for itself."""
    wanted = tuple(sorted(set(ranks)))
    before = _known.get(pager)
    if before is not None:
        if before.ranks != wanted:
            before.stop()
        return
    if len(wanted) > 1:
        _known[pager] = Agreement(pager, wanted, timeout)


def timeout_of(group: Any) -> timedelta | None:
    """Of collectives on the CPU in ``group``, by default of all ranks; ``None`` if it has none."""
    group = group or dist.group.WORLD
    try:
        found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    except (RuntimeError, AttributeError):
        return None
    return found


def note_meeting(pager: Core) -> None:
    """The iteration that runs, if one does, has a collective of all the ranks."""
    agreement = _known.get(pager)
    if agreement is not None and pager.in_iteration():
        agreement.met = True


class Agreement:
    """One rank's part in it. ``may_follow``, ``may_take``: what all ranks may do when the next
    iteration begins. ``met``: they have, in the iteration that runs."""

    def __init__(self, pager: Core, ranks: tuple[int, ...], timeout: timedelta | None) -> None:
        self.ranks = ranks
        self.met = self.may_follow = self.may_take = False
        self._pager, self._timeout = weakref.ref(pager), timeout
        self._group: Any = None
        self._late = 0
        self._stopped = False
        if pager.follower is not None:
            pager.follower.others = self
        pager.on_ended.append(self._ended)

    def stop(self) -> None:
        """Each rank plans for itself."""
        pager, self._stopped = self._pager(), True
        if pager is not None and pager.follower is not None:
            pager.follower.others = None

    def _ended(self) -> None:
        pager, met = self._pager(), self.met
        self.met = False
        if pager is None or self._stopped:
            return
        follower: Any = pager.follower
        if met:
            self._exchange(pager, None if pager.fits else follower)
        elif follower is not None:
            with pager.lock:
                follower.plan_if_due()

    def _exchange(self, pager: Core, follower: Follower | None) -> None:
        with pager.lock:
            kind = follower.to_come() if follower is not None else None
            stand = _stand_of(follower, kind)
            due = follower is not None and follower.is_due()
            planning = follower is not None and follower.is_planning
            measured = follower is None or not due or follower.is_calibrated
            ended = follower.learned if follower is not None else None
            met = ended.met_seconds() if ended is not None else []
        *found, fewest, most = self._least(
            stand != "waits", stand != "left", stand != "ready", not planning, not due, measured,
            len(met), -len(met),
        )  # fmt: skip
        nobody_waits, nobody_left, nobody_ready, nobody_plans, nobody_due, all_measured = found
        if fewest and fewest == -most:
            assert ended is not None
            ended.have_met(self._least(*met))
        self.may_take = bool(nobody_plans)
        self.may_follow = bool(nobody_waits and nobody_left)
        self._late = self._late + 1 if stand == "waits" and not nobody_ready else 0
        if not nobody_due and not all_measured:
            self._measure(pager, follower)
        if follower is None:
            return
        with pager.lock:
            if not nobody_left and kind is not None and stand != "left":
                kind.leave("another rank has left its plan, and all leave theirs together")
            if not nobody_due and nobody_plans and nobody_left:
                follower.plan_if_due(with_others=True)
            if self._late >= LATE:
                self._late = 0
                follower.plan_quickly(kind)

    def _measure(self, pager: Core, follower: Follower | None) -> None:
        """All at the same time, unless all have measured within a week."""
        from ..machine.calibration.measure import is_known

        known = follower is None or is_known(pager.backend, pager.disk, pager.page_size)
        if self._least(known)[0] or follower is None:
            return
        with pager.lock, suppress(PagerError):  # where it is needed it fails again, and says why
            follower.calibrate(fresh=True)

    def _least(self, *mine: float) -> list[float]:
        """Of each of these the least of all ranks: what holds, if it does on each."""
        if self._group is None:
            # A group of its own: collectives of the user's that are on their way, in a thread that
            # saves perhaps, are not to be mixed up with these.
            self._group = dist.new_group(
                list(self.ranks), self._timeout, "gloo", use_local_synchronization=True
            )
        values = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MIN, self._group)
        found: list[float] = values.tolist()
        return found


def _stand_of(follower: Follower | None, kind: StepSignature | None) -> str:
    """Of the iteration to come: a plan is "ready", one that may still come "waits", it has been
    "left", or there is "none" to wait for."""
    if follower is None:
        return "none"
    if follower.mover.error is not None:
        return "left"
    if kind is None:
        return "waits"
    if kind.compiled is not None:
        return "ready"
    if kind.left:
        return "left"
    if kind.refused is not None or kind.turned_down is not None:
        return "none"
    return "none" if kind.plans >= follower.most_plans and kind.process is None else "waits"
