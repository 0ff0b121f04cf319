"""AdamW, Adam and SGD on pages: one kernel reads and writes all that an update needs.

::

    parameters that take a share of the arena together    pinned together, one launch
    one that is larger                                    slab by slab; the next is read ahead

Pages need not be consecutive, so nothing is gathered, and states may be kept in less memory
(``fused_states.py``). Each element is updated exactly once: what a step that broke off has updated
stays so, and the next step goes on from there, within a parameter too.

When it is used is :func:`mode`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ...kernels.adam import adam_step
from ...kernels.as_torch import can_be_cut
from ...kernels.launch import runs_triton
from ...kernels.sgd import sgd_step
from ...kernels.update import CHUNK, FLOATS, STATE_FLOATS, State
from ..budget.fits import fits, frames_anyway
from ..core import PagedStorage
from ..tensor.operands import (
    Coded,
    NotAtOnce,
    Value,
    has_no_gaps,
    held,
    in_slabs,
    pages_of,
    pages_per_slab,
    runs_of,
    same_order,
    tensors_of,
    whole,
)
from ..tensor.paged_tensor import PagedTensor
from . import torch_fused
from .fused_states import (
    MASTER,
    Format,
    entry,
    follow,
    geometry,
    new_value,
    read,
    stays_dense,
    zeros,
)

if TYPE_CHECKING:
    from ..core import Core

SUPPORTED: tuple[type, ...] = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
_BATCH_SHARE = 8  # what is updated together takes this fraction of the arena at most
_WHOLE_SHARE = 2  # a parameter that takes more than this fraction goes slab by slab

_too_much: weakref.WeakSet[PagedStorage] = weakref.WeakSet()  # of parameters


def plain_class(optimizer: Any) -> type:
    """The class of a paged optimizer before it was paged."""
    return type(optimizer).__mro__[2]


# -- when ----------------------------------------------------------------------------------------
def mode(optimizer: Any) -> str:
    """When the kernels make an optimizer's updates.

    "always": where states or masters were chosen, and where compiled kernels run. "where needed":
    elsewhere, where PyTorch's own loop is as fast on plain views, for what is in scattered frames
    or larger than the arena. "never": classes that the kernels do not know.
    """
    if plain_class(optimizer) not in SUPPORTED:
        known = any(_is_torchs(optimizer, group) for group in optimizer.param_groups)
        return "where needed" if known else "never"
    if optimizer._tp_format.chosen or runs_triton(optimizer._tp_pager.device):
        return "always"
    return "where needed"


def why_not(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> str | None:
    """Why PyTorch's own code has to update ``parameter``; its results are the kernels', but for
    rounding."""
    if _is_torchs(optimizer, group):
        return torch_fused.why_not(group, parameter) or _other_states(optimizer, group, parameter)
    if plain_class(optimizer) not in SUPPORTED:
        return "its class is not supported"
    chosen: Format = optimizer._tp_format
    pager: Core = optimizer._tp_pager
    grad = parameter.grad
    if group.get("differentiable"):
        return "the group is differentiable"
    if any(isinstance(x, torch.Tensor) for x in (*group.get("betas", ()), group["weight_decay"])):
        return "its betas or weight decay are tensors"
    if grad is None or grad.layout is not torch.strided:
        return "its gradient is sparse"
    if parameter.dtype not in FLOATS or grad.dtype not in FLOATS:
        return f"it is {parameter.dtype} with a gradient in {grad.dtype}"
    if torch.float64 in (parameter.dtype, grad.dtype) and parameter.dtype is not grad.dtype:
        return f"it is {parameter.dtype} with a gradient in {grad.dtype}"
    if parameter.device.type != pager.device.type or not has_no_gaps(parameter):
        return "it is on another device, or has gaps in memory"
    if chosen.chosen:
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
    return _other_states(optimizer, group, parameter)


def _other_states(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> str | None:
    for tensor in _known_states(optimizer, group, parameter):
        if tensor.dtype != parameter.dtype or not same_order(tensor, parameter):
            return "its states have another dtype or order in memory"
    return None


def _is_torchs(optimizer: Any, group: dict[str, Any]) -> bool:
    """Whether torch's fused kernel for the CPU is what updates pages."""
    if optimizer._tp_format.chosen:
        return False
    return torch_fused.is_asked(optimizer._tp_pager, plain_class(optimizer), group)


