"""``OpLog``: the ops of an iteration, and which pages each one used.

Ops are seen by a dispatch mode (autograd takes it along to the threads that run backward on a GPU).
An op is what the dispatcher is asked for from outside; what it does inside is part of it. Uses of
pages outside of any op are ops of their own (``tensorpager::pack``, …), or, where pages are held
for longer (``tensor.pin()``, an optimizer's step on plain views), uses by the ops whose operands
lie in them.

While it runs everything is appended to lists, at some 5 µs an op; ``traces.py`` makes the trace of
them afterwards.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from ...planner.trace import Floats, Ints
from ..core import Core
from ..devices.dense_allocator import Account, AllocatorMeter, DenseAllocator, loaded
from ..devices.device import Device
from ..memory.space import Extent
from ..tensor.dispatcher import OpWatcher, hide_from_dynamo
from ..tensor.names import ModulePaths, named_parameters, named_runs
from ..tensor.op_info import describe
from ..tensor.paged_tensor import PagedTensor
from .access_log import Wait

# What an access outside of ops is called, by the kind of the pages.
FILLS = {
    "activation": "tensorpager::pack",
    "gradient": "tensorpager::page_gradient",
    "optimizer": "tensorpager::page_state",
    "parameter": "tensorpager::page_parameter",
}
FILL, PIN = "tensorpager::page", "tensorpager::pin"
_SAMPLE_US = 1.5  # that a look at dense memory may cost an op on average
_TRIALS = 5

# Where an op begins: its number, the OpOverload or a name, the moment, dense bytes then.
Mark = tuple[int, Any, Any, int]


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


class OpLog:
    """What was seen from ``start`` to ``stop``, which are called in one thread. Runs are kept
    alive, so that they can be told apart by identity.

    ``marks``: of ops in the order in which they were appended, which differs from theirs where
    several threads run ops. ``accesses``: (op, runs); ``writes``: (op, run); ``waits``: (op, what
    it waited); ``saved``: runs of saved tensors, and the module that ran; ``names``: of runs, as
    they were met; ``births``: runs born before. ``has_clock``: moments are the device's.
    """

    def __init__(self, pager: Core, *, has_clock: bool) -> None:
        self.marks: list[Mark] = []
        self.accesses: list[tuple[int, Sequence[Extent]]] = []
        self.writes: list[tuple[int, Extent]] = []
        self.waits: list[tuple[int, Wait]] = []
        self.saved: list[tuple[Extent, str]] = []
        self.names = list(named_runs(pager))
        self.births = pager.space.births
        self.levels = levels_of(pager.backend)
        self.here = _Here()
        self._pager = pager
        self._has_clock = has_clock
        self._now: Callable[[], Any] = pager.backend.stamp if has_clock else time.perf_counter
        self._modules = ModulePaths(pager)
        self._count = itertools.count()
        self._stack = ExitStack()
        self._written: dict[Any, frozenset[int | str]] = {}  # op → arguments that it writes

    def start(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._owners_of_gradients())
            stack.enter_context(self._modules.watching())
            stack.enter_context(self.levels.measuring())
            stack.enter_context(_Ops(self))
            self._stack = stack.pop_all()
        self.started = self.mark("")

    def stop(self) -> None:
        """Everything is as before the start."""
        self._stack.close()

    def seconds(self, before: Any, after: Any) -> float:
        """Between two moments."""
        between = self._pager.backend.elapsed(before, after) if self._has_clock else after - before
        return float(between)

    # -- marks -----------------------------------------------------------------------------------
    def mark(self, what: Any) -> Mark:
        """A moment at which no op begins."""
        return -1, what, self._now(), self.levels.sample()

    def begin(self, what: Any) -> int:
        op = next(self._count)
        self.marks.append((op, what, self._now(), self.levels.sample()))
        return op

    # -- uses of pages ---------------------------------------------------------------------------
    def pinning(self, runs: Sequence[Extent]) -> None:
        here = self.here
        if here.op >= 0:
            self.accesses.append((here.op, runs))
        else:
            here.open.append(_Open(runs))
            here.held_at.clear()

    def writing(self, run: Extent) -> None:
        here = self.here
        if here.op >= 0:
            self.writes.append((here.op, run))
            return
        for held in here.open:
            if run in held.members:
                held.written.add(run)

    def waited(self, wait: Wait) -> None:
        """In the op that runs, or in the one before, which lasts until the next one begins."""
        last = self.marks[-1][0] if self.marks else 0
        self.waits.append((self.here.op if self.here.op >= 0 else last, wait))

    def unpinned(self, runs: Sequence[Extent]) -> None:
        here = self.here
        if here.op < 0 and here.open:
            self._close(here, runs)

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
                op = self.begin(PIN)
                self.accesses.append((op, rest))
                self.writes += [(op, run) for run in rest if run in held.written]
            return

    @contextmanager
    def filling(self, run: Extent) -> Iterator[None]:
        """Values that the pager itself copies into new pages: an op each."""
        here = self.here
        if here.op >= 0:
            yield
            return
        here.op = self.begin(FILLS.get(run.kind, FILL))
        if run.kind == "activation":
            self.saved.append((run, self._modules.current))
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
        gradients = self.here.gradients
        self.names += [(run, f"{name}.grad") for run in gradients]
        gradients.clear()

    # -- ops -------------------------------------------------------------------------------------
    def use_held(self, op: int, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
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
        here = self.here
        place = tensor.data_ptr() - self._pager.backend.address
        if not 0 <= place < self._pager.reach_bytes:
            return
        run = here.held_at.get(place)
        if run is None:
            run = self._held_at(here, place)
            if run is None:
                return
            here.held_at[place] = run
        self.accesses.append((op, (run,)))
        if writes:
            self.writes.append((op, run))

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


class _Ops(OpWatcher):
    """Tells a log where ops begin and end."""

    def __init__(self, log: OpLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        log = self._log
        here = log.here
        if here.op >= 0:  # inside of a fill
            return func(*args, **kwargs)
        here.op = op = log.begin(func)
        try:
            if here.open:
                log.use_held(op, func, args, kwargs)
            return func(*args, **kwargs)
        finally:
            here.op = -1


hide_from_dynamo(_Ops.__torch_dispatch__)


# -- dense memory ----------------------------------------------------------------------------------
# How much there is beside the arena while each op runs. On the CPU from our own allocator, ops'
# temporaries included. Elsewhere, and where it could not be built, from a look at the device's
# count as ops begin: what an op makes and gives back is not seen.
class AllocatorLevels:
    """On the CPU, by an account of our allocator. ``sample()`` need not look."""

    source = "allocator"

    def __init__(self, allocator: DenseAllocator) -> None:
        self._meter = AllocatorMeter(Account(allocator))

    def sample(self) -> int:
        return 0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        self._meter.account.reset()
        self._meter.start()
        try:
            yield
        finally:
            self._meter.stop()
            self._meter.account.close()

    def levels(self, began: Floats, samples: Ints) -> Ints:
        """Most dense bytes while each op ran, [ops], on top of those at the start (so they may be
        negative). ``began``: when each op began, ``time.perf_counter``; ``samples``: what
        ``sample()`` gave then."""
        times, dense, _ = self._meter.timeline
        order = np.argsort(times, kind="stable")
        level = np.concatenate([[0], dense[order]]).astype(np.int64)  # after so many events
        at = np.searchsorted(times[order], began, "right")
        inside = np.maximum.reduceat(level, at)
        after = level[np.append(at[1:], len(level) - 1)]
        most: Ints = np.maximum(inside, after)
        return most


class SampledLevels:
    """By the device's count. Asking for it takes some microseconds, so only every few ops do."""

    source = "samples"

    def __init__(self, backend: Device) -> None:
        self._allocated = backend.dense_now
        self._in_ram = backend.host_addressable
        self._before = self._last = 0
        self._every = 1
        self._ops = 0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        start = time.perf_counter()
        for _ in range(_TRIALS):
            self._last = self._allocated()
        cost_us = (time.perf_counter() - start) / _TRIALS * 1e6
        self._every = max(1, math.ceil(cost_us / _SAMPLE_US))
        # In RAM there is more than tensors; on an accelerator all that was there counts.
        self._before = self._last if self._in_ram else 0
        yield

    def sample(self) -> int:
        self._ops += 1
        if self._ops % self._every == 0:
            self._last = self._allocated()
        return self._last - self._before

    def levels(self, began: Floats, samples: Ints) -> Ints:
        """As :class:`AllocatorLevels`. What an op leaves is seen as a later one begins."""
        return np.maximum(samples, np.append(samples[1:], samples[-1:]))


Levels = AllocatorLevels | SampledLevels


def levels_of(backend: Device) -> Levels:
    allocator = loaded() if backend.host_addressable else None
    return SampledLevels(backend) if allocator is None else AllocatorLevels(allocator)
