"""What the disk is at, and since when: retries of what fails for a moment, and an end to waiting.

Note: a disk that does not answer
---------------------------------
A read or write that never returns cannot be called back, and goes on using its buffers. So whoever
waits for the disk waits in small steps. When one single call has not returned for ``io_timeout``
seconds the wait ends with ``HungDisk``, which says what is under way. A slow disk is not a hung
one: each call moves 2 MiB at most, and calls that follow each other may take as long as they do.

From then on everything that would move pages is refused at once. Nothing is given up: frames and
slots of the call stay taken, and its memory mapped (even after ``close``), until it returns; then
all goes on as if nothing had been. A process that was stopped and continued (SIGSTOP, a suspended
laptop) has not waited: steps count as what they were meant to last.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import HungDisk
from .engine import Engine

RETRY_PAUSES_SECONDS = (0.01, 0.1, 0.5)
"""Before each further try of a call that failed for what may be a moment."""

_MAY_PASS = {
    errno.EIO, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ENOMEM, errno.ENOBUFS,
    errno.ETIMEDOUT, errno.EREMOTEIO, errno.ESTALE,
}  # fmt: skip
_TICK_SECONDS = 0.5
_MOST_TOLD = 8  # calls that a report names


def check_timeout(seconds: float) -> float:
    """``io_timeout`` as a user gave it. Raises ``ValueError``."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(
            f"io_timeout={seconds!r} is not a time; give seconds above 0, or float('inf') for never"
        )
    return float(seconds)


@dataclass(frozen=True)
class Call:
    """One call of the engine that is under way. Time as ``time.monotonic`` has it."""

    verb: str
    offset: int
    nbytes: int
    began: float


class IoWatch:
    """The calls of one disk tier. Any thread.

    ``timeout_seconds``: what one call may take; ``inf`` for any time. ``retries``: calls that were
    tried again. ``tell``: what the bytes ``(offset, nbytes)`` of the file are, for reports.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.retries = 0
        self.tell: Callable[[int, int], str] = lambda offset, nbytes: f"{nbytes} bytes at {offset}"
        self._calls: dict[int, Call] = {}
        self._hung: set[int] = set()
        self._next = 0
        self._lock = threading.Lock()

    @contextmanager
    def calling(self, verb: str, offset: int, nbytes: int) -> Iterator[None]:
        """Inside, the engine is at work."""
        with self._lock:
            self._next += 1
            number = self._next
            self._calls[number] = Call(verb, offset, nbytes, time.monotonic())
        try:
            yield
        finally:
            with self._lock:
                del self._calls[number]
                self._hung.discard(number)

    @property
    def calls(self) -> list[Call]:
        """Under way, oldest first."""
        with self._lock:
            return list(self._calls.values())

    def again(self) -> None:
        with self._lock:
            self.retries += 1

    # -- waiting ---------------------------------------------------------------------------------
    def refuse_if_hung(self) -> None:
        """Raises ``HungDisk``, at once, while a call that was given up has not returned."""
        if self._hung:
            raise HungDisk(
                f"the disk still does not answer: {self._report()}. Nothing is lost; this can be "
                "tried again when the disk is back"
            )

    def wait(self, future: Future[None]) -> None:
        """``future.result()``. Raises ``HungDisk`` if the disk does not answer; the future may end
        later then, and uses its buffers until it does."""
        self.wait_for_end(future)
        future.result()

    def wait_for_end(self, future: Future[None]) -> None:
        """The same for one whose result is not wanted."""
        patience = Patience(self)
        while True:
            try:
                future.exception(patience.tick_seconds)
                return
            except TimeoutError:
                patience.ticked()

    def wait_until_idle(self) -> bool:
        """Until no call is under way; ``False`` if one is that does not return."""
        patience = Patience(self)
        try:
            while self._calls:
                self.refuse_if_hung()
                time.sleep(min(0.01, patience.tick_seconds))
                patience.ticked()
        except HungDisk:
            return False
        return True

    def give_up(self) -> HungDisk:
        """The calls under way for too long are given up; the error that reports them, once."""
        report = self._report()
        oldest = time.monotonic() - self.timeout_seconds
        with self._lock:
            self._hung.update(n for n, call in self._calls.items() if call.began <= oldest)
        return HungDisk(
            f"the disk does not answer: {report} (io_timeout={self.timeout_seconds:g} s). All "
            "pages are where they were and nothing is lost; look at the drive or mount (dmesg), "
            "and go on, or save pager.state_dict(), when it is back"
        )

    def _report(self) -> str:
        now, calls = time.monotonic(), self.calls
        told = [
            f"{call.verb} of {self.tell(call.offset, call.nbytes)} for {now - call.began:.3g} s"
            for call in calls[:_MOST_TOLD]
        ]
        more = len(calls) - len(told)
        return "; ".join(told) + (f"; and {more} more" if more else "")


class Patience:
    """Of one wait: whoever waits says each time that a step of it has ended."""

    def __init__(self, watch: IoWatch) -> None:
        self._watch = watch
        self.tick_seconds = min(_TICK_SECONDS, watch.timeout_seconds / 4)
        self._waited = 0.0
        self._last = time.monotonic()

    def ticked(self) -> None:
        """Raises ``HungDisk`` if one call has been under way for too long, seen from here."""
        now = time.monotonic()
        self._waited += min(now - self._last, 2 * self.tick_seconds)
        self._last = now
        watch = self._watch
        watch.refuse_if_hung()
        if self._waited < watch.timeout_seconds:
            return
        calls = watch.calls
        if calls and now - calls[0].began >= watch.timeout_seconds:
            raise watch.give_up()


class WatchedEngine:
    """Puts an :class:`IoWatch` around an engine, and tries again what may have failed for a moment.

    Implements :class:`~.io_engine.Engine`. ``inner`` may be replaced (tests put faults there).
    """

    def __init__(self, inner: Engine, watch: IoWatch) -> None:
        self.name, self.direct, self.takes_device = inner.name, inner.direct, inner.takes_device
        self.inner = inner
        self.watch = watch

    def write(self, buffers: Sequence[Any], offset: int) -> None:
        self._call("write", buffers, offset)

    def read(self, buffers: Sequence[Any], offset: int) -> None:
        self._call("read", buffers, offset)

    def close(self) -> None:
        self.inner.close()

    def _call(self, verb: str, buffers: Sequence[Any], offset: int) -> None:
        nbytes = sum(buffer.nbytes for buffer in buffers)
        for pause in (*RETRY_PAUSES_SECONDS, None):
            try:
                with self.watch.calling(verb, offset, nbytes):
                    getattr(self.inner, verb)(buffers, offset)
                return
            except OSError as error:
                if pause is None or error.errno not in _MAY_PASS:
                    raise
            self.watch.again()
            time.sleep(pause)
