"""What a training says of itself while it runs, for ``tensorpager top`` and other readers.

The training thread publishes a snapshot when an iteration ends, at most fifty a second; what plans
say is looked up only then. In between a thread publishes twice a second, so that readers see that
the training lives and what moves inside a long iteration. It reads counters without the pager's
lock, so figures of one snapshot may be of slightly different instants.

Note: why nothing is left behind
--------------------------------
A snapshot is JSON in a ``memfd`` of mode 0600. It is in no folder, and however the process ends, it
is gone. Each is written into a fresh one, which then takes the place of the last under the same
descriptor (``dup2``), so a reader that opens that descriptor sees a whole one.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

from ..core import Core
from ..plan.follower import Follower
from .reader import LINK, NAME, TIMES, VERSION, MetricsError
from .stats import counters, plan_figures

PERIOD_SECONDS = 0.5
RECENT = 60  # iteration times kept
_LEAST_SECONDS = 0.02  # between snapshots at the ends of iterations: short ones are not slowed down


class Metrics:
    """Of one pager. Without :meth:`open` nothing is published, and every call costs next to
    nothing."""

    def __init__(self, pager: Core, follower: Follower | None = None) -> None:
        self._pager, self._follower = pager, follower
        self._fd: int | None = None
        self._lock = threading.RLock()  # a signal handler may close the pager inside publish()
        self._started = time.time()
        self._began = self._published = 0.0
        self._recent_us: list[float] = []
        self._iterations_us = 0.0
        self._plan_us: dict[str, float | None] = dict.fromkeys(TIMES)
        self._logged: dict[str, float] = {}
        self._stop = threading.Event()
        self._finalizer: weakref.finalize[..., Metrics] | None = None

    def log(self, name: str, value: float) -> None:
        """Publish a number of the program's own, such as ``"loss"`` or ``"tokens_per_second"``.

        The latest value of each name counts. ``value`` may be a tensor of one element; one on CUDA
        is waited for. Does nothing where the Pager was made without ``metrics``. Raises
        ``ValueError`` for a name that is not printable text.
        """
        if self._fd is None:
            return
        if not name or not name.isprintable():
            raise ValueError(f"name={name!r} must be printable text")
        self._logged[name] = float(value)

    def open(self) -> None:
        """Begin to publish. Raises ``MetricsError`` where the system cannot."""
        if not hasattr(os, "memfd_create"):
            raise MetricsError("metrics need memfd_create, which only Linux has; use metrics=None")
        self._fd = _memory(b"")
        self._finalizer = weakref.finalize(self, os.close, self._fd)
        self._finalizer.atexit = False  # the process's end closes it, when nobody writes any more
        self._stop = threading.Event()
        self.publish()
        thread = threading.Thread(
            target=_publish_now_and_then,
            args=(weakref.ref(self), self._stop),
            name=NAME,
            daemon=True,
        )
        thread.start()

    def begin(self) -> None:
        """An iteration begins."""
        if self._fd is not None:
            self._began = time.monotonic()

    def end(self) -> None:
        """It is over, and all went well."""
        if self._fd is None or not self._began:
            return
        us = (time.monotonic() - self._began) * 1e6
        self._recent_us = [*self._recent_us, us][-RECENT:]
        self._iterations_us += us
        if time.monotonic() - self._published >= _LEAST_SECONDS:
            self._plan_us |= plan_figures(self._follower)
            self.publish()

    def publish(self) -> None:
        """Write a snapshot of this moment. Any thread may call it."""
        with self._lock:
            if self._fd is None:
                return
            self._published = time.monotonic()
            fresh = _memory(json.dumps(self._snapshot()).encode())
            if self._fd is not None:  # unless a signal handler has closed it
                os.dup2(fresh, self._fd, inheritable=False)
            os.close(fresh)

    def close(self) -> None:
        """Leave nothing behind. Idempotent."""
        with self._lock:
            self._stop.set()
            self._fd = None
            if self._finalizer is not None:
                self._finalizer()

    def forget(self) -> None:
        """In a forked child, which has the parent's descriptors and none of its threads."""
        self._lock = threading.RLock()  # the other may be held by a thread that is not here
        if self._fd is None or self._finalizer is None:
            return
        self._finalizer.detach()
        self._fd = None
        for name in os.listdir("/proc/self/fd"):  # also one that was about to take its place
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}") == LINK:
                    os.close(int(name))

    def _snapshot(self) -> dict[str, Any]:
        """As ``reader.checked`` wants it."""
        pager, recent = self._pager, self._recent_us
        found = counters(pager, self._follower)
        # What is on its way counts as used, and for the peak when it has arrived.
        used, peak = found["used_bytes"], found["peak_bytes"]
        return {
            **self._plan_us,
            **found,
            "peak_bytes": {tier: max(used[tier], nbytes) for tier, nbytes in peak.items()},
            "iterations_us": self._iterations_us,
            "iteration_us": recent[-1] if recent else None,
            "recent_iteration_us": recent,
            "version": VERSION,
            "script": _script(),
            "device": str(pager.device),
            "page_size": pager.page_size,
            "started": self._started,
            "updated": time.time(),
            "clock": time.monotonic(),
            "began": self._began if pager.inside else 0,
            "logged": dict(self._logged),
        }


def _memory(data: bytes) -> int:
    """A descriptor of memory that holds ``data``."""
    cloexec, noexec_seal = 1, 8
    try:
        fd = os.memfd_create(NAME, cloexec | noexec_seal)
    except OSError:  # before Linux 6.3 there is no such flag
        fd = os.memfd_create(NAME, cloexec)
    os.fchmod(fd, 0o600)
    os.write(fd, data)
    return fd


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
