"""Steps of an optimizer that the host takes, on the pages where they lie in host memory.

::

    device    backward | step(): pages of gradients leave | forward of the next iteration
    host                          | step of layer 1 | of layer 2 | ...
                                                    | the weight may come back

A step reads and writes the host tier's slots of a parameter, its gradient and its states: the
kernels of ``fused.py`` in plain torch, which go over all cores. So states move neither way, and the
device has its time for what only it can do. ``step()`` returns when all is queued: a *ticket*
(``moves/tickets.py``) is on the slots, and whoever reads them (a move onto the device, saving) or
fills them anew waits for it.

The same bits as a step on the device of a CPU: element by element the same operations in the same
order. A device that contracts to fused multiply-add rounds some of them once less (README).

What the host cannot take the device does: parameters that share a page or have no states yet,
states in other dtypes, what GradScaler scales inside of kernels, and all where slots are short.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Queue
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...kernels.pieces import Operand, Paged
from ...kernels.update import CHUNK, ROOMS, State
from ..devices.device import Mark
from ..errors import PagerError
from ..memory.frame_pool import Numbers
from ..memory.page_table import BLANK
from ..memory.space import Extent
from ..moves.tickets import Lane, MoveFailed, Ticket
from ..tensor.operands import begin_of
from ..tensor.paged_tensor import PagedTensor
from . import fused
from .paged_optimizer import PagedOptimizer

if TYPE_CHECKING:
    from ..core import Core
    from ..moves.mover import Mover


_TRIES, _MOMENT_SECONDS = 1000, 0.01


class HostSteps:
    """Of one pager; under its lock. ``taken``, ``nbytes``: steps given to the host, and bytes of
    pages that they use. ``left``: why others were left to the device → how many. ``planned``: plans
    may choose steps; ``offered``: the latest is left to the device, and one may choose it.
    ``chosen``: asked whether the plan that is followed has the host take the access that begins
    now; its place in the order of the plan, or ``None``."""

    def __init__(self, pager: Core) -> None:
        self.taken = self.nbytes = 0
        self.left: Counter[str] = Counter()
        self.planned = self.offered = False
        self.chosen: Callable[[Sequence[Extent]], int | None] = lambda runs: None
        self._pager = pager
        self._lane = Lane("host-step", 1, _ByRank())
        self._work: _Work | None = None
        pager.mover.beside.append(self._lane)

    @property
    def seconds(self) -> float:
        """That the host was at it."""
        return self._lane.moving_seconds

    def may_take(self, paged: PagedOptimizer) -> bool:
        """Whether it is asked about each step of ``paged`` now."""
        if paged.host_step is False or self._pager.fits or self._pager.budget.metering:
            return False
        return paged.host_step is True or self.planned

    def take(self, paged: PagedOptimizer, group: dict[str, Any], parameter: torch.Tensor) -> bool:
        """Give the step of ``parameter`` to the host. ``False``, and nothing done, if it is the
        device's."""
        pager, self.offered = self._pager, False
        if not self.may_take(paged):
            return False
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), pager.lock:
            why = fused.why_not(paged, group, parameter) or _other(paged, group, parameter)
            if why is not None:
                self.left[why] += 1
                return False
            update = fused.prepare(paged, group, parameter)
            values: list[Any] = update.values
            if not all(type(value) is PagedTensor for value in values):
                self.left["it or its states are dense"] += 1
                return False
            # As a step on the device takes them.
            order = values if fused.always(paged) else [parameter, *values]
            runs = list({t._storage.run.id: t._storage.run for t in order}.values())
            place = self.chosen(runs)
            if paged.host_step == "auto" and place is None:
                self._offer(runs)
                return False
            place = paged.numbers.get(id(parameter), 0) if place is None else place
            rank = (pager.iterations, place)
            return self._give(paged, update, values, runs, rank)

    def _give(
        self,
        paged: PagedOptimizer,
        update: fused.Update,
        values: list[PagedTensor],
        runs: list[Extent],
        rank: tuple[int, int],
    ) -> bool:
        pager = self._pager
        written = [v._storage.run for v, writes in zip(values, update.write) if writes]
        why = self._cannot_leave(runs)
        work = self._room_to_work(update) if why is None else None
        if why or work is None:
            self.left[why or "host_budget has no room for temporaries"] += 1
            return False
        if not self._send(runs):
            work.done()
            self.left["host_budget has no room for its pages"] += 1
            return False
        mover, table = pager.mover, pager.table
        self._note(runs, written)
        pages = np.concatenate([run.pages for run in runs])
        slots: Numbers = table.host[pages]
        before = table.version[pages].copy()
        for run in written:
            mover.slots.drop_copies(run.pages, "disk")
            table.rewritten_below(run.pages)
            run.writes += 1
        operands: list[State] = [self._operand(value) for value in values]
        with fused.counted(paged, [update]):
            call = fused.on_host(paged, update, operands, work.memory)
        step = _Step(
            mover, pages, before, table.version[pages].copy(), slots, call, pager.backend.mark(),
            work, rank,
        )  # fmt: skip
        ticket = mover.tickets.take(f"a step of {paged.name} on the host", ("host", slots))
        ticket.undo = partial(step.undo, ticket)
        self._lane.add(step, ticket)  # type: ignore[arg-type]
        fused.finish(paged, update)
        self.taken += 1
        self.nbytes += len(pages) * pager.page_size
        follower = pager.follower
        if follower is not None and pager.in_iteration():
            follower.unpinned()
        return True

    def _offer(self, runs: list[Extent]) -> None:
        """A planner may have the host take such a step the next time."""
        watch = self._pager.watcher()
        if watch is not None and all(run.small is None for run in runs):
            watch.step(runs, hosted=False)
            self.offered = True

    def _note(self, runs: list[Extent], written: list[Extent]) -> None:
        """To those who look on it is an access like that of a step on the device."""
        watch = self._pager.watcher()
        if watch is not None:
            watch.step(runs, hosted=True)
            for run in written:
                watch.writing(run)
            watch.unpinned(runs)

    def _cannot_leave(self, runs: list[Extent]) -> str | None:
        pager, table = self._pager, self._pager.table
        if pager.before_write is not None:
            return "values are being saved beside the training, which the device's writes know of"
        if any(run.pins for run in runs):
            pager.residency.let_go()
        for run in runs:
            if run.small is not None:
                return "it shares a page with others"
            if run.pins or run.parts is not None:
                return "its pages are in use"
            if (table.flags[run.pages] & BLANK).any():
                return "its pages were never written"
            if ((table.frame[run.pages] < 0) & (table.host[run.pages] < 0)).any():
                return "its pages are on disk"
        return None

    def _room_to_work(self, update: fused.Update) -> _Work | None:
        """Shared by all steps that are queued at once."""
        most = min(CHUNK, update.parameter.numel()) * update.parameter.dtype.itemsize
        work = self._work
        if work is not None and len(work.memory) >= ROOMS * most and work.join():
            return work
        slots, size = self._pager.mover.slots, self._pager.page_size
        pool = slots.host.slots
        pages = -(-ROOMS * most // size)
        while pages:
            start = pool.allocate_run(pages)
            if start is not None and len(list(slots.host.cut(start, pages))) == 1:
                break
            if start is not None:
                pool.free(start, pages)
            pages //= 2
        else:
            return None
        taken = np.arange(start, start + pages)
        self._work = _Work(torch.from_numpy(slots.host.view(start, pages)))
        slots.hold([self._work.over], {"host": taken})
        slots.note_peaks()
        return self._work

    def _send(self, runs: list[Extent]) -> bool:
        """What is on the device leaves it for the host, or is on its way afterwards. ``False``, and
        nothing has left, where there are too few slots, or values would be cut by the end of a
        piece of host memory."""
        pager, mover, table = self._pager, self._pager.mover, self._pager.table
        pages = np.concatenate([run.pages for run in runs])
        there = pages[table.frame[pages] >= 0]
        if mover.tickets.pending("device", table.frame[there]).any():
            try:  # it may come from the disk, and fail
                mover.tickets.wait(mover.tickets.of(("device", table.frame[there])))
            except MoveFailed:
                mover.drain()
                return False
        without = pages[table.host[pages] < 0]
        slots = mover.slots.take("host", len(without), leaving=pages)
        if len(slots) < len(without):
            mover.slots.give("host", slots)
            return False
        kept = table.host[pages]
        kept[table.host[pages] < 0] = slots
        at = 0
        for run in runs:
            ends = kept[at : at + run.count]
            at += run.count
            if len({pager.host.piece_of(int(slot))[0] for slot in (ends.min(), ends.max())}) > 1:
                mover.slots.give("host", slots)
                return False
        clean = there[table.host[there] >= 0]
        if len(without):
            mover.out("host", without, slots)
        if len(clean):
            mover.give_frames(table.unplace(clean))
        mover.unsettle(pages)
        return True

    def _operand(self, value: PagedTensor) -> Operand:
        """``value`` where it lies in host memory."""
        pager, run = self._pager, value._storage.run
        size, begin = pager.page_size, begin_of(value)
        end = begin + value.numel() * value.dtype.itemsize
        slots = pager.table.host[run.first + begin // size : run.first - (-end // size)]
        first, memory = pager.host.piece_of(int(slots[0]))
        assert begin % size == 0
        frames = slots - first
        return Paged(torch.from_numpy(memory), frames, size, value.dtype, value.numel())


def _other(paged: PagedOptimizer, group: dict[str, Any], parameter: torch.Tensor) -> str | None:
    """Why the host cannot take a step that kernels on pages could."""
    if paged.format.chosen:
        return "states= and master_weights= are the device's"
    if id(parameter) in paged.progress:
        return "its update broke off"
    if any(x is not None for x in fused.scaling(paged)):
        return "GradScaler scales inside of the kernels"
    state = paged.state_of(parameter)
    if any(key not in state for key in fused.keys_of(paged, group)):
        return "it has no states yet"
    numbers = group["lr"], state.get("step")
    if any(isinstance(x, torch.Tensor) and x.device.type != "cpu" for x in numbers):
        return "its learning rate or counter is on the device"
    return None


class _Work:
    """Slots for temporaries, as bytes: of no page, and free when no step uses them any more."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.over: Future[None] = Future()
        self.users = 1
        self._lock = threading.Lock()

    def join(self) -> bool:
        """One more step uses it; ``False`` if it is over."""
        with self._lock:
            self.users += not self.over.done()
            return not self.over.done()

    def done(self) -> None:
        """A step is over. Any thread."""
        with self._lock:
            self.users -= 1
            if not self.users:
                self.over.set_result(None)


class _Step:
    """One that the host takes: ``call`` on ``slots`` of ``pages``, of versions ``before`` and
    ``after`` it."""

    def __init__(
        self, mover: Mover, pages: Numbers, before: Any, after: Any, slots: Numbers,
        call: Callable[[], None], mark: Mark, work: _Work, rank: tuple[int, int],
    ) -> None:  # fmt: skip
        self.pages, self.rank = pages, rank
        self._mover, self._before, self._after, self._slots = mover, before, after, slots
        self._call: Callable[[], None] | None = call
        self._mark, self._work = mark, work

    def run(self, after: Mark) -> Mark:
        """Any thread."""
        carrier, backend = self._mover.carrier, self._mover.backend
        backend.wait(self._mark + after)
        carrier.verify_host(self.pages, self._before, self._slots)
        assert self._call is not None
        for _ in range(_TRIES):  # on a CPU the device may be short of dense memory for a moment
            try:
                self._call()  # where it raises this nothing is written yet (``kernels/update.py``)
                break
            except torch.OutOfMemoryError:
                time.sleep(_MOMENT_SECONDS)
        else:
            self._call()
        carrier.stamp_host(self.pages, self._after, self._slots)
        self._call = None
        self._work.done()
        return ()

    def undo(self, ticket: Ticket) -> None:
        """It has failed, and ``step()`` has returned: nobody may take for stepped what is not."""
        error = ticket.error
        raise PagerError(
            "an optimizer's step on the host failed, so a parameter and its states are not what "
            f"step() should have made of them ({type(error).__name__}: {error}). Go on from a "
            "checkpoint"
        ) from error


class _ByRank(Queue[Any]):
    """Steps and their tickets: of those whose pages have arrived the one comes first that is wanted
    first. Where none can begin, the oldest: what that waits for waits for no other step."""

    def _get(self) -> Any:
        ready = [
            work for work in self.queue
            if work is not None and all(before.is_over for before in work[1].after)
        ]  # fmt: skip
        chosen = min(ready, key=lambda work: work[0].rank) if ready else self.queue[0]
        self.queue.remove(chosen)
        return chosen
