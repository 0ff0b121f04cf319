"""AdamW, Adam and SGD on pages: one kernel reads and writes all that an update needs.

::

    parameters that take a share of the arena together    pinned together, one launch; all of a
                                                          group where everything fits
    one that is larger                                    slab by slab; the next is read ahead

Pages need not be consecutive, so nothing is gathered, and states may be kept in less memory
(``fused_states.py``). Each element is updated exactly once: what a step that broke off has updated
stays so, and the next step goes on from there, within a parameter too.

When it is used is :func:`always` and :func:`is_due`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from itertools import chain
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from ...kernels.adam import adam_step
from ...kernels.as_torch import can_be_cut
from ...kernels.launch import runs_triton
from ...kernels.sgd import sgd_step
from ...kernels.update import CHUNK, FLOATS, STATE_FLOATS, State
from ..budget.fits import fits, frames_anyway
from ..errors import InfeasibleBudget, TierFull
from ..tensor.operands import (
    NotAtOnce,
    Value,
    as_operand,
    count_pages,
    has_no_gaps,
    pages_per_slab,
    runs_of,
    same_order,
    slabs,
    tensors_of,
    whole,
)
from ..tensor.paged_tensor import PagedTensor
from . import torch_fused
from .again import BatchAgain
from .fused_states import (
    MASTER,
    SMALL,
    entry,
    follow,
    geometry,
    new_value,
    read,
    stays_dense,
    zeros,
)
from .paged_optimizer import PagedOptimizer, Progress

if TYPE_CHECKING:
    from ..core import Core

aten = torch.ops.aten
P = ParamSpec("P")
R = TypeVar("R")
SUPPORTED: tuple[type, ...] = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
_BATCH_SHARE = 8  # what is updated together takes this fraction of the arena at most
_STAND_IN = 1024  # elements, see `need_of`
_WHOLE_SHARE = 2  # a parameter that takes more than this fraction goes slab by slab


# -- when ----------------------------------------------------------------------------------------
def always(paged: PagedOptimizer) -> bool:
    """Whether the kernels make all updates that they can: where states or masters were chosen, and
    where compiled kernels run. Elsewhere PyTorch's own loop is as fast on plain views, and they are
    for what is in scattered frames or larger than the arena."""
    return paged.kind in SUPPORTED and (paged.format.chosen or runs_triton(paged.pager.device))


def why_not(paged: PagedOptimizer, group: dict[str, Any], parameter: torch.Tensor) -> str | None:
    """Why PyTorch's own code has to update ``parameter``; its results are the kernels', but for
    rounding."""
    torchs = _is_torchs(paged, group)
    if not torchs and paged.kind not in SUPPORTED:
        return "its class is not supported"
    pager, grad = paged.pager, parameter.grad
    if grad is None or grad.layout is not torch.strided:
        return "its gradient is sparse"
    if parameter.device.type != pager.device.type or not has_no_gaps(parameter):
        return "it is on another device, or has gaps in memory"
    dtypes = {parameter.dtype, grad.dtype}
    wide = torchs or torch.float64 in dtypes
    if not dtypes.issubset(FLOATS) or (wide and len(dtypes) > 1):
        return f"it is {parameter.dtype} with a gradient in {grad.dtype}"
    if torchs:
        return _other_states(paged, group, parameter)
    if group.get("differentiable"):
        return "the group is differentiable"
    if any(isinstance(x, torch.Tensor) for x in (*group.get("betas", ()), group["weight_decay"])):
        return "its betas or weight decay are tensors"
    if paged.format.chosen:
        return None
    if runs_triton(pager.device):
        if group.get("foreach") is False or group.get("fused") is False:
            return "foreach=False or fused=False asks for PyTorch's own code"
    elif parameter.dtype not in (torch.float32, torch.float64) or grad.dtype != parameter.dtype:
        return "PyTorch rounds 16-bit states after each operation"
    elif group.get("capturable"):
        return "capturable has another formula"
    elif torch.get_num_threads() > 1 and not _cut_anywhere(parameter.dtype):
        return "PyTorch rounds otherwise where the part of a thread ends"
    if parameter.dtype not in STATE_FLOATS:
        return f"its states are {parameter.dtype}"
    return _other_states(paged, group, parameter)


def _other_states(
    paged: PagedOptimizer, group: dict[str, Any], parameter: torch.Tensor
) -> str | None:
    for tensor in _known_states(paged, group, parameter):
        if tensor.dtype != parameter.dtype or not same_order(tensor, parameter):
            return "its states have another dtype or order in memory"
    return None


def _is_torchs(paged: PagedOptimizer, group: dict[str, Any]) -> bool:
    """Whether torch's fused kernel for the CPU is what updates pages."""
    on_cpu = paged.pager.device.type == "cpu" and paged.kind in torch_fused.KINDS
    return on_cpu and not paged.format.chosen and bool(group.get("fused"))


