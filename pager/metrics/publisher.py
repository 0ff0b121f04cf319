"""What a training says of itself while it runs, for ``tensorpager top`` and other readers.

The training thread publishes a record when an iteration ends, at most fifty a second; what plans
say is looked up only then. In between a thread publishes twice a second, so that readers see that
the training lives and what moves inside a long iteration. It reads counters without the pager's
lock, so figures of one record may be of slightly different instants.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from .format import (
    CHANNELS,
    COUNTERS,
    LOGGED,
    NAME_BYTES,
    RECENT,
    TIERS,
    TIMES,
    Record,
    Tier,
    encode,
)
from .outputs import Outputs
from .stats import counters, plan_figures

if TYPE_CHECKING:
    from ..api import Pager

PERIOD_SECONDS = 0.5
_LEAST_SECONDS = 0.02  # between records at the ends of iterations: short ones are not slowed down


class Metrics:
    """Of one pager. Without :meth:`open` nothing is published, and every call costs next to
    nothing."""

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self._outputs: Outputs | None = None
        self._lock = threading.RLock()  # a signal handler may close the pager inside publish()
        self._sequence = 0
        self._pid, self._script, self._device = 0, "", ""
        self._started_ns = time.time_ns()
        self._began_ns = self._published_ns = 0
        self._recent: tuple[float, ...] = ()  # seconds
        self._iterations_us = 0.0
        self._plan_us: dict[str, float | None] = dict.fromkeys(TIMES)
        self._logged: dict[str, float] = {}
        self._stop = threading.Event()
        self._finalizer: weakref.finalize[..., Metrics] | None = None

    # -- the program's side ----------------------------------------------------------------------
    def log(self, name: str, value: float) -> None:
        """Publish a number of the program's own, such as ``"loss"`` or ``"tokens_per_second"``.

        The latest value of each name counts. ``value`` may be a tensor of one element; one on CUDA
        is waited for. Does nothing where the Pager was made without ``metrics``. Raises
        ``ValueError`` for a name of more than 32 bytes, and for more than 16 names.
        """
        if self._outputs is None:
            return
        if not name or not name.isprintable() or len(name.encode()) > NAME_BYTES:
            raise ValueError(f"name={name!r} must be 1 to {NAME_BYTES} bytes of printable text")
        if name not in self._logged and len(self._logged) == LOGGED:
            raise ValueError(f"name={name!r} is one too many: {LOGGED} names can be logged")
        self._logged[name] = float(value)

    # -- the pager's side ------------------------------------------------------------------------
    def open(self, path: Path | None) -> None:
        """Begin to publish; also to the file ``path`` if one is given. Raises ``MetricsError``."""
        self._outputs = Outputs(path)
        self._pid, self._script, self._device = os.getpid(), _script(), str(self._pager.device)
        self._finalizer = weakref.finalize(self, self._outputs.close)  # also at exit
        self._stop = threading.Event()
        self.publish()
        thread = threading.Thread(
            target=_publish_now_and_then,
            args=(weakref.ref(self), self._stop),
            name="tensorpager-metrics",
            daemon=True,
        )
        thread.start()

    def begin(self) -> None:
        """An iteration begins."""
        if self._outputs is not None:
            self._began_ns = time.monotonic_ns()

    def end(self) -> None:
        """It is over, and all went well."""
        if self._outputs is None or not self._began_ns:
            return
        seconds = (time.monotonic_ns() - self._began_ns) / 1e9
        self._recent = (*self._recent, seconds)[-RECENT:]
        self._iterations_us += seconds * 1e6
        if time.monotonic_ns() - self._published_ns >= _LEAST_SECONDS * 1e9:
            self._plan_us = plan_figures(self._pager.follower)
            self.publish()

    def publish(self, *, closed: bool = False) -> None:
        """Write a record of this moment. Any thread may call it."""
        with self._lock:
            if self._outputs is not None:
                self._sequence += 1
                self._published_ns = time.monotonic_ns()
                self._outputs.write(encode(self._record(closed), self._sequence))

    def close(self) -> None:
        """Say that it is over, and leave nothing behind. Idempotent."""
        with self._lock:
            self.publish(closed=True)
            self._stop.set()
            self._outputs = None
            if self._finalizer is not None:
                self._finalizer()

    def forget(self) -> None:
        """In a forked child, which has the parent's descriptors and none of its threads."""
        if self._outputs is not None and self._finalizer is not None:
            self._finalizer.detach()
            self._outputs.forget()
        self._outputs = None
        self._lock = threading.RLock()

    def _record(self, closed: bool) -> Record:
        pager = self._pager
        found = {**counters(pager), "page_size": pager.page_size}
        recent = self._recent
        times = {
            **self._plan_us,
            "stall_us": found["stall_us"],
            "iterations_us": self._iterations_us,
            "iteration_us": recent[-1] * 1e6 if recent else None,
        }
        used, peak, budget = found["used_bytes"], found["peak_bytes"], found["budget_bytes"]
        return Record(
            pid=self._pid,
            script=self._script,
            device=self._device,
            mode=found["mode"],
            closed=closed,
            started_ns=self._started_ns,
            updated_ns=time.time_ns(),
            monotonic_ns=time.monotonic_ns(),
            began_ns=self._began_ns if pager._inside else 0,
            # What is on its way counts as used, and for the peak when it has arrived.
            tiers={n: Tier(used[n], max(used[n], peak[n]), budget[n]) for n in TIERS},
            channel_bytes={name: found["channel_bytes"][name] for name in CHANNELS},
            counters={name: found[name] for name in COUNTERS},
            times_us={name: times[name] for name in TIMES},
            recent_s=recent,
            logged=dict(self._logged),
        )


def _publish_now_and_then(reference: weakref.ref[Metrics], stop: threading.Event) -> None:
    """Ends with the pager: it is not kept alive by this."""
    while not stop.wait(PERIOD_SECONDS):
        metrics = reference()
        if metrics is None:
            return
        metrics.publish()
        del metrics


def _script() -> str:
    """What the user would call this program."""
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    return name if name not in ("", "-c", "-m") else os.path.basename(sys.executable)
