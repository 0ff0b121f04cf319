"""What the rooms above need of a pager: where pages are, and how they are used.

::

    ops, slabs, steps, checkpoints          who use pages
              | hold
              v
            Core ------------------------>  who look on: the log, a plan's follower, a recorder
              |
              v
    page table, moves, budget               what they are made of
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import Lock, RLock, get_ident
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..kernels.copies import gather_pages, scatter_pages
from ..planner.sizes import parse_bytes
from .budget.arguments import Arguments
from .budget.budget import DeviceBudget
from .devices.choice import make_device
from .disk.tier import DiskTier
from .disk.watch import IoWatch, WatchedEngine
from .disk.wear import Wear
from .errors import InfeasibleBudget, PagerError, TierFull
from .machine.ranks import share_of
from .memory.frame_pool import FramePool, Numbers
from .memory.host import HostTier
from .memory.page_table import PageTable
from .memory.space import Extent, Part, Space
from .memory.turns import Turns
from .memory.untyped import PagedUntypedStorage
from .moves.mover import Mover
from .moves.residency import Residency

_MAX_REACH = 1 << 45  # bytes of address space; no page of it costs memory before it is used

_left_to_others: list[Core] = []  # closed, and plain tensors still lie in their arenas
_closing = Lock()
_left_to_the_disk: list[tuple[object, ...]] = []  # tiers of cores closed while it did not answer


class Watcher:
    """Told of every use of paged tensors, in order, under the lock; must be quick. While an
    iteration runs other threads' uses are none of its, and it is not told of them.

    An access is ``pinning``, then ``writing`` for each run that will be written, then ``unpinned``
    with the same runs. ``pinning`` comes before pages are waited for. Accesses can nest. What a
    watcher does not want to know it leaves as it is here.
    """

    sees_ends = False  # whether it wants `unpinned`

    def pinning(self, runs: Sequence[Extent]) -> None:
        """``runs`` are about to be used."""

    def together(self, run: Extent) -> list[Extent]:
        """What the access that comes next uses, if ``run`` is among it; else ``run``."""
        return [run]

    def joining(self, runs: Sequence[Extent]) -> bool:
        """The access that began last uses ``runs`` too; whether it can be so: otherwise their use
        is an access by itself."""
        return True

    def writing(self, run: Extent) -> None:
        """The bytes of ``run``, which is pinned, are about to change."""

    def unpinned(self, runs: Sequence[Extent]) -> None:
        """The use of ``runs`` is over."""

    def step(self, runs: Sequence[Extent], *, hosted: bool) -> None:
        """The next access is an optimizer's step on ``runs`` that the host could take. ``hosted``:
        it takes it: the access, of pages in host memory, begins now."""

    def collective(self, what: str) -> None:
        """An access of no pages: ranks meet in ``what`` ("gather", "reduce"), or, if that is empty,
        have met."""

    def filling(self, run: Extent) -> AbstractContextManager[None]:
        """Inside, values are copied into new pages of ``run``, by no op of the program."""
        return nullcontext()

    def wait_begins(self) -> Any:
        """Pages may have to be waited for; what it gives is for ``waited``."""

    def waited(self, seconds: float, began: Any, *, own: bool) -> None:
        """The access that began last has waited; ``own``: a stream, for pages of its slabs."""

    def stream_begins(self, runs: Sequence[Extent], write: Sequence[bool], frames: int) -> Any:
        """An access by itself, until ``stream_ended``: a stream through ``runs`` that fills
        ``frames`` at once. ``None`` where that is of no interest."""

    def stream_ended(self, access: Any) -> None:
        """``access``: what ``stream_begins`` gave."""


class IterationListener(Protocol):
    """Told where iterations begin and end, in the thread that runs them: ``Core.on_iteration``."""

    def begin(self) -> None:
        """An iteration begins: nothing of it has run yet."""

    def end(self, ok: bool) -> None:
        """It is over; ``ok``: without an exception."""


# What rooms above give a Core to hold; rooms between them and this one ask it for no more.
class Opened(Protocol):
    """Weights that are open as plain tensors (``open_weights.py``). ``as_before``: those of the
    iteration before. ``lent_memory``: storages of those that stand for parameters in compiled code
    that runs."""

    native: bool
    as_before: bool
    lent_memory: set[int]

    @property
    def in_use(self) -> bool: ...
    def open(self, paged: Any) -> Any: ...
    def forget(self, paged: Any) -> None: ...
    def lend(self, model: torch.nn.Module) -> None: ...
    def called(self, model: torch.nn.Module) -> None: ...
    def begin(self) -> None: ...
    def end(self) -> None: ...
    def close(self) -> None: ...
    def stop(self) -> None: ...
    def disown(self) -> None: ...


class Lender(Protocol):
    """Of saved tensors to nodes of autograd (``lending.py``). ``lends``: an access of one goes on;
    ``in_use``: what was lent is still in somebody's hands."""

    lends: bool

    @property
    def in_use(self) -> bool: ...
    def lend(self, saved: Any, asking: Any) -> torch.Tensor | None: ...
    def take_back(self) -> None: ...
    def end(self) -> None: ...


