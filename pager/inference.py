"""A model that is only read: ``pager.inference()``.

Nothing is metered, logged or planned. Dense memory (a cache that grows token by token, results)
takes from the arena what it asks for, inside the budget, in the middle of an op; weights stay on
the device or are read ahead (``plan/cycle.py``). Inputs of any size are one kind.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from .iteration import Iteration, Running


class Reading(Running):
    """What ``inference()`` has switched on."""

    def start(self) -> None:
        pager = self._pager
        pager.inside = pager.inferring = True
        with pager.lock:
            pager.turns.move_home()
            if pager.follower is not None:
                pager.follower.pause()
        self._no_grad = torch.no_grad()
        self._no_grad.__enter__()
        with pager.lock, pager.quiet():
            pager.budget.begin_inference()
        with pager.lock:
            pager.begin_guests()
            pager.cycle.begin()
        pager.opened.begin()

    def end(self) -> None:
        self._stop(ok=True)

    def cut(self, error: BaseException | None, how: str = "") -> None:
        """Nothing is dropped with it."""
        self._stop(ok=False)

    def _stop(self, *, ok: bool) -> None:
        pager = self._pager
        pager.running = None
        pager.inside = pager.inferring = False
        with ExitStack() as stack, pager.lock:  # the last one first
            stack.callback(self._no_grad.__exit__, None, None, None)
            stack.callback(pager.budget.end_inference)
            stack.callback(pager.cycle.end)
            stack.callback(pager.opened.end)
            stack.callback(pager.backend.limit_guests, None)


class Inference(Iteration):
    """What ``pager.inference()`` gives: a context manager, and ``begin()`` and ``end()``."""

    def _make_running(self) -> Reading:
        return Reading(self._pager, self._metrics, self)
