"""One optimizer that steps on pages: what is known of it, and what PyTorch's code is shown of it.

PyTorch's own step reads the optimizer's ``param_groups`` and ``state``. To update one parameter of
many, or plain views in place of pages, or this rank's shards, it is shown only these for a while.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..tensor.operands import Value
from .fused_states import Format

if TYPE_CHECKING:
    from ..core import Core, PagedStorage


@dataclass
class Progress:
    """Of a parameter whose update broke off: elements [0, ``done``) have it, in slabs of ``pages``.
    ``states``: those that are not in the optimizer's state before the update is complete."""

    done: int = 0
    pages: int = 0
    states: dict[str, Value] = field(default_factory=dict)


class PagedOptimizer:
    """What is known of one optimizer. It is an attribute of it, and does not keep it alive.

    kind : its class.
    format : how its states are kept.
    done : ids of parameters already updated by a step that was interrupted.
    progress : of parameters whose update was interrupted, by their ids.
    numbers : of parameters, by their ids, for random rounding.
    versions : of parameters with a master, by their ids, when that was last updated.
    too_much : parameters of which PyTorch's own update takes more than the budget has.
    again : batches of updates to be made again (``again.py``), by the id of the first parameter.
    stepped : it has made the states that it makes.
    op_by_op : it compiles its step in one piece, which cannot take pages: it runs as written.
    in_backward : what it updates ahead of ``step()`` (``in_backward.py``), or ``None``.
    host_step : whether the host takes steps (``host_steps.py``): ``True``, ``False``, ``"auto"``.
    """

    def __init__(self, pager: Core, optimizer: torch.optim.Optimizer, format: Format) -> None:
        self.pager = pager
        self.kind = type(optimizer)
        self.format = format
        self.done: set[int] = set()
        self.progress: dict[int, Progress] = {}
        self.numbers: dict[int, int] = {}
        self.versions: dict[int, int] = {}
        self.too_much: weakref.WeakSet[PagedStorage] = weakref.WeakSet()
        self.again: dict[int, Any] = {}
        self.stepped = self.op_by_op = False
        self.in_backward: Any = None
        self.host_step: bool | str = "auto"
        self.ref = weakref.ref(optimizer)

    @property
    def optimizer(self) -> Any:
        optimizer = self.ref()
        if optimizer is None:
            raise ReferenceError(f"this {self.name} is gone; keep it for as long as it steps")
        return optimizer

    @property
    def name(self) -> str:
        return self.kind.__name__

    @property
    def is_torchs(self) -> bool:
        """Its step is one of ``torch.optim``: each parameter is updated by itself. A class of
        somebody else's may count its steps in a group, or take a norm of all gradients."""
        for cls in self.kind.__mro__:
            if _is_of_torch(cls):
                return cls is not torch.optim.Optimizer
            own = (vars(cls)[name] for name in vars(cls).keys() - {"__init__"})
            if any(callable(value) and not _is_of_torch(value) for value in own):
                return False
        return False

    def states(self) -> list[dict[str, Any]]:
        """What it keeps of each parameter. (Some keep a number of their own beside these.)"""
        return [state for state in self.optimizer.state.values() if isinstance(state, dict)]

    def state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """What it keeps of ``parameter`` so far; not to be written to."""
        return self.optimizer.state.get(parameter, {})  # type: ignore[no-any-return]

    def stepped_now(self) -> list[tuple[dict[str, Any], torch.Tensor]]:
        """Parameters that have a gradient, with their groups."""
        groups = self.optimizer.param_groups
        return [(group, p) for group in groups for p in group["params"] if p.grad is not None]

    def run(self, optimizer: Any = None, *given: Any, **named: Any) -> Any:
        """The class's own step without PyTorch's hooks, which run once, around ours. ``optimizer``:
        a stand-in. What that compiled for its small operands would be compiled again for operands
        of any size, which are other bits."""
        step: Any = self.kind.step
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        eager = self.op_by_op or (optimizer is not None and not self.is_torchs)
        with torch.compiler.set_stance("force_eager") if eager else nullcontext():
            return step(self.optimizer if optimizer is None else optimizer, *given, **named)