@cache
def _cut_anywhere(dtype: torch.dtype) -> bool:
    """Whether the ops of an update have the same bits wherever they are cut on this CPU."""
    x = torch.empty(1, dtype=dtype)
    ops: dict[str, list[Any]] = {
        "add": [x, x, 0.1],
        "lerp": [x, x, 0.1],
        "addcmul": [x, x, x, 0.1],
        "addcdiv": [x, x, x, 0.1],
        "sqrt": [x],
        "div": [x, 0.1],
    }
    return all(can_be_cut(op, dtype, values, reordered=True) for op, values in ops.items())


def _known_states(optimizer: Any, group: dict[str, Any], parameter: Any) -> Iterator[torch.Tensor]:
    state = optimizer.state.get(parameter, {})
    values = (read(state, key) for key in _keys(optimizer, group))
    yield from tensors_of(value for value in values if value is not None)


def _keys(optimizer: Any, group: dict[str, Any]) -> tuple[str, ...]:
    """States that an update reads and writes, named as in torch.optim."""
    if plain_class(optimizer) is torch.optim.SGD:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()
    if plain_class(optimizer) is torch.optim.Adagrad:
        return ("sum",)
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))


def note_too_much(parameter: torch.Tensor, too_much: bool) -> None:
    """Whether PyTorch's own code takes more for an update of ``parameter`` than the budget has: in
    a metered iteration, and in all that follow, since what it takes was not measured."""
    if type(parameter) is PagedTensor:
        (_too_much.add if too_much else _too_much.discard)(parameter._storage)