@cache
def _cut_anywhere(dtype: torch.dtype) -> bool:
    """Whether the ops of an update have the same bits wherever they are cut on this CPU."""
    x = torch.empty(1, dtype=dtype)
    ops: dict[Any, dict[str, Any]] = {
        aten.add_.Tensor: {"self": x, "other": x, "alpha": 0.1},
        aten.lerp_.Scalar: {"self": x, "end": x, "weight": 0.1},
        aten.addcmul_.default: {"self": x, "tensor1": x, "tensor2": x, "value": 0.1},
        aten.addcdiv_.default: {"self": x, "tensor1": x, "tensor2": x, "value": 0.1},
        aten.sqrt_.default: {"self": x},
        aten.div_.Tensor: {"self": x, "other": 0.1},
    }
    return all(can_be_cut(op, given, reordered=True) for op, given in ops.items())


def _known_states(
    paged: PagedOptimizer, group: dict[str, Any], parameter: Any
) -> Iterator[torch.Tensor]:
    state = paged.state_of(parameter)
    values = (read(state, key) for key in keys_of(paged, group))
    yield from tensors_of(value for value in values if value is not None)


def keys_of(paged: PagedOptimizer, group: dict[str, Any]) -> tuple[str, ...]:
    """States that an update reads and writes, named as in torch.optim."""
    if paged.kind is torch.optim.SGD:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()
    if paged.kind is torch.optim.Adagrad:
        return ("sum",)
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))


def is_due(paged: PagedOptimizer, group: dict[str, Any], parameter: torch.Tensor) -> bool:
    """Whether the kernels are to update ``parameter`` before anything else is tried, with a few
    pages of each tensor at a time: where not all its pages can be on the device, PyTorch's own code
    was found to take more than the budget has (``step_need.py``), or an update broke off. Not where
    even the few are too many; ops one by one take fewer."""
    if id(parameter) in paged.progress:
        return True
    if why_not(paged, group, parameter) is not None:
        return False
    if always(paged) or (type(parameter) is PagedTensor and parameter._storage in paged.too_much):
        return True
    budget, space = paged.pager.budget, paged.pager.space
    known = list(_known_states(paged, group, parameter))
    count = count_pages([parameter, parameter.grad, *known])  # type: ignore[list-item]
    for shape in _shapes(paged, group, parameter) if not known else ():
        nbytes = shape.numel() * shape.element_size()
        count += 0 if space.is_small(nbytes) else space.pages_for(nbytes)
    return not fits(budget, count) and fits(budget, least_pages(paged, group, parameter))


