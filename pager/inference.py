"""A model that is only read: ``pager.inference()``, and passes without gradients outside of it.

Nothing is metered, logged or planned. Dense memory (a cache that grows token by token, results)
takes from the arena what it asks for, inside the budget, in the middle of an op; weights stay on
the device or are read ahead (``plan/cycle.py``). Inputs of any size are one kind.
"""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING

import torch

from .iteration import Iteration, Running

if TYPE_CHECKING:
    from .core import Core


class Reading(Running):
    """What ``inference()`` has switched on."""

    def start(self) -> None:
        pager = self._pager
        pager.passes.stop()
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


class PlainPasses:
    """Of one pager: calls of paged models with gradients switched off (``torch.no_grad()``,
    ``torch.inference_mode()``) and no iteration around them. Each is to the budget and to weights
    what it would be inside of ``inference()``; between two, dense memory is not counted, as ever
    outside of iterations. What is known of the order, and the border, stay from one to the next
    until something else begins. In a training without iterations nothing is a pass.

    Where several threads call models at once, weights come when an op needs them: whose dense
    memory goes beyond the budget could not be told.
    """

    def __init__(self, pager: Core) -> None:
        self._pager = pager
        self._calls: dict[int, torch.nn.Module] = {}  # thread → the outermost call that runs there
        self._open = False  # one of these is a pass
        self._goes_on = False  # the border and the cycle are those of passes

    def enter(self, module: torch.nn.Module) -> None:
        """``module``, which is paged, is called."""
        pager, me = self._pager, threading.get_ident()
        if pager.inside:
            return
        other = torch.is_grad_enabled() or pager.stepping or pager.budget.stepped_outside
        if other or pager.fits:
            if self._goes_on:
                self.stop()
            return
        with pager.lock:
            outer = self._calls.get(me)
            if outer is not None and _is_running(outer, besides=module):
                return
            self._end()  # of a call that an interrupt has ended
            self._calls[me] = module
            if len(self._calls) == 1:
                self._begin()

    def leave(self, module: torch.nn.Module) -> None:
        """The call is over, or has raised."""
        me = threading.get_ident()
        if self._calls.get(me) is module:
            with self._pager.lock:
                del self._calls[me]
                self._end()

    def stop(self) -> None:
        """Something else begins: an iteration, inference, a training that has none."""
        with self._pager.lock:
            self._calls.pop(threading.get_ident(), None)
            self._end()
            if self._goes_on:
                self._goes_on = False
                self._pager.cycle.end()

    def _begin(self) -> None:
        pager = self._pager
        if self._goes_on:
            pager.budget.begin_inference(as_before=True)
        else:
            if pager.follower is not None:
                pager.follower.pause()
            with pager.quiet():
                pager.budget.begin_inference()
        self._open = self._goes_on = pager.inferring = True
        pager.cycle.begin()

    def _end(self) -> None:
        pager = self._pager
        if self._open:
            self._open = pager.inferring = False
            pager.cycle.rest()
            pager.budget.end_inference()


def _is_running(module: torch.nn.Module, *, besides: torch.nn.Module) -> bool:
    """Whether a call of ``module`` is under way in this thread, beside that of ``besides`` which
    begins now. (Of a call that Ctrl-C ends, PyTorch's hooks are not told.)"""
    calls = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals.get("self") is module:
            calls += 1
        frame = frame.f_back
    return calls > (module is besides)


_CALL = torch.nn.Module._call_impl.__code__