def _pages_of_update(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> int:
    pager: Core = optimizer._tp_pager
    grad = parameter.grad
    assert grad is not None
    known = list(_known_states(optimizer, group, parameter))
    count = pages_of([parameter, grad, *known])
    if not known:
        for dtype in [optimizer._tp_format.dtype(parameter)] * len(_keys(optimizer, group)):
            count += sum(_pages(pager, shape) for shape in geometry(parameter, dtype))
    return count


def goes_in_slabs(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> bool:
    """Whether an update of ``parameter`` does with a few pages of each tensor at a time: where not
    all its pages can be on the device, or PyTorch's own code was found to take more than the budget
    has (``step_need.py``). Not where even the few are too many; ops one by one take fewer."""
    if why_not(optimizer, group, parameter) is not None:
        return False
    if mode(optimizer) == "always":
        return True
    if type(parameter) is PagedTensor and parameter._storage in _too_much:
        return True
    pager: Core = optimizer._tp_pager
    if fits(pager.budget, _pages_of_update(optimizer, group, parameter)):
        return False
    return fits(pager.budget, _least_pages(optimizer, group, parameter))


def _least_pages(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> int:
    """One of each tensor of an update: gradient, parameter, states (in 8 bits codes and scales)."""
    chosen: Format = optimizer._tp_format
    of_each = 2 if chosen.dtype(parameter) is torch.uint8 else 1
    return 2 + of_each * len(_keys(optimizer, group)) + chosen.has_master(parameter)


def _pages(pager: Core, shape: torch.Tensor) -> int:
    nbytes = shape.numel() * shape.element_size()
    return 0 if pager.space.is_small(nbytes) else pager.space.pages_for(nbytes)


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
    def write(self) -> list[bool]:
        return [self.unscales] + [True] * (len(self.values) - 1)

    @property
    def kind(self) -> tuple[Any, ...]:
        """The same for updates that one call can make."""
        step = float(self.step) if self.seed is not None and self.step is not None else 0.0
        numbered = step if "momentum" in self.group else 0.0
        return self.master is not None, self.seed is not None, numbered


@dataclass
class Progress:
    """Of a parameter whose update broke off: elements [0, ``done``) have it, in slabs of ``pages``.
    ``states``: those that are not in the optimizer's state before the update is complete."""

    done: int = 0
    pages: int = 0
    states: dict[str, Value] = field(default_factory=dict)


def _prepare(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> Update:
    """Everything of an update, with states made where there are none."""
    pager: Core = optimizer._tp_pager
    grad = parameter.grad
    assert grad is not None
    if not same_order(grad, parameter) or not has_no_gaps(grad):
        grad = torch.empty_strided(
            parameter.size(), parameter.stride(), dtype=grad.dtype, device=parameter.device
        ).copy_(grad)
    state = optimizer.state.get(parameter, {})
    progress = optimizer._tp_progress.get(id(parameter))
    made = dict(progress.states) if progress is not None else {}
    update = _assemble(optimizer, group, parameter, grad, state, made, pager)
    new: dict[str, Any] = {}
    if update.step is not None and "step" not in state:
        new["step"] = update.step
    for key, value in update.states.items():
        if not update.fresh and read(state, key) is None:
            new |= entry(key, value)
    if update.master is not None and MASTER not in state:
        new |= entry(MASTER, update.master)
    elif update.master is not None and progress is None and _was_written(optimizer, parameter):
        assert isinstance(update.master, torch.Tensor)
        follow(pager, update.master, parameter)
    if new:
        optimizer.state[parameter].update(new)
    return update


def _was_written(optimizer: Any, parameter: torch.Tensor) -> bool:
    """Whether somebody may have written to a parameter since its master was updated."""
    return bool(optimizer._tp_versions.get(id(parameter)) != parameter._version)


def _assemble(
    optimizer: Any,
    group: dict[str, Any],
    parameter: torch.Tensor,
    grad: torch.Tensor,
    state: dict[str, Any],
    made: dict[str, Value],
    pager: Core | None,
) -> Update:
    """``made``: values that there are beside ``state``. Others are made, dense without a pager."""
    chosen: Format = optimizer._tp_format
    dtype = chosen.dtype(parameter)
    sgd = plain_class(optimizer) is torch.optim.SGD
    keys = _keys(optimizer, group)
    states: dict[str, Value] = {}
    fresh = False
    for key in keys:
        value = read(state, key)
        if value is None and sgd:
            fresh = True
            value = made[key] if key in made else new_value(pager, parameter, dtype)
        states[key] = zeros(pager, parameter, dtype) if value is None else value
    random = chosen.states in ("bf16", "8bit") and dtype in (torch.bfloat16, torch.uint8)
    step = state.get("step")
    if step is None and (not sgd or (random and keys)):
        step = _new_counter(group, parameter)
    master = state.get(MASTER)
    if master is None and chosen.has_master(parameter):
        master = new_value(pager, parameter, torch.float32)
        master.copy_(parameter.detach())  # type: ignore[union-attr]
    seed = optimizer._tp_numbers.get(id(parameter), 0) if random and keys else None
    unscales = _is_torchs(optimizer, group) and _scaling(optimizer)[0] is not None
    return Update(group, parameter, grad, states, master, step, seed, fresh, unscales)


def _new_counter(group: dict[str, Any], parameter: torch.Tensor) -> torch.Tensor:
    """As torch.optim makes it."""
    if group.get("capturable") or group.get("fused"):
        return torch.zeros((), dtype=torch.float32, device=parameter.device)
    wide = torch.get_default_dtype() is torch.float64
    return torch.tensor(0.0, dtype=torch.float64 if wide else torch.float32)


def _finish(optimizer: Any, update: Update) -> None:
    if update.fresh:
        for key, value in update.states.items():
            optimizer.state[update.parameter].update(entry(key, value))
    optimizer._tp_progress.pop(id(update.parameter), None)
    grad = update.parameter.grad
    if update.unscales and grad is not None and grad is not update.grad:
        grad.copy_(update.grad)
    # Autograd must notice if a graph still wants the old values.
    torch.autograd.graph.increment_version([update.parameter])
    if update.master is not None:
        optimizer._tp_versions[id(update.parameter)] = update.parameter._version


@contextmanager
def _counted(updates: Sequence[Update], found_inf: torch.Tensor | None) -> Iterator[None]:
    """Step counters count this step, unless it breaks off, or a gradient is not finite."""
    counters = [update.step for update in updates if update.step is not None]
    for counter in counters:
        counter += 1
    try:
        yield
    except BaseException:
        for counter in counters:
            counter -= 1
        raise
    if found_inf is not None:
        for counter in counters:
            counter -= found_inf.reshape(()).to(counter.device, non_blocking=True)


# -- calls of the kernels ------------------------------------------------------------------------
def _run(
    optimizer: Any,
    updates: Sequence[Update],
    operands: Sequence[list[State]],
    first: int = 0,
) -> None:
    """Updates of one group on what is held; ``first``: number of the operands' first element."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for index, update in enumerate(updates):
        kinds.setdefault(update.kind, []).append(index)
    for members in kinds.values():
        _call(optimizer, [updates[i] for i in members], [operands[i] for i in members], first)


def _call(
    optimizer: Any, updates: Sequence[Update], operands: Sequence[list[State]], first: int
) -> None:
    group, count = updates[0].group, len(updates)
    if _is_torchs(optimizer, group):
        _call_torchs(optimizer, updates, operands)
        return
    columns: list[Any] = [list(column) for column in zip(*operands)]
    grads, params, *rest = columns
    masters = rest.pop() if updates[0].master is not None else None
    scale, found_inf = _scaling(optimizer)
    common: dict[str, Any] = {
        "lr": group["lr"],
        "weight_decay": float(group["weight_decay"]),
        "maximize": group["maximize"],
        "masters": masters,
        "inv_scale": None if scale is None else scale.reshape(()).double().reciprocal(),
        "found_inf": found_inf,
        "seeds": None if updates[0].seed is None else [update.seed for update in updates],
        "firsts": [first] * count,
    }
    if plain_class(optimizer) is torch.optim.SGD:
        sgd_step(
            *(params, grads, rest[0] if rest else None),
            momentum=group["momentum"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            first=[update.fresh for update in updates],
            step=updates[0].kind[2],
            **common,
        )
        return
    beta1, beta2 = (float(beta) for beta in group["betas"])
    adam_step(
        *(params, grads, rest[0], rest[1]),
        max_exp_avg_sqs=rest[2] if group["amsgrad"] else None,
        steps=[update.step for update in updates],  # type: ignore[misc]
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        decoupled=group["decoupled_weight_decay"],
        amsgrad=group["amsgrad"],
        **common,
    )


def _call_torchs(
    optimizer: Any, updates: Sequence[Update], operands: Sequence[list[State]]
) -> None:
    scale, found_inf = _scaling(optimizer)
    for update, row in zip(updates, operands):
        torch_fused.update(
            *(plain_class(optimizer), update.group, row),  # type: ignore[arg-type]
            step=update.step,
            fresh=update.fresh,
            grad_scale=scale,
            found_inf=found_inf,
        )


def _scaling(optimizer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What GradScaler leaves on optimizers made with ``fused=True``."""
    return getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)


def _is_left_out(optimizer: Any) -> bool:
    """Whether GradScaler found a gradient that is not finite; on a device kernels look for it."""
    found_inf = _scaling(optimizer)[1]
    return found_inf is not None and found_inf.device.type == "cpu" and bool(found_inf)


# -- whole parameters, and slabs -----------------------------------------------------------------
def _at_once(optimizer: Any, updates: Sequence[Update]) -> None:
    """Raises ``NotAtOnce``, with nothing changed, where they do not fit together."""
    values = [value for update in updates for value in update.values]
    write = [written for update in updates for written in update.write]
    with whole(optimizer._tp_pager, values, write) as operands:
        _on_held(optimizer, updates, operands)


def _on_held(optimizer: Any, updates: Sequence[Update], operands: Sequence[State]) -> None:
    each = iter(operands)
    rows = [[next(each) for _ in update.values] for update in updates]
    with _counted(updates, _scaling(optimizer)[1]):
        _run(optimizer, updates, rows)
    for update in updates:
        _finish(optimizer, update)


def _slab_by_slab(optimizer: Any, update: Update) -> None:
    """What a fault raises leaves elements before the slab updated, and noted as such: for the next
    step, and for the user in a note to the error."""
    pager: Core = optimizer._tp_pager
    pages = pages_per_slab(pager, update.values)
    progress = optimizer._tp_progress.get(id(update.parameter), Progress())
    # Then the slabs of this step divide those of the one that broke off.
    pages = min(pages, progress.pages) if progress.done else pages
    with _counted([update], _scaling(optimizer)[1]), _noted(optimizer, update):
        spans = in_slabs(pager, update.values, update.write, pages)
        with closing(spans):  # type: ignore[type-var]
            for span in spans:
                if span.stop <= progress.done:
                    continue
                _run(optimizer, [update], [span.operands], span.start)
                states = update.states if update.fresh else {}
                progress = Progress(span.stop, pages, states)
                optimizer._tp_progress[id(update.parameter)] = progress
    _finish(optimizer, update)


@contextmanager
def _noted(optimizer: Any, update: Update) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        done = optimizer._tp_progress.get(id(update.parameter), Progress()).done
        error.add_note(
            f"{plain_class(optimizer).__name__}.step() had updated {done} of "
            f"{update.parameter.numel()} elements of a parameter of shape "
            f"{tuple(update.parameter.shape)} and of its states; the next step() updates the others"
        )
        raise


def _alone(optimizer: Any, update: Update) -> None:
    if not update.parameter.numel():
        with _counted([update], _scaling(optimizer)[1]):
            pass
        _finish(optimizer, update)
        return
    progress = id(update.parameter) in optimizer._tp_progress
    most = frames_anyway(optimizer._tp_pager.budget) // _WHOLE_SHARE
    if not progress and pages_of(update.values) <= most:
        try:
            _at_once(optimizer, [update])
        except NotAtOnce:
            pass
        else:
            return
    _slab_by_slab(optimizer, update)


# -- steps ---------------------------------------------------------------------------------------
def number_parameters(optimizer: Any) -> None:
    """Numbers that random rounding depends on: the same whenever the program runs."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    optimizer._tp_numbers = {id(p): number for number, p in enumerate(parameters)}


def refuse(optimizer: Any) -> None:
    """Raise ``ValueError``, before anything is changed, for a parameter whose states cannot be kept
    as ``Pager.optimizer`` was asked to, or that ``fused=True`` cannot update."""
    torch_fused.refuse(optimizer._tp_pager, plain_class(optimizer), optimizer.param_groups)
    if not optimizer._tp_format.chosen:
        return
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter.grad is None:
                continue
            reason = why_not(optimizer, group, parameter)
            if reason is not None:
                raise ValueError(
                    f"parameter {position} of group {index}, shape {tuple(parameter.shape)}, "
                    f"cannot be updated with {_asked(optimizer._tp_format)}: {reason}. Give it an "
                    "optimizer of its own, paged without these options"
                )


def _asked(chosen: Format) -> str:
    asked = [f"states={chosen.states!r}"] if chosen.states is not None else []
    return ", ".join([*asked, *(["master_weights=True"] if chosen.masters else [])])


def step_all(optimizer: Any, otherwise: Callable[[dict[str, Any], torch.Tensor], None]) -> bool:
    """One step of all parameters that have a gradient and are not in ``optimizer._tp_done``.
    ``False``, and nothing done, if GradScaler wants it left out.

    ``otherwise``: updates one that the kernels do not.
    """
    if _is_left_out(optimizer):
        return False
    most = frames_anyway(optimizer._tp_pager.budget) // _BATCH_SHARE
    for group in optimizer.param_groups:
        batch = _Batch(optimizer, most)
        for parameter in group["params"]:
            if parameter.grad is None or id(parameter) in optimizer._tp_done:
                continue
            if why_not(optimizer, group, parameter) is not None:
                otherwise(group, parameter)
                optimizer._tp_done.add(id(parameter))
            else:
                batch.add(_prepare(optimizer, group, parameter))
        batch.flush()
    return True


class _Batch:
    """Updates of one group that are made together."""

    def __init__(self, optimizer: Any, most: int) -> None:
        self._optimizer = optimizer
        self._most = most
        self._updates: list[Update] = []
        self._runs: set[Any] = set()

    def add(self, update: Update) -> None:
        runs = {*self._runs, *runs_of(update.values)}
        alone = not update.parameter.numel() or id(update.parameter) in self._optimizer._tp_progress
        if self._updates and (alone or sum(run.count for run in runs) > self._most):
            self.flush()
            runs = set(runs_of(update.values))
        self._updates.append(update)
        self._runs = runs
        if alone:
            self.flush()

    def flush(self) -> None:
        updates, self._updates, self._runs = self._updates, [], set()
        if len(updates) > 1:
            try:
                _at_once(self._optimizer, updates)
            except NotAtOnce:
                pass
            else:
                self._done(updates)
                return
        for update in updates:
            _alone(self._optimizer, update)
            self._done([update])

    def _done(self, updates: Iterable[Update]) -> None:
        self._optimizer._tp_done.update(id(update.parameter) for update in updates)


def step_one(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> bool:
    """The update of one parameter, where the kernels are to make it before anything else is tried.
    ``False``, and nothing done, otherwise."""
    progress = id(parameter) in optimizer._tp_progress
    if not progress and not goes_in_slabs(optimizer, group, parameter):
        return False
    if not _is_left_out(optimizer):
        _alone(optimizer, _prepare(optimizer, group, parameter))
    return True


def step_held(optimizer: Any) -> bool:
    """Updates of all that ``optimizer`` names, whose pages are pinned, and have their states.
    ``False``, and nothing done, if one is not the kernels' to make."""
    named = [(g, p) for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    if any(_calls_fused(optimizer, g) or why_not(optimizer, g, p) is not None for g, p in named):
        return False
    if any(id(p) in optimizer._tp_progress or not _is_ready(optimizer, g, p) for g, p in named):
        return False
    updates = [_prepare(optimizer, group, parameter) for group, parameter in named]
    for group in optimizer.param_groups:
        mine = [update for update in updates if update.group is group]
        values = [value for update in mine for value in update.values]
        write = [written for update in mine for written in update.write]
        _on_held(optimizer, mine, held(optimizer._tp_pager, values, write))
    return True


def _calls_fused(optimizer: Any, group: dict[str, Any]) -> bool:
    """Whether the optimizer calls a fused kernel of torch's that is not called here."""
    return bool(group.get("fused")) and not _is_torchs(optimizer, group)


def _is_ready(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> bool:
    """Whether all of its states are there."""
    state = optimizer.state.get(parameter, {})
    counted = plain_class(optimizer) is torch.optim.SGD or "step" in state
    there = all(read(state, key) is not None for key in _keys(optimizer, group))
    return counted and there and parameter.numel() > 0


# -- what a step will need -----------------------------------------------------------------------
def state_shapes(optimizer: Any, parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Meta tensors of what is made in pages for parameters that have no states yet."""
    chosen: Format = optimizer._tp_format
    wanted = {id(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in wanted:
                continue
            dtypes = [chosen.dtype(parameter)] * len(_keys(optimizer, group))
            dtypes += [torch.float32] * chosen.has_master(parameter)
            for dtype in dtypes:
                for shape in geometry(parameter, dtype):
                    if not stays_dense(shape):
                        yield shape


def need_of(
    optimizer: Any, parameter: torch.Tensor, measure: Callable[[Callable[[], None]], int]
) -> tuple[int, int, int]:
    """Dense bytes of an update, of how many bytes of the parameter; pages that it takes at least.

    A stand-in of it is updated, as large as what the kernels do at a time on the CPU.
    """
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    grad = parameter.grad
    assert grad is not None
    shape = (min(parameter.numel(), CHUNK),)
    twin = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
    ones = torch.ones(shape, dtype=grad.dtype, device=parameter.device)
    step = torch.ones(())
    update = _assemble(optimizer, group, twin, ones, {"step": step}, {}, None)
    operands: list[list[State]] = [held(optimizer._tp_pager, update.values, update.write)]
    dense = measure(lambda: _run(optimizer, [update], operands))
    pages = sum(2 if isinstance(value, Coded) else 1 for value in update.values)
    sizes = [t.dtype.itemsize for t in (twin, ones)]
    return dense, math.prod(shape) * sizes[0], pages
