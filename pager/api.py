"""``Pager``: one budget, its tiers, and everything that is paged inside it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from ..planner.plan import Plan
from .budget.arguments import check_arguments
from .budget.fits import bytes_in_pages, check_capacity
from .checkpoint import save_load as _checkpoint
from .core import Core
from .devices.openmp import OpenMPWaits
from .disk.watch import IoWatch, check_timeout
from .distributed import collectives as _collectives  # noqa: F401 - serves them
from .distributed.replicas import page_sharded, refuse_wrapped, watch_forward
from .errors import PagerError
from .inference import Inference, PlainPasses
from .iteration import Iteration, drop
from .metrics.publisher import Metrics
from .metrics.stats import snapshot, summary
from .moves.interrupts import guard_interrupts
from .optim import optimizer as _optimizer
from .optim.fused_states import Format
from .optim.host_steps import HostSteps
from .optim.in_backward import InBackward
from .optim.optimizer import watch_steps
from .plan.cycle import Cycle
from .plan.explain import explain
from .plan.follower import Follower
from .plan.record import record_iterations, recording_from_environment
from .plan.recorder import Recorder
from .plan.starting import starting_plan
from .profile_run import ProfileRun
from .streaming import linear as _linear  # noqa: F401 - serves it
from .streaming import tables as _tables  # noqa: F401 - serves them
from .tensor import dispatcher as _dispatcher
from .tensor import module as _module
from .tensor import new_pages as _new_pages
from .tensor.activations import SavedTensors, guard_transforms
from .tensor.images import Images
from .tensor.interop import guard_data, guard_doors
from .tensor.module import fill_buffers
from .tensor.names import name_pages
from .tensor.open_weights import OpenWeights
from .tensor.paged_tensor import PagedTensor
from .tensor.segments import Segments

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

_open_pagers: weakref.WeakSet[Pager] = weakref.WeakSet()


class Pager:
    """A paging runtime with byte-hard budgets for device, host and disk.

    Args:
        device_budget: bytes on the device: the arena of page frames and the dense temporaries
            beside it. Byte counts are ints or strings as ``"20GiB"`` (2³⁰) or ``"20GB"`` (10⁹);
            ``"80%"`` is of what is free.
        host_budget: bytes of host memory for evicted pages (page-locked on a GPU); reserved once.
            ``"50%"`` is of what is free, of the container's limit where there is one.
        disk_budget, disk_path: bytes of one preallocated, unlinked file in folder ``disk_path``.
            Without any budget: 90 % of what the accelerator has free, half of what the host has
            (what may be page-locked, at most), and no disk; on the CPU three quarters of what is
            free. :meth:`explain` says what was taken. Beside others a budget that is left out is 0.
        page_size: a power of two, 64 KiB to 16 MiB.
        dense_reserve: bytes of ``device_budget`` kept for dense temporaries; ``"auto"`` measures
            them in the first iteration.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or any accelerator of PyTorch (``"xpu"``, one
            that a package adds): ``tensorpager doctor`` says what it has to do without. Default:
            CUDA if there is one.
        policy: ``"lp"`` (the default) plans what each kind of iteration moves, and when; until a
            plan is there it pages on demand, as ``"lru"`` always does. ``"joint"`` plans as
            ``"lp"`` does, and where that promises to be faster, blocks of the model run again in
            the backward pass instead of having their activations stored, with the same bits.
        plan: a file of ``tensorpager estimate --plan``, followed from the first iteration after the
            metered one until there is a plan of what was recorded: its moves of parameters and
            optimizer states, by their names and the order of their uses. A warning names the
            first difference, and then it is left.
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
        disk_write_limit: bytes that may be written to the paging file in a day (24 hours from the
            first iteration on), as ``"500GB"``, so that a drive lasts: once they are, no iteration
            begins (``DiskWriteLimit``) until the next day. ``stats()["disk_wear"]`` says how fast
            the drive wears out.

    Raises ``InfeasibleBudget``, ``PagerError`` or ``ValueError`` at once for budgets and paths that
    cannot work. Use as a context manager or call :meth:`close`. Not for use in forked children.
    """

    def __init__(
        self,
        device_budget: int | str | None = None,
        host_budget: int | str | None = None,
        disk_budget: int | str | None = None,
        disk_path: str | os.PathLike[str] | None = None,
        page_size: int | str = "2MiB",
        dense_reserve: int | str = "auto",
        device: str | torch.device | None = None,
        policy: str = "lp",
        plan: str | os.PathLike[str] | None = None,
        verify: bool = False,
        metrics: bool | None = None,
        io_engine: str = "auto",
        io_timeout: float = 60.0,
        disk_write_limit: int | str | None = None,
    ) -> None:
        given = check_arguments(
            device_budget, host_budget, disk_budget, disk_path, page_size, dense_reserve, device,
            policy, metrics, io_engine, disk_write_limit,
        )  # fmt: skip
        starting = None if plan is None else starting_plan(plan, given.page_size, policy)
        self.device, self.page_size, self.policy = given.device, given.page_size, policy
        self.core = core = Core(given, IoWatch(check_timeout(io_timeout)), verify=verify, face=self)
        name_pages(core)
        core.saved = saved = SavedTensors(core)
        core.images = Images()
        core.in_backward = in_backward = InBackward(core)
        core.page_grad = in_backward.page_grad
        core.host_steps = HostSteps(core)
        core.profile_run = ProfileRun(core)
        watch_forward(core)
        core.opened = OpenWeights(core)
        core.residency.let_go = core.opened.close
        self._begun: Iteration | None = None
        self._recorder = recorder = Recorder(core)
        plans = policy != "lru"
        segments = Segments(core, saved) if policy == "joint" else None
        follower = Follower(core, recorder, segments, starting) if plans else None
        core.follower = self._follower = follower
        core.cycle = Cycle(core)
        core.passes = PlainPasses(core)
        if core.backend.host_addressable:
            waits = OpenMPWaits(lambda: not core.fits)
            core.on_ended.append(waits.iteration_ended)
            core.on_close.append(waits.spin)
        self.metrics = Metrics(core, self._follower)
        guard_data(saved)
        guard_doors()
        guard_transforms()
        _dispatcher.hide_all_from_dynamo()
        guard_interrupts()
        watch_steps()
        _open_pagers.add(self)
        try:
            recording_from_environment(recorder)
            if given.metrics:
                self.metrics.open()
        except BaseException:
            self.close()
            raise

    # -- paging things ---------------------------------------------------------------------------
    def page(self, tensor: torch.Tensor) -> PagedTensor:
        """A PagedTensor with the values of ``tensor`` (copied; same shape, dtype and gradient flag;
        same strides where these are dense and do not overlap). A leaf; a Parameter stays one."""
        self.core.check_open()
        return _new_pages.page_copy(self.core, tensor)

    def page_module(self, model: ModuleT) -> ModuleT:
        """Make every parameter of ``model`` a PagedTensor, in place, and return ``model``.

        Parameters on the meta device become pages with undefined values: build a model that is
        larger than memory under ``torch.device("meta")``, page it, then initialise it. Buffers stay
        dense. Those on the meta device are set by the ``reset_parameters()`` of their module or an
        ``_init_weights(module)`` of the model; a warning names those that are left and are in no
        checkpoint, and calling their module raises ``PagerError``. Gradients are kept as pages.
        Tied parameters stay tied, frozen ones frozen; an optimizer made before is given the paged
        parameters by :meth:`optimizer`, which therefore comes after (``PagerError``).

        Raises ``TierFull`` before anything is moved if all tiers together cannot hold them, and
        ``PagerError`` for quantised parameters and other tensor classes, by name.
        """
        core = self.core
        core.check_open()
        refuse_wrapped(model)
        _module.refuse_lazy(model)
        _module.refuse_subclasses(model)
        _optimizer.refuse_earlier(core, model)
        dense = (p for p in model.parameters() if not isinstance(p, PagedTensor))
        need = bytes_in_pages(core.space, dense)
        with core.lock:
            check_capacity(core.budget, need, f"the parameters of {type(model).__name__}")
        with torch.no_grad():
            fill_buffers(core, model)
            page_sharded(core, model)
            _module.page_module(core, model)
        core.saved.note_buffers(model)
        _module.note_model(core, model)
        return model

    def optimizer(
        self,
        optimizer: OptimizerT,
        *,
        overlap: bool = False,
        host_step: bool | str = "auto",
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

        ``host_step``: AdamW, Adam and SGD may have the host step parameters where they lie in host
        memory, with gradients and states, over all cores, while the device goes on: ``True``, all
        that it can (not in the first iteration, nor where everything fits); ``False``, none;
        ``"auto"``, those of a plan of ``policy="joint"``. ``step()`` returns when they are queued;
        what reads or saves what they write waits for them. On the CPU the bits are those of a step
        on the device; an accelerator that contracts to fused multiply-add differs by that rounding.
        What cannot be is left to the device: parameters that share a page, ``states`` and
        ``master_weights``, and where ``host_budget`` is short.

        ``states``, for AdamW, Adam and SGD themselves: ``"fp32"``; ``"bf16"``, half the bytes,
        rounded at random so that small changes count; ``"8bit"``, a quarter, with a scale for each
        256 elements. Small parameters (below 4096 elements) keep fp32, float64 ones float64. In
        ``state_dict()`` 8-bit states are ``<name>_codes`` and ``<name>_scales``. Any of these loads
        any other, and what plain torch saves; the same kind is restored bit for bit. Plain torch
        loads what ``None``, ``"fp32"`` and ``"bf16"`` save.

        ``master_weights``: parameters in bfloat16 or float16 have a float32 copy, state
        ``"master"``. It is what is updated, and the parameter is rounded from it. States are fp32
        then, unless said otherwise. What is written to a parameter by hand is taken over.

        A wrapper, such as ``Accelerator.prepare`` gives, goes on working; what it wraps is paged,
        and so is what an optimizer such as lookahead or SAM has step for it.

        Raises ``TypeError`` for LBFGS, which needs all parameters at once, and for ``states`` or
        ``master_weights`` with other classes; ``ValueError`` for unknown ``states``, and where
        ``fused=True`` cannot be on the CPU: a parameter larger than the budget of a class whose
        fused kernel is not known in parts, or 16-bit parameters with momentum in SGD.
        """
        _dispatcher.hide_all_from_dynamo()
        chosen = Format(states, master_weights)
        return _optimizer.paged_optimizer(
            self.core, optimizer, overlap=overlap, host_step=host_step, chosen=chosen
        )

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
        self.core.check_open()
        return Iteration(self.core, self.metrics)

    def inference(self) -> Inference:
        """A model that is only read, as by ``model.generate()``: a context manager, without
        gradients inside.

        As many weights as the budget holds stay on the device and are not moved again; the others
        come ahead of use, in the order that the first pass has shown. Nothing is metered: what is
        dense, such as the cache of a generation, takes from the arena what it needs, inside the
        budget. Prompts and answers of any length are alike. Calls of a model in ``torch.no_grad()``
        or ``torch.inference_mode()`` outside of it are such passes by themselves; what is made
        between two of them does not count.

        Raises ``PagerError`` if an iteration is running, and ``InfeasibleBudget`` where an op finds
        no room inside the budget.
        """
        self.core.check_open()
        return Inference(self.core, self.metrics)

    def begin(self) -> None:
        """:meth:`iteration` in two calls, for trainers that call back where a step begins and where
        it ends. Raises ``PagerError`` if an iteration is running."""
        self._begun = self.iteration().begin()

    @property
    def is_begun(self) -> bool:
        """Whether a step that :meth:`begin` began is running."""
        return self._begun is not None

    def end(self, error: BaseException | None = None) -> None:
        """The step that :meth:`begin` began is done; or ``error`` cut it short, and what was
        measured and recorded of it is dropped.

        Raises ``PagerError`` where none was begun, and for ``torch.OutOfMemoryError`` the
        ``InfeasibleBudget`` that says what was too much."""
        begun, self._begun = self._begun, None
        if begun is None:
            raise PagerError("end() of a step that was not begun; call begin() first")
        if error is None:
            begun.end()
        else:
            begun.__exit__(type(error), error, error.__traceback__)

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
        self.core.check_open()
        return _checkpoint.state_dict(self.core)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave into the same models and optimizers."""
        self.core.check_open()
        _checkpoint.load_state_dict(self.core, state)

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
        self.core.check_open()
        return self.core.images.saving()

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
        self.core.check_open()
        _checkpoint.save(self.core, path, state, metadata=metadata)

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
        self.core.check_open()
        return _checkpoint.load(self.core, path, model, strict=strict)

    # -- looking ---------------------------------------------------------------------------------
    def stats(self) -> dict[str, Any]:
        """Counters so far, as JSON can hold them; keys are listed in ``pager/README.md``."""
        return snapshot(self.core, self._follower)

    def record(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Context manager: the first whole iteration inside it is recorded, and written to ``path``
        as a trace (``tensorpager show`` and ``plan`` read it) when the block ends.

        Every op counts, on dense tensors too. Without an iteration inside, the block is one.
        Recording makes an iteration slower, a small model's most. Raises ``PagerError`` if ``path``
        cannot be written or no iteration was completed; nothing is written then.
        """
        self.core.check_open()
        return record_iterations(self._recorder, path)

    def plan(self, *, wait: bool = True) -> Plan | None:
        """The plan of the latest kind of iteration; ``None`` if it has none (everything fits,
        ``policy="lru"``, no iteration yet, or it was refused: :meth:`explain` says why).

        ``wait``: until plans that are being made are there; training uses them from the next
        iteration on in any case. A plan that another rank makes for all is not waited for: it comes
        at the end of an iteration.
        """
        self.core.check_open()
        if self._follower is None:
            return None
        if wait:
            self._follower.wait_for_plans()
        with self.core.lock:
            return self._follower.plan()

    def explain(self) -> str:
        """What the plan does, in words: what moves, what limits it (compute, the link, the disk),
        and what one more GiB on the device would buy. Takes some seconds for a large model."""
        self.core.check_open()
        return explain(self.core, self._follower)

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
        self.core.check_open()
        wanted = {"device": device_budget, "host": host_budget, "disk": disk_budget}
        self.core.grow(wanted)

    # -- the end ---------------------------------------------------------------------------------
    def close(self) -> None:
        """Give back every tier. Tensors paged here say so from then on. Idempotent."""
        core = self.core
        if core.closed_reason is not None:
            return
        self._begun = None
        drop(core)
        while core.on_close:
            core.on_close.pop()()
        core.closed_reason = "was closed"
        self.metrics.close()
        if core.follower is not None:
            core.follower.stop()
        core.close()

    def __repr__(self) -> str:
        """Budgets, what is in use, and how it pages: one line for each tier that there is."""
        return summary(self.core, self._follower)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pager:
        return self  # copies of what it pages are paged here too

    def __reduce__(self) -> Any:
        raise PagerError(
            "a Pager cannot be pickled; save pager.state_dict(), or the model's own state_dict()"
        )

    def __enter__(self) -> Self:
        self.core.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _disown_in_child() -> None:
    """Arenas are not inherited by a forked child: say so instead of crashing there."""
    for pager in list(_open_pagers):
        pager.core.closed_reason = "does not exist in this forked process"
        pager.core.opened.disown()
        pager.metrics.forget()


os.register_at_fork(after_in_child=_disown_in_child)