def _shapes(
    paged: PagedOptimizer, group: dict[str, Any], parameter: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Meta tensors of its states."""
    for _ in keys_of(paged, group):
        yield from geometry(parameter, paged.format.dtype(parameter))
    if paged.format.has_master(parameter):
        yield from geometry(parameter, torch.float32)


def least_pages(paged: PagedOptimizer, group: dict[str, Any], parameter: torch.Tensor) -> int:
    """One of each tensor of an update: gradient, parameter, states (in 8 bits codes and scales)."""
    return 2 + sum(1 for _ in _shapes(paged, group, parameter))


# -- one update ----------------------------------------------------------------------------------
@dataclass(eq=False)
class Update:
    """One parameter's part of a step. ``fresh``: a momentum buffer that holds nothing yet;
    ``unscales``: the gradient is divided by GradScaler's scale in place, as torch's kernels do."""

    group: dict[str, Any]
    parameter: torch.Tensor
    grad: torch.Tensor
    states: dict[str, Value]
    master: Value | None
    step: torch.Tensor | None
    seed: int | None
    fresh: bool
    unscales: bool

    @property
    def values(self) -> list[Value]:
        master = [self.master] if self.master is not None else []
        return [self.grad, self.parameter, *self.states.values(), *master]

    @property
    def entries(self) -> dict[str, Any]:
        """Its states, as a state dict has them."""
        return {k: v for key, value in self.states.items() for k, v in entry(key, value).items()}

    @property
    def write(self) -> list[bool]:
        return [self.unscales] + [True] * (len(self.values) - 1)

    @property
    def kind(self) -> tuple[Any, ...]:
        """The same for updates that one call can make."""
        step = float(self.step) if self.seed is not None and self.step is not None else 0.0
        numbered = step if "momentum" in self.group else 0.0
        return self.master is not None, self.seed is not None, numbered


def prepare(paged: PagedOptimizer, group: dict[str, Any], parameter: torch.Tensor) -> Update:
    """Everything of an update, with states made where there are none."""
    grad = parameter.grad
    assert grad is not None
    if not same_order(grad, parameter) or not has_no_gaps(grad):
        grad = torch.empty_strided(
            parameter.size(), parameter.stride(), dtype=grad.dtype, device=parameter.device
        ).copy_(grad)
    state, progress = paged.state_of(parameter), paged.progress.get(id(parameter))
    made = progress.states if progress is not None else {}
    update = _assemble(paged, group, parameter, grad, state, made, paged.pager)
    new = {} if update.fresh else update.entries
    if update.step is not None:
        new["step"] = update.step
    if update.master is not None:
        new[MASTER] = update.master
        # Somebody may have written to the parameter since its master was updated.
        written = paged.versions.get(id(parameter)) != parameter._version
        if MASTER in state and progress is None and written:
            assert isinstance(update.master, torch.Tensor)
            follow(paged.pager, update.master, parameter)
    if any(key not in state for key in new):
        paged.optimizer.state[parameter].update(new)
    return update


def _assemble(
    paged: PagedOptimizer,
    group: dict[str, Any],
    parameter: torch.Tensor,
    grad: torch.Tensor,
    state: dict[str, Any],
    made: dict[str, Any],
    pager: Core | None,
) -> Update:
    """``made``: states that there are beside ``state``. Others are made, dense without a pager."""
    dtype = paged.format.dtype(parameter)
    sgd = paged.kind is torch.optim.SGD
    keys = keys_of(paged, group)
    make = new_value if sgd else zeros
    found = {key: read({**made, **state}, key) for key in keys}
    states = {k: make(pager, parameter, dtype) if v is None else v for k, v in found.items()}
    fresh = sgd and any(read(state, key) is None for key in keys)
    random = bool(keys) and paged.format.rounds_at_random(parameter)
    step = state.get("step")
    if step is None and (not sgd or random):
        step = _new_counter(group, parameter)
    master = state.get(MASTER)
    if master is None and paged.format.has_master(parameter):
        master = new_value(pager, parameter, torch.float32).copy_(parameter.detach())  # type: ignore[union-attr]
    seed = paged.numbers.get(id(parameter), 0) if random else None
    unscales = _is_torchs(paged, group) and scaling(paged)[0] is not None
    return Update(group, parameter, grad, states, master, step, seed, fresh, unscales)


def _new_counter(group: dict[str, Any], parameter: torch.Tensor) -> torch.Tensor:
    """As torch.optim makes it."""
    if group.get("capturable") or group.get("fused"):
        return torch.zeros((), dtype=torch.float32, device=parameter.device)
    wide = torch.get_default_dtype() is torch.float64
    return torch.tensor(0.0, dtype=torch.float64 if wide else torch.float32)


def finish(paged: PagedOptimizer, update: Update) -> None:
    if update.fresh:
        paged.optimizer.state[update.parameter].update(update.entries)
    paged.progress.pop(id(update.parameter), None)
    grad = update.parameter.grad
    if update.unscales and grad is not None and grad is not update.grad:
        grad.copy_(update.grad)
    # Autograd must notice if a graph still wants the old values.
    torch.autograd.graph.increment_version([update.parameter])
    if update.master is not None:
        paged.versions[id(update.parameter)] = update.parameter._version


@contextmanager
def counted(paged: PagedOptimizer, updates: Sequence[Update]) -> Iterator[None]:
    """Step counters count this step, unless it breaks off, or a gradient is not finite."""
    with _counting(paged, [update.step for update in updates if update.step is not None]):
        yield


@contextmanager
def _counting(paged: PagedOptimizer, counters: list[torch.Tensor]) -> Iterator[None]:
    if counters:
        torch._foreach_add_(counters, 1)
    try:
        yield
    except BaseException:
        if counters:
            torch._foreach_sub_(counters, 1)
        raise
    found_inf = scaling(paged)[1]
    if found_inf is not None:
        for counter in counters:
            counter -= found_inf.reshape(()).to(counter.device, non_blocking=True)


# -- calls of the kernels ------------------------------------------------------------------------
def _run(
    paged: PagedOptimizer,
    updates: Sequence[Update],
    operands: Sequence[list[State]],
    first: int = 0,
) -> None:
    """Updates of one group on what is held; ``first``: number of the operands' first element."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for index, update in enumerate(updates):
        kinds.setdefault(update.kind, []).append(index)
    for members in kinds.values():
        some = [updates[i] for i in members], [operands[i] for i in members]
        _call(paged, *some, first, scaling(paged))


def on_host(
    paged: PagedOptimizer, update: Update, operands: list[State], work: torch.Tensor
) -> Callable[[], None]:
    """What makes ``update``, which is counted, on ``operands`` in host memory, in whatever thread
    and with settings as they are now. ``work``: for its temporaries. It keeps no tensor alive."""
    group = {k: v for k, v in update.group.items() if k not in ("params", "param_names")}
    group = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), group)
    nothing = torch.empty(0)
    step = None if update.step is None else update.step.clone()
    alone = replace(update, group=group, parameter=nothing, grad=nothing, states={}, step=step)
    return partial(_call, paged, [alone], [operands], 0, (None, None), work)


