"""Any ``torch.optim.Optimizer`` on paged parameters, one parameter at a time.

The optimizer's own ``step`` runs once per parameter, so that at most one parameter with its
gradient and states must be on the device; states go into pages as they are made. Optimizers update
each parameter by itself, so the result is bit for bit that of one ``step`` over all of them with
``foreach=False``.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .dense_step import step_alone_as_dense, step_as_dense
from .errors import PagerError
from .module import known_parameter

if TYPE_CHECKING:
    from .early import EarlyUpdates
    from .runtime import Pager

_STATE_THRESHOLD_BYTES = 512  # step counters stay dense
_PROBE_DIM = 64


class PagedOptimizer:
    """Mixin put in front of the optimizer's class by :func:`page_optimizer`."""

    _tp_pager: Pager
    _tp_done: set[int]  # parameters already updated by a step that was interrupted
    _tp_stepped: bool  # has made the states that it makes
    _tp_early: EarlyUpdates | None = None  # updates parameters ahead of step()
    param_groups: list[dict[str, Any]]
    state: Any

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters.

        Room for new states is checked before anything changes. If a step is interrupted all the
        same (``TierFull``, a failing disk), the parameters updated so far keep their update, and
        the next ``step`` finishes the others only.
        """
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
        pager.before_step(self)
        if early is not None:
            early.measure(self)
        with pager.overlap.step_of(self):
            self._step_all(pager)
        if early is not None:
            early.stepped()
        return loss

    def _step_all(self, pager: Pager) -> None:
        raw = raw_step(type(self))
        try:
            pager.stepping = True
            if not self._tp_done and step_as_dense(self, raw):
                for state in self.state.values():  # some make one later, when a setting changes
                    page_state(pager, state)
            else:
                for parameter in _one_at_a_time(self):
                    if id(parameter) in self._tp_done:
                        continue
                    if not step_alone_as_dense(self, raw):
                        raw(self)
                    page_state(pager, self.state.get(parameter))
                    self._tp_done.add(id(parameter))
                self._tp_stepped = True
        finally:
            pager.stepping = False
        self._tp_done.clear()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as an optimizer of the plain class, on plain tensors."""
        return _rebuild, (type(self).__mro__[2], self.__getstate__())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        plain: Any = object.__new__(type(self).__mro__[2])
        plain.__dict__ = {k: v for k, v in self.__dict__.items() if not k.startswith("_tp_")}
        twin = memo[id(self)] = self._tp_pager.optimizer(copy.deepcopy(plain, memo))
        return twin

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As PyTorch's; loaded states go into pages one by one."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        for state in self.state.values():
            page_state(self._tp_pager, state)


def page_optimizer(pager: Pager, optimizer: torch.optim.Optimizer) -> None:
    """Make ``optimizer`` step on pages; see ``Pager.optimizer``."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS needs all parameters and a history of them at once, as one dense vector, so it "
            "cannot run in pages; use another optimizer, or keep this model unpaged"
        )
    if isinstance(optimizer, PagedOptimizer):
        if optimizer._tp_pager is not pager:
            raise PagerError("this optimizer already belongs to another Pager")
        return
    _take_over_replaced(pager, optimizer)
    kind = type(optimizer)
    paged_kind = type(f"Paged{kind.__name__}", (PagedOptimizer, kind), {})
    paged_kind.step = torch.optim.Optimizer.profile_hook_step(paged_kind.step)  # type: ignore[attr-defined]
    paged_kind.step.hooked = True  # type: ignore[attr-defined]
    # A scheduler made before has put its wrapper of the plain step on the object.
    if hasattr(optimizer.__dict__.get("step"), "_wrapped_by_lr_sched"):
        del optimizer.step
    paged_kind.step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.__class__ = paged_kind
    optimizer._tp_pager = pager  # type: ignore[attr-defined]
    optimizer._tp_done = set()  # type: ignore[attr-defined]
    optimizer._tp_stepped = False  # type: ignore[attr-defined]
    for state in optimizer.state.values():
        page_state(pager, state)


def _rebuild(kind: type[torch.optim.Optimizer], state: dict[str, Any]) -> torch.optim.Optimizer:
    optimizer = kind.__new__(kind)
    optimizer.__setstate__(state)
    return optimizer


def raw_step(paged_kind: type) -> Callable[..., Any]:
    """The optimizer's own step without PyTorch's hook wrapper, which runs once, around ours."""
    step: Any = paged_kind.__mro__[2].step  # type: ignore[attr-defined]
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def _one_at_a_time(optimizer: Any) -> Iterator[torch.Tensor]:
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
                yield parameter
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


def page_state(pager: Pager, state: dict[str, Any] | None) -> None:
    """Dense tensors of one parameter's state move into pages."""
    for key, value in (state or {}).items():
        if _is_big_dense(value) and value.device.type == pager.device.type:
            state[key] = pager.copy_in(value.detach(), "optimizer")  # type: ignore[index]


