"""What the rooms above need of a pager: where pages are, and how they are used.

::

    ops, slabs, steps, checkpoints          who use pages
              | hold, pin, will_write
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
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..kernels.gather import gather_pages
from ..kernels.scatter import scatter_pages
from .budget.arguments import Arguments
from .budget.budget import DeviceBudget
from .budget.settling import Settling
from .devices.choice import make_device
from .disk.tier import DiskTier
from .disk.watch import IoWatch, WatchedEngine
from .errors import InfeasibleBudget, PagerError
from .machine.calibration.disk_threads import threads_for
from .memory.host import HostTier
from .memory.page_names import name_pages
from .memory.page_table import PageTable
from .memory.space import PagedStorage, PageRun, Space
from .memory.turns import Turns
from .moves.migration import Migration
from .moves.residency import Residency

if TYPE_CHECKING:
    from .iteration import Running
    from .optim.overlap import Overlap
    from .plan.follower import Follower
    from .tensor.activations import SavedTensors
    from .tensor.images import Images
    from .tensor.open_weights import OpenWeights

_MAX_REACH = 1 << 45  # bytes of address space; no page of it costs memory before it is used

_left_to_others: list[object] = []  # arenas that plain tensors still lie in
_left_to_the_disk: list[tuple[object, ...]] = []  # tiers of cores closed while it did not answer


class Watcher(Protocol):
    """Told of every use of paged tensors, in order, under the lock; must be quick.

    An access is ``pinning``, then ``writing`` for each run that will be written, then ``unpinned``
    with the same runs. ``pinning`` comes before pages are waited for. Accesses can nest.
    """

    def pinning(self, runs: Sequence[PageRun]) -> None:
        """``runs`` are about to be used."""

    def writing(self, run: PageRun) -> None:
        """The bytes of ``run``, which is pinned, are about to change."""

    def unpinned(self, runs: Sequence[PageRun]) -> None:
        """The use of ``runs`` is over."""

    def filling(self, run: PageRun) -> AbstractContextManager[None]:
        """Inside, values are copied into new pages of ``run``, by no op of the program."""


class IterationListener(Protocol):
    """Told where iterations begin and end, in the thread that runs them: ``Core.on_iteration``."""

    def begin(self) -> None:
        """An iteration begins: nothing of it has run yet."""

    def end(self, ok: bool) -> None:
        """It is over; ``ok``: without an exception."""


class Core:
    """Of one pager. ``face``: the object that the user made, ``PagedTensor.pager``.

    ``inside``: an iteration runs. ``fits``: everything fits, nothing has to move. ``stepping``: an
    optimizer's step is under way. ``replaced``: paged parameters by the id of what they were made
    of. ``cut_short``: what was dropped with the latest iteration, if it was. ``after_op``: called
    when an access has ended. ``watch``, ``follower``, ``on_iteration``: who look on.
    ``page_grad``: hook of a parameter whose gradient is there.
    """

    saved: SavedTensors
    images: Images
    overlap: Overlap
    opened: OpenWeights
    follower: Follower | None
    page_grad: Callable[[torch.Tensor], None]

    def __init__(self, given: Arguments, io_watch: IoWatch, *, verify: bool, face: Any) -> None:
        self.face = face
        self.device, self.page_size = given.device, given.page_size
        self.budget_bytes = dict(given.budget_bytes)
        self.io_watch = io_watch
        self.closed_reason: str | None = None
        self.models: list[weakref.ref[torch.nn.Module]] = []
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._open_tiers(given, verify=verify)
        name_pages(self)
        self.lock = RLock()
        self.turns = Turns(self.lock, self.space.runs)
        self.residency = Residency(
            self.table, self.space, self.migration, self.backend, given.frames, self.page_size,
            self.turns,
        )  # fmt: skip
        self.budget = DeviceBudget(
            given.budget_bytes["device"], self.page_size, given.reserve, self.residency,
            self.backend,
        )  # fmt: skip
        self.settling = Settling(self)
        self.stepping = self.inside = self.fits = False
        self.after_op: Callable[[], None] | None = None
        self.watch: Watcher | None = None
        self.on_iteration: list[IterationListener] = []
        self.running: Running | None = None
        self.cut_short: str | None = None
        self.replaced: dict[int, tuple[Any, Any]] = {}
        self.iterations = self.gathers = 0
        self.stall_us = 0.0
        self._guests: set[int] = set()  # threads that use pages beside the iteration that runs

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
                    threads=threads_for(given.disk_path),
                    io_engine=given.io_engine,
                    on_cuda=self.backend.takes_drives,
                )
                undo.callback(self.disk.close)
                self.disk.engine = WatchedEngine(self.disk.engine, self.io_watch)
            if self.disk is not None and self.disk.registration is not None:
                self.backend.register_frames(self.disk.registration)
            self.host = HostTier(given.budget_bytes["host"], size, self.backend)
            undo.callback(self.host.close)
            self.table = PageTable(given.frames, self.device)
            self.space = Space(self.table, size, self.backend.alignment)
            self.migration = Migration(
                self.table, self.backend, self.host, self.disk, size,
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

    def pin(self, runs: Sequence[PageRun]) -> None:
        """Bring ``runs`` onto the device and keep them there until :meth:`unpin`."""
        if self.closed_reason is not None:
            self.check_open()
        with self.lock:
            if get_ident() == self.turns.home:
                self._pin_at_home(runs)
            else:
                self._pin_beside(runs)
            # Now: while this thread waited for its turn, others may have noted theirs.
            self.backend.note_compute()

    def _pin_at_home(self, runs: Sequence[PageRun]) -> None:
        if self.watch is not None:
            self.watch.pinning(runs)
        follower, residency = self.follower, self.residency
        if follower is not None and follower.log is not None:
            follower.pinning(runs)
        if not (self.budget.metering or self.turns.queue):
            for run in runs:
                if run.base < 0:
                    break
            else:
                for run in runs:
                    run.pins += 1
                    residency.touch(run)
                return
        self._bring(runs)

    def _pin_beside(self, runs: Sequence[PageRun]) -> None:
        """The same in another thread than the one whose iteration runs or ran last. Only what
        autograd does for the iteration on threads of its own is known to it."""
        turns, follower = self.turns, self.follower
        own = turns.is_home()
        if self.watch is not None and (own or not self.inside):
            self.watch.pinning(runs)
        if not own:
            self.note_guest()
        if own and follower is not None and follower.log is not None:
            follower.pinning(runs)
        metering = own and self.budget.metering
        if metering or turns.queue or any(run.base < 0 for run in runs):
            self._bring(runs)
            return
        turns.took([(run, None) for run in runs])
        for run in runs:
            run.pins += 1
            self.residency.touch(run)

    def _bring(self, runs: Sequence[PageRun]) -> None:
        """Pin ``runs``, which are not all on the device, when this thread's turn comes."""
        follower, turns = self.follower, self.turns
        pins = None if get_ident() == turns.home else [(run, None) for run in runs]

        def attempt() -> None:
            if pins is not None:
                turns.took(pins)
            try:
                if follower is None:
                    self.residency.pin(runs)
                else:
                    follower.pin(runs)
            except BaseException:
                if pins is not None:
                    turns.left(pins)
                raise

        start = time.perf_counter()
        moved = self.migration.bytes_in + self.migration.bytes_out
        try:
            turns.take(attempt)
            self.budget.log_frames()
        finally:
            seconds = time.perf_counter() - start
            self.stall_us += seconds * 1e6
            if follower is not None:
                waited = moved != self.migration.bytes_in + self.migration.bytes_out
                follower.stalled(seconds if waited else 0.0)

    def note_guest(self) -> None:
        """This thread, which is not at home, uses pages: beside an iteration, perhaps."""
        if self.inside and get_ident() not in self._guests:
            self._guests.add(get_ident())
            self.backend.add_guest()

    def refusal_of_guest(self, error: torch.OutOfMemoryError) -> InfeasibleBudget | None:
        """What to raise for ``error``; ``None`` in the thread whose iteration runs, and outside."""
        if not self.inside or self.turns.is_home():
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
        """Under the lock, with no page moving but by the caller."""
        with self.lock, ExitStack() as stack:
            if self.follower is not None:
                stack.enter_context(self.follower.executor.quiet())
            stack.enter_context(self.residency.still())
            yield

    def unpin(self, runs: Sequence[PageRun]) -> None:
        """End of what :meth:`pin` began."""
        with self.lock:
            for run in runs:
                run.pins -= 1
            turns = self.turns
            if get_ident() != turns.home:
                turns.left([(run, None) for run in runs])
            elif turns.queue:
                turns.unpinned()
            if self.watch is not None:
                self.watch.unpinned(runs)
            if self.follower is not None and self.follower.guide is not None and turns.is_home():
                self.follower.unpinned()
            if self.after_op is not None:
                self.after_op()

    def will_write(self, run: PageRun) -> None:
        """Copies below of a pinned run become void: its bytes are about to change."""
        run.writes += 1
        if self.watch is not None:
            self.watch.writing(run)
        if self.follower is not None:
            self.follower.wrote(run)
        if run.settled:
            return
        if run.kind == "parameter" and not self.stepping and self.in_iteration():
            self.budget.check()
        with self.lock:
            self.residency.written(run)

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

    def gather(self, run: PageRun) -> torch.Tensor:
        """The bytes of a pinned run in scattered frames as one dense tensor, uint8."""
        self.gathers += 1
        out = torch.empty(run.count * self.page_size, dtype=torch.uint8, device=self.device)
        with self.lock:
            frames = self.table.device_frames(run.first, run.count)
        gather_pages(self.residency.arena, frames, out, self.page_size)
        return out

    def scatter(self, run: PageRun, source: torch.Tensor) -> None:
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

    # -- the end ---------------------------------------------------------------------------------
    def close(self) -> None:
        """Give back every tier. Nothing uses pages any more."""
        for stream in list(self.residency.streams):
            stream.stop()
        if not self.io_watch.wait_until_idle():
            _left_to_the_disk.append((self.backend, self.host, self.disk, self.migration))
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
            self.migration.close()
            if self.disk is not None:
                self.disk.close()
            self.host.close()
            self.opened.stop()
            if self.opened.in_use:  # a graph that was kept past our hooks would read freed memory
                _left_to_others.append(self.backend)
            else:
                self.backend.close()


def _components(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []
