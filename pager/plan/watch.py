"""Who looks on while tensors are used: recorders of what an iteration accesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..memory.space import PageRun


class Watcher(Protocol):
    """Told of every use of paged tensors, in order, under the pager's lock; must be quick.

    An access is ``pinning``, then ``writing`` for each run that will be written, then ``unpinned``
    with the same runs. ``pinning`` comes before pages are waited for. Accesses can nest.
    """

    def pinning(self, runs: Sequence[PageRun]) -> None:
        """``runs`` are about to be used."""

    def writing(self, run: PageRun) -> None:
        """The bytes of ``run``, which is pinned, are about to change."""

    def unpinned(self, runs: Sequence[PageRun]) -> None:
        """The use of ``runs`` is over."""


class IterationListener(Protocol):
    """Told where iterations begin and end, in the thread that runs them: ``Pager.on_iteration``."""

    def begin(self) -> None:
        """An iteration begins: nothing of it has run yet."""

    def end(self, ok: bool) -> None:
        """It is over; ``ok``: without an exception."""
