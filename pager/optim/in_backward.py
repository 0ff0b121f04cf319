"""The optimizer in backward: parameters are updated as soon as their gradients are final.

::

    backward   | layer 3 | update 3 | layer 2 | update 2 | layer 1 | update 1 |     step(): the rest

Moving optimizer states hides under the backward pass that way, and a gradient lives for a moment:
it is used where it was made, dense, and dropped.

Why the result is the same. A parameter's hook runs when all nodes of the graph that read it on the
way to its gradient have run, so this backward pass needs its old value no more; and an optimizer of
``torch.optim`` updates each parameter by itself. What would break it is a program that looks at
gradients, or at parameters, between backward and ``step()``, or that makes two backward passes for
one step. So the first steps of each optimizer are taken as usual and *watched*; if anything of that
kind happens it is off for good, with a warning. Later on single backward passes, or single
parameters, are left to ``step()``. A program that changes its ways after it was watched gets a
``PagerError`` where that can be noticed. The states of one optimizer::

    watching --- 2 steps, nothing odd ---> updates <---> held (for one backward pass)
        |                                        |
        +---- gradients or parameters used ------+--- a closure, a pre-hook ---> off, for good

FSDP2 runs the hooks of a shard when its gradient has been reduced. By then the backward pass is
done with the parameter that was gathered from it, which is other memory anyway.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import PagerError, TierFull
from ..memory.space import Extent
from ..streaming.tables import is_large
from ..tensor.dispatcher import hide_from_dynamo
from ..tensor.new_pages import copy_in
from ..tensor.paged_tensor import PagedTensor
from ..tensor.sharded import is_sharded, local_of
from . import fused
from .optimizer import is_ours, update_one
from .paged_optimizer import PagedOptimizer, paged_of
from .step_need import peak_of_results, probe_step, steppable

if TYPE_CHECKING:
    from ..core import Core

_SMALL = 64  # of such gradients have room in one page
_WATCHED_STEPS = 2
_REMEDY = "pass overlap=False to pager.optimizer"
_USED = "gradients are used between backward and step()"


class _Mark(NamedTuple):
    """When a gradient was made: its size, and the dense bytes in use, its own among them."""

    owner: OneInBackward
    group: int
    nbytes: int
    dense: int


class InBackward:
    """Of one pager's optimizers. Active inside ``pager.iteration()``.

    ``updates``: parameters updated during backward passes so far. ``dense_peak``: most dense bytes
    in use during such updates, on the CPU; never more than the budget's reserve.
    """

    def __init__(self, pager: Core) -> None:
        self.pager = pager
        self.updates = 0
        self.dense_peak = 0
        # Of parameters, by their ids: the optimizer and the number of the group that has them. Not
        # of those that two optimizers have.
        self._places: dict[int, tuple[OneInBackward | None, int]] = {}
        self._watch = False  # an optimizer is being watched in this iteration
        self._used: dict[int, tuple[Extent, int]] = {}  # by id, and when each was last used
        self._marks: list[_Mark] = []  # of a metered iteration
        self._dense_before = 0
        self._too_big: dict[int, int] = {}  # id of a parameter → the reserve that was too small

    def switch(self, paged: PagedOptimizer, on: bool) -> None:
        """Allow or forbid it to an optimizer, from the next iteration on."""
        if not on:
            paged.in_backward = None
        elif paged.in_backward is None:
            paged.in_backward = OneInBackward(self, paged)
            paged.in_backward.stop(_unsuitable(paged))

    def _all(self) -> list[PagedOptimizer]:
        found = [paged_of(ref()) for ref in self.pager.optimizers]
        return list(dict.fromkeys(paged for paged in found if paged is not None))

    def _owners(self) -> list[OneInBackward]:
        """Of the parameters of this iteration."""
        return list(dict.fromkeys(owner for owner, _ in self._places.values() if owner is not None))

    @property
    def watching(self) -> bool:
        """An optimizer is still being watched: later iterations will use pages in another order."""
        return any(p.in_backward is not None and p.in_backward.watching for p in self._all())

    # -- called by the pager ---------------------------------------------------------------------
    def begin(self) -> None:
        """An iteration begins. What one that raised has updated stays updated, and what else it
        has left does not count."""
        self._places.clear()
        self._marks.clear()
        self._watch = False
        optimizers = self._all()
        if all(paged.in_backward is None for paged in optimizers):
            return
        shared = set()
        for paged in optimizers:
            for number, group in enumerate(paged.optimizer.param_groups):
                for parameter in group["params"]:
                    if id(parameter) in self._places:
                        shared.add(id(parameter))
                    self._places[id(parameter)] = paged.in_backward, number
            if paged.in_backward is not None:
                paged.in_backward.stepped()
        for key in shared:
            del self._places[key]
        self._watch = self.watching
        self._used.clear()
        self._dense_before = self.pager.backend.dense_now()

    def end(self, ok: bool) -> None:
        """An iteration is over; ``ok``: it did not raise. Then raises ``PagerError`` if parameters
        were updated and no ``step()`` followed; the next iteration starts afresh."""
        owners = self._owners()
        self._places.clear()
        self._used.clear()
        errors = [error for owner in owners if ok and (error := owner.end()) is not None]
        if errors:
            raise errors[0]

    def update(self, parameter: torch.Tensor) -> bool:
        """Update ``parameter`` and drop its gradient, if that is allowed.
        ``False``, and nothing done, if it is left to ``step()``."""
        owner, number = self._places.get(id(parameter), (None, 0))
        optimizer = None if owner is None else owner.paged.ref()
        if owner is None or optimizer is None or self.pager.fits or not self.pager.in_iteration():
            return False
        groups: list[Any] = optimizer.param_groups
        if number >= len(groups) or not any(p is parameter for p in groups[number]["params"]):
            return False  # the groups were changed since
        grad: Any = parameter.grad
        if type(grad) is PagedTensor and is_large(parameter):  # type: ignore[arg-type]
            return False  # made in pages, slab by slab; so is its update
        hooks: Any = parameter._post_accumulate_grad_hooks
        watched = len(hooks) > 1  # the user's come after ours, and want the gradient
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), ExitStack() as stack:
            if is_sharded(parameter):
                from .shards import on_shards  # torch.distributed, which others need not load

                stack.enter_context(on_shards(owner.paged, [parameter]))
            return owner.update(groups[number], number, local_of(parameter), wanted=watched)

    def page_grad(self, parameter: torch.Tensor) -> None:
        """Post-accumulate hook: ``parameter`` is updated at once, where that is allowed, or else
        its dense gradient moves into pages, unless it is much smaller than one."""
        if not self.pager.fits and not (self._places and self.update(parameter)):
            with torch._C.DisableTorchFunctionSubclass():
                self._into_pages(parameter)

    def _into_pages(self, parameter: torch.Tensor) -> None:
        pager, grad = self.pager, parameter.grad
        if grad is None or grad.requires_grad:  # create_graph=True: its history is wanted
            return
        if type(grad) is PagedTensor:
            if self.pager.budget.placement.is_new(grad._storage):
                self.note_paged(parameter, grad.nbytes)
                self.pager.budget.placement.note_arrived(grad._storage)
            return
        if grad.layout is torch.strided and pager.closed_reason is None:
            if _SMALL * grad.nbytes <= pager.page_size and not self._watch:
                return  # dense: a copy and its bookkeeping cost more than such ones free
            parameter.grad = None
            parameter.grad = copy_in(pager, grad, "gradient")
            if self._places or self._watch:
                self.note_paged(parameter)

    def note_paged(self, parameter: torch.Tensor, beside: int = 0) -> None:
        """The gradient of ``parameter`` was left to ``step()`` and has just moved into pages.
        ``beside``: dense bytes that were there with it."""
        owner, group = self._places.get(id(parameter), (None, 0))
        grad: Any = parameter.grad
        parameter, grad = local_of(parameter), local_of(grad)
        if owner is not None and self.pager.budget.metering:
            self._marks.append(_Mark(owner, group, parameter.nbytes, beside + self._dense()))
        if self._watch:
            self.note(grad)  # whoever's it is: small gradients share pages
            if owner is not None and owner.watching:
                owner.note(parameter, grad)

    @contextmanager
    def step_of(self, paged: PagedOptimizer) -> Iterator[None]:
        """It makes its step, and may use pages that gradients of others are in, too."""
        owners = self._owners() if self._watch else []
        others = [owner for owner in owners if owner.paged is not paged]
        for other in others:
            other.look()
        try:
            yield
        finally:
            if others:
                self._used = {key: (run, self._age(run)) for key, (run, _) in self._used.items()}

    def extra_dense(self) -> int:
        """At the end of a metered iteration: bytes that the dense reserve should have beside the
        measured peak, so that large parameters can be updated while backward's own tensors live.
        Gradients will need no pages in return. At most a quarter of the arena, and none where that
        would leave it short."""
        budget, residency = self.pager.budget, self.pager.residency
        peaks = [
            mark.dense + math.ceil(need * mark.nbytes)
            for mark in self._marks
            if mark.owner.off is None and (need := mark.owner.needs.get(mark.group)) is not None
        ]
        frames = (budget.bytes - budget.dense_peak) // self.pager.page_size
        spare = min(frames // 4, frames - 2 * residency.largest_need) * self.pager.page_size
        return max((n for p in peaks if 0 < (n := p - budget.dense_peak) <= spare), default=0)

    # -- called by OneInBackward -----------------------------------------------------------------
    def _age(self, run: Extent) -> int:
        return int(self.pager.residency.ages[run.id])

    def note(self, tensor: Any) -> Extent:
        """Remember when the pages of ``tensor`` were last used: now."""
        run: Extent = tensor._storage.run
        self._used[run.id] = run, self._age(run)
        return run

    def untouched(self, run: Extent) -> bool:
        """``run`` was not used since it was noted."""
        noted, tick = self._used[run.id]
        return noted is run and self._age(run) == tick

    def is_earlier(self, grad: Any) -> bool:
        """Whether ``grad`` was there before this backward pass."""
        if type(grad) is not PagedTensor:
            return False
        return not self.pager.budget.placement.is_new(grad._storage)

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


hide_from_dynamo(InBackward.page_grad)


class OneInBackward:
    """What one optimizer has updated ahead of its ``step()``, and whether it may.

    ``off``: why never, or ``None``. ``held``: not in this backward pass.
    ``watched``: steps taken as usual so far, to see what the program does with gradients.
    ``needs``: group → bytes of temporaries of an update, per byte of a parameter.
    """

    def __init__(self, room: InBackward, paged: PagedOptimizer) -> None:
        self.room, self.paged = room, paged
        self.off: str | None = None
        self.held = False
        self.watched = 0
        self.needs: dict[int, float] = {}
        self._updated: set[int] = set()
        self.stepped()

    @property
    def watching(self) -> bool:
        """Not yet known whether updates in backward are right."""
        return self.off is None and self.watched < _WATCHED_STEPS

    def stop(self, reason: str | None) -> None:
        """Off for good, if there is a reason."""
        if reason is not None and self.off is None:
            self.off = reason
            warnings.warn(
                f"the overlap of backward with {self.paged.name}.step() is off: {reason}. Results "
                f"are those of overlap=False; {_REMEDY} to be rid of this warning.",
                stacklevel=2,
            )

    # -- from step to step -----------------------------------------------------------------------
    def stepped(self) -> None:
        """``step()`` is complete."""
        self._updated.clear()
        self._task = -1
        self._passes = 0  # backward passes that have added to these gradients
        self._settings: list[dict[str, Any]] = []
        self._gradients: dict[int, Extent] = {}  # noted ones, by the id of their parameter
        self._weights: list[Extent] = []  # of noted parameters that share no page
        self._seen: str | None = None  # what was used that should not be

    def end(self) -> PagerError | None:
        """An iteration is complete; what is wrong with it."""
        count = len(self._updated)
        if count:
            self.stepped()
            return PagerError(
                f"the iteration ended without a step() of {self.paged.name}, but {count} of its "
                "parameters were updated during the backward pass already; call step() once after "
                f"each backward pass, or {_REMEDY}"
            )
        if self._passes and self.watching:
            self.stop("an iteration ended with gradients and without a step()")
        return None

    def before_step(self) -> None:
        """``step()`` begins. Raises ``PagerError`` if an update was not what it would do."""
        if self.off is not None:
            return
        change = _change(self._settings, self.paged)
        if self._updated and change is not None:
            raise PagerError(
                f"{change} between backward and step(), and {len(self._updated)} parameters of "
                f"{self.paged.name} were updated with the old value during the backward pass; "
                f"change it before backward, or {_REMEDY}"
            )
        if not self.watching or self._updated:
            return
        if self._passes:
            self.stop(self._misuse(change))
            self.watched += self.off is None
        elif self.watched and not self.room.pager.fits and self.paged.stepped_now():
            self.stop("step() runs more than once for a backward pass")

    # -- watching --------------------------------------------------------------------------------
    def note(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        """A gradient has just moved into pages: nobody should use it, or its parameter, from now
        on."""
        self._gradients[id(parameter)] = self.room.note(grad)
        if parameter._storage.run.small is None:  # type: ignore[attr-defined]
            self._weights.append(self.room.note(parameter))

    def look(self) -> None:
        """See whether gradients or parameters were used since they were noted."""
        untouched = self.room.untouched
        if not all(map(untouched, self._gradients.values())):
            self._seen = self._seen or _USED
        if not all(map(untouched, self._weights)):
            self._seen = self._seen or _USED.replace("gradients", "parameters")

    def _misuse(self, change: str | None) -> str | None:
        """Why updates in backward would have been wrong for this step."""
        if self._passes > 1:
            return (
                "gradients are there when a backward pass begins (several passes for one step(), "
                "or zero_grad(set_to_none=False))"
            )
        if change is not None:
            return f"{change} between backward and step()"
        for group in self.paged.optimizer.param_groups:
            for parameter in group["params"]:
                noted, grad = self._gradients.get(id(parameter)), parameter.grad
                if noted and (type(grad) is not PagedTensor or grad._storage.run is not noted):
                    return _USED
        self.look()
        return self._seen

    def measure(self) -> None:
        """Find out what an update takes, from groups with gradients that it is not known of."""
        for number, group in enumerate(self.paged.optimizer.param_groups):
            if self.off is None and number not in self.needs:
                mine = [member for member in steppable(self.paged) if member[0] is group]
                need = probe_step(self.paged, peak_of_results, mine)
                if need is not None:
                    self.needs[number] = need.dense

    # -- in the backward pass --------------------------------------------------------------------
    def update(
        self, group: dict[str, Any], number: int, parameter: torch.Tensor, *, wanted: bool
    ) -> bool:
        """See ``InBackward.update``; ``parameter`` is one of group ``number``. ``wanted``: others
        will read its gradient."""
        if self.off is not None:
            return False
        task = torch._C._current_graph_task_id()
        if self._updated and (task != self._task or id(parameter) in self._updated):
            raise PagerError(
                f"another backward pass reached parameters of {self.paged.name} before its "
                f"step(), but {len(self._updated)} of them were updated with the gradients of the "
                f"first pass already; call step() once after each backward pass, or {_REMEDY}"
            )
        if task != self._task:
            self._begin_pass(parameter, task)
        grad: Any = parameter.grad
        earlier = grad is None or self.room.is_earlier(grad)
        self.held |= earlier or grad.requires_grad or self.room.pager.budget.metering
        if self.held or wanted or not self._may_update(number, parameter, grad):
            return False
        self.held = not _is_finite(grad)
        return not self.held and self._step(group, parameter)

    def _begin_pass(self, parameter: torch.Tensor, task: int) -> None:
        others = any(p is not parameter for _, p in self.paged.stepped_now())
        earlier = self.room.is_earlier(parameter.grad) or others  # there are gradients of one
        if earlier:
            self._passes += 1 if self._passes else 2
        else:
            self.stepped()
            self._passes = 1
        self._task = task
        self._settings = _settings(self.paged)
        self.stop(_unsuitable(self.paged))
        no_pass = task == -1
        self.held = earlier or no_pass or self.watching or self.off is not None

    def _may_update(self, number: int, parameter: torch.Tensor, grad: Any) -> bool:
        """Whether this one parameter can be updated now."""
        if grad.layout is not torch.strided or grad.dtype != parameter.dtype:
            return False
        stateless = self.paged.stepped and not self.paged.optimizer.state
        if not self.paged.state_of(parameter) and not stateless:
            return False  # states would be made, and step() checks first that there is room
        need = self.needs.get(number)
        return need is not None and self.room.has_room(
            parameter, math.ceil(need * parameter.nbytes)
        )

    def _step(self, group: dict[str, Any], parameter: torch.Tensor) -> bool:
        """The step of ``parameter`` alone. ``False`` if the tiers below are too full to bring its
        pages in; what was updated of it is noted then, and ``step()`` goes on from there."""
        pager = self.room.pager
        residency, kind = pager.residency, pager.device.type
        cast = torch.is_autocast_enabled(kind)  # step() is not called under it as a rule
        before, needs = pager.stepping, residency.needs
        pager.stepping = True
        try:
            with torch.autocast(kind, enabled=False) if cast else nullcontext():
                if not self._on_host(group, parameter):
                    most = residency.frames - residency.pinned_pages()
                    update_one(self.paged, group, parameter, most)
        except TierFull:
            if not fused.is_due(self.paged, group, parameter):
                raise
            return False
        finally:
            pager.stepping = before
            residency.needs = needs  # it could do with less
        self._updated.add(id(parameter))
        self.room.updates += 1
        parameter.grad = None
        return True

    def _on_host(self, group: dict[str, Any], parameter: torch.Tensor) -> bool:
        """Give the step of ``parameter`` to the host, if it takes it; the gradient is in pages
        then."""
        pager, grad = self.room.pager, parameter.grad
        if self.paged.host_step is not True or grad is None or pager.space.is_small(grad.nbytes):
            return False
        parameter.grad = None
        parameter.grad = copy_in(pager, grad, "gradient")
        del grad
        return pager.host_steps.take(self.paged, group, parameter)


# -- conditions ----------------------------------------------------------------------------------
def _unsuitable(paged: PagedOptimizer) -> str | None:
    """Why no step of an optimizer may be taken apart."""
    if not paged.is_torchs:
        return f"{paged.name} is not of torch.optim and may look at several parameters at once"
    if any(group.get("differentiable") for group in paged.optimizer.param_groups):
        return "it is differentiable"
    of_all = [hook for hook in _global_optimizer_pre_hooks.values() if not is_ours(hook)]
    if paged.optimizer._optimizer_step_pre_hooks or of_all:
        return "a step pre-hook may look at gradients"
    return None


def _is_finite(grad: torch.Tensor) -> bool:
    """One pass without temporaries. Waits for the device."""
    if not grad.numel():
        return True
    low, high = torch.aminmax(torch.view_as_real(grad) if grad.is_complex() else grad)
    return math.isfinite(low.item()) and math.isfinite(high.item())


# -- settings of groups --------------------------------------------------------------------------
def _settings(paged: PagedOptimizer) -> list[dict[str, Any]]:
    settings = [
        {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for group in paged.optimizer.param_groups
    ]
    return tree_map_only(torch.Tensor, lambda t: t.detach().clone(), settings)  # type: ignore[no-any-return]


def _change(old: list[dict[str, Any]], paged: PagedOptimizer) -> str | None:
    """The first setting that is not what it was, in words."""
    for number, (was, now) in enumerate(zip(old, _settings(paged))):
        for key in (*was, *(key for key in now if key not in was)):
            before, after = was.get(key), now.get(key)
            pairs = itertools.zip_longest(tree_leaves(before), tree_leaves(after))
            if not all(one is other or bool(one == other) for one, other in pairs):
                return f"param_groups[{number}][{key!r}] changed from {before!r} to {after!r}"
    return None