class Saved(Protocol):
    """What autograd saves (``activations.py``). ``skip``: dense storages that live on anyway, and
    their bytes; ``dense_allowance``: bytes that need no pages, ``dense_bytes``: that have none;
    ``again``: blocks that run again; ``kept_all``: nothing of this iteration went into pages."""

    kept_all: bool
    skip: dict[int, tuple[StorageWeakRef, int]]
    dense_allowance: int
    dense_bytes: int
    again: frozenset[str]

    @property
    def lender(self) -> Lender: ...
    @property
    def is_on(self) -> bool: ...
    def scale(self, size: int, largest: int) -> None: ...
    def note_buffers(self, module: torch.nn.Module) -> None: ...
    def count(self) -> None: ...
    def put_on(self) -> None: ...
    def pause(self) -> bool: ...
    def go_on(self) -> None: ...
    def take_off(self) -> None: ...


class Images(Protocol):
    """Bytes of storages at their own addresses (``images.py``)."""

    def address_of(self, tensor: Any) -> int: ...
    def plain_twin(self, tensor: Any) -> torch.Tensor: ...
    def saving(self) -> AbstractContextManager[None]: ...


class ProfileRun(Protocol):
    """Which iterations are metered (``profile_run.py``)."""

    @property
    def needed_bytes(self) -> int: ...
    def note_shapes(self, module: Any, args: Any, kwargs: Any) -> None: ...
    def does_more(self, missing: int = 0) -> int: ...
    def begin(self) -> None: ...
    def end(self) -> None: ...


class InBackward(Protocol):
    """The optimizer in backward (``in_backward.py``)."""

    updates: int
    dense_peak: int

    def switch(self, paged: Any, on: bool) -> None: ...
    def begin(self) -> None: ...
    def end(self, ok: bool) -> None: ...
    def update(self, parameter: torch.Tensor) -> bool: ...
    def note_paged(self, parameter: torch.Tensor, beside: int = 0) -> None: ...
    def step_of(self, paged: Any) -> AbstractContextManager[None]: ...
    def extra_dense(self) -> int: ...


class HostSteps(Protocol):
    """Steps that the host takes (``host_steps.py``). ``planned``: plans may choose them;
    ``chosen``: by the one that is followed; ``offered``: the latest is left to the device, and a
    plan may choose it."""

    taken: int
    nbytes: int
    planned: bool
    offered: bool
    chosen: Callable[[Sequence[Extent]], int | None]

    @property
    def seconds(self) -> float: ...
    def may_take(self, paged: Any) -> bool: ...
    def take(self, paged: Any, group: dict[str, Any], parameter: torch.Tensor) -> bool: ...


class Cycle(Protocol):
    """What stays and what is read ahead in inference (``cycle.py``)."""

    def begin(self) -> None: ...
    def rest(self) -> None: ...
    def end(self) -> None: ...


