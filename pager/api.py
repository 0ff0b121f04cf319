"""``Pager``: one budget, its tiers, and everything that is paged inside it."""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import get_ident
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..kernels.gather import gather_pages
from ..kernels.scatter import scatter_pages
from ..planner.plan import Plan
from .budget import growth as _growth
from .budget.arguments import Arguments, check_arguments
from .budget.budget import DeviceBudget
from .budget.capacity import bytes_in_pages, check_capacity, check_states
from .budget.settling import Settling
from .checkpoint import save_load as _checkpoint
from .checkpoint import saving as _saving
from .devices.choice import make_device
from .disk.tier import DiskTier
from .disk.watch import IoWatch, WatchedEngine, check_timeout
from .errors import InfeasibleBudget, PagerError
from .iteration import Iteration, Running, drop
from .machine.calibration.disk_threads import threads_for
from .memory.host import HostTier
from .memory.page_names import name_pages
from .memory.page_table import Int32, PageTable
from .memory.space import PagedStorage, PageRun, Space
from .memory.turns import Turns
from .metrics.publisher import Metrics
from .metrics.stats import snapshot
from .moves.interrupts import guard_interrupts
from .moves.migration import Migration
from .moves.residency import Residency
from .optim import optimizer as _optimizer
from .optim.advice import Advice, watch_steps
from .optim.fused_states import Format
from .optim.overlap import Overlap
from .plan.explain import explain
from .plan.follower import Follower
from .plan.record import record_iterations, recording_from_environment
from .plan.watch import IterationListener, Watcher
from .streaming import slabs as _slabs
from .tensor import dispatcher as _dispatcher  # noqa: F401 - gives PagedTensor its two hooks
from .tensor import module as _module
from .tensor import new_pages as _new_pages
from .tensor.activations import SavedTensors
from .tensor.dense_views import pinned_view
from .tensor.doors import guard_data, guard_dlpack
from .tensor.images import Images
from .tensor.meta_buffers import fill_buffers
from .tensor.open_weights import OpenWeights, backward_is_over
from .tensor.paged_tensor import PagedTensor
from .tensor.transforms import guard_transforms

_MAX_REACH = 1 << 45  # bytes of address space; no page of it costs memory before it is used
ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

_open_pagers: weakref.WeakSet[Pager] = weakref.WeakSet()
_left_to_others: list[object] = []  # arenas that plain tensors still lie in
_left_to_the_disk: list[tuple[object, ...]] = []  # tiers of pagers closed while it did not answer


