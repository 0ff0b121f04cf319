"""What an optimizer's step will need: found out before anything changes, on small stand-ins."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..budget.fits import bytes_in_pages, check_capacity
from ..budget.steps import Measure, Room, StepRoom
from ..tensor.paged_tensor import PagedTensor
from . import fused
from .fused_states import is_big_dense
from .paged_optimizer import PagedOptimizer

_PROBE_DIM = 64
_TRIED = 12  # steps of a class of somebody else's
_Member = tuple[dict[str, Any], torch.Tensor]  # a parameter with a gradient, and its group


class StepNeed(NamedTuple):
    """Per byte of a parameter: ``dense`` bytes alive at once during its step, and ``state`` bytes
    kept. ``operands``: tensors of its size that one op of the step touches, at most. ``second`` and
    ``others``: dense bytes per byte of the second largest parameter that the same step updates, and
    of all others: what a loop still has of the one before, and what is made of all at once."""

    state: float
    dense: float
    operands: int
    second: float = 0.0
    others: float = 0.0


class _Watch(TorchDispatchMode):
    """Most distinct tensors out of ``persistent`` that one op takes; most bytes of them that one op
    has for ``out=``: in pages, such a tensor is written by way of a dense one; and the ``peak`` of
    the bytes that results of ops hold. Unlike the meter it works in any profiler."""

    def __init__(self, persistent: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._persistent = {t.untyped_storage()._cdata for t in persistent}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.operands = self.out_bytes = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = _memories((args, kwargs))
        self.operands = max(self.operands, len(given.keys() & self._persistent))
        written = _memories((kwargs or {}).get("out"))
        mine = [m.nbytes() for key, m in written.items() if key in self._persistent]
        self.out_bytes = max(self.out_bytes, sum(mine))
        out = func(*args, **(kwargs or {}))
        self._live = {key: kept for key, kept in self._live.items() if not kept[0].expired()}
        for key, memory in _memories(out).items():
            if key not in given:
                self._live[key] = StorageWeakRef(memory), memory.nbytes()
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return out


def _memories(tree: Any) -> dict[int, Any]:
    """Storages of plain tensors, by what tells them apart."""
    tensors = (t for t in tree_leaves(tree) if isinstance(t, torch.Tensor))
    memories = (t.untyped_storage() for t in tensors if type(t) is not PagedTensor)
    return {memory._cdata: memory for memory in memories}


def peak_of_results(action: Callable[[], None]) -> int:
    """Bytes of the results of ops that were alive at once during ``action``, at most."""
    watch = _Watch(())
    with watch:
        action()
    return watch.peak


def step_room(paged: PagedOptimizer, measure: Measure) -> StepRoom | None:
    """What a step takes at least. ``None`` if that cannot be found out.

    Parameters whose update by PyTorch's own code would be too much go slab by slab from now on, if
    the kernels know how.
    """
    has_room = paged.pager.budget.has_room
    streamed: list[_Member] = []
    free: list[_Member] = []  # PyTorch's own code can update them, and the kernels slab by slab
    fixed: list[_Member] = []
    for group, parameter in steppable(paged):
        _note_too_much(paged, parameter, False)
        if fused.is_due(paged, group, parameter):
            streamed.append((group, parameter))
        else:
            known = fused.why_not(paged, group, parameter) is None
            (free if known else fixed).append((group, parameter))
    need = probe_step(paged, measure, free + fixed)
    if need is None and (free or fixed or not streamed):
        return None
    room = least = Room(0, 0)
    if fixed:
        room = least = _room_of(paged, need, fixed)
    if streamed or free:
        least = least.with_(_slab_room(paged, streamed + free, measure))
    for member in free:
        own = _room_of(paged, need, [member])
        too_much = not has_room(own)
        _note_too_much(paged, member[1], too_much)
        if too_much:
            streamed.append(member)
        else:
            room = room.with_(own)
    if streamed:
        room = room.with_(_slab_room(paged, streamed, measure))
    if not has_room(room):
        # Each has room by itself, but not beside what another takes: all go slab by slab.
        for _, parameter in free:
            _note_too_much(paged, parameter, True)
        room = least
    return StepRoom(room, least, by_slabs=bool(streamed or free))


def _note_too_much(paged: PagedOptimizer, parameter: torch.Tensor, too_much: bool) -> None:
    """Whether PyTorch's own code takes more for an update of ``parameter`` than the budget has: in
    a metered iteration, and in all that follow, since what it takes was not measured."""
    if type(parameter) is PagedTensor:
        change = paged.too_much.add if too_much else paged.too_much.discard
        change(parameter._storage)


def _slab_room(paged: PagedOptimizer, among: Sequence[_Member], measure: Measure) -> Room:
    """What updates by the kernels take, slab by slab."""
    largest = _largest(among)
    return Room(fused.least_pages(paged, *largest), fused.need_of(paged, *largest, measure)[0])


def _room_of(paged: PagedOptimizer, need: StepNeed | None, among: Sequence[_Member]) -> Room:
    assert need is not None
    first, second, *others = *sorted((p.nbytes for _, p in among), reverse=True), 0
    dense = need.dense * first + need.second * second + need.others * sum(others)
    return Room(need.operands * -(-first // paged.pager.page_size), int(dense))


def probe_step(
    paged: PagedOptimizer, measure: Measure, among: Sequence[_Member] | None = None
) -> StepNeed | None:
    """Run the optimizer's step on a small stand-in of its largest parameter, and measure.

    Nothing of the optimizer changes, nor what random numbers come next. ``None`` if the stand-in
    cannot be stepped.
    """
    among = steppable(paged) if among is None else among
    if not among:
        return None
    group, largest = _largest(among)
    if fused.always(paged) and fused.why_not(paged, group, largest) is None:
        dense, nbytes = fused.need_of(paged, group, largest, measure)
        state = sum(shape.nbytes for shape in fused.state_shapes(paged, [largest]))
        operands = fused.least_pages(paged, group, largest)
        return StepNeed(state / max(1, largest.nbytes), dense / max(1, nbytes), operands)
    devices = [] if paged.pager.backend.host_addressable else [largest.device]
    try:
        with torch.random.fork_rng(devices):
            probe, twin = _stand_in(paged, group, largest, 1)
            big = [value for value in probe.state[twin].values() if is_big_dense(value)]
            one = two = three = measure(partial(_steps, paged, probe))
            with _Watch([twin, twin.grad, *big]) as watch:
                paged.run(probe)
            if not paged.is_torchs and len(among) > 1:
                more = (_stand_in(paged, group, largest, count)[0] for count in (2, 3))
                two, three = (measure(partial(_steps, paged, each)) for each in more)
    except Exception:  # an optimizer of the user's that needs more than this: nothing is known
        return None
    state, nbytes = sum(value.nbytes for value in big), twin.nbytes
    dense = one + watch.out_bytes
    second, others = (max(0, now - before) for before, now in ((one, two), (two, three)))
    return StepNeed(
        state / nbytes, dense / nbytes, watch.operands, second / nbytes, others / nbytes
    )


def _steps(paged: PagedOptimizer, probe: Any) -> None:
    """The next one; of a class of somebody else's, which may go another way later on, the next
    few."""
    for _ in range(1 if paged.is_torchs else _TRIED):
        paged.run(probe)


def _stand_in(
    paged: PagedOptimizer, group: dict[str, Any], of: torch.Tensor, count: int
) -> tuple[Any, Any]:
    """An optimizer like it, of ``count`` small parameters like ``of``, one of which comes too, that
    has made its states."""
    shape = _shape_of_twin(of.shape)
    twins = [
        torch.zeros(shape, dtype=of.dtype, device=of.device, requires_grad=True)
        for _ in range(count)
    ]
    for twin in twins:
        twin.grad = torch.ones_like(twin)
    plain = {key: _own(value) for key, value in group.items()}
    probe: Any = object.__new__(paged.kind)
    for key, value in vars(paged.optimizer).items():  # what it was told to do may be one of these
        is_function = isinstance(value, FunctionType) and not hasattr(paged.kind, key)
        if is_function or _is_setting(value):
            setattr(probe, key, _own(value))
    probe.__setstate__(
        {
            "defaults": paged.optimizer.defaults,
            "state": defaultdict(dict),
            "param_groups": [{**plain, "params": twins}],
        }
    )
    paged.run(probe)
    return probe, twins[0]


def _own(value: Any) -> Any:
    """A copy, if it may be written to."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return copy.deepcopy(value) if _is_setting(value) else value


