"""Threads that share one pager: whose pins are whose, and who waits for whom.

One thread is *at home*: the one whose iteration runs or ran last, at first the one that made the
pager. Threads that autograd has for its backward passes are its family: it waits for them. The pins
of these are not listed, so that training pays one comparison an op. Those of all others are: what
is pinned and not listed is the family's.

An op whose pages would fit were it not for what others have pinned is *crowded*: it lets go of
everything it has begun to pin and waits until somebody unpins. Those that wait are served in the
order in which they came, and an op of a thread that holds nothing begins behind them, so an op that
needs every frame runs alone when its turn comes::

    thread 1   | 2 pages | 2 pages |            waits | 2 pages | ...
    thread 2       | 2 pages |                  waits | 2 pages | ...
    thread 3         waits ........ | all frames |

Who holds pins already goes before everybody, as only its end gives frames back. If all who hold
pins wait, nobody would ever go on: the last one to come is refused.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import torch

from ..errors import PagerError
from .frame_pool import Numbers
from .space import Extent

_TICK_SECONDS = 0.1  # pins of open weights end without a word
_PATIENCE_SECONDS = 60.0  # without anybody unpinning
_PATIENCE_ALONE_SECONDS = 5.0

ResultT = TypeVar("ResultT")
Pin = tuple[Extent, Numbers | None]  # of these pages by themselves, or of the whole run


class Crowded(Exception):  # noqa: N818 - a state, and never the user's
    """There are frames enough for this op, but others have pinned too many of them.

    ``refusal``: the error that says so, where waiting does not help.
    """

    def __init__(self, refusal: PagerError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class Turns:
    """Of one pager. Called with its lock held, but for :meth:`is_home`. ``runs``: all its runs.

    ``home``: the thread that is at home; ``family``: it, and those of its family that have been
    seen. ``queue``: threads that wait for frames, in the order in which they came; the family is
    one.
    """

    def __init__(self, lock: threading.RLock, runs: Mapping[int, Extent]) -> None:
        self.home = threading.get_ident()
        self.family = {self.home}
        self.queue: deque[int] = deque()
        self.lock = lock
        self._changed = threading.Condition(lock)
        self._runs = runs
        self._listed: dict[int, list[Pin]] = {}
        self._since = 0.0  # when anybody unpinned

    # -- whose -----------------------------------------------------------------------------------
    def is_home(self) -> bool:
        """Whether this thread is at home, or is one that autograd has for its backward passes."""
        me = threading.get_ident()
        if me not in self.family:
            if not _is_autograds_own():
                return False
            self.family.add(me)  # it is nothing else
        return True

    def _me(self) -> int:
        return self.home if self.is_home() else threading.get_ident()

    def move_home(self) -> None:
        """This thread is at home from now on."""
        me = threading.get_ident()
        if me == self.home:
            return
        theirs = self._not_listed()
        if theirs:
            self._listed.setdefault(self.home, []).extend(theirs)
        self._listed.pop(me, None)
        self.home, self.family = me, {me}

    def took(self, pins: Iterable[Pin]) -> None:
        """This thread, which is not at home, is about to pin these."""
        self._listed.setdefault(threading.get_ident(), []).extend(pins)

    def left(self, pins: Iterable[Pin]) -> None:
        """What this thread, which is not at home, has unpinned, or did not come to pin. (What a
        generator has pinned may be unpinned by another thread, which closes it.)"""
        me = threading.get_ident()
        for run, pages in pins:
            for ident in (me, *self._listed):
                if self._strike(ident, run, pages):
                    break
        self.unpinned()

    def _strike(self, ident: int, run: Extent, pages: Numbers | None) -> bool:
        listed = self._listed.get(ident, [])
        for index, pin in enumerate(listed):
            if pin[0] is run and pin[1] is pages:
                del listed[index]
                if not listed:
                    del self._listed[ident]
                return True
        return False

    def unpinned(self) -> None:
        """Frames may be had that were not before."""
        if self.queue:
            self._since = time.monotonic()
            self._changed.notify_all()

    def _not_listed(self) -> list[Pin]:
        """The family's pins."""
        every = [pin for listed in self._listed.values() for pin in listed]
        whole = Counter(run for run, pages in every if pages is None)
        parts = {id(pages) for _, pages in every}
        found: list[Pin] = []
        for run in self._runs.values():
            found += [(run, None)] * (run.pins - whole[run])
            found += [(run, pages) for pages in run.parts or () if id(pages) not in parts]
        return found

    def mine(self) -> Sequence[Pin] | None:
        """What this thread has pinned; ``None`` if nobody else has pinned anything."""
        if self.is_home():
            return self._not_listed() if self._listed else None
        return self._listed.get(threading.get_ident(), ())

    # -- taking turns ----------------------------------------------------------------------------
    def take(
        self, attempt: Callable[[], ResultT], *, patience_seconds: float = _PATIENCE_SECONDS
    ) -> ResultT:
        """What ``attempt`` gives, which pins; again and again while it is ``Crowded``, and not
        before those that came earlier. Raises the refusal where nobody is left who would give
        frames back, or nobody did for that long, and what ``attempt`` raises."""
        try:
            while True:
                crowded = None
                if not self._must_queue():
                    try:
                        return attempt()
                    except Crowded as error:
                        crowded = error
                self._wait(crowded, patience_seconds)
        finally:
            if self.queue:
                self._leave()

    def alone(self) -> None:
        """Wait until no thread but the home one, which asks, has anything pinned: for some
        seconds, as a thread may keep it for as long as the user likes."""

        def attempt() -> None:
            if self._listed:
                raise Crowded(PagerError("another thread has pages pinned"))

        with suppress(PagerError):
            self.take(attempt, patience_seconds=_PATIENCE_ALONE_SECONDS)

    def _must_queue(self) -> bool:
        """Whether others came before, and this thread holds nothing that they may wait for."""
        me = self._me()
        if not self.queue or self.queue[0] == me or me in self._listed:
            return False
        return me != self.home or not self._not_listed()

    def _wait(self, crowded: Crowded | None, patience_seconds: float) -> None:
        me = self._me()
        if me not in self.queue:
            if not self.queue:
                self._since = time.monotonic()
            self.queue.append(me)
        if crowded is not None:
            holders = set(self._listed)
            if self._not_listed():
                holders.add(self.home)
            late = time.monotonic() > self._since + patience_seconds
            if late or not holders - set(self.queue):
                raise crowded.refusal from None
        self._changed.wait(_TICK_SECONDS)

    def pause(self) -> None:
        """Let others have the lock for a moment."""
        self._changed.wait(_TICK_SECONDS)

    def _leave(self) -> None:
        me = self._me()
        if me in self.queue:
            self.queue.remove(me)
            self._changed.notify_all()


def _is_autograds_own() -> bool:
    """Whether this is a thread that autograd has made, at work in a backward pass."""
    if torch._C._current_graph_task_id() == -1:
        return False
    return isinstance(threading.current_thread(), threading._DummyThread)