class Pager:
    """A paging runtime with byte-hard budgets for device, host and disk.

    Args:
        device_budget: bytes on the device: the arena of page frames and the dense temporaries
            beside it. Byte counts are ints or strings as ``"20GiB"`` (2³⁰) or ``"20GB"`` (10⁹).
        host_budget: bytes of host memory for evicted pages (page-locked on a GPU); reserved once.
        disk_budget, disk_path: bytes of one preallocated, unlinked file in folder ``disk_path``.
        page_size: a power of two, 64 KiB to 16 MiB.
        dense_reserve: bytes of ``device_budget`` kept for dense temporaries; ``"auto"`` measures
            them in the first iteration.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or any accelerator of PyTorch (``"xpu"``, one
            that a package adds): ``tensorpager doctor`` says what it has to do without. Default:
            CUDA if there is one.
        policy: ``"lp"`` (the default) plans what each kind of iteration moves, and when; until a
            plan is there it pages on demand, as ``"lru"`` always does.
        verify: check a checksum on every way in from the host too (disk is always checked).
        metrics: ``True`` publishes what ``tensorpager top`` shows while the training runs, in
            memory that ends with the process, however it ends.
            ``pager.metrics.log("loss", value)`` adds numbers of your own.
        io_engine: how the disk is read and written: ``"posix"``; ``"kvikio"`` (NVIDIA's KvikIO,
            GPUDirect Storage where the machine has it; ``pip install 'tensorpager[gds]'``); or
            ``"auto"``, KvikIO on a GPU where it works. ``tensorpager bench-io`` compares them.
        io_timeout: seconds after which one read or write of the disk that has not returned is given
            up, with a ``PagerError`` that says what was under way; ``inf`` for never. Nothing is
            lost by it, and all goes on when the disk answers again.

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
        metrics: bool | None = None,
        io_engine: str = "auto",
        io_timeout: float = 60.0,
    ) -> None:
        self.closed_reason: str | None = "is not open"
        given = check_arguments(
            device_budget, host_budget, disk_budget, disk_path, page_size, dense_reserve, device,
            policy, metrics, io_engine,
        )  # fmt: skip
        self.device, self.policy = given.device, policy
        self.page_size, self.budget_bytes = given.page_size, dict(given.budget_bytes)
        self.io_watch = IoWatch(check_timeout(io_timeout))
        self._open_tiers(given, verify=verify)
        name_pages(self)
        self.lock = threading.RLock()
        self.turns = Turns(self.lock, self.space.runs)
        self.residency = Residency(
            self.table, self.space, self.migration, self.backend, given.frames, self.page_size,
            self.turns,
        )  # fmt: skip
        budget = given.budget_bytes["device"]
        self.budget = DeviceBudget(
            budget, self.page_size, given.reserve, self.residency, self.backend
        )
        self.advice = Advice(self.budget)
        self.saved = SavedTensors(self)
        self.images = Images()
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
        self.opened = OpenWeights(self)
        self.residency.let_go = self.opened.close
        self.follower: Follower | None = Follower(self) if policy != "lru" else None
        self.on_iteration: list[IterationListener] = []
        self._settling = Settling(self)
        self._inside = False  # whether an iteration runs
        self.running: Running | None = None
        self.cut_short: str | None = None  # what was dropped with the latest one, if it was
        self._guests: set[int] = set()  # threads that use pages beside the iteration that runs
        self.metrics = Metrics(self)
        self.closed_reason = None
        guard_data(self.saved)
        guard_dlpack()
        guard_transforms()
        guard_interrupts()
        watch_steps()
        _open_pagers.add(self)
        try:
            recording_from_environment(self)
            if given.metrics:
                self.metrics.open()
        except BaseException:
            self.close()
            raise

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

    # -- paging things ---------------------------------------------------------------------------
    def page(self, tensor: torch.Tensor) -> PagedTensor:
        """A PagedTensor with the values of ``tensor`` (copied; same shape, dtype and gradient flag;
        same strides where these are dense and do not overlap). A leaf; a Parameter stays one."""
        self.check_open()
        return _new_pages.page_copy(self, tensor)

    def page_module(self, model: ModuleT) -> ModuleT:
        """Make every parameter of ``model`` a PagedTensor, in place, and return ``model``.

        Parameters on the meta device become pages with undefined values: build a model that is
        larger than memory under ``torch.device("meta")``, page it, then initialise it. Buffers stay
        dense. Those on the meta device are set by the ``reset_parameters()`` of their module or an
        ``_init_weights(module)`` of the model; a warning names those that are left and are in no
        checkpoint, and calling their module raises ``PagerError``. Gradients are kept as pages.
        Tied parameters stay tied, frozen ones frozen; an optimizer made before is given the paged
        parameters by :meth:`optimizer`, which therefore comes after (``PagerError``).

        Raises ``TierFull`` before anything is moved if all tiers together cannot hold them.
        """
        self.check_open()
        _module.refuse_lazy(model)
        _optimizer.refuse_earlier(self, model)
        dense = (p for p in model.parameters() if not isinstance(p, PagedTensor))
        need = bytes_in_pages(self, dense)
        check_capacity(self, need, f"the parameters of {type(model).__name__}")
        with torch.no_grad():
            fill_buffers(self, model)
            _module.page_module(self, model)
        self.note_buffers(model)
        if not any(known() is model for known in self.models):
            self.models.append(weakref.ref(model))
            model.register_forward_pre_hook(_module.ShapeHook(self), with_kwargs=True)
        return model

    def note_buffers(self, module: torch.nn.Module) -> None:
        """Buffers stay dense: they count beside the pages, and are not copied into these."""
        for buffer in module.buffers():
            if buffer.device.type == self.device.type and type(buffer) is not PagedTensor:
                memory = buffer.untyped_storage()
                self.saved.skip[memory._cdata] = StorageWeakRef(memory), memory.nbytes()
        self._count_buffers()

    def _count_buffers(self) -> None:
        self.saved.forget()
        self.budget.dense_baseline = sum(nbytes for _, nbytes in self.saved.skip.values())

    def optimizer(
        self,
        optimizer: OptimizerT,
        *,
        overlap: bool = False,
        states: str | None = None,
        master_weights: bool = False,
    ) -> OptimizerT:
        """Make ``optimizer`` step on pages, and return it.

        It stays the same object and an instance of its class (schedulers and GradScaler work as
        usual). Its states live in pages. On the CPU the result is bit for bit that of
        ``foreach=False``, or of ``fused=True`` where that was chosen (but not with ``states`` or
        ``master_weights``, which have kernels of their own). On CUDA torch's own AdamW, Adam and
        SGD are updated by one kernel on pages, whose results differ from PyTorch's by rounding;
        ``foreach=False`` or ``fused=False`` on the optimizer keeps PyTorch's code. Pages of a
        parameter that is larger than the arena come and go slab by slab.

        ``overlap``: update each parameter during the backward pass, as soon as its gradient is
        final, and drop the gradient (``param.grad`` is ``None`` afterwards). For programs in which
        each backward pass is followed by one ``step()``, inside ``iteration()``, and nothing looks
        at gradients or parameters in between (clipping, accumulation, GradScaler). That is
        checked in the first steps; where it does not hold the overlap goes off, with a warning. It
        does not hold later: ``PagerError``, where that can be noticed.

        ``states``, for AdamW, Adam and SGD themselves: ``"fp32"``; ``"bf16"``, half the bytes,
        rounded at random so that small changes count; ``"8bit"``, a quarter, with a scale for each
        256 elements. Small parameters (below 4096 elements) keep fp32, float64 ones float64. In
        ``state_dict()`` 8-bit states are ``<name>_codes`` and ``<name>_scales``. Any of these loads
        any other, and what plain torch saves; the same kind is restored bit for bit. Plain torch
        loads what ``None``, ``"fp32"`` and ``"bf16"`` save.

        ``master_weights``: parameters in bfloat16 or float16 have a float32 copy, state
        ``"master"``. It is what is updated, and the parameter is rounded from it. States are fp32
        then, unless said otherwise. What is written to a parameter by hand is taken over.

        A wrapper, such as ``Accelerator.prepare`` gives, goes on working; what it wraps is paged.

        Raises ``TypeError`` for LBFGS, which needs all parameters at once, and for ``states`` or
        ``master_weights`` with other classes; ``ValueError`` for unknown ``states``, and where
        ``fused=True`` cannot be on the CPU: a parameter larger than the budget of a class whose
        fused kernel is not known in parts, or 16-bit parameters with momentum in SGD.
        """
        self.check_open()
        chosen = Format(states, master_weights)
        inner = _optimizer.unwrapped(optimizer)
        _optimizer.page_optimizer(self, inner, chosen)
        _optimizer.refresh_wrapper(optimizer)
        self.optimizers.append(weakref.ref(inner))
        self.overlap.switch(inner, overlap)
        return optimizer

    # -- training --------------------------------------------------------------------------------
    def iteration(self) -> Iteration:
        """One training iteration: what autograd saves inside goes into pages.

        A context manager; or, where a step begins in one place and ends in another,
        ``iteration = pager.iteration()`` and then ``iteration.begin()`` and ``iteration.end()``,
        again and again (``abandon()`` for a step that was cut short).

        The first one measures dense memory and may raise ``InfeasibleBudget``, with the smallest
        budget that works, before any parameter has changed. An exception ends it, and the pager is
        ready for the next one; what was measured and recorded is dropped, and the exception and
        :meth:`explain` say so. An iteration that is dropped while it runs is ended when the next
        one begins, with a warning.
        """
        self.check_open()
        return Iteration(self)

    def in_iteration(self) -> bool:
        """Whether what this thread does now belongs to an iteration: in the thread that began it,
        and in autograd's own that do its backward passes."""
        return self._inside and self.turns.is_home()

    def note_shapes(self, module: Any, args: Any, kwargs: Any) -> None:
        """Shapes that this model never ran on are metered again: they may need more."""
        if not self.turns.is_home():
            self.note_guest()
        self._settling.note_shapes(module, args, kwargs)

    def before_step(self, optimizer: Any) -> None:
        """Checks of an optimizer's step, before anything changes."""
        self.check_open()
        self.advice.stepping(inside=self._inside)
        self.budget.check(optimizer)
        check_states(self, optimizer)

    def unpaged_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that is not paged is about to step on parameters that are paged here."""
        self.advice.stepping(inside=self._inside)
        self.budget.unpaged = weakref.ref(optimizer)

    def page_grad(self, parameter: torch.Tensor) -> None:
        """Post-accumulate hook: the parameter is updated at once, where ``overlap.py`` allows it,
        or else its dense gradient moves into pages."""
        if self.fits:
            backward_is_over(parameter)
            return
        if self.overlap.update(parameter):
            return
        grad = parameter.grad
        if grad is None or grad.requires_grad:  # create_graph=True: its history is wanted
            return
        if type(grad) is PagedTensor:
            if self.metering_this() and type(parameter) is PagedTensor:
                self.budget.placement.gradient_is_kept(parameter._storage.run)
            return
        if grad.layout is torch.strided and self.closed_reason is None:
            parameter.grad = None
            parameter.grad = self.copy_in(grad, "gradient")
            self.overlap.paged(parameter)

    # -- state -----------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Ordinary tensors, as PyTorch's own: ``{"models": […], "optimizers": […]}`` in the order
        in which they were paged. Load with :meth:`load_state_dict` or with the models' own.

        Of sharded models (``fully_shard``) DTensors of this rank's shards, as their own
        ``state_dict()`` has them; ``torch.distributed.checkpoint`` takes either.

        Copies, on the CPU: they stay as they are when training goes on and after :meth:`close`.
        What takes more than 64 MiB is not in memory but in a file without a name, in ``disk_path``
        or ``TMPDIR``, which the tensors map; where neither has room it is in memory after all. To
        write a checkpoint, :meth:`save` needs no such copy.
        """
        self.check_open()
        return _saving.state_dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave into the same models and optimizers."""
        self.check_open()
        _saving.load_state_dict(self, state)

    def saving(self) -> AbstractContextManager[None]:
        """Context manager: tensors paged here may be read through ``data_ptr()`` inside it, as
        libraries that write files do (safetensors).

        What is there is a copy, made when the address is first asked for and anew after a write,
        not to be written to. It is there until the block ends, or the tensor: such libraries take
        all addresses before they read. Beyond 16 MiB copies are not in memory but in files without
        a name, in ``disk_path`` or ``TMPDIR``; where neither has room they are in memory after all.
        (On an accelerator nothing is there: the address is to compare, and reading is by
        ``.cpu()``.)

        What ``model.state_dict()`` gives needs no such block, so ``save_pretrained`` and
        safetensors' ``save_model`` need none. :meth:`save` makes no copies.
        """
        self.check_open()
        return self.images.saving()

    def save(
        self,
        path: str | os.PathLike[str],
        state: Any = None,
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write a checkpoint straight from pages. The format is that of the file's suffix:

        * ``.pt``, ``.pth``, ``.bin``, ``.ckpt``: a file of ``torch.save`` with all models and
          optimizers that are paged here, as :meth:`state_dict` has them.
        * ``.safetensors``: the weights of the one model that is paged here, for others to read.

        ``state``: what to write instead; dicts, lists and tuples of tensors, in pages or not, and
        plain values, such as ``{"model": model.state_dict(), "step": 7}``. For safetensors a dict
        of tensors. ``metadata``: texts for the header of a safetensors file.

        Memory: one slab (at most 16 MiB) above the budget. The file appears whole, mode 0600, or
        not at all: a failure or a kill leaves an older one as it was.

        Of models sharded by ``fully_shard`` all ranks call it, with the same ``path``: rank 0
        writes one ordinary file of whole tensors, which :meth:`load` reads on any number of ranks,
        and plain PyTorch too. An error of one rank is raised on all.

        Raises ``OSError``; ``ValueError`` for other suffixes; ``TypeError`` for what such a file
        cannot hold.
        """
        self.check_open()
        _checkpoint.save(self, path, state, metadata=metadata)

    def load(
        self,
        path: str | os.PathLike[str],
        model: torch.nn.Module | None = None,
        *,
        strict: bool = True,
    ) -> _checkpoint.Loaded:
        """Load a checkpoint straight into pages, whatever made it; nothing in it is run.

        * What :meth:`save` wrote without ``state``: into the same models and optimizers, in the
          order in which they were paged.
        * A state dict, of plain PyTorch or Hugging Face: into ``model``, by default the one that is
          paged here. ``path`` is a PyTorch or safetensors file, the index of shards
          (``….index.json``), or the folder that they are in.

        The checkpoint may be larger than device, host and memory together. Into a sharded model
        each rank loads its part, however many ranks have saved it. ``strict`` and the first
        two of the result, ``missing_keys`` and ``unexpected_keys``, are as ``load_state_dict`` has
        them; the third is the ``metadata`` of safetensors files.

        Raises ``RuntimeError`` as ``load_state_dict`` does for names and shapes that do not match,
        ``PagerError`` for a file that is no checkpoint, ``OSError``.
        """
        self.check_open()
        return _checkpoint.load(self, path, model, strict=strict)

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
        three budgets, elsewhere the first budget). Nothing changes if it fails.
        """
        self.check_open()
        wanted = {"device": device_budget, "host": host_budget, "disk": disk_budget}
        _growth.grow(self, wanted)

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
        if self.watch is not None and (own or not self._inside):
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
        if self._inside and get_ident() not in self._guests:
            self._guests.add(get_ident())
            self.backend.add_guest()

    def refusal_of_guest(self, error: torch.OutOfMemoryError) -> InfeasibleBudget | None:
        """What to raise for ``error``; ``None`` in the thread whose iteration runs, and outside."""
        if not self._inside or self.turns.is_home():
            return None
        return InfeasibleBudget(
            f"{error} dense_reserve={self.budget.reserve} of device_budget={self.budget.bytes} is "
            "what this training has; what other threads need beside it is not measured.",
            minimum=self.budget.bytes + self.page_size,
        )

    def _begin_guests(self) -> None:
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

    def part(
        self, tensor: PagedTensor, first: int, count: int, *, write: bool = False
    ) -> AbstractContextManager[Int32]:
        """Keep some pages of a tensor, which may be larger than the arena, on the device; see
        ``slabs.part``."""
        return _slabs.part(self, tensor, first, count, write=write)

    def pinned(self, tensor: PagedTensor) -> AbstractContextManager[torch.Tensor]:
        """See ``PagedTensor.pin``."""
        return pinned_view(self, tensor)

    # -- new pages -------------------------------------------------------------------------------
    def empty_like_geometry(
        self, like: torch.Tensor, kind: str, *, overwritten: bool = False
    ) -> PagedTensor:
        """A PagedTensor with ``like``'s shape, dtype and (dense) strides; zeros. ``overwritten``:
        the caller writes all of it before anyone reads it, so the values may be anything."""
        return _new_pages.empty_like_geometry(self, like, kind, overwritten=overwritten)

    def copy_in(self, dense: torch.Tensor, kind: str) -> PagedTensor:
        """A PagedTensor with the values of plain, strided ``dense``."""
        return _new_pages.copy_in(self, dense, kind)

    def enlarge(self, storage: PagedStorage, nbytes: int) -> None:
        """Give ``storage`` room for ``nbytes``; its contents stay, new bytes are undefined. All
        PagedTensors that share it see the larger one."""
        _new_pages.enlarge(self, storage, nbytes)

    def store_bytes(self, source: torch.Tensor, kind: str) -> PagedStorage:
        """A new storage that holds the bytes of ``source`` (uint8, one-dimensional)."""
        return _new_pages.store_bytes(self, source, kind)

    def _write(self, storage: PagedStorage, source: torch.Tensor) -> None:
        _new_pages.write(self, storage, source)

    def duplicate(self, tensor: PagedTensor) -> PagedTensor:
        """What ``copy.deepcopy`` of a leaf gives: its own pages, the same attributes."""
        return _new_pages.duplicate(self, tensor)

    # -- the end ---------------------------------------------------------------------------------
    def close(self) -> None:
        """Give back every tier. Tensors paged here say so from then on. Idempotent."""
        if self.closed_reason is not None:
            return
        drop(self)
        self.closed_reason = "was closed"
        self.metrics.close()
        if self.follower is not None:
            self.follower.stop()
        for stream in list(self.residency.streams):
            stream.stop()
        if not self.io_watch.wait_until_idle():
            _left_to_the_disk.append(self._tiers())
            warnings.warn(
                "the disk does not answer: the pager's memory and file are given back when the "
                "process ends, because a read or write that has not returned still uses them",
                RuntimeWarning,
                stacklevel=2,
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

    def _tiers(self) -> tuple[object, ...]:
        return self.backend, self.host, self.disk, self.migration

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


def _components(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def _disown_in_child() -> None:
    """Arenas are not inherited by a forked child: say so instead of crashing there."""
    for pager in list(_open_pagers):
        pager.closed_reason = "does not exist in this forked process"
        pager.opened.disown()
        pager.metrics.forget()


os.register_at_fork(after_in_child=_disown_in_child)