class Before:
    """What an optimizer's settings, states and numbers were before a step that may break off at
    once. Some keep a number beside the states of parameters, or as an attribute."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._own = {k: v for k, v in vars(optimizer).items() if isinstance(v, int | float)}
        self._groups = [dict(group) for group in optimizer.param_groups]
        states = optimizer.state.items()
        self._states = {k: dict(v) if isinstance(v, dict) else v for k, v in states}
        held = [p for group in self._groups for p in group["params"]]
        for values in (*self._groups, *self._states.values()):
            some = values.values() if isinstance(values, dict) else [values]
            held += [value for value in some if isinstance(value, torch.Tensor)]
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = [(tensor, tensor._version) for tensor in held if tensor.numel() != 1]
            self._numbers = [(t, t.detach().clone()) for t in held if t.numel() == 1]

    def restore(self) -> bool:
        """As it was; ``False``, and nothing done, if more than numbers were written to."""
        optimizer = self._optimizer
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if any(tensor._version != version for tensor, version in self._versions):
                return False
            for number, value in self._numbers:
                number.copy_(value)
        vars(optimizer).update(self._own)
        for group, before in zip(optimizer.param_groups, self._groups):
            group.clear()
            group.update(before)
        optimizer.state.clear()
        optimizer.state.update(self._states)
        return True


def cannot_compile(error: Exception) -> bool:
    """Whether it is of ``torch.compile``, which was not to leave anything out. (Up to PyTorch 2.13
    a function that could not be compiled once is not tried again, which is an error as well.)"""
    module = sys.modules.get("torch._dynamo.exc")
    if module is None:
        return False
    return isinstance(error, module.TorchDynamoException) or (
        isinstance(error, RuntimeError) and "fullgraph=True" in str(error)
    )


def _is_of_torch(thing: Any) -> bool:
    """A class, or what a class has: also what PyTorch has put its hooks around."""
    return f"{getattr(thing, '__module__', '')}.".startswith("torch.optim.")


def paged_of(optimizer: Any) -> PagedOptimizer | None:
    """What is known of ``optimizer``, if it was paged."""
    return getattr(optimizer, "_tp_paged", None)


@contextmanager
def alone(optimizer: Any, group: dict[str, Any], *parameters: torch.Tensor) -> Iterator[None]:
    """The optimizer sees ``parameters``, some of ``group``, and no others."""
    shown = [
        (g, {k: g[k] for k in ("params", "param_names") if k in g}) for g in optimizer.param_groups
    ]
    wanted = set(map(id, parameters))
    mine = [number for number, p in enumerate(group["params"]) if id(p) in wanted]
    try:
        for one, lists in shown:
            places = mine if one is group else []
            one.update({key: [values[i] for i in places] for key, values in lists.items()})
        yield
    finally:
        for one, lists in shown:
            one.update(lists)


Convert = Callable[[str, Any, torch.Tensor], Any]  # key, value, and whose it becomes


@contextmanager
def in_place(
    optimizer: Any, twins: dict[torch.Tensor, torch.Tensor], there: Convert, back: Convert
) -> Iterator[None]:
    """The optimizer sees the twins of parameters, with their gradients and states as ``there`` has
    them. Afterwards it has the parameters again, with the twins' states by way of ``back``; what
    has no gradient then has none any more."""
    for parameter, twin in twins.items():
        if parameter.grad is not None:
            twin.grad = there("grad", parameter.grad, twin)
        if parameter in optimizer.state:
            kept = optimizer.state[parameter]
            optimizer.state[twin] = {k: there(k, v, twin) for k, v in kept.items()}
    _swap(optimizer, twins)
    try:
        yield
    finally:
        _swap(optimizer, {twin: parameter for parameter, twin in twins.items()})
        for parameter, twin in twins.items():
            if twin.grad is None:
                parameter.grad = None
            twin.grad = None
            made = optimizer.state.pop(twin, None)
            if made is not None:
                kept = optimizer.state[parameter]
                kept.clear()
                kept.update({k: back(k, v, parameter) for k, v in made.items()})


def _swap(optimizer: Any, to: dict[torch.Tensor, torch.Tensor]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [to.get(parameter, parameter) for parameter in group["params"]]
