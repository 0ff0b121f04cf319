"""Tickets: what is queued already, and whoever comes next waits for.

Note: program order
-------------------
The page table says where pages are in the order of the program. Whoever queues a transfer changes
it at once; what is not there yet has a *ticket*. Each place (a frame, a host slot, a disk slot)
knows the latest ticket of a transfer that reads or fills it::

    out  A: frame 3 -> slot 7    ticket 1 on both        frame 3 is free, A is in slot 7
    in   B: slot 5 -> frame 3    ticket 2, after 1       B is in frame 3
    in   A: slot 7 -> frame 4    ticket 3, after 1       A is in frame 4
    op on B                      waits for ticket 2

So a transfer waits for the tickets of all its places, and an op for those of its frames. Tickets
wait only for lower numbers and each lane takes them in order, so some ticket can always go on.

Where streams carry the bytes a ticket is over when its copies are queued, and has their *mark* then
(``devices/device.py``): what comes after it is queued behind that, and the host does not wait. What
ops have been made to wait for is forgotten. So the host waits for the disk alone.

A ticket that fails makes all fail that wait for it, and none of these has touched a byte: what the
first one was to save is still in its frame. It stays on its places until ``Mover.drain`` has put
the page table right.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from queue import Empty, Queue, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..devices.device import Mark
from ..disk.watch import IoWatch, Patience
from ..errors import HungDisk, PagerError
from ..memory.frame_pool import Numbers, values_of

if TYPE_CHECKING:
    from .transfers import Shift, Transfer

_WATCHDOG_SECONDS = 60.0
Places = tuple[str, Numbers]  # a tier, and frames or slots of it


class MoveFailed(Exception):  # noqa: N818 - never the user's: ``Mover.drain`` deals with it
    """What was waited for has failed; ``__cause__`` says how."""


class Ticket:
    """Of one transfer. ``after``: tickets that it waits for; ``mark``: when its bytes are there,
    once it is over; ``error``: how it failed; ``undo``: puts the page table right where it has."""

    __slots__ = ("_gate", "_told", "after", "error", "is_over", "label", "mark", "number", "undo")

    def __init__(self, number: int, after: list[Ticket], over: deque[int], label: str) -> None:
        self.number = number
        self.after = after
        self.label = label
        self.mark: Mark = ()
        self.error: BaseException | None = None
        self.undo: Callable[[], None] = lambda: None
        self.is_over = False
        self._gate = threading.Lock()  # of those who wait; an Event takes ten times as long to make
        self._gate.acquire()
        self._told = over

    def end(self, error: BaseException | None = None, mark: Mark = ()) -> None:
        """The bytes are there at ``mark``, or will not be. Any thread."""
        self.error, self.mark = error, mark
        self.is_over = True
        self._gate.release()
        self._told.append(self.number)

    def carry(self, run: Callable[[Mark], Mark]) -> None:
        """``run`` when all that this one waits for is over, behind their marks. Any thread."""
        error: BaseException | None = None
        after: Mark = ()
        for before in self.after:
            before.wait()
            error, after = error or before.error, after + before.mark
        try:
            mark = run(after) if error is None else ()
        except BaseException as failure:  # a thread that died would be waited for
            error, mark = failure, ()
        self.after = [before for before in self.after if before.mark]
        self.end(error, mark)

    def wait(self, seconds: float = -1) -> bool:
        """Until it is over, or so many seconds; whether it is."""
        if not self.is_over and self._gate.acquire(timeout=seconds):
            self._gate.release()  # for the next one who waits
        return self.is_over


class Tickets:
    """Those of one pager. Under its lock. ``waits``: how often somebody had to."""

    def __init__(self, watch: IoWatch, reach: Callable[[Mark], None]) -> None:
        self.waits = 0
        self._watch = watch
        self._reach = reach  # of the device
        self._last = 0
        self._live: dict[int, Ticket] = {}  # not over, or failed, or not reached by ops
        self._over: deque[int] = deque()  # numbers of those that have ended since
        self._columns = {tier: np.zeros(0, np.int64) for tier in ("device", "host", "disk")}

    def take(self, label: str, *places: Places) -> Ticket:
        """A ticket on all of ``places``, after those that they have."""
        self._last += 1
        ticket = Ticket(self._last, self.of(*places), self._over, label)
        for tier, numbers in places:
            try:
                self._columns[tier][numbers] = self._last
            except IndexError:  # nothing was asked of so many places before
                self._of_places(tier, numbers)
                self._columns[tier][numbers] = self._last
        self._live[self._last] = ticket
        return ticket

    def of(self, *places: Places) -> list[Ticket]:
        """Tickets of ``places`` that are not over, or have failed, or that ops have not reached."""
        self._sweep()
        if not self._live:
            return []
        found: set[int] = set()
        for tier, numbers in places:
            found |= values_of(self._of_places(tier, numbers))
        live = self._live
        return [live[number] for number in sorted(found) if number in live]

    def reach_at_once(self, first: int, count: int) -> bool:
        """Ops come after the tickets of ``count`` frames from ``first`` on, where the host has to
        wait for nothing; whether."""
        if self._over:
            self._sweep()
        live = self._live
        if live:
            # The column ends with the last ticket's.
            found = live.keys() & values_of(self._columns["device"][first : first + count])
            if found:
                theirs = [live[number] for number in sorted(found)]
                for ticket in theirs:
                    if not ticket.is_over or ticket.error is not None:
                        return False
                self._pass(theirs)
        return True

    def latest(self, tier: str, numbers: Numbers) -> npt.NDArray[np.int64]:
        """The number of the ticket of each of these places, 0 where there is none that is not over,
        or has failed."""
        found: npt.NDArray[np.int64] = np.where(
            self.pending(tier, numbers), self._of_places(tier, numbers), 0
        )
        return found

    def behind(self, number: int) -> int:
        """How many tickets there may be before the one with this number, itself included."""
        return number - next(iter(self._live), number + 1) + 1

    def pending(self, tier: str, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """Which of these places have one that is not over, or has failed."""
        self._sweep()
        if not self._live:
            return np.zeros(len(numbers), np.bool_)
        theirs = self._of_places(tier, numbers)
        found: npt.NDArray[np.bool_] = theirs >= next(iter(self._live))
        if found.any():  # then it is worth to look at each
            several = set(theirs[found].tolist())
            may_fail = [number for number in several if self._may_fail(number)]
            if len(may_fail) < len(several):
                found &= np.isin(theirs, may_fail)
        return found

    def _may_fail(self, number: int) -> bool:
        ticket = self._live.get(number)
        return ticket is not None and not (ticket.is_over and ticket.error is None)

    @property
    def any(self) -> bool:
        self._sweep()
        return bool(self._live)

    @property
    def failed(self) -> list[Ticket]:
        """The latest first."""
        self._sweep()
        return [ticket for ticket in reversed(self._live.values()) if ticket.error is not None]

    def wait(self, tickets: Iterable[Ticket], lock: threading.RLock | None = None) -> bool:
        """Until all are over, and what ops do next comes after them. ``lock``: is given away while
        the host waits; whether it had to. Raises ``MoveFailed``, and ``HungDisk`` if a call of the
        disk does not return."""
        waited = self.wait_over(tickets, lock)
        self._pass(tickets)
        return waited

    def wait_over(self, tickets: Iterable[Ticket], lock: threading.RLock | None = None) -> bool:
        """The same, for what is queued behind their marks."""
        waited = False
        for ticket in tickets:
            if not ticket.is_over:
                self.waits += 1
                waited = True
                held = lock._release_save() if lock is not None else None  # type: ignore[attr-defined]
                try:
                    self._wait(ticket)
                finally:
                    if lock is not None:
                        lock._acquire_restore(held)  # type: ignore[attr-defined]
            if ticket.error is not None:
                raise MoveFailed from ticket.error
        return waited

    def wait_for_all(self) -> None:
        """Until every ticket is over, failed or not; ops come after them."""
        live = list(self._live.values())
        for ticket in live:
            if not ticket.is_over:
                self.waits += 1
                self._wait(ticket)
        self._pass(live)

    def pass_over(self) -> None:
        """Ops come after all that is over."""
        self._pass([ticket for ticket in self._live.values() if ticket.is_over])

    def _pass(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            if ticket.error is None and self._live.pop(ticket.number, None) is not None:
                if ticket.mark:
                    self.waits += 1
                    self._reach(ticket.mark)
                self._forget_before(ticket)

    def _forget_before(self, ticket: Ticket) -> None:
        """Whoever comes after it comes after what it waited for."""
        behind = [ticket]
        while behind:
            last = behind.pop()
            before, last.after = last.after, []
            behind += [one for one in before if self._live.pop(one.number, None) is not None]

    def forget(self, tickets: Iterable[Ticket]) -> None:
        """What failed has been put right."""
        for ticket in tickets:
            self._live.pop(ticket.number, None)

    def _wait(self, ticket: Ticket) -> None:
        patience = Patience(self._watch)
        deadline, ended = time.monotonic() + _WATCHDOG_SECONDS, len(self._over)
        while not ticket.wait(patience.tick_seconds):
            patience.ticked()
            # A slow disk (a hung one has its own time-out), or a long queue of others.
            if self._watch.calls or len(self._over) != ended:
                ended = len(self._over)
                deadline = time.monotonic() + _WATCHDOG_SECONDS
            if time.monotonic() > deadline:
                under_way = [t.label for t in list(self._live.values()) if not t.is_over]
                raise PagerError(
                    f"no page moved for {_WATCHDOG_SECONDS:g} s; queued: {', '.join(under_way)}"
                )

    def _sweep(self) -> None:
        while self._over:
            number = self._over.popleft()
            ticket = self._live.get(number)
            if ticket is not None and ticket.error is None and not ticket.mark:
                del self._live[number]
                self._forget_before(ticket)

    def _of_places(self, tier: str, numbers: Numbers) -> npt.NDArray[np.int64]:
        """Numbers of the latest ticket of each."""
        column = self._columns[tier]
        try:
            return column[numbers]
        except IndexError:  # there are more places than before
            grown = np.zeros(max(2 * len(column), int(numbers.max()) + 1), np.int64)
            grown[: len(column)] = column
            self._columns[tier] = grown
            return grown[numbers]


class Lane:
    """Transfers of one tier in one direction, begun in their order, by ``threads`` threads: the
    next one is under way when one ends, as Python lies in between, which waits for the GIL.
    ``queue``: one with another order."""

    def __init__(self, name: str, threads: int, queue: Queue[Any] | None = None) -> None:
        self.name = name
        self.threads: list[threading.Thread] = []
        # While any transfer was under way: what was moved, and how long that took.
        self.moved_pages = 0
        self.moving_seconds = 0.0
        self._count = threads
        self._queue: Queue[Any] | SimpleQueue[Any] = SimpleQueue() if queue is None else queue
        self._clock = threading.Lock()
        self._busy = 0
        self._since = 0.0

    def add(self, transfer: Transfer | Shift, ticket: Ticket) -> None:
        if not self.threads:
            for _ in range(self._count):
                name = f"tensorpager-{self.name}"
                self.threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                self.threads[-1].start()
        self._queue.put((transfer, ticket))

    def stop(self) -> None:
        """What has not begun fails. Threads end when they have done what they are at."""
        while True:
            try:
                work = self._queue.get_nowait()
            except Empty:
                break
            if work is not None:
                work[1].end(PagerError("the Pager was closed"))
        for _ in self.threads:
            self._queue.put(None)

    def join(self, watch: IoWatch) -> None:
        """One that waits for a disk that does not answer is left behind: it ends when that does."""
        patience = Patience(watch)
        for thread in self.threads:
            try:
                while thread.is_alive():
                    thread.join(patience.tick_seconds)
                    patience.ticked()
            except HungDisk:
                continue
        self.threads.clear()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            transfer, ticket = work
            ticket.carry(partial(self._carry, transfer))
            del work, transfer, ticket

    def _carry(self, transfer: Transfer | Shift, after: Mark) -> Mark:
        with self._clock:
            if not self._busy:
                self._since = time.perf_counter()
            self._busy += 1
        try:
            return transfer.run(after)
        finally:
            with self._clock:
                self._busy -= 1
                self.moved_pages += len(transfer.pages)
                if not self._busy:
                    self.moving_seconds += time.perf_counter() - self._since