def _is_big_dense(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.numel() * value.element_size() >= _STATE_THRESHOLD_BYTES
    )


def _take_over_replaced(pager: Pager, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer made before ``page_module`` gets the paged parameters instead."""
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            paged = known_parameter(pager, parameter)
            if paged is None:
                continue
            group["params"][index] = paged
            if parameter in optimizer.state:
                optimizer.state[paged] = optimizer.state.pop(parameter)


# -- what a step will need -----------------------------------------------------------------------
class StepNeed(NamedTuple):
    """Per byte of a parameter: ``state`` bytes kept, ``dense`` bytes alive at once during its step;
    ``operands``: tensors of the parameter's size that one op of the step touches, at most."""

    state: float
    dense: float
    operands: int


class _CountOperands(TorchDispatchMode):
    """Most distinct tensors out of ``persistent`` that one op takes."""

    def __init__(self, persistent: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.persistent = persistent
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = tree_leaves((args, kwargs))
        pointers = {t.data_ptr() for t in leaves if isinstance(t, torch.Tensor)}
        self.most = max(self.most, len(pointers & self.persistent))
        return func(*args, **(kwargs or {}))


def probe_step(optimizer: Any, measure: Callable[[Callable[[], None]], int]) -> StepNeed | None:
    """Run the optimizer's step on a small stand-in of its largest parameter, and measure.

    Nothing of the optimizer changes. ``None`` if the stand-in cannot be stepped.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    parameters = [p for p in parameters if p.grad is not None and p.grad.layout is torch.strided]
    if not parameters:
        return None
    largest = max(parameters, key=lambda p: p.numel())
    shape = [min(n, _PROBE_DIM) for n in largest.shape]
    while len(shape) and _numel(shape) < _PROBE_DIM**2 and _numel(shape) < largest.numel():
        axis = max(range(len(shape)), key=lambda i: largest.shape[i] / shape[i])
        shape[axis] = min(largest.shape[axis], shape[axis] * 2)
    twin = torch.zeros(shape, dtype=largest.dtype, device=largest.device, requires_grad=True)
    twin.grad = torch.ones_like(twin)
    group = next(g for g in optimizer.param_groups if any(p is largest for p in g["params"]))
    probe = copy.copy(optimizer)
    probe.state = defaultdict(dict)
    plain = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items()}
    probe.param_groups = [{**plain, "params": [twin]}]
    raw = raw_step(type(optimizer))
    size = twin.numel() * twin.element_size()
    try:
        raw(probe)  # makes the states
        states = probe.state[twin].values()
        state = sum(v.numel() * v.element_size() for v in states if _is_big_dense(v))
        dense = measure(lambda: raw(probe))
        big = [v for v in states if _is_big_dense(v)]
        with _CountOperands({t.data_ptr() for t in (twin, twin.grad, *big)}) as counter:
            raw(probe)
    except Exception:  # an optimizer of the user's that needs more than this: nothing is known
        return None
    return StepNeed(state / size, dense / size, counter.most)


class _LiveResults(TorchDispatchMode):
    """Peak of the bytes that results of ops hold. Unlike the meter it works in any profiler."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {m._cdata for m in _memories((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        self._live = {key: kept for key, kept in self._live.items() if not kept[0].expired()}
        for memory in _memories(out):
            if memory._cdata not in given:
                self._live[memory._cdata] = StorageWeakRef(memory), memory.nbytes()
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return out


def _memories(tree: Any) -> list[Any]:
    return [t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def peak_of_results(action: Callable[[], None]) -> int:
    """Bytes of the results of ops that were alive at once during ``action``, at most."""
    results = _LiveResults()
    with results:
        action()
    return results.peak


def _numel(shape: list[int]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count
