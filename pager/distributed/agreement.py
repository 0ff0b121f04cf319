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
* What one rank plans anew, the others do too. Where all are to plan the same (accesses of as many
  pages in the same order, tiers of the same sizes), as ranks of FSDP2 are, the first one makes the
  plan for all, by the slowest channels of any: plans of one optimum wait at different accesses, and
  where ranks meet these waits would add up. A rank that is late is given a quick plan.
* The channels of a node are measured while all its ranks use them, so each finds its real part.
* A collective has taken what it took the last rank to come. The others have waited for that one: a
  plan that hid moves in this time would count on the other rank to be late again.

An iteration in which a rank has met no other (an evaluation on the first rank, a pass that only
accumulates under DDP) is none of the others', and ends without an exchange: nobody waits in vain.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from ..errors import PagerError
from ..plan.planning import Awaited, PlanningProcess, Question

if TYPE_CHECKING:
    from ..core import Core
    from ..plan.follower import Follower
    from ..plan.signatures import StepSignature

LATE = 10  # iterations in which others wait for a rank's plan
_RATES = (
    "d2h_bytes_per_s", "h2d_bytes_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s",
    "host_adam_bytes_per_s",
)  # fmt: skip

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
        # The kind that all are planning, and the plan that is made for it.
        self._together: tuple[StepSignature, PlanningProcess | Awaited] | None = None
        if pager.follower is not None:
            pager.follower.others = self
        pager.on_ended.append(self._ended)

    def stop(self) -> None:
        """Each rank plans for itself."""
        pager, self._stopped = self._pager(), True
        together, self._together = self._together, None
        if together is not None and together[0].process is together[1]:
            together[0].cancel()
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
            if self._together is not None and isinstance(self._together[1], PlanningProcess):
                planning = planning or not self._together[1].done()
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
        if self._together is not None and nobody_plans:
            self._tell()
        if not nobody_due and not all_measured:
            self._measure(pager, follower)
        with pager.lock:
            if not nobody_left and kind is not None and stand != "left":
                kind.leave("another rank has left its plan, and all leave theirs together")
        if not nobody_due and nobody_plans and nobody_left:
            self._plan(pager, follower)
        if follower is None:
            return
        with pager.lock:
            if self._late >= LATE:
                self._late = 0
                follower.plan_quickly(kind)

    def _plan(self, pager: Core, follower: Follower | None) -> None:
        """What this rank is to plan, it plans; the first one for all, where that is the same."""
        kind = question = None
        if follower is not None:
            with pager.lock:
                kind = follower.to_plan()
                question = follower.question(kind) if kind is not None else None
        number, rates = 0.0, dict.fromkeys(_RATES, math.inf)
        if question is not None and kind is not None and kind.recorded is not None:
            number = _number_of(question, kind.recorded.position)
            rates = {name: getattr(question.hardware, name) for name in _RATES}
        least, most, *slowest = self._least(number, -number, *rates.values())
        if follower is None or question is None or kind is None:
            return
        with pager.lock:
            if not number or least != -most:
                follower.ask(kind, question)
                return
            if self._is_first:
                hardware = question.hardware.with_(**dict(zip(_RATES, slowest)))
                self._together = kind, follower.ask(kind, question._replace(hardware=hardware))
            else:
                kind.process = awaited = Awaited()
                self._together = kind, awaited

    @property
    def _is_first(self) -> bool:
        return dist.get_rank() == self.ranks[0]

    def _tell(self) -> None:
        """The plan that the first rank has made is all ranks'."""
        assert self._together is not None
        (kind, process), self._together = self._together, None
        said = self._from_first(process.said if isinstance(process, PlanningProcess) else b"")
        if isinstance(process, Awaited) and kind.process is process:
            if said:
                process.told(said)
            else:
                kind.cancel()

    def _from_first(self, said: bytes) -> bytes:
        count = torch.tensor([len(said)])
        dist.broadcast(count, self.ranks[0], self._group)
        if not count:
            return b""
        data = torch.frombuffer(bytearray(said or int(count)), dtype=torch.uint8)
        dist.broadcast(data, self.ranks[0], self._group)
        return data.numpy().tobytes()

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


def _number_of(question: Question, position: list[int]) -> float:
    """The same for questions to which the same plan is an answer, but for how fast things are;
    whole, above 0. ``position``: the access that each op is."""
    trace, hardware = question.trace, question.hardware
    told = (
        trace.page_size,
        trace.op_names,
        trace.op_rerun.tolist(),
        np.isnan(trace.op_host_us).tolist(),
        trace.segments,
        trace.pages(trace.page_size).tolist(),
        trace.tensor_kinds,
        trace.tensor_persistent.tolist(),
        *(column.tolist() for column in (
            trace.access_op, trace.access_tensor, trace.access_mode, trace.access_first_page,
            trace.access_page_count,
        )),
        position,
        (hardware.page_size, hardware.device_bytes, hardware.host_bytes, hardware.disk_bytes),
        question.quick,
        question.policy,
    )  # fmt: skip
    return float(1 + int.from_bytes(hashlib.sha256(repr(told).encode()).digest()[:6], "big"))
