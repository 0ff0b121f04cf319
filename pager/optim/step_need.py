"""What an optimizer's step will need: found out before anything changes, on small stand-ins."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..budget.budget import Measure, Room, StepRoom
from ..budget.capacity import bytes_in_pages, check_capacity
from ..tensor.paged_tensor import PagedTensor
from . import fused
from .fused_states import is_big_dense

if TYPE_CHECKING:
    from ..core import Core

_PROBE_DIM = 64


class StepNeed(NamedTuple):
    """Per byte of a parameter: ``dense`` bytes alive at once during its step, and ``state`` bytes
    kept. ``operands``: tensors of its size that one op of the step touches, at most."""

    state: float
    dense: float
    operands: int


class _CountOperands(TorchDispatchMode):
    """Most distinct tensors out of ``persistent`` that one op takes, and most bytes of them that
    one op has for ``out=``: in pages, such a tensor is written by way of a dense one."""

    def __init__(self, persistent: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.persistent = persistent
        self.most = self.out_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = tree_leaves((args, kwargs))
        pointers = {t.data_ptr() for t in leaves if isinstance(t, torch.Tensor)}
        self.most = max(self.most, len(pointers & self.persistent))
        out = tree_leaves((kwargs or {}).get("out"))
        self.out_bytes = max(
            self.out_bytes,
            sum(t.nbytes for t in out if t is not None and t.data_ptr() in self.persistent),
        )
        return func(*args, **(kwargs or {}))


def step_room(optimizer: Any, measure: Measure) -> StepRoom | None:
    """What a step of ``optimizer`` takes at least. ``None`` if that cannot be found out.

    Parameters whose update by PyTorch's own code would be too much go slab by slab from now on, if
    the kernels know how.
    """
    streamed: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        for parameter in _steppable(group):
            fused.note_too_much(parameter, False)
            few = fused.goes_in_slabs(optimizer, group, parameter)
            (streamed if few else others).append(parameter)
    if not others:
        if not streamed:
            return None
        room = _slab_room(optimizer, streamed, measure)
        return StepRoom(room, room)
    pager = optimizer._tp_pager
    need = probe_step(optimizer, measure, others)
    if need is None:
        return None
    fixed, free = _divide(optimizer, others)
    room = least = _room_of(pager, need, _largest(fixed)) if fixed else Room(0, 0)
    if streamed or free:
        least = least.with_(_slab_room(optimizer, streamed + free, measure))
    for parameter in free:
        room_of_it = _room_of(pager, need, parameter)
        too_much = not pager.budget.has_room(room_of_it)
        fused.note_too_much(parameter, too_much)
        if too_much:
            streamed.append(parameter)
        else:
            room = room.with_(room_of_it)
    if streamed:
        room = room.with_(_slab_room(optimizer, streamed, measure))
    if not pager.budget.has_room(room):
        # Each has room by itself, but not beside what another takes: all go slab by slab.
        for parameter in free:
            fused.note_too_much(parameter, True)
        room = least
    return StepRoom(room, least)


def _slab_room(optimizer: Any, parameters: Sequence[torch.Tensor], measure: Measure) -> Room:
    """What updates by the kernels take, slab by slab."""
    dense, _, pages = fused.need_of(optimizer, _largest(parameters), measure)
    return Room(pages, dense)


def _divide(
    optimizer: Any, parameters: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Those that only PyTorch's own code can update, and those that the kernels can, slab by
    slab."""
    fixed: list[torch.Tensor] = []
    free: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if any(parameter is p for p in parameters):
                kernels_can = fused.why_not(optimizer, group, parameter) is None
                (free if kernels_can else fixed).append(parameter)
    return fixed, free


