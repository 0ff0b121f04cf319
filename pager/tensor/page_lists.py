"""List ops (``_foreach_*``, AMP's check) on pages: many elements in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InfeasibleBudget, TierFull
from ..memory.space import PageRun
from .page_ops import form_of
from .page_reduce import LISTS, UNSCALE, Reduction
from .page_run import Call, call_of, do_together
from .paged_tensor import PagedTensor

if TYPE_CHECKING:
    from ..api import Pager

_GROUP_SHARE = 3  # a group of list elements holds this fraction of the arena at most


class ListRun:
    """A list op, element by element, in as few launches as may be.

    Elements that are on the device in scattered frames are pinned one after the other, as they are
    without this, and done together; at most a share of the arena is held. Other elements are not
    taken, and none are in a metered iteration, which finds out what one op needs, nor while a plan
    is followed, which counts on frames to be free after each access.
    """

    def __init__(self, func: Any) -> None:
        self._func = func
        self._calls: list[Call] = []
        self._slots: list[list[torch.Tensor | None]] = []
        self._pins: list[tuple[Pager, list[PageRun]]] = []
        self._touched: set[tuple[str, int]] = set()  # what calls read or write: runs, and memory
        self._pages = 0

    def take(
        self, args: Sequence[Any], kwargs: dict[str, Any], paged: Sequence[PagedTensor]
    ) -> list[torch.Tensor | None] | None:
        """Pin one element and keep it for the next launch: a list, empty until :meth:`flush` puts
        the result in. ``None``, with nothing pinned or kept, if it has to run by itself."""
        pager = paged[0]._storage.pager
        if any(t._storage.pager is not pager for t in paged) or not _may_group(pager):
            return None
        runs = list({t._storage.run.id: t._storage.run for t in paged}.values())
        pages = sum(run.count for run in runs)
        most = pager.residency.pool.count // _GROUP_SHARE
        if pages > most or not any(_is_scattered(pager, run) for run in runs):
            return None
        with torch._C.DisableTorchFunctionSubclass():
            call = call_of(self._func, args, kwargs)
        if call is None:
            return None
        touched = {("run", run.id) for run in runs} | _plain_memory(call)
        if (
            self._pages + pages > most
            or not touched.isdisjoint(self._touched)
            or (self._calls and not _go_together(self._calls[0], call))
        ):
            self.flush()
        try:
            pager.pin(runs)
        except (InfeasibleBudget, TierFull):
            if not self._calls:
                raise
            self.flush()
            pager.pin(runs)
        self._pins.append((pager, runs))
        first = call.tensors[0]
        if type(first) is PagedTensor and not isinstance(call, Reduction):
            pager.will_write(first._storage.run)
        self._calls.append(call)
        self._slots.append([])
        self._touched |= touched
        self._pages += pages
        return self._slots[-1]

    def flush(self) -> None:
        """Run what was taken, and unpin it."""
        try:
            if self._calls:
                with torch._C.DisableTorchFunctionSubclass():
                    results = do_together(self._calls)
                for slot, result in zip(self._slots, results):
                    slot.append(result)
        finally:
            pins, self._pins = self._pins, []
            self._calls, self._slots, self._pages = [], [], 0
            self._touched = set()
            for pager, runs in pins:
                pager.unpin(runs)


def knows_list(func: Any) -> bool:
    """Whether ``func`` is a list op that the kernels do."""
    form = form_of(func)
    return func in LISTS or func is UNSCALE or (form is not None and form.lists)


def _may_group(pager: Pager) -> bool:
    if pager.budget.metering:
        return False
    return pager.follower is None or pager.follower.guide is None


def _is_scattered(pager: Pager, run: PageRun) -> bool:
    """On the device, all of it, and in no order."""
    if run.base >= 0 or run.moving:
        return False
    return bool((pager.table.frame[run.first : run.first + run.count] >= 0).all())


def _plain_memory(call: Call) -> set[tuple[str, int]]:
    return {
        ("memory", t.untyped_storage().data_ptr())
        for t in call.tensors
        if type(t) is not PagedTensor
    }


def _go_together(one: Call, other: Call) -> bool:
    """Two elements of a list op, in one launch."""
    return not isinstance(one, Reduction) or one.dtype is other.dtype  # type: ignore[union-attr]