def _call(
    paged: PagedOptimizer,
    updates: Sequence[Update],
    operands: Sequence[list[State]],
    first: int,
    scaled: tuple[torch.Tensor | None, torch.Tensor | None],
    work: torch.Tensor | None = None,
) -> None:
    group, (scale, found_inf) = updates[0].group, scaled
    if _is_torchs(paged, group):
        for update, row in zip(updates, operands):
            torch_fused.update(
                *(paged.kind, group, row),  # type: ignore[arg-type]
                step=update.step,
                fresh=update.fresh,
                grad_scale=scale,
                found_inf=found_inf,
            )
        return
    columns: list[Any] = [list(column) for column in zip(*operands)]
    grads, params, *rest = columns
    common = {
        **torch_fused.settings(paged.kind, group),
        "masters": rest.pop() if updates[0].master is not None else None,
        "inv_scale": _reciprocal(scale),
        "found_inf": found_inf,
        "seeds": None if updates[0].seed is None else [update.seed for update in updates],
        "firsts": [first] * len(updates),
        "reference": work is not None,
        "work": work,
    }
    if paged.kind is torch.optim.SGD:
        fresh, step = [update.fresh for update in updates], updates[0].kind[2]
        buffers = rest[0] if rest else None
        sgd_step(params, grads, buffers, first=fresh, step=step, **common)
        return
    adam_step(
        *(params, grads, rest[0], rest[1]),
        max_exp_avg_sqs=rest[2] if group["amsgrad"] else None,
        steps=[update.step for update in updates],  # type: ignore[misc]
        decoupled=group["decoupled_weight_decay"],
        **common,
    )


