"""Parameters are updated during the backward pass, each as soon as its gradient is final.

::

    backward   | layer 3 | update 3 | layer 2 | update 2 | layer 1 | update 1 |     step(): the rest

Moving optimizer states hides under the backward pass that way, and a gradient lives for a moment:
it is used where it was made, dense, and dropped.

Why the result is the same. A parameter's hook runs when all nodes of the graph that read it on the
way to its gradient have run, so this backward pass needs its old value no more; and an optimizer of
``torch.optim`` updates each parameter by itself. What would break it is a program that looks at
gradients, or at parameters, between backward and ``step()``, or that makes two backward passes for
one step. So the first steps of each optimizer are taken as usual and *watched*; if anything of that
kind happens the overlap is off for good, with a warning. Later on single backward passes, or single
parameters, are left to ``step()``: see the reasons that :class:`EarlyUpdates` gives. A program that
changes its ways after it was watched gets a ``PagerError`` where that can be noticed.

FSDP2 runs the hooks of a shard when its gradient has been reduced. By then the backward pass is
done with the parameter that was gathered from it, which is other memory anyway.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..memory.space import Extent
from ..streaming.table_rows import is_large
from ..tensor.dispatcher import hide_from_dynamo
from ..tensor.new_pages import copy_in
from ..tensor.paged_tensor import PagedTensor
from ..tensor.sharded import is_sharded, local_of
from .early import EarlyUpdates, unsuitable

if TYPE_CHECKING:
    from ..core import Core


class _Place(NamedTuple):
    """Where a parameter is: ``optimizer.param_groups[group]["params"][position]``."""

    optimizer: weakref.ref[Any]
    group: int
    position: int


class _Mark(NamedTuple):
    """When a gradient was made: its size, and the dense bytes in use, its own among them."""

    early: EarlyUpdates
    group: int
    nbytes: int
    dense: int


class Overlap:
    """Early updates of one pager's optimizers. Active inside ``pager.iteration()``.

    ``updates``: parameters updated during backward passes so far. ``dense_peak``: most dense bytes
    in use during such updates, on the CPU; never more than the budget's reserve.
    """

    def __init__(self, pager: Core) -> None:
        self.pager = pager
        self.updates = 0
        self.dense_peak = 0
        self._places: dict[int, _Place] = {}  # by id; no parameter that two optimizers have
        self._watch = False  # an optimizer is being watched in this iteration
        self._used: dict[int, tuple[Extent, int]] = {}  # by id, and when each was last used
        self._marks: list[_Mark] = []  # of a metered iteration
        self._dense_before = 0
        self._too_big: dict[int, int] = {}  # id of a parameter → the reserve that was too small

    def switch(self, optimizer: Any, on: bool) -> None:
        """Allow or forbid early updates of a paged optimizer, from the next iteration on."""
        if not on:
            optimizer._tp_early = None
        elif optimizer._tp_early is None:
            optimizer._tp_early = early = EarlyUpdates(self)
            reason = unsuitable(optimizer)
            if reason is not None:
                early.stop(optimizer, reason)

    @property
    def watching(self) -> bool:
        """An optimizer is still being watched: later iterations will use pages in another order."""
        optimizers = [ref() for ref in self.pager.optimizers]
        early = [getattr(optimizer, "_tp_early", None) for optimizer in optimizers]
        return any(e is not None and e.watching for e in early)

    # -- called by the pager ---------------------------------------------------------------------
    def begin(self) -> None:
        """An iteration begins. What one that raised has updated early stays updated."""
        self._places.clear()
        self._marks.clear()
        self._watch = False
        optimizers: dict[int, Any] = {
            id(o): o for ref in self.pager.optimizers if (o := ref()) is not None
        }
        if all(o._tp_early is None for o in optimizers.values()):
            return
        shared = set()
        for optimizer in optimizers.values():
            weak = weakref.ref(optimizer)
            for number, group in enumerate(optimizer.param_groups):
                for position, parameter in enumerate(group["params"]):
                    if id(parameter) in self._places:
                        shared.add(id(parameter))
                    self._places[id(parameter)] = _Place(weak, number, position)
            if optimizer._tp_early is not None:
                optimizer._tp_early.restart()
        for key in shared:
            del self._places[key]
        self._watch = self.watching
        self._used.clear()
        self._dense_before = self.pager.backend.dense_now()

    def end(self, ok: bool) -> None:
        """An iteration is over; ``ok``: it did not raise. Then raises ``PagerError`` if parameters
        were updated early and no ``step()`` followed; the next iteration starts afresh."""
        optimizers = {id(o): o for p in self._places.values() if (o := p.optimizer()) is not None}
        self._places.clear()
        self._used.clear()
        if not ok:
            return
        errors = [
            error
            for optimizer in optimizers.values()
            if optimizer._tp_early is not None
            and (error := optimizer._tp_early.end(optimizer)) is not None
        ]
        if errors:
            raise errors[0]

    def update(self, parameter: torch.Tensor) -> bool:
        """Update ``parameter`` and drop its gradient, if that is allowed.
        ``False``, and nothing done, if it is left to ``step()``."""
        place = self._places.get(id(parameter))
        if place is None or self.pager.fits or not self.pager.in_iteration():
            return False
        optimizer = place.optimizer()
        early = getattr(optimizer, "_tp_early", None)
        if early is None:
            return False
        groups = optimizer.param_groups  # type: ignore[union-attr]
        group: list[Any] = groups[place.group]["params"] if place.group < len(groups) else []
        if place.position >= len(group) or group[place.position] is not parameter:
            return False  # the groups were changed since
        if type(parameter.grad) is PagedTensor and is_large(parameter):
            return False  # made in pages, slab by slab; so is its update
        hooks: Any = parameter._post_accumulate_grad_hooks
        watched = len(hooks) > 1  # the user's come after ours, and want the gradient
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), ExitStack() as stack:
            if is_sharded(parameter):
                from .shards import one_shard  # torch.distributed, which others need not load

                shard = one_shard(optimizer, group, place.position)
                parameter = stack.enter_context(shard)
            return bool(early.update(optimizer, place.group, parameter, wanted=watched))

    def page_grad(self, parameter: torch.Tensor) -> None:
        """Post-accumulate hook: ``parameter`` is updated at once, where that is allowed, or else
        its dense gradient moves into pages."""
        pager = self.pager
        if pager.fits:
            return
        if self.update(parameter):
            return
        grad = parameter.grad
        if grad is None or grad.requires_grad:  # create_graph=True: its history is wanted
            return
        if type(grad) is PagedTensor:
            if pager.metering_this() and type(parameter) is PagedTensor:
                pager.budget.placement.gradient_is_kept(parameter._storage.run)
            return
        if grad.layout is torch.strided and pager.closed_reason is None:
            parameter.grad = None
            parameter.grad = copy_in(pager, grad, "gradient")
            self.paged(parameter)

    def paged(self, parameter: torch.Tensor) -> None:
        """The gradient of ``parameter`` was left to ``step()`` and has just moved into pages."""
        metering = self.pager.budget.metering and self._places
        grad = parameter.grad
        assert grad is not None
        if not self._watch and not metering:
            return
        place = self._places.get(id(parameter))
        early = getattr(place.optimizer(), "_tp_early", None) if place is not None else None
        parameter, grad = local_of(parameter), local_of(grad)
        if metering and early is not None and place is not None:
            nbytes = parameter.numel() * parameter.element_size()
            self._marks.append(_Mark(early, place.group, nbytes, self._dense()))
        if self._watch:
            self.note(grad)  # whoever's it is: small gradients share pages
            if early is not None and early.watching:
                early.note(parameter, grad)

    @contextmanager
    def step_of(self, optimizer: Any) -> Iterator[None]:
        """``optimizer`` makes its step. It may use pages that gradients of others are in, too."""
        owners = {id(o): o for p in self._places.values() if (o := p.optimizer()) is not None}
        if not self._watch or len(owners) < 2:
            yield
            return
        for other in owners.values():
            if other is not optimizer and other._tp_early is not None:
                other._tp_early.look()
        try:
            yield
        finally:
            ages = self.pager.residency.ages
            self._used = {key: (run, int(ages[key])) for key, (run, _) in self._used.items()}

    def extra_dense(self) -> int:
        """At the end of a metered iteration: bytes that the dense reserve should have beside the
        measured peak, so that large parameters can be updated while backward's own tensors live.
        Gradients will need no pages in return. At most a quarter of the arena, and none where that
        would leave it short."""
        budget, residency = self.pager.budget, self.pager.residency
        peaks = [
            mark.dense + math.ceil(need * mark.nbytes)
            for mark in self._marks
            if mark.early.off is None and (need := mark.early.need(mark.group)) is not None
        ]
        frames = (budget.bytes - budget.dense_peak) // self.pager.page_size
        spare = min(frames // 4, frames - 2 * residency.largest_need) * self.pager.page_size
        return max((n for p in peaks if 0 < (n := p - budget.dense_peak) <= spare), default=0)

    # -- called by EarlyUpdates ------------------------------------------------------------------
    def note(self, tensor: Any) -> Extent:
        """Remember when the pages of ``tensor`` were last used: now."""
        run: Extent = tensor._storage.run
        self._used[run.id] = run, int(self.pager.residency.ages[run.id])
        return run

    def untouched(self, run: Extent) -> bool:
        """``run`` was not used since it was noted."""
        noted, tick = self._used[run.id]
        return noted is run and int(self.pager.residency.ages[run.id]) == tick

    def has_room(self, parameter: torch.Tensor, nbytes: int) -> bool:
        """Whether ``nbytes`` of temporaries fit beside what is dense now."""
        reserve = self.pager.budget.reserve
        if self.pager.backend.caps_dense:
            if self._too_big.get(id(parameter)) == reserve:
                return False
            try:
                torch.empty(nbytes, dtype=torch.uint8, device=self.pager.device)
            except torch.OutOfMemoryError:
                self._too_big[id(parameter)] = reserve
                return False
            return True
        dense = self._dense() + nbytes
        if dense > reserve:
            return False
        self.dense_peak = max(self.dense_peak, dense)
        return True

    def _dense(self) -> int:
        """Dense bytes now, as the budget counts them: on top of when the iteration began."""
        grown = self.pager.backend.dense_now() - self._dense_before
        return self.pager.budget.dense_baseline + max(0, grown)


hide_from_dynamo(Overlap.page_grad)
