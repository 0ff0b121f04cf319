"""Any ``torch.optim.Optimizer`` on paged parameters, a few at a time.

Those of ``torch.optim`` update each parameter by itself, so at most one with its gradient and
states must be on the device; states go into pages as they are made. The result is bit for bit that
of one ``step`` over all of them with ``foreach=False``. A step of somebody else's class may depend
on several parameters, or count how often it is called: it runs once for all, op by op. ::

    op by op on pages, all parameters      a step of somebody else's class
    all parameters at once on views        everything is on the device anyway
    several at once on views               all but one are small
    else one parameter at a time:
        kernels on pages (``fused.py``)    slab by slab, or in scattered frames, which have no view
        on views                           where it takes a share of the arena, and has its states
        op by op on pages                  anything

An update is many small ops (Adam: 14 for a parameter), and each one on a PagedTensor goes through
Python. So pages are held for a whole update and the optimizer is given plain views of them.

The optimizer stays the object that it is, of its own class. ``step`` and ``load_state_dict`` are
attributes of it, as a learning-rate scheduler's are, and so is what copies and pickles it.
"""

from __future__ import annotations

import copy
import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..budget.steps import Measure, StepRoom
from ..errors import InfeasibleBudget, PagerError, TierFull
from ..tensor.dispatcher import hide_from_dynamo
from ..tensor.module import known_parameter
from ..tensor.paged_tensor import PagedTensor, blank, direct_view, withdraw
from ..tensor.sharded import is_sharded, local_state, sharded_state
from . import fused, torch_fused
from .fused_states import (
    OURS,
    Format,
    check_format,
    convert_state,
    is_big_dense,
    is_special,
    page_state,
)
from .paged_optimizer import Before, PagedOptimizer, alone, cannot_compile, in_place, paged_of
from .step_need import check_states, step_room

if TYPE_CHECKING:
    from ..core import Core
    from ..memory.space import Extent

_LEAST_FRAMES_PER_PAGE = 3  # so many in the arena for each page that an update holds
_FRAMES_PER_PAGE_BESIDE = 32  # the same of those beside the largest parameter of several
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


# -- a step --------------------------------------------------------------------------------------
@torch.optim.Optimizer.profile_hook_step
def _step(
    optimizer: torch.optim.Optimizer,
    closure: Callable[[], Any] | None = None,
    *given: Any,
    **named: Any,
) -> Any:
    """One update of all parameters; of those of FSDP2, on their local shards.

    Room for new states is checked before anything changes. If a step is interrupted all the same
    (``TierFull``, a failing disk), the parameters updated so far keep their update, and the next
    ``step`` finishes the others only; of a parameter that is updated slab by slab, the elements
    that are left. (Of somebody else's class it begins anew.) Where the device budget is too small
    nothing is updated: the iteration is refused at its end. ``given``, ``named``: what else a class
    of somebody else's takes.
    """
    paged = paged_of(optimizer)
    assert paged is not None
    pager, ahead = paged.pager, paged.in_backward
    optimizer._opt_called = True  # type: ignore[attr-defined]  # as schedulers note it
    loss = None
    if closure is not None and paged.is_torchs:
        if ahead is not None:
            ahead.stop("step() is given a closure")
        with torch.enable_grad():
            loss = closure()
    with _on_shards(paged):
        if ahead is not None:
            ahead.before_step()
        fused.refuse(paged)
        fused.number_parameters(paged)
        pager.check_open()
        _advise(pager, 4)
        if not pager.budget.check(optimizer):
            if ahead is not None:
                ahead.stepped()
            return loss
        check_states(paged)
        if ahead is not None:
            ahead.measure()
        with pager.in_backward.step_of(paged):
            if paged.is_torchs:
                _step_all(paged)
            else:
                loss = _step_of_others(paged, closure, *given, **named)
        if ahead is not None:
            ahead.stepped()
    return loss


def _step_of_others(
    paged: PagedOptimizer, closure: Callable[[], Any] | None, *given: Any, **named: Any
) -> Any:
    """The step of somebody else's class. One that is compiled in one piece, which its first step
    shows before it has updated anything, runs op by op."""
    if paged.stepped or paged.op_by_op or closure is not None:
        return _step_whole(paged, closure, *given, **named)
    before = Before(paged.optimizer)
    try:
        return _step_whole(paged, None, *given, **named)
    except Exception as error:
        if not (cannot_compile(error) and before.restore()):
            raise
    paged.op_by_op = True
    warnings.warn(
        f"{paged.name} compiles its step in one piece (fullgraph=True), which cannot take pages: "
        "it runs op by op, as with torch.compiler.set_stance('force_eager')",
        UserWarning,
        stacklevel=5,
    )
    return _step_whole(paged, None, *given, **named)


def _step_whole(
    paged: PagedOptimizer, closure: Callable[[], Any] | None, *given: Any, **named: Any
) -> Any:
    """The step of somebody else's class, as it is. It may ask ``closure`` how often it wants."""
    pager = paged.pager

    def asked(*of: Any, **what: Any) -> Any:
        assert closure is not None
        frames, pager.residency.step = pager.residency.step, None
        pager.stepping = False
        try:
            return closure(*of, **what)
        finally:
            pager.stepping, pager.residency.step = True, frames

    first = () if closure is None else (asked,)
    with pager.budget.stepping(paged.optimizer):
        pager.stepping = True
        try:
            result = paged.run(None, *first, *given, **named)
        finally:
            pager.stepping = False
    for state in paged.states():
        page_state(pager, state)
    paged.stepped = True
    return result


def _step_all(paged: PagedOptimizer) -> None:
    pager = paged.pager
    with pager.budget.stepping(paged.optimizer):
        try:
            pager.stepping = True
            by_kernels = fused.always(paged)
            if by_kernels and fused.is_left_out(paged):
                return
            if by_kernels or paged.done or paged.progress or not _step_as_dense(paged):
                for group in paged.optimizer.param_groups:
                    _step_group(paged, group, by_kernels)
                paged.stepped = True
        finally:
            pager.stepping = False
    paged.done.clear()


def _step_group(paged: PagedOptimizer, group: dict[str, Any], by_kernels: bool) -> None:
    batch, host = fused.Batch(paged), paged.pager.host_steps
    with torch._C.DisableTorchFunctionSubclass():
        to_update = [p for p in group["params"] if p.grad is not None and id(p) not in paged.done]
    at = 0
    while at < len(to_update):
        if by_kernels:
            count = batch.again(group, to_update, at)
        else:
            count = 0 if host.may_take(paged) else _several_on_views(paged, group, to_update[at:])
        parameter = to_update[at]
        if not count and host.take(paged, group, parameter):
            paged.done.add(id(parameter))
        elif not count and not (by_kernels and batch.add(group, parameter, alone=host.offered)):
            update_one(paged, group, parameter)
            paged.done.add(id(parameter))
        at += max(1, count)
    batch.flush()


# -- on plain views ------------------------------------------------------------------------------
def _step_as_dense(paged: PagedOptimizer) -> bool:
    """The optimizer's own step with all paged parameters, gradients and states seen as plain views.
    Values, states and groups are as after a step on the paged ones.

    ``False``, and nothing done, where not everything is kept on the device or has a plain view,
    where states would be made (one parameter at a time is less at once), or where the class is a
    user's own, which may look at what it is given.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if not paged.pager.fits or not _step_on_views(paged):
            return False
        for state in paged.states():  # some make one later, when a setting changes
            page_state(paged.pager, state)
    return True


def _several_on_views(
    paged: PagedOptimizer, group: dict[str, Any], parameters: list[torch.Tensor]
) -> int:
    """Update the first of ``parameters`` together, on views: as many as take few pages beside the
    largest. How many; 0, and nothing done, where there are not two, or each has to be seen to by
    itself. PyTorch's loop takes no more dense memory for several."""
    if paged.progress or paged.pager.budget.metering or group.get("foreach"):
        return 0
    frames = paged.pager.budget.frames_for_steps
    most, few = frames // _LEAST_FRAMES_PER_PAGE, frames // _FRAMES_PER_PAGE_BESIDE
    runs: set[Extent] = set()
    count = pages = largest = 0
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in parameters:
            values = (parameter, parameter.grad, *paged.state_of(parameter).values())
            paged_ones = [value._storage for value in values if type(value) is PagedTensor]
            mine = {storage.run for storage in paged_ones}.difference(runs)
            more = sum(run.count for run in mine)
            pages, largest = pages + more, max(largest, more)
            too_many = pages > most or pages - largest > few
            if count and _is_optional(parameter) != _is_optional(parameters[0]):
                break  # what others are updated with does not depend on what is used now and then
            if too_many or not paged.too_much.isdisjoint(paged_ones):
                break
            runs |= mine
            count += 1
        if count < 2:
            return 0
        some = parameters[:count]
        with alone(paged.optimizer, group, *some):
            if not _step_on_views(paged):
                return 0
    paged.done.update(map(id, some))
    for parameter in some:  # some optimizers make one later, when a setting changes
        page_state(paged.pager, paged.optimizer.state.get(parameter, {}))
    return count


def _is_optional(parameter: torch.Tensor) -> bool:
    return type(parameter) is PagedTensor and parameter._storage.run.optional


def update_one(
    paged: PagedOptimizer, group: dict[str, Any], parameter: torch.Tensor, most: int | None = None
) -> None:
    """One parameter's part of the step. On views if it takes no more than ``most`` pages, a share
    of the arena unless said otherwise; ops one by one take less."""
    with torch._C.DisableTorchFunctionSubclass():
        if fused.is_due(paged, group, parameter):
            fused.update_one(paged, group, parameter)
            return
    if most is None:
        most = paged.pager.budget.frames_for_steps // _LEAST_FRAMES_PER_PAGE
    with alone(paged.optimizer, group, parameter):
        with torch._C.DisableTorchFunctionSubclass():
            done = _step_on_views(paged, most)
        if not done:
            paged.run()
    state = paged.optimizer.state
    if parameter in state:
        page_state(paged.pager, state[parameter], small=True)


def _note_updated(paged: PagedOptimizer, written: Callable[[torch.Tensor], int]) -> None:
    """PyTorch's loop broke off when it had ``written`` to parameters so often: the next ``step``
    goes on behind them. The last one counts if it was written to as often as the first of its
    group; otherwise it was amid its update."""
    begun = [(group, p) for group, p in paged.stepped_now() if written(p)]
    paged.done.update(id(parameter) for _, parameter in begun[:-1])
    for group, last in begun[-1:]:
        first = next(parameter for one, parameter in begun if one is group)
        if first is not last and written(first) == written(last):
            paged.done.add(id(last))


def _may_see_views(paged: PagedOptimizer, stepped: list[torch.Tensor]) -> bool:
    """Not where states would be made; and only a gradient of the parameter's own dtype can be a
    plain view's."""
    pager, state = paged.pager, paged.optimizer.state
    if pager.budget.metering or pager.after_op is not None or not paged.is_torchs:
        return False
    has_states = all(state.get(p) for p in stepped) if state else paged.stepped
    return has_states and all(p.grad.dtype == p.dtype for p in stepped)  # type: ignore[union-attr]


def _step_on_views(paged: PagedOptimizer, most: int | None = None) -> bool:
    """``False``, and nothing done, if what the optimizer has to update may not be seen so, takes
    more than ``most`` pages or cannot be held on the device at once (the user pins too much, tiers
    are full), or something has no plain view, and kernels on pages have not PyTorch's bits."""
    pager, states = paged.pager, paged.optimizer.state
    parameters = [parameter for _, parameter in paged.stepped_now()]
    if not _may_see_views(paged, parameters):
        return False
    tensors: list[PagedTensor] = []
    for parameter in parameters:
        values = (parameter, parameter.grad, *states.get(parameter, {}).values())
        tensors += [value for value in values if type(value) is PagedTensor]
    runs = list({tensor._storage.run.id: tensor._storage.run for tensor in tensors}.values())
    if most is not None and sum(run.count for run in runs) > most:
        return False
    try:
        pager.take(runs)
    except (InfeasibleBudget, TierFull):
        return False
    try:
        if any(run.base < 0 for run in runs):  # in scattered frames
            return fused.update_held(paged)
        pager.will_write(runs)
        views: dict[torch.Tensor, torch.Tensor] = {t: direct_view(t) for t in tensors}
        before = {tensor: view._version for tensor, view in views.items()}
        try:
            with _shown(paged, parameters, views):
                paged.run()
        except BaseException:
            _note_updated(paged, lambda p: views[p]._version - before[p] if p in views else 0)
            withdraw(tensors, views.values())
            raise
    finally:
        pager.release(runs)
    # Autograd must notice if a graph still wants the old values.
    torch.autograd.graph.increment_version(parameters)
    return True


@contextmanager
def _shown(
    paged: PagedOptimizer, parameters: list[torch.Tensor], views: dict[torch.Tensor, torch.Tensor]
) -> Iterator[None]:
    """The optimizer sees ``views``; what it does to them is done to the paged tensors."""
    optimizer = paged.optimizer
    tensors = {view: tensor for tensor, view in views.items()}
    loops = [g for g in optimizer.param_groups if g.get("foreach", False) is None]
    twins = {parameter: views[parameter] for parameter in parameters if parameter in views}

    def there(key: str, value: Any, _: Any) -> Any:
        return views.get(value, value) if type(value) is PagedTensor else value

    def back(key: str, value: Any, _: Any) -> Any:
        return tensors.get(value, value) if type(value) is torch.Tensor else value

    with in_place(optimizer, twins, there, back):
        for group in loops:
            group["foreach"] = False  # what it decides for a PagedTensor
        try:
            yield
        finally:
            for group in loops:
                group["foreach"] = None


# -- shards --------------------------------------------------------------------------------------
def _on_shards(paged: PagedOptimizer) -> Any:
    """Within it the optimizer has the local shards of FSDP2's parameters."""
    if not _is_sharded(paged):
        return nullcontext()
    from .shards import on_shards  # torch.distributed, which others need not load

    return on_shards(paged)


def _is_sharded(paged: PagedOptimizer) -> bool:
    if "torch.distributed.tensor" not in sys.modules:
        return False
    groups = paged.optimizer.param_groups
    others = [p for group in groups for p in group["params"] if type(p) is not PagedTensor]
    return any(map(is_sharded, others))


# -- steps that are foreseen ---------------------------------------------------------------------
def optimizers_due(pager: Core) -> list[torch.optim.Optimizer]:
    """Those that have gradients to step with."""
    found = (known() for known in pager.optimizers)
    with torch._C.DisableTorchFunctionSubclass():
        return [
            optimizer
            for optimizer in found
            if optimizer is not None
            and paged_of(optimizer) is not None
            and any(p.grad is not None for g in optimizer.param_groups for p in g["params"])
        ]


def room_of_step(optimizer: Any, measure: Measure) -> StepRoom | None:
    """See :func:`step_room`; on this rank's shards."""
    paged = paged_of(optimizer)
    assert paged is not None
    with _on_shards(paged):
        return step_room(paged, measure)


# -- what an optimizer gets ----------------------------------------------------------------------
class _Doors:
    """Attributes of an optimizer that steps on pages."""

    def __init__(self, paged: PagedOptimizer) -> None:
        self._paged = paged

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return _step(self._paged.optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler need not do it

    def zero_grad(self, set_to_none: bool = True) -> None:
        """PyTorch's own, whose looks at each ``grad`` need not come by ``__torch_function__``."""
        with torch._C.DisableTorchFunctionSubclass():
            _ZERO_GRAD(self._paged.optimizer, set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As PyTorch's; loaded states go into pages one by one, kept as this optimizer keeps them.

        A step that was interrupted is forgotten.
        """
        paged, optimizer = self._paged, self._paged.optimizer
        if _is_sharded(paged):
            state_dict = local_state(optimizer, state_dict)
        with _on_shards(paged), _one_at_a_time(optimizer), torch.no_grad():
            paged.kind.load_state_dict(optimizer, state_dict)
            paged.done.clear()
            paged.progress.clear()
            paged.versions.clear()
            for state in paged.states():
                page_state(paged.pager, state)

    def __getstate__(self) -> dict[str, Any]:
        """Pickled it is an optimizer without pages, with states as torch itself keeps them."""
        paged = self._paged
        kept: dict[str, Any] = paged.kind.__getstate__(paged.optimizer)
        if not paged.format.chosen:
            return kept
        plain = {
            parameter: convert_state(paged.pager, state, parameter, Format(), dense=True)
            for parameter, state in kept["state"].items()
        }
        return {**kept, "state": plain}

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.optim.Optimizer:
        paged, optimizer = self._paged, self._paged.optimizer
        twin = memo[id(optimizer)] = object.__new__(paged.kind)
        twin.__setstate__(copy.deepcopy(paged.kind.__getstate__(optimizer), memo))
        return paged_optimizer(paged.pager, twin, host_step=paged.host_step, chosen=paged.format)


_ZERO_GRAD = torch.optim.Optimizer.zero_grad
_DOORS = ("step", "zero_grad", "load_state_dict", "__getstate__", "__deepcopy__")
for _door in (_Doors.step, _Doors.zero_grad):  # with PyTorch's: what is compiled keeps its operands
    hide_from_dynamo(_door)


# -- loading -------------------------------------------------------------------------------------
# ``Optimizer.load_state_dict`` casts and moves all states before anything else is done with them:
# of a model in pages, more memory than there is; and in the parameter's dtype, which states in 8
# bits have not. Here it never sees the large ones. They wait where they are saved (mapped from a
# file, say), and each goes straight into pages, kept as this optimizer keeps its states.
def load_optimizer(
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    loaded: Callable[[], None] = lambda: None,
) -> None:
    """``optimizer.load_state_dict(state)`` with one dense state at a time; the optimizer may be
    paged or not. None of the tensors of ``state`` is taken over. ``loaded``: called when those of
    a parameter were copied.

    States of sharded parameters may be sharded or whole (see ``sharded.py``)."""
    if not any(is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
        state = local_state(optimizer, state)
    elif paged_of(optimizer) is None:  # else its own load_state_dict does so
        state = sharded_state(optimizer, state)
    with _one_at_a_time(optimizer, loaded), torch.no_grad():
        optimizer.load_state_dict(state)


@contextmanager
def _one_at_a_time(
    optimizer: torch.optim.Optimizer, loaded: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Inside, ``load_state_dict`` of ``optimizer`` works so; its user's hooks see what they do."""
    paged = paged_of(optimizer)
    kept: list[tuple[int, dict[str, Any]]] = []  # of each parameter: its number in the dict, states
    groups: list[dict[str, Any]] = []
    converted = paged is not None and paged.format.chosen

    def before(_: Any, given: dict[str, Any]) -> dict[str, Any] | None:
        nonlocal converted
        states = given["state"]
        if any(map(is_special, states.values())):
            if paged is None:
                return None
            converted = True
        groups.extend(given["param_groups"])
        rest = dict(states)
        for key in itertools.chain.from_iterable(group["params"] for group in groups):
            state = states.get(key)
            state = state if isinstance(state, dict) else {}
            apart = {
                k: v for k, v in state.items() if (k in OURS if converted else is_big_dense(v))
            }
            kept.append((key, apart))
            if apart:
                rest[key] = {k: v for k, v in state.items() if k not in apart}
        return {**given, "state": rest}

    def after(_: Any) -> None:
        parameters = itertools.chain.from_iterable(g["params"] for g in optimizer.param_groups)
        for parameter, (key, apart) in zip(parameters, kept):
            if converted and paged is not None:
                made = convert_state(paged.pager, apart, parameter, paged.format)
            else:
                made = {k: _own(paged, parameter, v, key, groups, k) for k, v in apart.items()}
            if made:
                optimizer.state[parameter].update(made)
            loaded()
        kept.clear()

    hooks = [
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after, prepend=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _own(
    paged: PagedOptimizer | None,
    parameter: torch.Tensor,
    value: torch.Tensor,
    key: int,
    groups: list[dict[str, Any]],
    name: str,
) -> torch.Tensor:
    """A state with this value: in pages, or a dense copy. PyTorch says of which dtype."""
    cast = torch.optim.Optimizer._process_value_according_to_param_policy
    if paged is None:
        made = cast(parameter, value, key, groups, name)
        return made.clone() if made is value else made
    like = torch.empty(0, dtype=parameter.dtype)
    wanted = cast(like, torch.empty(0, dtype=value.dtype), key, groups, name).dtype
    shape = torch.empty_like(value, dtype=wanted, device="meta")
    return blank(paged.pager, shape, "optimizer").copy_(value)


# -- paging one ----------------------------------------------------------------------------------
def paged_optimizer(
    pager: Core,
    optimizer: OptimizerT,
    *,
    overlap: bool = False,
    host_step: bool | str = "auto",
    chosen: Format,
) -> OptimizerT:
    """See ``Pager.optimizer``."""
    pager.check_open()
    if host_step not in ("auto", True, False):
        raise ValueError(f"host_step={host_step!r}; choose 'auto', True or False")
    inner = unwrapped(optimizer)
    several = [inner, *_inside(inner)]
    paged = [_page(pager, one, chosen) for one in several]
    for one in paged:
        one.host_step = host_step
    pager.in_backward.switch(paged[0], overlap)
    refresh_wrapper(optimizer)
    pager.optimizers += map(weakref.ref, several)
    return optimizer


def _inside(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Others that step its parameters for it, as lookahead, SAM and schedule-free wrappers have."""
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for value in vars(optimizer).values():
        if not isinstance(value, torch.optim.Optimizer) or value is optimizer:
            continue
        if any(id(p) in mine for group in value.param_groups for p in group["params"]):
            yield value
            yield from _inside(value)


def _page(pager: Core, optimizer: torch.optim.Optimizer, chosen: Format) -> PagedOptimizer:
    """Make ``optimizer`` step on pages."""
    check_format(type(optimizer), fused.SUPPORTED, chosen)
    known = paged_of(optimizer)
    if known is not None:
        if known.pager is not pager:
            raise PagerError("this optimizer already belongs to another Pager")
        if chosen.chosen and chosen != known.format:
            raise PagerError(
                f"this optimizer is paged already, with {known.format}, and now {chosen} is asked "
                "for; load its state_dict() into a new optimizer that is paged so"
            )
        return known
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS needs all parameters and a history of them at once, as one dense vector, so it "
            "cannot run in pages; use another optimizer, or keep this model unpaged"
        )
    torch_fused.refuse(pager, type(optimizer), optimizer.param_groups)
    _take_over_replaced(pager, optimizer)
    paged = PagedOptimizer(pager, optimizer, chosen)
    if chosen.chosen:
        with torch.no_grad():
            for parameter, state in optimizer.state.items():
                fresh = convert_state(pager, state, parameter, chosen)
                state.clear()
                state.update(fresh)
    for state in paged.states():
        page_state(pager, state)
    doors = _Doors(paged)
    own = getattr(optimizer.zero_grad, "__func__", None) is not _ZERO_GRAD
    for name in _DOORS:  # over what a scheduler, or accelerate, has put there of the plain step
        if name != "zero_grad" or not own:
            setattr(optimizer, name, getattr(doors, name))
    optimizer._tp_paged = paged  # type: ignore[attr-defined]
    return paged


def _take_over_replaced(pager: Core, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer made before ``page_module`` gets the paged parameters instead."""
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            paged = known_parameter(pager, parameter)
            if paged is None:
                continue
            group["params"][index] = paged
            if parameter in optimizer.state:
                optimizer.state[paged] = optimizer.state.pop(parameter)


def refuse_earlier(pager: Core, model: torch.nn.Module) -> None:
    """``PagerError`` if an optimizer was paged with parameters that are about to be replaced: it
    would go on with the old ones, which get no gradients any more."""
    dense = (p for p in model.parameters() if not isinstance(p, PagedTensor))
    replaced = {id(p) for p in dense if not is_sharded(p)}  # shards stay the objects that they are
    for known in pager.optimizers:
        optimizer = known()
        groups = optimizer.param_groups if optimizer is not None else []
        if any(id(p) in replaced for group in groups for p in group["params"]):
            raise PagerError(
                f"pager.optimizer() was given a {type(optimizer).__name__} with parameters of this "
                f"{type(model).__name__}, which page_module would replace; call "
                "page_module(model) first, then pager.optimizer(optimizer)"
            )


# -- wrappers ------------------------------------------------------------------------------------
def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that steps: what ``optimizer`` wraps, as accelerate's does, or itself.

    Raises ``TypeError`` for what is no optimizer, or never was initialised as one.
    """
    inner = optimizer
    while not hasattr(inner, "_optimizer_step_pre_hooks"):
        if not isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
            raise TypeError(
                f"{type(optimizer).__name__} is no torch.optim.Optimizer that was initialised, nor "
                "a wrapper with one in its attribute 'optimizer'; pass pager.optimizer() the "
                "optimizer itself, before it is wrapped"
            )
        inner = inner.optimizer
    return inner  # type: ignore[no-any-return]


def refresh_wrapper(wrapper: Any) -> None:
    """accelerate's wrapper keeps the ``step`` of what it wraps, for its GradScaler; unpickling it
    looks it up anew."""
    while not hasattr(wrapper, "_optimizer_step_pre_hooks"):
        if hasattr(wrapper, "_optimizer_original_step_method"):
            wrapper.__setstate__(wrapper.__getstate__())
        wrapper = wrapper.optimizer


# -- advice ----------------------------------------------------------------------------------------
# PyTorch tells of every optimizer's step. A step on paged parameters outside of ``iteration()``, or
# of an optimizer that never was given to ``Pager.optimizer``, works, with all that it saves or
# makes dense; nobody would see why. So the line that is left out is named, once.
OUTSIDE = (
    "a training step outside of pager.iteration(): what autograd saves stays dense, dense memory "
    "is not held to the budget, and nothing is planned. Put 'with pager.iteration():' around "
    "forward, backward and optimizer.step()"
)


def _advise(pager: Core, frames: int) -> None:
    """A step on parameters that are paged here, which the user began so many frames above."""
    if not pager.inside and pager.budget.note_step_outside():
        warnings.warn(OUTSIDE, UserWarning, stacklevel=frames + 1)


_watching = False


def watch_steps() -> None:
    """Be told of the steps of all optimizers, from the first call on."""
    global _watching
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_on_step)


def is_ours(hook: Any) -> bool:
    """Whether this is the hook before steps that :func:`watch_steps` has registered; it looks at no
    gradient."""
    return hook is _on_step


def _on_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if hasattr(optimizer, "_tp_paged"):  # a paged one says so by itself
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if type(parameter) is PagedTensor:
                pager = parameter._storage.pager
                _advise(pager, 3)
                pager.budget.unpaged = weakref.ref(optimizer)
                return