def scaling(paged: PagedOptimizer) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What GradScaler leaves on optimizers made with ``fused=True``."""
    optimizer = paged.optimizer
    return getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)


def _reciprocal(scale: torch.Tensor | None) -> torch.Tensor | None:
    return None if scale is None else scale.reshape(()).double().reciprocal()


def is_left_out(paged: PagedOptimizer) -> bool:
    """Whether GradScaler found a gradient that is not finite; on a device kernels look for it."""
    found_inf = scaling(paged)[1]
    return found_inf is not None and found_inf.device.type == "cpu" and bool(found_inf)


# -- whole parameters, and slabs -----------------------------------------------------------------
def _at_once(paged: PagedOptimizer, updates: Sequence[Update]) -> bool:
    """``False``, with nothing changed, where they do not fit together."""
    values = [value for update in updates for value in update.values]
    write = [written for update in updates for written in update.write]
    try:
        with whole(paged.pager, values, write) as operands, counted(paged, updates):
            each = iter(operands)
            _run(paged, updates, [[next(each) for _ in update.values] for update in updates])
    except NotAtOnce:
        return False
    for update in updates:
        finish(paged, update)
    return True


def _slab_by_slab(paged: PagedOptimizer, update: Update) -> None:
    """What a fault raises leaves elements before the slab updated, and noted as such: for the next
    step, and for the user in a note to the error."""
    parameter, pager = update.parameter, paged.pager
    pages = pages_per_slab(pager, update.values)
    progress = paged.progress.get(id(parameter), Progress())
    # Then the slabs of this step divide those of the one that broke off.
    pages = min(pages, progress.pages) if progress.done else pages
    with counted(paged, [update]):
        spans = slabs(pager, update.values, pages, write=update.write)
        try:
            with closing(spans):  # type: ignore[type-var]
                for span in spans:
                    if span.stop <= progress.done:
                        continue
                    _run(paged, [update], [span.operands], span.start)
                    states = update.entries if update.fresh else {}
                    progress = paged.progress[id(parameter)] = Progress(span.stop, pages, states)
        except Exception as error:
            error.add_note(
                f"{paged.name}.step() had updated {progress.done} of {parameter.numel()} elements "
                f"of a parameter of shape {tuple(parameter.shape)} and of its states; the next "
                "step() updates the others"
            )
            raise
    finish(paged, update)


def _alone(paged: PagedOptimizer, update: Update) -> None:
    if not update.parameter.numel():
        with counted(paged, [update]):
            pass
        finish(paged, update)
        return
    most = frames_anyway(paged.pager.budget) // _WHOLE_SHARE
    in_slabs = id(update.parameter) in paged.progress or count_pages(update.values) > most
    if in_slabs or not _at_once(paged, [update]):
        _slab_by_slab(paged, update)


# -- steps ---------------------------------------------------------------------------------------
def number_parameters(paged: PagedOptimizer) -> None:
    """Numbers that random rounding depends on: the same whenever the program runs."""
    groups = [group["params"] for group in paged.optimizer.param_groups]
    paged.numbers = {id(p): number for number, p in enumerate(chain.from_iterable(groups))}


def refuse(paged: PagedOptimizer) -> None:
    """Raise ``ValueError``, before anything is changed, for a parameter whose states cannot be kept
    as ``Pager.optimizer`` was asked to, or that ``fused=True`` cannot update."""
    torch_fused.refuse(paged.pager, paged.kind, paged.optimizer.param_groups)
    if not paged.format.chosen:
        return
    for index, group in enumerate(paged.optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter.grad is None:
                continue
            reason = why_not(paged, group, parameter)
            if reason is not None:
                raise ValueError(
                    f"parameter {position} of group {index}, shape {tuple(parameter.shape)}, "
                    f"cannot be updated with {paged.format.asked}: {reason}. Give it an "
                    "optimizer of its own, paged without these options"
                )


def _inside(function: Callable[P, R]) -> Callable[P, R]:
    """Without gradients, and PagedTensors are seen as they are."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return run


@_inside
def update_one(paged: PagedOptimizer, group: dict[str, Any], parameter: torch.Tensor) -> None:
    if not is_left_out(paged):
        _alone(paged, prepare(paged, group, parameter))


def update_held(paged: PagedOptimizer) -> bool:
    """Update all that the optimizer has a gradient of, whose pages are pinned. ``False``, and
    nothing done, if for one of them the kernels have not the bits of PyTorch's code."""
    shown = paged.stepped_now()
    for group, parameter in shown:
        other_bits = group.get("fused") and not _is_torchs(paged, group)
        if other_bits or why_not(paged, group, parameter) is not None:
            return False
    for group, parameter in shown:
        update_one(paged, group, parameter)
    return True


