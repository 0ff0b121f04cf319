"""Saved tensors in pages, as plain tensors, for the nodes of autograd that ask for them.

A node that is PyTorch's own asks for what it has saved, runs its ops, and is done with it. What it
asks for is *lent*: it is on the device, held, and read where it lies, so that the node runs
PyTorch's own code from beginning to end and none of its ops comes through the dispatcher. All that
one node asks for is one access to those who look on. It is over when the next access begins: then
all is released that nobody has any more. What is lent at one place and in one form shares a storage
with nothing else, which counts who has it; what somebody still has stays where it is until nobody
does. That storage, and a tensor over it, are kept for the next iteration, in which a plan puts the
same there.

Others get a PagedTensor, whose ops each hold it for themselves: who may keep what is saved for any
time (``ctx.saved_tensors`` of a Function, ``grad_fn._saved_self``), and a node that is itself
differentiated. So does everybody while others watch ops (a recording, a mode), while an
iteration is metered, and where the arena is small beside what one op needs.
"""

from __future__ import annotations

from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..budget.fits import frames_anyway
from ..core import PagedStorage
from ..errors import PagerError
from ..memory.space import Extent
from .op_info import our_modes
from .paged_tensor import Form, PagedTensor

if TYPE_CHECKING:
    from ..core import Core

# That are kept, as faults put what they bring anywhere. Each takes RAM, of which a CPU's budgets
# are.
_MOST_VIEWS, _MOST_IN_RAM = 8192, 32
_PARTS = 4  # no op, and no node with what it is lent, needs more than one of so many of the arena
_asking = {torch.autograd.graph._engine_run_backward.__code__}  # code that is lent to
_modes = torch._C._len_torch_dispatch_stack
_node_that_runs: Any = torch._C._current_autograd_node
_uses: Any = torch._C._storage_Use_Count


def lend_to(backward: Any) -> None:
    """``backward``, of a Function of ours, is done with what it asks for when pages are used the
    next time."""
    _asking.add(backward.__code__)


class InPages(NamedTuple):
    """A saved tensor: where its bytes are, and all else."""

    storage: PagedStorage
    form: Form

    def paged(self) -> PagedTensor:
        return self.form.paged(self.storage)


class _View(NamedTuple):
    """Of bytes of the arena in one form. Without any other tensor over it ``memory``, the tensor's
    storage, has two uses."""

    tensor: torch.Tensor
    memory: torch.UntypedStorage

    @property
    def in_use(self) -> bool:
        return int(_uses(self.memory._cdata)) > 2


class Lender:
    """Of one pager. ``lends``: something is lent for an access that goes on."""

    def __init__(self, pager: Core) -> None:
        self.lends = False
        self._pager = pager
        self._node = -1  # whose access it is, by its sequence number
        self._held: list[Extent] = []  # for it
        self._lent: list[tuple[_View, Extent]] = []
        self._kept: list[tuple[list[_View], Extent]] = []  # beyond their access
        self._views: dict[tuple[int, int, Form], _View] = {}
        self._most_views = _MOST_IN_RAM if pager.device.type == "cpu" else _MOST_VIEWS

    def lend(self, saved: InPages, asking: FrameType | None) -> torch.Tensor | None:
        """``saved`` as a plain tensor for the node that asks in this frame; ``None`` where it gets
        a PagedTensor."""
        if asking is not None and asking.f_code not in _asking:
            return None  # code of the user, or of a library: `None` is a thread of the engine
        pager, storage = self._pager, saved.storage
        if not pager.inside or pager.inferring or pager.sees_ops or pager.budget.metering:
            return None
        node = _node_that_runs()
        if node is None or torch.is_grad_enabled() or pager.closed_reason is not None:
            return None
        if _modes() > our_modes.count:
            return None
        turns, run = pager.turns, storage.run
        if get_ident() not in turns.family and not turns.is_home():
            return None
        with pager.lock:
            number = node._sequence_nr()
            if self.lends and number != self._node:
                self.take_back()
            if run not in self._held and not self._hold(run):
                return None
            self.lends, self._node = True, number
            if run.base < 0:
                return None
            view = self._view(saved)
            self._lent.append((view, run))
            return view.tensor.detach()

    def _view(self, saved: InPages) -> _View:
        storage, form = saved
        address = self._pager.address_of(storage)
        key = address, storage.nbytes, form
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= self._most_views:
                self._views.clear()
            tensor = form.plain(storage, address)
            view = self._views[key] = _View(tensor, tensor.untyped_storage())
        return view

    def _hold(self, run: Extent) -> bool:
        """Hold ``run``, and with it all that the access has, if that is known; whether."""
        pager, joins = self._pager, self.lends
        runs = [run] if joins or pager.watch is None else pager.watch.together(run)
        # Where an op may need most of the arena, what is held for it one by one would be in the way
        # of the rest.
        need = sum(one.count for one in (*self._held, *runs))
        need = max(need, pager.residency.rigid_need)
        if _PARTS * need > frames_anyway(pager.budget):
            return False
        try:
            pager.take(runs, joins=joins)
        except PagerError:  # there is no room for it beside what else is held
            return False
        self._held += runs
        return True

    def take_back(self) -> None:
        """The access is over. What somebody still has of it is kept where it is until nobody does;
        what was kept of others is released if nobody has it now."""
        with self._pager.lock:
            held, lent = self._held, self._lent
            self.lends, self._node, self._held, self._lent = False, -1, [], []
            if self._kept:
                self._release_kept()
            for view, _ in lent:
                if view.in_use:
                    held = self._without_kept(held, lent)
                    break
            self._pager.release(held)

    def _without_kept(self, held: list[Extent], lent: list[tuple[_View, Extent]]) -> list[Extent]:
        left = []
        for run in held:
            theirs = [view for view, of in lent if of is run and view.in_use]
            if theirs:
                self._kept.append((theirs, run))
            else:
                left.append(run)
        return left

    def _release_kept(self) -> None:
        kept, self._kept = self._kept, []
        for views, run in kept:
            if any(view.in_use for view in views):
                self._kept.append((views, run))
            else:
                self._pager.residency.release([run])

    def end(self) -> None:
        """The iteration is over, or the pager is being closed."""
        with self._pager.lock:
            if self.lends:
                self.take_back()
            elif self._kept:
                self._release_kept()

    @property
    def in_use(self) -> bool:
        """After :meth:`end`: somebody still has a tensor over pages."""
        return bool(self._kept)