def _room_of(pager: Core, need: StepNeed, parameter: torch.Tensor) -> Room:
    nbytes = parameter.numel() * parameter.element_size()
    pages = -(-nbytes // pager.page_size)
    return Room(need.operands * pages, int(need.dense * nbytes))


def raw_step(paged_kind: type) -> Callable[..., Any]:
    """The optimizer's own step without PyTorch's hook wrapper, which runs once, around ours."""
    step: Any = paged_kind.__mro__[2].step  # type: ignore[attr-defined]
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def probe_step(
    optimizer: Any, measure: Measure, among: Sequence[torch.Tensor] | None = None
) -> StepNeed | None:
    """Run the optimizer's step on a small stand-in of its largest parameter, and measure.

    Nothing of the optimizer changes. ``None`` if the stand-in cannot be stepped.
    """
    if among is None:
        among = [p for group in optimizer.param_groups for p in _steppable(group)]
    if not among:
        return None
    largest = _largest(among)
    group = next(g for g in optimizer.param_groups if any(p is largest for p in g["params"]))
    if fused.mode(optimizer) == "always" and fused.why_not(optimizer, group, largest) is None:
        dense, nbytes, operands = fused.need_of(optimizer, largest, measure)
        shapes = fused.state_shapes(optimizer, [largest])
        state = sum(shape.numel() * shape.element_size() for shape in shapes)
        nbytes = max(1, nbytes)
        return StepNeed(state / max(1, largest.nbytes), dense / nbytes, operands)
    shape = _shape_of_twin(largest.shape)
    twin = torch.zeros(shape, dtype=largest.dtype, device=largest.device, requires_grad=True)
    twin.grad = torch.ones_like(twin)
    probe = copy.copy(optimizer)
    probe.state = defaultdict(dict)
    plain = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items()}
    probe.param_groups = [{**plain, "params": [twin]}]
    raw = raw_step(type(optimizer))
    size = twin.numel() * twin.element_size()
    try:
        raw(probe)  # makes the states
        states = probe.state[twin].values()
        state = sum(v.numel() * v.element_size() for v in states if is_big_dense(v))
        dense = measure(lambda: raw(probe))
        big = [v for v in states if is_big_dense(v)]
        with _CountOperands({t.data_ptr() for t in (twin, twin.grad, *big)}) as counter:
            raw(probe)
    except Exception:  # an optimizer of the user's that needs more than this: nothing is known
        return None
    return StepNeed(state / size, (dense + counter.out_bytes) / size, counter.most)


def check_states(pager: Core, optimizer: Any) -> None:
    """Refuse the states that the next step of ``optimizer`` makes if all tiers together cannot hold
    them: ``TierFull``."""
    with torch._C.DisableTorchFunctionSubclass():
        fresh = [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and not optimizer.state.get(p)
        ]
    if optimizer._tp_stepped and not optimizer.state:  # of the kind that keeps none
        fresh = []
    if not fresh:
        return
    what = f"the states of {type(optimizer).__mro__[2].__name__}"
    if fused.mode(optimizer) == "always":
        nbytes = bytes_in_pages(pager.space, fused.state_shapes(optimizer, fresh))
        with pager.lock:
            check_capacity(pager.budget, nbytes, what)
        return
    need = probe_step(optimizer, lambda action: (action(), 0)[1])  # type: ignore[func-returns-value]
    if need is not None:
        nbytes = int(need.state * bytes_in_pages(pager.space, fresh))
        with pager.lock:
            check_capacity(pager.budget, nbytes, what)


def _shape_of_twin(shape: Sequence[int]) -> list[int]:
    """Of no more than ``_PROBE_DIM``² elements, where it goes; its last dimensions, of which some
    optimizers make rows and columns, are the largest."""
    found: list[int] = []
    room = _PROBE_DIM**2
    for n in reversed(shape):
        found.insert(0, min(n, _PROBE_DIM, room))
        room //= max(1, found[0])
    while found and _numel(found) < _PROBE_DIM**2 and _numel(found) < _numel(shape):
        axis = max(range(len(found)), key=lambda i: shape[i] / max(1, found[i]))
        found[axis] = min(shape[axis], found[axis] * 2)
    return found


def _steppable(group: dict[str, Any]) -> list[torch.Tensor]:
    return [p for p in group["params"] if p.grad is not None and p.grad.layout is torch.strided]


def _largest(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    return max(parameters, key=lambda p: p.numel())


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
    """Of plain tensors; what is in pages is not dense."""
    return [
        t.untyped_storage()
        for t in tree_leaves(tree)
        if isinstance(t, torch.Tensor) and type(t) is not PagedTensor
    ]


def peak_of_results(action: Callable[[], None]) -> int:
    """Bytes of the results of ops that were alive at once during ``action``, at most."""
    results = _LiveResults()
    with results:
        action()
    return results.peak


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count