class Batch:
    """Updates of one group that are made together, and noted in ``paged.done``."""

    def __init__(self, paged: PagedOptimizer) -> None:
        self._paged = paged
        frames = frames_anyway(paged.pager.budget)
        self._most = frames if paged.pager.fits else frames // _BATCH_SHARE
        self._updates: list[Update] = []
        self._runs: set[Any] = set()

    @_inside
    def add(self, group: dict[str, Any], parameter: torch.Tensor, *, alone: bool) -> bool:
        """``False``, and nothing done, if the kernels cannot update it. ``alone``: with no other,
        as it is where the host could do it too."""
        if why_not(self._paged, group, parameter) is not None:
            return False
        update = prepare(self._paged, group, parameter)
        mine = runs_of(update.values)
        alone = alone or not parameter.numel() or id(parameter) in self._paged.progress
        if alone or sum(run.count for run in self._runs.union(mine)) > self._most:
            self.flush()
        self._updates.append(update)
        self._runs.update(mine)
        if alone:
            self.flush()
        return True

    @_inside
    def again(self, group: dict[str, Any], parameters: Sequence[torch.Tensor], first: int) -> int:
        """Update ``parameters`` from number ``first`` on as in the last step; how many, 0 if that
        cannot be."""
        paged, begin = self._paged, id(parameters[first])
        known = paged.again.get(begin)
        if known is None or paged.pager.budget.metering or paged.progress:
            return 0
        some = parameters[first : first + len(known.parameters)]
        if known.most != self._most or not known.matches(paged, group, some):
            del paged.again[begin]
            return 0
        self.flush()
        scale, found_inf = scaling(paged)
        try:
            with known.held(paged.pager) as addresses:
                if addresses is None:
                    updates = [prepare(paged, group, parameter) for parameter in some]
                    with counted(paged, updates):
                        _run(paged, updates, [[*map(as_operand, u.values)] for u in updates])
                else:
                    with _counting(paged, known.counters):
                        known.launch(group, addresses, _reciprocal(scale), found_inf)
        except (InfeasibleBudget, TierFull):
            del paged.again[begin]
            return 0
        # Autograd must notice if a graph still wants the old values.
        torch.autograd.graph.increment_version(some)
        paged.done.update(map(id, some))
        return len(some)

    @_inside
    def flush(self) -> None:
        updates, self._updates, self._runs = self._updates, [], set()
        together = len(updates) > 1 and _at_once(self._paged, updates)
        for update in updates:
            if not together:
                _alone(self._paged, update)
            self._paged.done.add(id(update.parameter))
        made = BatchAgain.of(self._paged, updates, self._most) if together else None
        if made is not None:
            self._paged.again[id(updates[0].parameter)] = made


# -- what a step will need -----------------------------------------------------------------------
def state_shapes(
    paged: PagedOptimizer, parameters: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Meta tensors of what is made in pages for parameters that have no states yet."""
    wanted = {id(parameter) for parameter in parameters}
    for group in paged.optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in wanted:
                shapes = _shapes(paged, group, parameter)
                yield from (shape for shape in shapes if not stays_dense(shape))


def need_of(
    paged: PagedOptimizer,
    group: dict[str, Any],
    parameter: torch.Tensor,
    measure: Callable[[Callable[[], None]], int],
) -> tuple[int, int]:
    """Dense bytes of an update, and of how many bytes of the parameter: of as many as the kernels
    do at a time on the CPU.

    Stand-ins of it are updated, of so few elements that they take next to nothing of the budget:
    each element takes the same, and something is taken for none.
    """
    assert parameter.grad is not None
    dtype, device = parameter.grad.dtype, parameter.device

    def measured(count: int) -> int:
        twin = torch.zeros(count, dtype=parameter.dtype, device=device)
        ones = torch.ones(count, dtype=dtype, device=device)
        update = _assemble(paged, group, twin, ones, {"step": torch.ones(())}, {}, None)
        operands: list[list[State]] = [[as_operand(value) for value in update.values]]
        return measure(lambda: _run(paged, [update], operands))

    count, few = min(parameter.numel(), CHUNK), SMALL if paged.format.chosen else _STAND_IN
    nbytes = count * parameter.dtype.itemsize
    if count <= 2 * few:
        return measured(count), nbytes
    one, two = measured(few), measured(2 * few)
    return one + max(0, two - one) * (count - few) // few, nbytes