class Passes(Protocol):
    """Calls of models without gradients, outside of iterations (``inference.py``)."""

    def enter(self, module: torch.nn.Module) -> None: ...
    def leave(self, module: torch.nn.Module) -> None: ...
    def stop(self) -> None: ...


class Follower(Protocol):
    """Of plans (``follower.py``). ``compiled``: the one that the iteration follows. ``is_ahead``:
    that or another one moves pages ahead of use. ``others``: ranks that plan together."""

    compiled: Any
    is_ahead: bool
    planned: Any
    others: Any

    @property
    def is_fixed(self) -> bool: ...
    def will_enter(self) -> bool: ...
    def make_room(self, frames: int) -> bool: ...
    def begin(self) -> None: ...
    def end(self, *, ok: bool) -> None: ...
    def warn(self) -> None: ...
    def stop(self) -> None: ...
    def bring(self, runs: Sequence[Extent]) -> None: ...
    def serve_at_once(self, runs: Sequence[Extent]) -> bool: ...
    def unpinned(self) -> None: ...
    def pause(self) -> None: ...
    def arena_resized(self) -> None: ...
    def forget_plans(self) -> None: ...


class Core:
    """Of one pager. ``face``: the object that the user made, ``PagedTensor.pager``.

    ``inside``: an iteration runs, or ``inference()``. ``inferring``: that, or a call of a model
    without gradients outside of both. ``fits``: everything fits, nothing
    has to move. ``stepping``: an optimizer's step is under way. ``replaced``: paged parameters by
    the id of what they were made of. ``cut_short``: what was dropped with the latest iteration, if
    it was. ``after_op``: called when an access has ended. ``watch``, ``follower``, ``on_iteration``
    look on. ``sees_ops``: the ops of the program are wanted one by one, and none that we make of
    them. ``on_forward``: called as a paged model runs, with it and whether it is the first time.
    ``page_grad``: hook of a parameter whose gradient is there. ``before_write``: told of extents
    that are about to be written, without the lock, while a save goes on beside the training.
    ``on_ended``: called when an iteration has ended well and all is learned of it.
    """

    saved: Saved
    images: Images
    opened: Opened
    profile_run: ProfileRun
    in_backward: InBackward
    host_steps: HostSteps
    cycle: Cycle
    passes: Passes
    follower: Follower | None
    page_grad: Callable[[torch.Tensor], None]

    def __init__(self, given: Arguments, io_watch: IoWatch, *, verify: bool, face: Any) -> None:
        self.face = face
        self.device, self.page_size = given.device, given.page_size
        self.budget_bytes = dict(given.budget_bytes)
        self.about_budgets = given.words
        self.io_watch = io_watch
        self.closed_reason: str | None = None
        self.models: list[weakref.ref[torch.nn.Module]] = []
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._open_tiers(given, verify=verify)
        self.lock = RLock()
        self.turns = Turns(self.lock, self.space.runs)
        self.residency = Residency(
            self.table, self.space, self.mover, self.backend, self.page_size, self.turns
        )  # fmt: skip
        self.budget = DeviceBudget(
            given.budget_bytes["device"], self.page_size, given.reserve, self.residency,
            self.backend,
        )  # fmt: skip
        self.stepping = self.inside = self.inferring = self.fits = False
        self.after_op: Callable[[], None] | None = None
        self.watch: Watcher | None = None
        self.before_write: Callable[[Sequence[Extent]], None] | None = None
        self.sees_ops = False
        self.on_iteration: list[IterationListener] = []
        self.running: Any = None  # the iteration (``iteration.py``)
        self.on_forward: list[Callable[[torch.nn.Module, bool], None]] = []
        self.on_close: list[Callable[[], None]] = []  # the latest first, when the pager closes
        self.on_ended: list[Callable[[], None]] = []
        self.cut_short: str | None = None
        self.replaced: dict[int, tuple[Any, Any]] = {}
        self.iterations = self.gathers = 0
        self.changed_in_place = 0  # how often a tensor got another geometry, or other pages
        self.stall_us = 0.0
        self._guests: set[int] = set()  # threads that use pages beside the iteration that runs
        self.had_guests = False

    def _open_tiers(self, given: Arguments, *, verify: bool) -> None:
        """The arena and the tiers below it; all are closed again if one cannot be had."""
        size = given.page_size
        # While the first iteration is metered the arena may have to hold any set of live pages.
        in_ram = self.device.type == "cpu"
        reach = sum(given.budget_bytes.values()) if in_ram else given.budget_bytes["device"]
        reach = min(reach, _MAX_REACH) // size * size
        with ExitStack() as undo:
            self.backend = make_device(self.device, reach, given.frames * size)
            undo.callback(self.backend.close)
            if given.reserve is None and not self.backend.knows_dense:
                raise ValueError(
                    f"dense_reserve='auto', but PyTorch's allocator for {self.device} does not "
                    "say how much memory is in use; pass dense_reserve= in bytes, a part of "
                    "device_budget"
                )
            self.disk: DiskTier | None = None
            if given.disk_path is not None:
                self.disk = DiskTier(
                    given.disk_path,
                    given.budget_bytes["disk"],
                    size,
                    io_engine=given.io_engine,
                    on_cuda=self.backend.takes_drives,
                )
                undo.callback(self.disk.close)
                self.disk.engine = WatchedEngine(self.disk.engine, self.io_watch)
            self.wear = Wear(self.disk, given.disk_write_limit)
            self.host = HostTier(given.budget_bytes["host"], size, self.backend)
            undo.callback(self.host.close)
            self.table = PageTable(given.frames, self.device)
            self.space = Space(self.table, size, self.backend.alignment)
            self.mover = Mover(
                self.table, FramePool(given.frames), self.backend, self.host, self.disk, size,
                verify=verify, watch=self.io_watch,
            )  # fmt: skip
            undo.pop_all()

    # -- using pages --------------------------------------------------------------------------
    def check_open(self) -> None:
        """Raise ``PagerError`` if this pager's tensors can no longer be used."""
        if self.closed_reason is not None:
            raise PagerError(
                f"the Pager of this tensor {self.closed_reason}; its pages are gone. Take "
                "state_dict() before close()."
            )

    def in_iteration(self) -> bool:
        """Whether what this thread does now belongs to an iteration: in the thread that began it,
        and in autograd's own that do its backward passes."""
        return self.inside and self.turns.is_home()

    @contextmanager
    def hold(self, extents: Sequence[Extent], write: Sequence[Extent] = ()) -> Iterator[None]:
        """Inside, ``extents`` are on the device and stay there. Those that ``write`` names, which
        are among them, are written. All or nothing."""
        self.take(extents, write)
        try:
            yield
        finally:
            self.release(extents)

    def take(
        self, extents: Sequence[Extent], write: Sequence[Extent] = (), *, joins: bool = False
    ) -> None:
        """What :meth:`hold` begins with, for those who cannot wait for a context. ``joins``: it
        belongs to the access that goes on, which saved tensors are lent for."""
        if self.closed_reason is not None:
            self.check_open()
        with self.lock:
            turns = self.turns
            # Of other threads, only what autograd does for the iteration is known to it.
            own = get_ident() in turns.family or turns.is_home()
            if own and not joins and self.saved.lender.lends:
                self.saved.lender.take_back()
            watch = self.watch if own or not self.inside else None
            if watch is not None and not (joins and watch.joining(extents)):
                watch.pinning(extents)
            if not own:
                self.note_guest()
            there = not (turns.queue or (self.budget.metering and own))
            absent = False
            for extent in extents:
                if extent.base < 0:
                    absent = True
            if absent and there:
                follower = self.follower
                there = own and follower is not None and follower.serve_at_once(extents)
            elif there:
                self.residency.keep(extents)
            if not there:
                self._bring(extents)
            elif not own:
                turns.took([(extent, None) for extent in extents])
            # Now: while this thread waited for its turn, others may have noted theirs.
            if not self.backend.host_addressable:
                self.backend.note_compute()
        if write:
            try:
                self.will_write(write)
            except BaseException:
                self.release(extents)
                raise

    def release(self, extents: Sequence[Extent]) -> None:
        """End of what :meth:`take` began."""
        with self.lock:
            for extent in extents:
                extent.pins -= 1
            turns, follower = self.turns, self.follower
            own = get_ident() in turns.family or turns.is_home()
            if not own:
                turns.left([(extent, None) for extent in extents])
            elif turns.queue:
                turns.unpinned()
            if self.watch is not None and self.watch.sees_ends:
                self.watch.unpinned(extents)
            if own and follower is not None and follower.is_ahead:
                follower.unpinned()
            if self.after_op is not None:
                self.after_op()

    def will_write(self, extents: Sequence[Extent]) -> None:
        """Bytes of ``extents``, which are held, are about to change: copies below are void. For
        those who learn of it after they took them."""
        if self.before_write is not None:
            self.before_write(extents)
        watch, fresh, turns = self.watch, [], self.turns
        own = not self.inside or get_ident() in turns.family or turns.is_home()
        if not own:
            watch = None
        for extent in extents:
            extent.writes += 1
            if watch is not None:
                watch.writing(extent)
            if extent.kind == "parameter" and (
                not extent.settled or self.budget.metering or not self.budget.written
            ):
                self._check_write(extent)
            if not extent.settled:
                fresh.append(extent)
        if fresh:
            with self.lock:
                self.residency.written_whole(fresh)

    def _check_write(self, extent: Extent) -> None:
        if extent.kind == "parameter" and not self.stepping and self.in_iteration():
            self.budget.check(before="this write to a parameter")

    def take_parts(
        self, parts: Sequence[Part], write: Sequence[Part] = (), *, streamed: bool = False
    ) -> list[Numbers]:
        """What :meth:`take` does, for some pages of extents; their frames, in any order. To a plan
        and a recorder they are nobody's access: a stream is one (``slabs.py``). ``streamed``: what
        is not held of their extents is the first to leave from now on."""
        self.check_open()
        if write and self.before_write is not None:
            self.before_write([extent for extent, _ in write])
        with self.lock:
            turns = self.turns
            if not turns.is_home():
                self.note_guest()
            elif self.saved.lender.lends:
                self.saved.lender.take_back()
            if turns.queue or self.metering_this() or not self.residency.has(parts):
                self._bring((), parts, streamed=streamed)
            else:
                if not turns.is_home():
                    turns.took(parts)
                self.residency.keep_parts(parts, streamed=streamed)
            self.backend.note_compute()
            try:
                for extent, pages in write:
                    self._check_write(extent)
                    self.residency.written(extent, pages)
                    extent.writes += 1
            except BaseException:
                self.release_parts(parts)
                raise
            return [self.table.frame[pages] for _, pages in parts]

    def release_parts(self, parts: Sequence[Part]) -> None:
        """End of what :meth:`take_parts` began."""
        with self.lock:
            self.residency.release_parts(parts)
            if not self.turns.is_home():
                self.turns.left(parts)
            else:
                self.turns.unpinned()
            if self.after_op is not None and self.closed_reason is None:
                self.after_op()

    def _bring(
        self, extents: Sequence[Extent], parts: Sequence[Part] = (), *, streamed: bool = False
    ) -> None:
        """Keep what is not all on the device, when this thread's turn comes."""
        follower, turns = self.follower, self.turns
        at_home = turns.is_home()
        pins = [*((extent, None) for extent in extents), *parts]

        def attempt() -> None:
            if not at_home:
                turns.took(pins)
            try:
                if follower is None or parts:
                    self.residency.bring(extents, parts, streamed=streamed)
                else:
                    follower.bring(extents)
            except BaseException:
                if not at_home:
                    turns.left(pins)
                raise

        with self.waiting(own=streamed):
            while True:
                try:
                    return turns.take(attempt)
                except TierFull:  # and nothing has moved
                    if not self.mover.slots.lends_some:
                        raise
                    turns.pause()  # a save that goes on gives its slots back

    def watcher(self) -> Watcher | None:
        """Who looks on at what this thread does."""
        watch = self.watch
        return watch if watch is None or not self.inside or self.turns.is_home() else None

    @contextmanager
    def waiting(self, *, own: bool = False) -> Iterator[None]:
        """What happens inside is waiting for pages; ``own``: for a stream's, which no plan can
        move."""
        watch, moved = self.watcher(), self.mover.activity
        began = watch.wait_begins() if watch is not None else None
        start = time.perf_counter()
        try:
            yield
            self.budget.log_frames()
        finally:
            seconds = time.perf_counter() - start
            self.stall_us += seconds * 1e6
            if watch is not None and moved != self.mover.activity:
                watch.waited(seconds, began, own=own)

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Inside, this thread meets other ranks, while pages move: an access of its own to those
        who look on, which ends where the next one begins, inside or after it."""
        self._meets(what)
        yield
        self._meets("")

    def _meets(self, what: str) -> None:
        watch, follower = self.watcher(), self.follower
        if watch is not None:
            with self.lock:
                watch.collective(what)
                if follower is not None and follower.is_ahead:
                    follower.unpinned()

    def note_guest(self) -> None:
        """This thread, which is not at home, uses pages: beside an iteration, perhaps."""
        if self.inside and get_ident() not in self._guests:
            self._guests.add(get_ident())
            self.had_guests = True
            self.backend.add_guest()

    def refusal_of(self, error: torch.OutOfMemoryError) -> InfeasibleBudget | None:
        """What to raise for ``error``; ``None`` in the thread whose iteration runs, which says it
        at its end, and where nothing runs."""
        if not self.inside:
            return self.budget.refused(error) if self.inferring else None
        if self.turns.is_home():
            return None
        return InfeasibleBudget(
            f"{error} dense_reserve={self.budget.reserve} of device_budget={self.budget.bytes} is "
            "what this training has; what other threads need beside it is not measured.",
            minimum=self.budget.bytes + self.page_size,
        )

    def begin_guests(self) -> None:
        """Whoever works beside the iteration that begins has what its dense memory leaves."""
        self._guests.clear()
        budget = self.budget
        room = max(0, budget.reserve - budget.dense_baseline)
        self.backend.limit_guests(None if budget.metering else room)

    def metering_this(self) -> bool:
        """Whether the iteration is metered that the ops of this thread belong to."""
        return self.budget.metering and self.turns.is_home()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Under the lock, with no page moving but by the caller, and no weight open."""
        with self.lock:
            self.mover.drain()
            self.residency.let_go()
            yield

    def address_of(self, storage: PagedStorage) -> int:
        """Address of the first byte of a storage whose run is pinned and consecutive."""
        return self.backend.address + storage.run.base * self.page_size + storage.offset

    @property
    def reach_bytes(self) -> int:
        """Of addresses that are the arena's."""
        return self.backend.arena.numel()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` (a result of an op) lies in the arena."""
        if tensor.layout is not torch.strided:
            return any(self.holds(part) for part in _components(tensor))
        if type(tensor) is not torch.Tensor or tensor.device.type != self.device.type:
            return False
        return 0 <= tensor.data_ptr() - self.backend.address < self.reach_bytes

    def gather(self, run: Extent) -> torch.Tensor:
        """The bytes of a pinned run in scattered frames as one dense tensor, uint8."""
        self.gathers += 1
        out = torch.empty(run.count * self.page_size, dtype=torch.uint8, device=self.device)
        with self.lock:
            frames = self.table.device_frames(run.first, run.count)
        gather_pages(self.residency.arena, frames, out, self.page_size)
        return out

    def scatter(self, run: Extent, source: torch.Tensor) -> None:
        """Write ``source`` (as :meth:`gather` gave it) back into the frames."""
        with self.lock:
            frames = self.table.device_frames(run.first, run.count)
        scatter_pages(source, frames, self.residency.arena, self.page_size)

    def residency_of(self, storage: PagedStorage) -> dict[str, int]:
        """See ``PagedTensor.residency``."""
        self.check_open()
        rows = slice(storage.run.first, storage.run.first + storage.run.count)
        columns = {
            "device": self.table.frame, "host": self.table.host, "disk": self.table.disk,
        }  # fmt: skip
        return {t: int((c[rows] >= 0).sum()) * self.page_size for t, c in columns.items()}

    # -- budgets that are enlarged ---------------------------------------------------------------
    def grow(self, wanted: dict[str, int | str | None]) -> None:
        """See ``Pager.grow``; ``wanted``: tier → its new budget, or ``None``."""
        self.check_open()
        for tier, text in wanted.items():
            if text is None:
                continue
            nbytes = share_of(parse_bytes(text, f"{tier}_budget"), tier, self.device.type)
            if nbytes < self.budget_bytes[tier]:
                raise ValueError(
                    f"{tier}_budget={text!r} is less than the {self.budget_bytes[tier]} bytes it "
                    "has now; budgets can only grow"
                )
            with self.lock:
                if self.follower is not None:
                    self.follower.forget_plans()
                self._grow_tier(tier, nbytes)
                self.budget_bytes[tier] = nbytes

    def _grow_tier(self, tier: str, nbytes: int) -> None:
        if tier == "host":
            self.host.grow(nbytes)
            self.mover.host_grew()
        elif tier == "disk":
            if self.disk is None:
                raise PagerError("this Pager has no disk tier; give disk_path when making it")
            self.disk.grow(nbytes)
        elif nbytes > self.backend.reserved_bytes:
            raise PagerError(
                f"device_budget can grow to {self.backend.reserved_bytes} bytes at most, the range "
                "reserved at start; save state_dict() and make a new Pager"
            )
        else:
            self.budget.bytes = nbytes
            with self.quiet():
                self.budget.place()

    # -- the end ---------------------------------------------------------------------------------
    def close(self) -> None:
        """Give back every tier. Nothing uses pages any more."""
        self.mover.stop()
        if not self.io_watch.wait_until_idle():
            _left_to_the_disk.append((self.backend, self.host, self.disk, self.mover))
            warnings.warn(
                "the disk does not answer: the pager's memory and file are given back when the "
                "process ends, because a read or write that has not returned still uses them",
                RuntimeWarning,
                stacklevel=3,
            )
            return
        with self.lock:
            self.backend.wait(self.backend.mark())
            self.backend.limit_dense(None)
            self.mover.close()
            if self.disk is not None:
                self.disk.close()
            self.host.close()
            _left_to_others.append(self)
        close_arenas()

    def close_arena(self) -> bool:
        """Once it is closed. Not as long as somebody has a plain tensor in it: a graph that has
        saved weights as they were open would read freed memory."""
        with self.lock:
            self.opened.stop()
            self.saved.lender.end()
            if self.opened.in_use or self.saved.lender.in_use:
                return False
            self.backend.close()
            return True


def close_arenas() -> None:
    """Of pagers that were closed, as far as nobody has tensors there any more."""
    with _closing:
        _left_to_others[:] = [core for core in _left_to_others if not core.close_arena()]


class PagedStorage:
    """``nbytes`` bytes at ``offset`` of ``run``. Freed when no PagedTensor refers to it."""

    __slots__ = ("__weakref__", "label", "nbytes", "offset", "pager", "run", "untyped")

    def __init__(self, pager: Core, nbytes: int, kind: str, apart: str = "") -> None:
        self.pager = pager
        self.nbytes = max(1, nbytes)
        self.run, self.offset = pager.space.allocate(self.nbytes, kind, apart)
        self.label: str | None = None
        self.untyped: PagedUntypedStorage | None = None

    def __del__(self) -> None:
        if hasattr(self, "run"):
            # May run anywhere, also inside a fault: only note it; Space.drain does the work.
            space = self.pager.space
            space.dead.append((self.run, self.offset, self.nbytes, space.clock))


def _components(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []
