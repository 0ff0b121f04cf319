"""Any ``torch.optim.Optimizer`` on paged parameters, one parameter at a time.

The optimizer's own ``step`` runs once per parameter, so that at most one parameter with its
gradient and states must be on the device; states go into pages as they are made. Optimizers update
each parameter by itself, so the result is bit for bit that of one ``step`` over all of them with
``foreach=False``. Those that kernels on pages know (``fused.py``) are updated by these where that
is better: then not even one parameter has to be on the device as a whole.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..errors import PagerError
from ..tensor.dispatcher import hide_from_dynamo
from ..tensor.module import is_dtensor, known_parameter
from ..tensor.new_pages import copy_in
from ..tensor.paged_tensor import PagedTensor
from ..tensor.sharded import local_state
from . import fused, torch_fused
from .advice import stepping
from .dense_step import step_alone_as_dense, step_as_dense
from .fused_states import (
    Format,
    check_format,
    convert_states,
    is_big_dense,
    loading,
    plain_states,
)
from .optimizer_states import one_at_a_time
from .step_need import check_states, raw_step, step_room

if TYPE_CHECKING:
    from ..core import Core
    from .early import EarlyUpdates

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


class PagedOptimizer:
    """Mixin put in front of the optimizer's class by :func:`page_optimizer`."""

    _tp_pager: Core
    _tp_done: set[int]  # parameters already updated by a step that was interrupted
    _tp_stepped: bool  # has made the states that it makes
    _tp_progress: dict[int, fused.Progress]  # of parameters whose update was interrupted
    _tp_format: Format  # how states are kept
    _tp_numbers: dict[int, int]  # of parameters, for random rounding
    _tp_versions: dict[int, int]  # of parameters with a master, when that was last updated
    _tp_early: EarlyUpdates | None = None  # updates parameters ahead of step()
    param_groups: list[dict[str, Any]]
    state: Any

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters; of those of FSDP2, on their local shards.

        Room for new states is checked before anything changes. If a step is interrupted all the
        same (``TierFull``, a failing disk), the parameters updated so far keep their update, and
        the next ``step`` finishes the others only; of a parameter that is updated slab by slab, the
        elements that are left.
        """
        if not _is_sharded(self):
            return self._step(closure)
        from .shards import local_step  # torch.distributed, which others need not load

        loss = None
        if closure is not None:  # it computes gradients, which are of the sharded parameters
            with torch.enable_grad():
                loss = closure()
        with local_step(self):
            self._step(None)
        return loss

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        self._opt_called = True  # as learning-rate schedulers note it
        loss = None
        early = self._tp_early
        if closure is not None:
            if early is not None:
                early.stop(self, "step() is given a closure")
            with torch.enable_grad():
                loss = closure()
        pager = self._tp_pager
        if early is not None:
            early.before_step(self)
        fused.refuse(self)
        fused.number_parameters(self)
        pager.check_open()
        stepping(pager)
        pager.budget.check(self, step_room)
        check_states(pager, self)
        if early is not None:
            early.measure(self)
        with pager.overlap.step_of(self):
            self._step_all(pager)
        if early is not None:
            early.stepped()
        return loss

    def _step_all(self, pager: Core) -> None:
        raw = raw_step(type(self))
        try:
            pager.stepping = True
            pager.residency.step = pager.budget.step_of(self)
            if fused.mode(self) == "always":
                self._step_by_kernels(raw)
            elif not self._tp_done and not self._tp_progress and step_as_dense(self, raw):
                for state in self.state.values():  # some make one later, when a setting changes
                    page_state(pager, state)
            else:
                for group, parameter in _one_at_a_time(self):
                    if id(parameter) in self._tp_done:
                        continue
                    self._step_alone(group, parameter, raw)
                    self._tp_done.add(id(parameter))
                self._tp_stepped = True
        finally:
            pager.stepping = False
            pager.residency.step = None
        self._tp_done.clear()

    def _step_by_kernels(self, raw: Callable[..., Any]) -> None:
        def otherwise(group: dict[str, Any], parameter: torch.Tensor) -> None:
            with alone(self, group, parameter):
                if not step_alone_as_dense(self, raw):
                    raw(self)
            page_state(self._tp_pager, self.state.get(parameter))

        with torch.no_grad():
            self._tp_stepped |= fused.step_all(self, otherwise)

    def _step_alone(
        self, group: dict[str, Any], parameter: torch.Tensor, raw: Callable[..., Any]
    ) -> None:
        """Groups name ``parameter`` only."""
        if fused.mode(self) != "never":
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                if fused.step_one(self, group, parameter):
                    return
        if not step_alone_as_dense(self, raw):
            raw(self)
        page_state(self._tp_pager, self.state.get(parameter))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as an optimizer of the plain class, on plain tensors."""
        state: dict[str, Any] = self.__getstate__()  # type: ignore[assignment]
        state = {**state, "state": plain_states(self)}
        return _rebuild, (type(self).__mro__[2], state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        plain: Any = object.__new__(type(self).__mro__[2])
        plain.__dict__ = {k: v for k, v in self.__dict__.items() if not k.startswith("_tp_")}
        states, masters = self._tp_format
        twin = memo[id(self)] = paged_optimizer(
            self._tp_pager, copy.deepcopy(plain, memo), chosen=Format(states, masters)
        )
        return twin

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As PyTorch's; loaded states go into pages one by one, kept as this optimizer keeps them.

        A step that was interrupted is forgotten.
        """
        if not _is_sharded(self):
            self._load(state_dict)
            return
        from .shards import local_step

        mine = local_state(self, state_dict)
        with local_step(self):
            self._load(mine)

    def _load(self, state_dict: dict[str, Any]) -> None:
        with one_at_a_time(self), loading(self), torch.no_grad():
            super().load_state_dict(state_dict)  # type: ignore[misc]
        self._tp_done.clear()
        self._tp_progress.clear()
        self._tp_versions.clear()
        for state in self.state.values():
            page_state(self._tp_pager, state)


hide_from_dynamo(PagedOptimizer.step)  # with PyTorch's step: what is compiled keeps its operands


def _is_sharded(optimizer: Any) -> bool:
    """Whether it has parameters of FSDP2."""
    if "torch.distributed.tensor" not in sys.modules:
        return False
    return any(is_dtensor(p) for group in optimizer.param_groups for p in group["params"])


def refuse_earlier(pager: Core, model: torch.nn.Module) -> None:
    """``PagerError`` if an optimizer was paged with parameters that are about to be replaced: it
    would go on with the old ones, which get no gradients any more."""
    dense = (p for p in model.parameters() if not isinstance(p, PagedTensor))
    replaced = {id(p) for p in dense if not is_dtensor(p)}  # shards stay the objects that they are
    for known in pager.optimizers:
        optimizer = known()
        groups = optimizer.param_groups if optimizer is not None else []
        if any(id(p) in replaced for group in groups for p in group["params"]):
            raise PagerError(
                f"pager.optimizer() was given a {type(optimizer).__mro__[2].__name__} with "
                f"parameters of this {type(model).__name__}, which page_module would replace; call "
                "page_module(model) first, then pager.optimizer(optimizer)"
            )


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


def paged_optimizer(
    pager: Core, optimizer: OptimizerT, *, overlap: bool = False, chosen: Format
) -> OptimizerT:
    """See ``Pager.optimizer``."""
    pager.check_open()
    inner = unwrapped(optimizer)
    page_optimizer(pager, inner, chosen)
    refresh_wrapper(optimizer)
    pager.optimizers.append(weakref.ref(inner))
    pager.overlap.switch(inner, overlap)
    return optimizer


def page_optimizer(
    pager: Core, optimizer: torch.optim.Optimizer, chosen: Format | None = None
) -> None:
    """Make ``optimizer`` step on pages; see ``Pager.optimizer``."""
    chosen = chosen or Format()
    if isinstance(optimizer, PagedOptimizer):
        if optimizer._tp_pager is not pager:
            raise PagerError("this optimizer already belongs to another Pager")
        check_format(fused.plain_class(optimizer), fused.SUPPORTED, chosen)
        if chosen.chosen and chosen != optimizer._tp_format:
            raise PagerError(
                f"this optimizer is paged already, with {optimizer._tp_format}, and now "
                f"{chosen} is asked for; load its state_dict() into a new optimizer that is "
                "paged so"
            )
        return
    check_format(type(optimizer), fused.SUPPORTED, chosen)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS needs all parameters and a history of them at once, as one dense vector, so it "
            "cannot run in pages; use another optimizer, or keep this model unpaged"
        )
    kind = type(optimizer)
    torch_fused.refuse(pager, kind, optimizer.param_groups)
    _take_over_replaced(pager, optimizer)
    paged_kind = type(f"Paged{kind.__name__}", (PagedOptimizer, kind), {})
    paged_kind.step = torch.optim.Optimizer.profile_hook_step(paged_kind.step)  # type: ignore[attr-defined]
    paged_kind.step.hooked = True  # type: ignore[attr-defined]
    # A scheduler made before has put its wrapper of the plain step on the object, and accelerate
    # the plain step itself.
    own = optimizer.__dict__.get("step")
    if hasattr(own, "_wrapped_by_lr_sched") or getattr(own, "__func__", None) is kind.step:
        del optimizer.step
    paged_kind.step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.__class__ = paged_kind
    paged: Any = optimizer
    paged._tp_pager = pager
    paged._tp_done = set()
    paged._tp_progress = {}
    paged._tp_format = chosen
    paged._tp_numbers = {}
    paged._tp_versions = {}
    paged._tp_stepped = False
    if chosen.chosen:
        with torch.no_grad():
            convert_states(paged)
    for state in optimizer.state.values():
        page_state(pager, state)


def _rebuild(kind: type[torch.optim.Optimizer], state: dict[str, Any]) -> torch.optim.Optimizer:
    optimizer = kind.__new__(kind)
    optimizer.__setstate__(state)
    return optimizer


def _one_at_a_time(optimizer: Any) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Let the optimizer see one parameter with a gradient at a time; restores the groups."""
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    names = [group.get("param_names") for group in groups]
    try:
        for group in groups:
            group["params"] = []
        for group, parameters, labels in zip(groups, whole, names):
            for index, parameter in enumerate(parameters):
                if parameter.grad is None:
                    continue
                group["params"] = [parameter]
                if labels is not None:
                    group["param_names"] = [labels[index]]
                yield group, parameter
            group["params"] = []
    finally:
        for group, parameters, labels in zip(groups, whole, names):
            group["params"] = parameters
            if labels is not None:
                group["param_names"] = labels


@contextmanager
def alone(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> Iterator[None]:
    """The optimizer sees ``parameter``, one of ``group``, and no other."""
    groups, parameters = optimizer.param_groups, group["params"]
    optimizer.param_groups = [group]
    group["params"] = [parameter]
    try:
        yield
    finally:
        group["params"] = parameters
        optimizer.param_groups = groups


def page_state(pager: Core, state: dict[str, Any] | None) -> None:
    """Dense tensors of one parameter's state move into pages."""
    for key, value in (state or {}).items():
        if is_big_dense(value) and value.device.type == pager.device.type:
            state[key] = copy_in(pager, value.detach(), "optimizer")  # type: ignore[index]


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
