"""``Recorder``: writes down what an iteration does while it runs.

Two things are watched: ops, by a dispatch mode (autograd takes it along to the threads that run
backward on a GPU), and uses of pages, by ``Core.watch``. An op is what the dispatcher is asked for
from outside; what it does inside is part of it. Uses of pages outside of any op are ops of their
own (``tensorpager::pack``, …), or, where pages are held for longer (``tensor.pin()``, an
optimizer's step on plain views), uses by the ops whose operands lie in them.

While it runs everything is appended to lists, at some 5 µs an op; ``recording.py`` makes the trace
of them afterwards.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..budget.dense_levels import levels_of
from ..errors import PagerError
from ..memory.space import Extent
from ..tensor.dispatcher import hide_from_dynamo
from ..tensor.names import ModulePaths, named_parameters, named_runs
from ..tensor.op_info import describe
from ..tensor.paged_tensor import PagedTensor
from .op_clock import clock_of
from .recording import Log, Mark, make_trace

if TYPE_CHECKING:
    from ...planner.trace import Trace
    from ..core import Core, Watcher

# What an access outside of ops is called, by the kind of the pages.
FILLS = {
    "activation": "tensorpager::pack",
    "gradient": "tensorpager::page_gradient",
    "optimizer": "tensorpager::page_state",
    "parameter": "tensorpager::page_parameter",
}
FILL, PIN = "tensorpager::page", "tensorpager::pin"

_recorded: weakref.WeakSet[Core] = weakref.WeakSet()


class _Open:
    """Runs that are held outside of any op, and which of them ops have used."""

    __slots__ = ("members", "runs", "used", "written")

    def __init__(self, runs: Sequence[Extent]) -> None:
        self.runs = list(runs)
        self.members = set(runs)
        self.used: set[Extent] = set()
        self.written: set[Extent] = set()


class _Here(threading.local):
    """What is going on in this thread: ``op`` is the number of the op that runs, or −1."""

    op = -1

    def __init__(self) -> None:
        self.open: list[_Open] = []
        self.held_at: dict[int, Extent] = {}  # by place in the arena, in bytes
        self.gradients: list[Extent] = []  # just paged, of a parameter not known yet


class Recorder:
    """Records from :meth:`start` to :meth:`finish`, which are called in one thread and outside of
    backward. Can be started again afterwards."""

    def __init__(self, pager: Core) -> None:
        self._pager = pager
        self._clock = clock_of(pager)
        self._now = self._clock.now
        self._here = _Here()
        self._stack = ExitStack()
        self._levels = levels_of(pager.backend)
        self._forward: Watcher | None = None
        self._written: dict[Any, frozenset[int | str]] = {}  # op → arguments that it writes

    def start(self) -> None:
        """Begin. Raises ``PagerError`` if this pager is being recorded already."""
        pager = self._pager
        pager.check_open()
        if pager in _recorded:
            raise PagerError(
                "this Pager is being recorded already; end that recording first (one record() at "
                "a time)"
            )
        self._log = Log()
        self._marks: list[tuple[int, Any, Any, float, int]] = []
        self._count = itertools.count()
        self._here = _Here()
        self._levels = levels_of(pager.backend)
        with pager.lock:
            pager.residency.collect()
            self._log.before = list(pager.space.runs.values())
        self._log.names = list(named_runs(pager))
        self._modules = ModulePaths(pager)
        with ExitStack() as stack:
            _recorded.add(pager)
            stack.callback(_recorded.discard, pager)
            stack.enter_context(self._owners_of_gradients())
            stack.enter_context(self._modules.watching())
            stack.enter_context(self._levels.measuring())
            stack.enter_context(self._clock.running(self._running))
            stack.enter_context(self._watching())
            stack.enter_context(_Ops(self))
            self._stack = stack.pop_all()
        self._started = self._mark("")

    def finish(self) -> Trace:
        """Stop, and the trace of what ran since :meth:`start`. Raises ``PagerError`` if nothing
        did."""
        ended = self._mark("")
        self.abandon()
        self._clock.finish()
        if not self._marks:
            raise PagerError("nothing ran while it was recorded: no PyTorch op, no page used")
        self._log.marks = sorted(itertools.starmap(Mark, self._marks), key=lambda mark: mark.op)
        return make_trace(self._pager, self._log, self._clock, self._levels, (self._started, ended))

    def abandon(self) -> None:
        """Stop, if it runs; the log is of no use then. Everything is as before the start."""
        self._stack.close()

    # -- marks -----------------------------------------------------------------------------------
    def _mark(self, what: Any) -> Mark:
        return Mark(-1, what, self._now(), self._pager.stall_us, self._levels.sample())

    def _begin(self, what: Any) -> int:
        op = next(self._count)
        # A plain tuple costs a third of a Mark, which finish() makes of it.
        mark = (op, what, self._now(), self._pager.stall_us, self._levels.sample())
        self._marks.append(mark)
        return op

    def _running(self) -> int:
        here = self._here
        marks = self._marks
        return here.op if here.op >= 0 or not marks else marks[-1][0]

    # -- uses of pages ---------------------------------------------------------------------------
    @contextmanager
    def _watching(self) -> Iterator[None]:
        pager = self._pager
        self._forward = pager.watch
        pager.watch = self
        try:
            yield
        finally:
            if pager.watch is self:
                pager.watch = self._forward

    def pinning(self, runs: Sequence[Extent]) -> None:
        here = self._here
        if here.op >= 0:
            self._log.accesses.append((here.op, runs))
        else:
            here.open.append(_Open(runs))
            here.held_at.clear()
        if self._forward is not None:
            self._forward.pinning(runs)

    def writing(self, run: Extent) -> None:
        here = self._here
        if here.op >= 0:
            self._log.writes.append((here.op, run))
        else:
            for held in here.open:
                if run in held.members:
                    held.written.add(run)
        if self._forward is not None:
            self._forward.writing(run)

    def unpinned(self, runs: Sequence[Extent]) -> None:
        here = self._here
        if here.op < 0 and here.open:
            self._close(here, runs)
        if self._forward is not None:
            self._forward.unpinned(runs)

    def _close(self, here: _Here, runs: Sequence[Extent]) -> None:
        """The end of what was held. What was opened later and is still there failed to pin."""
        wanted = list(runs)
        for index in reversed(range(len(here.open))):
            held = here.open[index]
            if held.runs != wanted:
                continue
            del here.open[index:]
            here.held_at.clear()
            rest = [run for run in held.runs if run not in held.used]
            if rest:
                op = self._begin(PIN)
                self._log.accesses.append((op, rest))
                self._log.writes += [(op, run) for run in rest if run in held.written]
            return

    @contextmanager
    def filling(self, run: Extent) -> Iterator[None]:
        """Values that the pager itself copies into new pages: an op each."""
        here = self._here
        if here.op >= 0:
            yield
            return
        here.op = self._begin(FILLS.get(run.kind, FILL))
        if run.kind == "activation":
            self._log.saved.append((run, self._modules.current))
        elif run.kind == "gradient":
            here.gradients.append(run)
        try:
            yield
        finally:
            here.op = -1

    @contextmanager
    def _owners_of_gradients(self) -> Iterator[None]:
        """Know whose gradient was paged: hooks that run after the pager's own."""
        with ExitStack() as stack:
            for name, parameter in named_parameters(self._pager):
                if type(parameter) is PagedTensor and parameter.requires_grad and parameter.is_leaf:
                    hook = partial(self._accumulated, name)
                    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                    stack.callback(handle.remove)
            yield

    def _accumulated(self, name: str, parameter: torch.Tensor) -> None:
        gradients = self._here.gradients
        self._log.names += [(run, f"{name}.grad") for run in gradients]
        gradients.clear()

    # -- ops -------------------------------------------------------------------------------------
    def _use_held(self, op: int, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """``func`` runs while pages are held: those that its operands lie in are its own."""
        writes = self._written.get(func)
        if writes is None:
            info = describe(func) if hasattr(func, "_schema") else None
            writes = frozenset((*info.writes, *info.writes_named) if info is not None else ())
            self._written[func] = writes
        for place, value in (*enumerate(args), *kwargs.items()):
            if type(value) is torch.Tensor:
                self._use_at(op, value, place in writes)
            elif isinstance(value, list | tuple):
                for tensor in value:
                    if type(tensor) is torch.Tensor:
                        self._use_at(op, tensor, place in writes)

    def _use_at(self, op: int, tensor: torch.Tensor, writes: bool) -> None:
        """Op ``op`` uses a plain tensor, which may lie in frames that are held."""
        if tensor.layout is not torch.strided:
            return
        here = self._here
        place = tensor.data_ptr() - self._pager.backend.address
        if not 0 <= place < self._pager.reach_bytes:
            return
        run = here.held_at.get(place)
        if run is None:
            run = self._held_at(here, place)
            if run is None:
                return
            here.held_at[place] = run
        self._log.accesses.append((op, (run,)))
        if writes:
            self._log.writes.append((op, run))

    def _held_at(self, here: _Here, place: int) -> Extent | None:
        """The run whose frames are at byte ``place`` of the arena, if it is held. It stays there
        until it is let go."""
        pager = self._pager
        frame, frames = place // pager.page_size, pager.table.frame_page
        page = int(frames[frame]) if frame < len(frames) else -1
        run = pager.space.runs.get(int(pager.table.owner[page])) if page >= 0 else None
        if run is None or run.base < 0:
            return None
        holding = [held for held in here.open if run in held.members]
        for held in holding:
            held.used.add(run)
        return run if holding else None


class _Ops(TorchDispatchMode):
    """Tells a recorder where ops begin and end."""

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # its wrapper would cost more than the rest; see hide_from_dynamo below

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code stays compiled: the same bits as without a recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        recorder = self._recorder
        here = recorder._here
        if here.op >= 0:  # inside of a fill
            return func(*args, **kwargs)
        here.op = op = recorder._begin(func)
        try:
            if here.open:
                recorder._use_held(op, func, args, kwargs)
            return func(*args, **kwargs)
        finally:
            here.op = -1


hide_from_dynamo(_Ops.__torch_dispatch__)