def _is_setting(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_setting, value))
    return isinstance(value, bool | int | float | str | None | torch.dtype | torch.device)


def check_states(paged: PagedOptimizer) -> None:
    """Refuse the states that the next step makes if all tiers together cannot hold them beside what
    an iteration has at its peak: ``TierFull``."""
    pager = paged.pager
    if paged.stepped and not paged.optimizer.state:  # of the kind that keeps none
        return
    with torch._C.DisableTorchFunctionSubclass():
        known = paged.optimizer.state
        fresh = [p for _, p in paged.stepped_now() if not known.get(p)]
    if not fresh:
        return
    if fused.always(paged):
        nbytes = bytes_in_pages(pager.space, fused.state_shapes(paged, fresh))
    else:
        with pager.budget.trying_out():
            need = probe_step(paged, lambda action: (action(), 0)[1])  # type: ignore[func-returns-value]
        if need is None:
            return
        nbytes = int(need.state * bytes_in_pages(pager.space, fresh))
    space = pager.space
    with pager.lock:
        beside = (space.peak_transient_pages - space.transient_pages) * pager.page_size
        check_capacity(pager.budget, nbytes, f"the states of {paged.name}", beside=beside)


def _shape_of_twin(shape: Sequence[int]) -> list[int]:
    """Of no more than ``_PROBE_DIM``² elements, where it goes; its last dimensions, of which some
    optimizers make rows and columns, are the largest."""
    found: list[int] = []
    room = _PROBE_DIM**2
    for n in reversed(shape):
        found.insert(0, min(n, _PROBE_DIM, room))
        room //= max(1, found[0])
    while found and math.prod(found) < _PROBE_DIM**2 and math.prod(found) < math.prod(shape):
        axis = max(range(len(found)), key=lambda i: shape[i] / max(1, found[i]))
        found[axis] = min(shape[axis], found[axis] * 2)
    return found


def steppable(paged: PagedOptimizer) -> list[_Member]:
    return [(g, p) for g, p in paged.stepped_now() if p.grad.layout is torch.strided]  # type: ignore[union-attr]


def _largest(among: Sequence[_Member]) -> _Member:
    return max(among, key=lambda member: member[1].numel())
