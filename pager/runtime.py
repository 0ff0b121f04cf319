"""``Pager``: one budget, its tiers, and everything that is paged inside it."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..kernels.gather import gather_pages
from ..kernels.scatter import scatter_pages
from ..planner.plan import Plan
from ..planner.sizes import format_bytes, parse_bytes
from . import module as _module
from . import optimizer as _optimizer
from .activations import SavedTensors
from .backend import make_backend
from .budget import DeviceBudget
from .disk import DiskTier
from .doors import guard_data
from .errors import InfeasibleBudget, PagerError, TierFull
from .explain import explain
from .follower import Follower
from .host import HostTier
from .migration import Migration
from .overlap import Overlap
from .page_table import PageTable
from .paged_tensor import PagedTensor, dense_twin, dense_view
from .record import record_iterations, recording_from_environment
from .residency import Residency
from .space import PagedStorage, PageRun, Space
from .stats import snapshot
from .watch import IterationListener, Watcher

_MIN_PAGE, _MAX_PAGE = 64 << 10, 16 << 20
_MAX_REACH = 1 << 45  # bytes of address space; no page of it costs memory before it is used
_POLICIES = ("lp", "lru")
ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

_open_pagers: weakref.WeakSet[Pager] = weakref.WeakSet()


class Pager:
    """A paging runtime with byte-hard budgets for device, host and disk.

    Args:
        device_budget: bytes on the device: the arena of page frames and the dense temporaries
            beside it. Byte counts are ints or strings as ``"20GiB"`` (2³⁰) or ``"20GB"`` (10⁹).
        host_budget: bytes of host memory for evicted pages (page-locked on CUDA); reserved once.
        disk_budget, disk_path: bytes of one preallocated, unlinked file in folder ``disk_path``.
        page_size: a power of two, 64 KiB to 16 MiB.
        dense_reserve: bytes of ``device_budget`` kept for dense temporaries; ``"auto"`` measures
            them in the first iteration.
        device: ``"cpu"`` or ``"cuda"``; default: CUDA if there is one.
        policy: ``"lru"`` pages on demand. ``"lp"`` (the default) names the planned mode; in this
            release both page on demand.
        verify: check a checksum on every way in from the host too (disk is always checked).

    Raises ``InfeasibleBudget``, ``PagerError`` or ``ValueError`` at once for budgets and paths that
    cannot work. Use as a context manager or call :meth:`close`. Not for use in forked children.
    """

    def __init__(
        self,
        device_budget: int | str,
        host_budget: int | str = 0,
        disk_budget: int | str = 0,
        disk_path: str | os.PathLike[str] | None = None,
        page_size: int | str = "2MiB",
        dense_reserve: int | str = "auto",
        device: str | torch.device | None = None,
        policy: str = "lp",
        verify: bool = False,
    ) -> None:
        self.closed_reason: str | None = "is not open"
        budget = parse_bytes(device_budget, "device_budget")
        host_bytes = parse_bytes(host_budget, "host_budget")
        disk_bytes = parse_bytes(disk_budget, "disk_budget")
        self.page_size = _check_page_size(parse_bytes(page_size, "page_size"))
        if policy not in _POLICIES:
            raise ValueError(f"policy={policy!r} is unknown; choose one of {', '.join(_POLICIES)}")
        reserve = None if dense_reserve == "auto" else parse_bytes(dense_reserve, "dense_reserve")
        frames = self._first_frames(budget, reserve)
        if disk_bytes and disk_path is None:
            raise ValueError(
                f"disk_budget={disk_budget!r} needs a disk_path: the folder for the paging file"
            )
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self.policy = policy
        self.budget_bytes = {"device": budget, "host": host_bytes, "disk": disk_bytes}

        # While the first iteration is metered the arena may have to hold any set of live pages.
        reach = budget if self.device.type == "cuda" else budget + host_bytes + disk_bytes
        size = self.page_size
        self.disk: DiskTier | None = None
        if disk_bytes:
            assert disk_path is not None
            self.disk = DiskTier(Path(disk_path), disk_bytes, size)
        try:
            reach = min(reach, _MAX_REACH) // size * size
            self.backend = make_backend(self.device, reach, frames * size)
        except BaseException:
            if self.disk is not None:
                self.disk.close()
            raise
        try:
            self.host = HostTier(host_bytes, size)
            self.backend.register_host(self.host.bytes)
            self.table = PageTable(frames, self.device)
            self.space = Space(self.table, size)
            self.migration = Migration(
                self.table, self.backend, self.host, self.disk, size, verify=verify
            )
        except BaseException:
            self.backend.close()
            if self.disk is not None:
                self.disk.close()
            raise
        self.residency = Residency(
            self.table, self.space, self.migration, self.backend, frames, size
        )
        self.budget = DeviceBudget(budget, size, reserve, self.residency, self.backend)
        self.saved = SavedTensors(self)
        self.lock = threading.RLock()
        self.stepping = False
        self.after_op: Callable[[], None] | None = None
        self.watch: Watcher | None = None
        self.replaced: dict[int, tuple[Any, Any]] = {}
        self.models: list[weakref.ref[torch.nn.Module]] = []
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self.iterations = self.gathers = 0
        self.stall_us = 0.0
        self.fits = False
        self.overlap = Overlap(self)
        self.reach_bytes = self.backend.arena.numel()  # of addresses that are the arena's
        self.follower: Follower | None = Follower(self) if policy != "lru" else None
        self.on_iteration: list[IterationListener] = []
        self._shapes: set[Any] = set()  # input shapes that were metered
        self._fresh_shapes: set[Any] = set()  # those of the iteration that runs
        self._inside = False
        self.closed_reason = None
        guard_data(self.saved)
        _open_pagers.add(self)
        try:
            recording_from_environment(self)
        except BaseException:
            self.close()
            raise

    def _first_frames(self, budget: int, reserve: int | None) -> int:
        frames = (budget - (budget // 4 if reserve is None else reserve)) // self.page_size
        if budget < self.page_size or (reserve is not None and frames < 1):
            minimum = (reserve or 0) + self.page_size
            raise InfeasibleBudget(
                f"device_budget of {budget} bytes does not hold one page of {self.page_size} bytes"
                + (f" beside dense_reserve of {reserve} bytes" if reserve else "")
                + f"; give at least {minimum} bytes, or smaller pages",
                minimum=minimum,
            )
        return max(1, frames)

    # -- paging things ---------------------------------------------------------------------------
    def page(self, tensor: torch.Tensor) -> PagedTensor:
        """A PagedTensor with the values of ``tensor`` (copied; same shape, dtype and gradient flag;
        same strides where these are dense and do not overlap). A leaf; a Parameter stays one."""
        self.check_open()
        if type(tensor) is PagedTensor and tensor._storage.pager is self:
            return tensor
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise TypeError(
                f"cannot page a tensor with layout {tensor.layout}, dtype {tensor.dtype}: only "
                "strided tensors of ordinary dtypes have pages; call .to_dense() on it first"
            )
        paged = self.copy_in(tensor.detach(), "user")
        if isinstance(tensor, torch.nn.Parameter):
            paged._is_param = True
        return paged.requires_grad_(tensor.requires_grad)  # type: ignore[return-value]

    def page_module(self, model: ModuleT) -> ModuleT:
        """Make every parameter of ``model`` a PagedTensor, in place, and return ``model``.

        Parameters on the meta device become pages with undefined values: build a model that is
        larger than memory under ``torch.device("meta")``, page it, then initialise it. Buffers stay
        dense. Gradients are kept as pages. Tied parameters stay tied, frozen ones frozen; an
        optimizer made before is given the paged parameters by :meth:`optimizer`.

        Raises ``TierFull`` before anything is moved if all tiers together cannot hold them.
        """
        self.check_open()
        _module.refuse_lazy(model)
        seen: set[int] = set()
        need = 0
        for parameter in model.parameters():
            if not isinstance(parameter, PagedTensor) and id(parameter) not in seen:
                seen.add(id(parameter))
                need += self._bytes_in_pages(parameter)
        self._check_capacity(need, f"the parameters of {type(model).__name__}")
        with torch.no_grad():
            _module.page_module(self, model)
        for buffer in model.buffers():
            if buffer.device.type == self.device.type and type(buffer) is not PagedTensor:
                memory = buffer.untyped_storage()
                self.saved.skip[memory._cdata] = StorageWeakRef(memory), memory.nbytes()
        self._count_buffers()
        if not any(known() is model for known in self.models):
            self.models.append(weakref.ref(model))
            model.register_forward_pre_hook(_module.ShapeHook(self), with_kwargs=True)
        return model

    def _count_buffers(self) -> None:
        self.saved.forget()
        self.budget.dense_baseline = sum(nbytes for _, nbytes in self.saved.skip.values())

    def optimizer(self, optimizer: OptimizerT, *, overlap: bool = False) -> OptimizerT:
        """Make ``optimizer`` step on pages, one parameter at a time, and return it.

        It stays the same object and an instance of its class (schedulers and GradScaler work as
        usual). The result is bit for bit that of ``foreach=False``. Its states live in pages.

        ``overlap``: update each parameter during the backward pass, as soon as its gradient is
        final, and drop the gradient (``param.grad`` is ``None`` afterwards). For programs in which
        each backward pass is followed by one ``step()``, inside ``iteration()``, and nothing looks
        at gradients or parameters in between (clipping, accumulation, GradScaler). That is
        checked in the first steps; where it does not hold the overlap goes off, with a warning. It
        does not hold later: ``PagerError``, where that can be noticed.

        Raises ``TypeError`` for LBFGS, which needs all parameters at once.
        """
        self.check_open()
        _optimizer.page_optimizer(self, optimizer)
        self.optimizers.append(weakref.ref(optimizer))
        self.overlap.switch(optimizer, overlap)
        return optimizer

    def _check_capacity(self, nbytes: int, what: str) -> None:
        """Refuse what all tiers together cannot hold beside what is live."""
        size = self.page_size
        with self.lock:
            self.residency.collect()
        slots = self.host.slots.count + (self.disk.slots.count if self.disk else 0)
        frames = self.budget.frames_at_least()
        room = max(0, frames + slots - self.space.live_pages) * size
        if nbytes > room:
            short = -(-(nbytes - room) // size) * size
            raise TierFull(
                f"{what} take {format_bytes(nbytes)} and the tiers have {format_bytes(room)} left "
                f"(device arena {format_bytes(frames * size)}, host "
                f"{format_bytes(self.host.capacity_bytes)}, disk "
                f"{format_bytes(self.disk.slots.count * size if self.disk else 0)}); raise "
                f"host_budget or disk_budget by at least {format_bytes(short)} ({short} bytes; "
                "pager.grow does it now). Nothing was changed."
            )

    # -- training --------------------------------------------------------------------------------
    @contextmanager
    def iteration(self) -> Iterator[None]:
        """One training iteration: what autograd saves inside goes into pages.

        The first one measures dense memory and may raise ``InfeasibleBudget``, with the smallest
        budget that works, before any parameter has changed.
        """
        self.check_open()
        if self._inside:
            raise PagerError("iteration() is already running; iterations do not nest")
        self._inside = True
        self._count_buffers()
        self._fresh_shapes.clear()
        if not self.budget.settled:
            self._start_metering()
        ok = False
        try:
            self._begin()
            with self.saved.hooks():
                yield
            ok = True
        except torch.OutOfMemoryError as error:
            self.budget.abandon()
            minimum = self.budget.bytes + self.page_size
            raise InfeasibleBudget(
                f"dense temporaries do not fit beside the arena: {error} Raise device_budget (now "
                f"{self.budget.bytes} bytes), or make the batch smaller.",
                minimum=minimum,
            ) from error
        except BaseException:
            self.budget.abandon()
            raise
        finally:
            self._inside = False
            self._end(ok=ok)
        if self.budget.metering:
            self._settle()
            self._shapes |= self._fresh_shapes
        self.iterations += 1

    def _begin(self) -> None:
        self.overlap.begin()
        if self.follower is not None and not self.fits:
            with self.lock:
                self.follower.begin()
        for listener in list(self.on_iteration):
            listener.begin()

    def _end(self, *, ok: bool) -> None:
        for listener in list(self.on_iteration):
            listener.end(ok)
        if self.follower is not None:
            with self.lock:
                self.follower.end(ok=ok)
        self.overlap.end(ok)

    def _start_metering(self) -> None:
        self.saved.dense_allowance = 0
        self.fits = False
        if self.follower is not None:
            with self.lock:
                self.follower.pause()
        self.budget.start()

    def note_shapes(self, module: Any, args: Any, kwargs: Any) -> None:
        """Shapes that this model never ran on are metered again: they may need more."""
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
        key = (
            id(module),
            torch.is_grad_enabled(),
            module.training,
            tuple((t.shape, t.dtype) for t in tensors),
        )
        if key in self._shapes or not self._inside:
            return
        self._fresh_shapes.add(key)
        if self.budget.settled:
            self._start_metering()

    def before_step(self, optimizer: Any) -> None:
        """Checks of an optimizer's step, before anything changes."""
        self.check_open()
        need = None
        fresh = [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and not optimizer.state.get(p)
        ]
        if optimizer._tp_stepped and not optimizer.state:  # of the kind that keeps none
            fresh = []
        self.budget.check(optimizer)
        if fresh:
            need = _optimizer.probe_step(optimizer, lambda action: (action(), 0)[1])  # type: ignore[func-returns-value]
        if need is not None:
            nbytes = int(need.state * sum(self._bytes_in_pages(p) for p in fresh))
            self._check_capacity(nbytes, f"the states of {type(optimizer).__mro__[2].__name__}")

    def _bytes_in_pages(self, tensor: torch.Tensor) -> int:
        """Bytes that a copy of ``tensor`` takes: whole pages, unless it shares one."""
        nbytes = tensor.numel() * tensor.element_size()
        small = self.space.is_small(nbytes)
        return nbytes if small else self.space.pages_for(nbytes) * self.page_size

    def _settle(self) -> None:
        """End of a metered iteration: place the border, and keep things dense if all fits."""
        budget, space = self.budget, self.space
        budget.check()
        transient = space.peak_transient_pages * self.page_size
        persistent = space.persistent_pages * self.page_size
        arena = max(persistent, self.residency.largest_need * self.page_size)
        dense = budget.dense_peak + budget.dense_peak // 8 + (1 << 20)
        self.fits = budget.fixed_reserve is None and arena + transient + dense <= budget.bytes
        with self.lock:
            frames = self.residency.pool.count
            roomy = self.fits and 4 * (arena + transient + dense) <= 3 * budget.bytes
            extra = transient if self.fits else self.overlap.extra_dense()
            budget.settle(extra, roomy=roomy)
            if self.follower is not None and self.residency.pool.count != frames:
                self.follower.forget_plans()
        self.saved.dense_allowance = transient if self.fits else 0

    def page_grad(self, parameter: torch.Tensor) -> None:
        """Post-accumulate hook: the parameter is updated at once, where ``overlap.py`` allows it,
        or else its dense gradient moves into pages."""
        if self.overlap.update(parameter):
            return
        grad = parameter.grad
        if grad is None or type(grad) is PagedTensor or self.fits:
            return
        if grad.requires_grad:  # create_graph=True: its history is wanted
            return
        if grad.layout is torch.strided and self.closed_reason is None:
            parameter.grad = None
            parameter.grad = self.copy_in(grad, "gradient")
            self.overlap.paged(parameter)

    # -- state -----------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Ordinary tensors, as PyTorch's own: ``{"models": […], "optimizers": […]}`` in the order
        in which they were paged. Load with :meth:`load_state_dict` or with the models' own."""
        self.check_open()
        models = [m() for m in self.models]
        optimizers = [o() for o in self.optimizers]
        return {
            "models": [_dense_tree(m.state_dict()) for m in models if m is not None],
            "optimizers": [_dense_tree(o.state_dict()) for o in optimizers if o is not None],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave into the same models and optimizers."""
        self.check_open()
        for name, owners in (("models", self.models), ("optimizers", self.optimizers)):
            live = [o for ref in owners if (o := ref()) is not None]
            if len(state[name]) != len(live):
                raise ValueError(
                    f"the state has {len(state[name])} {name} and this pager {len(live)}; page the "
                    "same ones in the same order first"
                )
            for owner, part in zip(live, state[name]):
                owner.load_state_dict(part)

    # -- looking ---------------------------------------------------------------------------------
    def stats(self) -> dict[str, Any]:
        """Counters so far, as JSON can hold them; keys are listed in ``pager/README.md``."""
        return snapshot(self)

    def record(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Context manager: the first whole iteration inside it is recorded, and written to ``path``
        as a trace (``tensorpager show`` and ``plan`` read it) when the block ends.

        Every op counts, on dense tensors too. Without an iteration inside, the block is one.
        Recording makes an iteration slower, a small model's most. Raises ``PagerError`` if ``path``
        cannot be written or no iteration was completed; nothing is written then.
        """
        self.check_open()
        return record_iterations(self, path)

    def plan(self, *, wait: bool = True) -> Plan | None:
        """The plan of the latest kind of iteration; ``None`` if it has none (everything fits,
        ``policy="lru"``, no iteration yet, or it was refused: :meth:`explain` says why).

        ``wait``: until plans that are being made are there; training uses them from the next
        iteration on in any case.
        """
        self.check_open()
        if self.follower is None:
            return None
        if wait:
            self.follower.wait_for_plans()
        with self.lock:
            return self.follower.plan()

    def explain(self) -> str:
        """What the plan does, in words: what moves, what limits it (compute, the link, the disk),
        and what one more GiB on the device would buy. Takes some seconds for a large model."""
        self.check_open()
        return explain(self)

    def residency_of(self, storage: PagedStorage) -> dict[str, int]:
        """See ``PagedTensor.residency``."""
        self.check_open()
        rows = slice(storage.run.first, storage.run.first + storage.run.count)
        columns = {
            "device": self.table.frame, "host": self.table.host, "disk": self.table.disk,
        }  # fmt: skip
        return {t: int((c[rows] >= 0).sum()) * self.page_size for t, c in columns.items()}

    # -- budgets that change ---------------------------------------------------------------------
    def grow(
        self,
        *,
        device_budget: int | str | None = None,
        host_budget: int | str | None = None,
        disk_budget: int | str | None = None,
    ) -> None:
        """Enlarge budgets in place, for instance after ``TierFull``; tensors keep their values.

        A device budget grows up to the address range reserved at start (on the CPU the sum of all
        three budgets, on CUDA the first budget). Nothing changes if it fails.
        """
        self.check_open()
        wanted = {"device": device_budget, "host": host_budget, "disk": disk_budget}
        for tier, text in wanted.items():
            if text is None:
                continue
            nbytes = parse_bytes(text, f"{tier}_budget")
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
            self.backend.host_ready()
            self.backend.unregister_host(self.host.bytes)
            self.host.grow(nbytes)
            self.backend.register_host(self.host.bytes)
            self.migration.host_grew()
        elif tier == "disk":
            if self.disk is None:
                raise PagerError("this Pager has no disk tier; give disk_path when making it")
            self.disk.grow(nbytes)
        elif nbytes > self.backend.arena.numel():
            raise PagerError(
                f"device_budget can grow to {self.backend.arena.numel()} bytes at most, the range "
                "reserved at start; save state_dict() and make a new Pager"
            )
        else:
            self.budget.bytes = nbytes
            self.budget.place()

    # -- the dispatcher's side -------------------------------------------------------------------
    def check_open(self) -> None:
        """Raise ``PagerError`` if this pager's tensors can no longer be used."""
        if self.closed_reason is not None:
            raise PagerError(
                f"the Pager of this tensor {self.closed_reason}; its pages are gone. Take "
                "state_dict() before close()."
            )

    def pin(self, runs: Sequence[PageRun]) -> None:
        """Bring ``runs`` onto the device and keep them there until :meth:`unpin`."""
        if self.closed_reason is not None:
            self.check_open()
        with self.lock:
            if self.watch is not None:
                self.watch.pinning(runs)
            follower, residency = self.follower, self.residency
            if follower is not None and follower.log is not None:
                follower.pinning(runs)
            if not self.budget.metering:
                for run in runs:
                    if run.base < 0:
                        break
                else:
                    for run in runs:
                        run.pins += 1
                        residency.touch(run)
                    return
            start = time.perf_counter()
            moved = self.migration.bytes_in + self.migration.bytes_out
            try:
                if follower is None:
                    residency.pin(runs)
                else:
                    follower.pin(runs)
                self.budget.log_frames()
            finally:
                seconds = time.perf_counter() - start
                self.stall_us += seconds * 1e6
                if follower is not None:
                    waited = moved != self.migration.bytes_in + self.migration.bytes_out
                    follower.stalled(seconds if waited else 0.0)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Under the lock, with no planned move under way and none that begins."""
        with self.lock:
            if self.follower is None:
                yield
            else:
                with self.follower.executor.quiet():
                    yield

    def unpin(self, runs: Sequence[PageRun]) -> None:
        """End of what :meth:`pin` began."""
        with self.lock:
            for run in runs:
                run.pins -= 1
            if self.watch is not None:
                self.watch.unpinned(runs)
            if self.follower is not None and self.follower.guide is not None:
                self.follower.unpinned()
            if self.after_op is not None:
                self.after_op()

    def will_write(self, run: PageRun) -> None:
        """Copies below of a pinned run become void: its bytes are about to change."""
        if self.watch is not None:
            self.watch.writing(run)
        if self.follower is not None:
            self.follower.wrote(run)
        if run.settled:
            return
        if run.kind == "parameter" and self._inside and not self.stepping:
            self.budget.check()
        with self.lock:
            self.residency.written(run)

    def address_of(self, storage: PagedStorage) -> int:
        """Address of the first byte of a storage whose run is pinned and consecutive."""
        return self.backend.address + storage.run.base * self.page_size + storage.offset

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
        frames = self.table.device_frames(run.first, run.count)
        gather_pages(self.residency.arena, frames, out, self.page_size)
        return out

    def scatter(self, run: PageRun, source: torch.Tensor) -> None:
        """Write ``source`` (as :meth:`gather` gave it) back into the frames."""
        frames = self.table.device_frames(run.first, run.count)
        scatter_pages(source, frames, self.residency.arena, self.page_size)

    @contextmanager
    def pinned(self, tensor: PagedTensor) -> Iterator[torch.Tensor]:
        """See ``PagedTensor.pin``."""
        run = tensor._storage.run
        self.pin([run])
        try:
            self.will_write(run)
            if run.base >= 0:
                yield dense_view(tensor, self.address_of(tensor._storage))
            else:
                buffer = self.gather(run)
                yield dense_view(tensor, buffer.data_ptr() + tensor._storage.offset)
                self.scatter(run, buffer)
        finally:
            self.unpin([run])

    # -- new pages -------------------------------------------------------------------------------
    def empty_like_geometry(self, like: torch.Tensor, kind: str) -> PagedTensor:
        """A PagedTensor with ``like``'s shape, dtype and (dense) strides; undefined values."""
        self.check_open()
        dense = torch.ops.aten.is_non_overlapping_and_dense(like)
        shape = like if dense else torch.empty(like.size(), dtype=like.dtype, device="meta")
        with self.lock:
            self.residency.collect()
            storage = self.space.storage(self, like.numel() * like.element_size(), kind)
        return PagedTensor(storage, shape.size(), shape.stride(), 0, like.dtype)

    def copy_in(self, dense: torch.Tensor, kind: str) -> PagedTensor:
        """A PagedTensor with the values of plain, strided ``dense``."""
        if not torch.ops.aten.is_non_overlapping_and_dense(dense):
            dense = dense.contiguous()
        dense = dense.resolve_conj().resolve_neg()
        paged = self.empty_like_geometry(dense, kind)
        if dense.numel():
            flat = dense.as_strided((dense.numel(),), (1,), dense.storage_offset())
            self._write(paged._storage, flat.view(torch.uint8))
        return paged

    def enlarge(self, storage: PagedStorage, nbytes: int) -> None:
        """Give ``storage`` room for ``nbytes``; its contents stay, new bytes are undefined. All
        PagedTensors that share it see the larger one."""
        with self.lock:
            self.residency.collect()
            larger = self.space.storage(self, nbytes, storage.run.kind)
        old = PagedTensor(storage, (storage.nbytes,), (1,), 0, torch.uint8)
        PagedTensor(larger, (storage.nbytes,), (1,), 0, torch.uint8).copy_(old)
        for name in ("run", "offset", "nbytes"):  # what it had is freed as `larger`
            mine, other = getattr(storage, name), getattr(larger, name)
            setattr(storage, name, other)
            setattr(larger, name, mine)

    def store_bytes(self, source: torch.Tensor, kind: str) -> PagedStorage:
        """A new storage that holds the bytes of ``source`` (uint8, one-dimensional)."""
        with self.lock:
            self.residency.collect()
            storage = self.space.storage(self, source.numel(), kind)
        self._write(storage, source)
        return storage

    def _write(self, storage: PagedStorage, source: torch.Tensor) -> None:
        run = storage.run
        self.pin([run])
        try:
            self.will_write(run)
            if run.base >= 0:
                start = run.base * self.page_size + storage.offset
                self.backend.arena[start : start + source.numel()].copy_(source)
            else:
                self.scatter(run, source.to(self.device))
        finally:
            self.unpin([run])

    def duplicate(self, tensor: PagedTensor) -> PagedTensor:
        """What ``copy.deepcopy`` of a leaf gives: its own pages, the same attributes."""
        kind = tensor._storage.run.kind
        twin = self.copy_in(dense_twin(tensor).detach(), kind)
        if getattr(tensor, "_is_param", False):
            twin._is_param = True
        if tensor.requires_grad:
            twin.requires_grad_(True)
            if kind == "parameter":
                twin.register_post_accumulate_grad_hook(self.page_grad)  # type: ignore[no-untyped-call]
        if tensor.grad is not None:
            grad = tensor.grad
            twin.grad = self.duplicate(grad) if type(grad) is PagedTensor else grad.clone()
        return twin

    # -- the end ---------------------------------------------------------------------------------
    def close(self) -> None:
        """Give back every tier. Tensors paged here say so from then on. Idempotent."""
        if self.closed_reason is not None:
            return
        self.closed_reason = "was closed"
        if self.follower is not None:
            self.follower.stop()
        with self.lock:
            self.backend.host_ready()
            self.backend.limit_dense(None)
            self.migration.close()
            self.backend.unregister_host(self.host.bytes)
            if self.disk is not None:
                self.disk.close()
            self.host.close()
            self.backend.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Pager:
        return self  # copies of what it pages are paged here too

    def __reduce__(self) -> Any:
        raise PagerError(
            "a Pager cannot be pickled; save pager.state_dict(), or the model's own state_dict()"
        )

    def __enter__(self) -> Self:
        self.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_page_size(size: int) -> int:
    if not _MIN_PAGE <= size <= _MAX_PAGE or size & (size - 1):
        raise ValueError(
            f"page_size={size} is not a power of two from 64 KiB to 16 MiB; try '2MiB', or '64KiB' "
            "for small models"
        )
    return size


def _components(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def _dense_tree(tree: Any) -> Any:
    if type(tree) is PagedTensor:
        return dense_twin(tree).detach()
    if isinstance(tree, dict):
        return {key: _dense_tree(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_dense_tree(value) for value in tree)
    return tree


def _disown_in_child() -> None:
    """Arenas are not inherited by a forked child: say so instead of crashing there."""
    for pager in list(_open_pagers):
        pager.closed_reason = "does not exist in this forked process"


os.register_at_fork(after_in_child=_disown_in_child)
