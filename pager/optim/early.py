"""What one optimizer has updated during the backward pass, ahead of its ``step()``.

``overlap.py`` says why that is right, and when not. The states of one optimizer::

    watching --- 2 steps, nothing odd ---> early updates <---> held (for one backward pass)
        |                                        |
        +---- gradients or parameters used ------+--- a closure, a pre-hook ---> off, for good
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from ..errors import PagerError, TierFull
from ..memory.space import Extent
from ..tensor.paged_tensor import PagedTensor
from . import fused
from .advice import is_ours
from .dense_step import paged_operands, step_on_views
from .optimizer import alone, page_state
from .step_need import peak_of_results, probe_step, raw_step

if TYPE_CHECKING:
    from ..core import Core
    from .overlap import Overlap

_WATCHED_STEPS = 2
_REMEDY = "pass overlap=False to pager.optimizer"


class EarlyUpdates:
    """What one optimizer has updated ahead of its ``step()``, and whether it may.

    ``off``: why never, or ``None``. ``held``: why not in this backward pass, or ``None``.
    ``watched``: steps taken as usual so far, to see what the program does with gradients.
    """

    def __init__(self, overlap: Overlap) -> None:
        self.overlap = overlap
        self.off: str | None = None
        self.held: str | None = None
        self.watched = 0
        self._needs: dict[int, float] = {}  # group → temporaries of an update / parameter bytes
        self._updated: set[int] = set()
        self.stepped()

    @property
    def watching(self) -> bool:
        """Not yet known whether early updates are right."""
        return self.off is None and self.watched < _WATCHED_STEPS

    def stop(self, optimizer: Any, reason: str) -> None:
        """Off for good."""
        if self.off is None:
            self.off = reason
            warnings.warn(
                f"the overlap of backward with {_name(optimizer)}.step() is off: {reason}. Results "
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

    def restart(self) -> None:
        """An iteration begins: what one that raised has left does not count."""
        self.stepped()

    def end(self, optimizer: Any) -> PagerError | None:
        """An iteration is complete; what is wrong with it."""
        count = len(self._updated)
        if count:
            self.stepped()
            return PagerError(
                f"the iteration ended without a step() of {_name(optimizer)}, but {count} of its "
                "parameters were updated during the backward pass already; call step() once after "
                f"each backward pass, or {_REMEDY}"
            )
        if self._passes and self.watching:
            self.stop(optimizer, "an iteration ended with gradients and without a step()")
        return None

    def before_step(self, optimizer: Any) -> None:
        """``step()`` begins. Raises ``PagerError`` if an early update was not what it would do."""
        if self.off is not None:
            return
        if self._updated:
            change = _change(self._settings, optimizer)
            if change is not None:
                raise PagerError(
                    f"{change} between backward and step(), and {len(self._updated)} parameters of "
                    f"{_name(optimizer)} were updated with the old value during the backward pass; "
                    f"change it before backward, or {_REMEDY}"
                )
        elif self.watching and self._passes:
            reason = self._misuse(optimizer)
            if reason is not None:
                self.stop(optimizer, reason)
                return
            self.watched += 1
        elif self.watching and self.watched and not self.overlap.pager.fits:
            self._expect_no_gradient(optimizer)

    def _expect_no_gradient(self, optimizer: Any) -> None:
        if _any_gradient(optimizer):
            self.stop(optimizer, "step() runs more than once for a backward pass")

    # -- watching --------------------------------------------------------------------------------
    def note(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        """A gradient has just moved into pages: nobody should use it, or its parameter, from now
        on."""
        self._gradients[id(parameter)] = self.overlap.note(grad)
        if parameter._storage.run.small is None:  # type: ignore[attr-defined]
            self._weights.append(self.overlap.note(parameter))

    def look(self) -> None:
        """See whether gradients or parameters were used since they were noted."""
        untouched = self.overlap.untouched
        if not all(map(untouched, self._gradients.values())):
            self._seen = self._seen or "gradients are used between backward and step()"
        if not all(map(untouched, self._weights)):
            self._seen = self._seen or "parameters are used between backward and step()"

    def _misuse(self, optimizer: Any) -> str | None:
        """Why early updates would have been wrong for this step."""
        if self._passes > 1:
            return (
                "gradients are there when a backward pass begins (several passes for one step(), "
                "or zero_grad(set_to_none=False))"
            )
        change = _change(self._settings, optimizer)
        if change is not None:
            return f"{change} between backward and step()"
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                noted, grad = self._gradients.get(id(parameter)), parameter.grad
                if noted and (type(grad) is not PagedTensor or grad._storage.run is not noted):
                    return "gradients are used between backward and step()"
        self.look()
        return self._seen

    def need(self, group: int) -> float | None:
        """Bytes of temporaries that an update takes, per byte of a parameter, if known."""
        return self._needs.get(group)

    def measure(self, optimizer: Any) -> None:
        """Find out what an update takes, from groups with gradients that it is not known of."""
        if self.off is not None:
            return
        for number, group in enumerate(optimizer.param_groups):
            if number in self._needs or all(p.grad is None for p in group["params"]):
                continue
            groups = optimizer.param_groups
            optimizer.param_groups = [group]
            try:
                need = probe_step(optimizer, peak_of_results)
            finally:
                optimizer.param_groups = groups
            if need is not None:
                self._needs[number] = need.dense

    # -- in the backward pass --------------------------------------------------------------------
    def update(self, optimizer: Any, number: int, parameter: torch.Tensor, *, wanted: bool) -> bool:
        """See ``Overlap.update``; ``parameter`` is one of group ``number``. ``wanted``: others will
        read its gradient."""
        if self.off is not None:
            return False
        task = torch._C._current_graph_task_id()
        if self._updated and (task != self._task or id(parameter) in self._updated):
            raise PagerError(
                f"another backward pass reached parameters of {_name(optimizer)} before its "
                f"step(), but {len(self._updated)} of them were updated with the gradients of the "
                f"first pass already; call step() once after each backward pass, or {_REMEDY}"
            )
        if task != self._task:
            self._begin_pass(optimizer, parameter, task)
        if self.overlap.pager.budget.metering:
            self.held = "this iteration is metered"
        grad = parameter.grad
        if self.held is None:
            self.held = _unusable(grad)
        if self.held is not None or wanted or not self._may_update(optimizer, number, parameter):
            return False
        assert grad is not None
        if not _is_finite(grad):
            self.held = "a gradient is not finite"
            return False
        if not self._step(optimizer, optimizer.param_groups[number], parameter):
            return False
        page_state(self.overlap.pager, optimizer.state.get(parameter))
        return True

    def _begin_pass(self, optimizer: Any, parameter: torch.Tensor, task: int) -> None:
        self.held = None
        if type(parameter.grad) is PagedTensor or _any_gradient(optimizer, but=parameter):
            self.held = "there are gradients of an earlier backward pass"
            self._passes += 1 if self._passes else 2
        else:
            self.stepped()
            self._passes = 1
        self._task = task
        self._settings = _settings(optimizer)
        reason = unsuitable(optimizer)
        if reason is not None:
            self.stop(optimizer, reason)
            self.held = reason
        elif self.watching:
            self.held = "the first steps are watched"
        elif task == -1:
            self.held = "the gradient is not from a backward pass"

    def _may_update(self, optimizer: Any, number: int, parameter: torch.Tensor) -> bool:
        """Whether this one parameter can be updated now."""
        grad = parameter.grad
        assert grad is not None
        if grad.layout is not torch.strided or grad.dtype != parameter.dtype:
            return False
        if not optimizer.state.get(parameter) and (optimizer.state or not optimizer._tp_stepped):
            return False  # states would be made, and step() checks first that there is room
        need = self.need(number)
        nbytes = parameter.numel() * parameter.element_size()
        return need is not None and self.overlap.has_room(parameter, math.ceil(need * nbytes))

    def _step(self, optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> bool:
        """The optimizer's own step of ``parameter`` alone. ``False``, and nothing changed, if its
        pages cannot be brought to the device."""
        pager = self.overlap.pager
        raw = raw_step(type(optimizer))
        kind = pager.device.type
        cast = torch.is_autocast_enabled(kind)  # step() is not called under it as a rule
        before = pager.stepping
        pager.stepping = True
        try:
            with (
                alone(optimizer, group, parameter),
                torch.autocast(kind, enabled=False) if cast else nullcontext(),
            ):
                if not _by_kernels(optimizer, group, parameter) and (
                    not _fits_at_once(optimizer) or not _on_views(optimizer, raw)
                ):
                    raw(optimizer)  # op by op, on pages
        except _NoRoom:
            return False
        finally:
            pager.stepping = before
        self._updated.add(id(parameter))
        self.overlap.updates += 1
        parameter.grad = None
        return True


class _NoRoom(Exception):  # noqa: N818 (caught here)
    """The tiers below are too full to bring one parameter and its states in together."""


def _fits_at_once(optimizer: Any) -> bool:
    """Whether the arena can hold all that the step takes, beside what is pinned."""
    pager: Core = optimizer._tp_pager
    with pager.lock:
        runs = {tensor._storage.run for tensor in paged_operands(optimizer)}
        pinned = pager.residency.pinned_pages(besides=list(runs))
        return sum(run.count for run in runs) + pinned <= pager.residency.frames


def _by_kernels(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> bool:
    residency = optimizer._tp_pager.residency
    needs = residency.needs
    try:
        return fused.step_one(optimizer, group, parameter)
    except TierFull as error:  # what was updated of it is noted, and step() goes on from there
        raise _NoRoom from error
    finally:
        residency.needs = needs  # it could do with less, slab by slab


def _on_views(optimizer: Any, raw: Callable[..., Any]) -> bool:
    residency = optimizer._tp_pager.residency
    needs = residency.needs
    try:
        return step_on_views(optimizer, raw)
    except TierFull as error:  # raised while pinning, and nothing was changed
        raise _NoRoom from error
    finally:
        residency.needs = needs  # it could do with less, one operation at a time


# -- conditions ----------------------------------------------------------------------------------
def unsuitable(optimizer: Any) -> str | None:
    """Why no step of ``optimizer`` may be taken apart."""
    plain = type(optimizer).__mro__[2]
    if not f"{plain.__module__}.".startswith("torch.optim."):
        return f"{plain.__name__} is not of torch.optim and may look at several parameters at once"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "it is differentiable"
    of_all = [hook for hook in _global_optimizer_pre_hooks.values() if not is_ours(hook)]
    if optimizer._optimizer_step_pre_hooks or of_all:
        return "a step pre-hook may look at gradients"
    return None


def _unusable(grad: torch.Tensor | None) -> str | None:
    if grad is None or type(grad) is PagedTensor:
        return "there are gradients of an earlier backward pass"
    if grad.requires_grad:
        return "the gradients have a graph of their own"
    return None


def _is_finite(grad: torch.Tensor) -> bool:
    """One pass without temporaries. Waits for the device."""
    if not grad.numel():
        return True
    low, high = torch.aminmax(torch.view_as_real(grad) if grad.is_complex() else grad)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _any_gradient(optimizer: Any, but: torch.Tensor | None = None) -> bool:
    return any(
        p.grad is not None and p is not but
        for group in optimizer.param_groups
        for p in group["params"]
    )


def _name(optimizer: Any) -> str:
    return str(type(optimizer).__mro__[2].__name__)


# -- settings of groups --------------------------------------------------------------------------
def _settings(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {k: _kept(v) for k, v in group.items() if k not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return tuple(_kept(item) for item in value)
    return value


def _change(old: list[dict[str, Any]], optimizer: Any) -> str | None:
    """The first setting that is not what it was, in words."""
    for number, (was, now) in enumerate(zip(old, _settings(optimizer))):
        for key in (*was, *(key for key in now if key not in was)):
            before, after = was.get(key), now.get(key)
            if not _equal(before, after):
                return f"param_groups[{number}][{key!r}] changed from {before!r} to {after!r}"
    return None


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one is other or bool(one == other)
