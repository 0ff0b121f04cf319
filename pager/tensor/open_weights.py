"""Weights as plain tensors, while everything fits.

Where nothing has to leave the device, an iteration need not ask before each op where a weight is.
In such an iteration a weight is *opened* when it is first used: its pages are pinned, and the ops
of ``TAKE_OPEN`` are given a plain tensor over them. To autograd that is the parameter itself, a
leaf with its ``AccumulateGrad`` node and version counter. So graphs, hooks, errors and the order in
which a gradient is added up are PyTorch's own, second derivatives included, and below the op no
Python of ours runs in either direction but for the hooks on saved tensors, where these are on.

::

    iteration begins    what was open in the last one is opened again, all at once
    a weight is used    opened, if it is not
    pages have to move  all are closed: ``Residency.still`` asks for it before anything moves
    iteration ends      all are closed

The plain tensor does not reach the user: ops of ``TAKE_OPEN`` give new memory and write to no
operand, and what autograd saves of it becomes the parameter again where hooks are on
(``activations.py``); else it stays in the graph. The one exception is what ``torch.compile``
traces, which no paged tensor can be a part of: while a compiled model, or a compiled part of one,
is called, its parameters *are* the plain tensors. What writes to one there is noted when the call
is over, as its pages cannot leave before. Closing may happen at any time. What still uses the
memory then (an op of another thread, a graph that saved it without our hooks) is known by the
storage's use count, and until it is gone the pages stay pinned.

An iteration that began with everything fitting keeps to PyTorch's nodes to its end, open or not:
activation checkpointing must see the same nodes again in the backward pass.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from ..core import Core
from ..memory.space import Extent
from .paged_tensor import PagedTensor, dense_view

# Their results are new memory, and they write to no operand. (Embeddings do with ``max_norm``.)
TAKE_OPEN = frozenset(
    {
        F.linear, F.layer_norm, F.rms_norm, F.group_norm, F.embedding,
        F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
        torch.mm, torch.matmul, torch.addmm, torch.bmm,
        torch.Tensor.mm, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm,
        torch.mul, torch.Tensor.mul, torch.add, torch.Tensor.add,
    }
)  # fmt: skip
# Of pagers whose iteration keeps to PyTorch's nodes, by id: where there is none, no op asks.
NATIVE: dict[int, weakref.ref[OpenWeights]] = {}
_ALIAS = torch.ops.aten.alias.default
_DETACH = torch.ops.aten.detach.default
# Asked before each op, so without the way through `torch` and `torch._C`.
_modes = torch._C._len_torch_dispatch_stack
_any_autocast = torch._C._is_any_autocast_enabled
_functorch_level = torch._C._functorch.peek_interpreter_stack
_no_overrides = torch._C.DisableTorchFunctionSubclass
_uses: Any = torch._C._storage_Use_Count
_COMPILED = os.path.join("torch", "_dynamo", "eval_frame.py")


_OWN_USES = 2
_made = _most = 0  # ops on open weights in this iteration, and in earlier ones of its pager


class OpenWeight:
    """A plain tensor over the pages of a weight (``dense``), in a storage of its own and with the
    weight's version counter, for as long as they stay where they are, open or not. Without any
    other tensor over it the storage has ``_OWN_USES``: by ``dense``, and by itself.

    ``tensor``: what ops are given. It, and ``paged``, whose it is, are ``None`` while it is closed.
    """

    __slots__ = ("dense", "generation", "paged", "requires_grad", "run", "storage", "tensor")

    def __init__(self, paged: PagedTensor) -> None:
        where = paged._storage
        self.run: Extent = where.run
        self.generation = where.run.generation
        dense = dense_view(paged, where.pager.address_of(where))
        self.storage = dense.untyped_storage()
        paged._opening = threading.get_ident(), dense
        try:
            self.dense: torch.Tensor = _DETACH(paged)
        finally:
            paged._opening = None
        self.requires_grad = False
        self.paged: PagedTensor | None = None
        self.tensor: torch.Tensor | None = None


class _Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


# Past what `Function.apply` does for functorch: no transform goes on where a weight is opened.
_save: Any = super(torch.autograd.Function, _Saved).apply


def _in_place_of(several: list[PagedTensor]) -> Iterator[torch.Tensor]:
    """The leaves that autograd takes for ``several``, which require gradients: with their
    ``AccumulateGrad`` nodes, over the memory that they open as. They are what autograd makes of
    leaves that it has saved, when hooks bring them back."""
    with saved_tensors_hooks(attrgetter("_opens_as"), attrgetter("dense")):
        result = _save(*several)
    node = result.grad_fn  # PyTorch 2.11 frees what it has saved with its result
    for paged, leaf, (accumulates, _) in zip(several, node.saved_tensors, node.next_functions):
        leaf._weight = paged
        # A leaf has its node by a weak reference, and without it would get one of its own and keep
        # the gradient. Whoever has taken the leaf for an op may be the last to have it: others
        # close.
        leaf._accumulates = accumulates
        yield leaf


def _as_view_of(paged: PagedTensor) -> torch.Tensor:
    """What autograd takes for a view of ``paged``, which has no gradient."""
    paged._opening = threading.get_ident(), paged._opens_as.dense
    try:
        view: torch.Tensor = _ALIAS(paged)
    finally:
        paged._opening = None
    return view


class _Lent(NamedTuple):
    """``tensor`` stands for ``paged`` in ``module``; ``version``: of both, when that began."""

    module: torch.nn.Module
    name: str
    paged: PagedTensor
    tensor: torch.Tensor
    version: int


class OpenWeights:
    """Of one pager. ``native``: this iteration keeps to PyTorch's nodes; ``as_before``: with the
    weights of the one before, which require gradients as they did."""

    def __init__(self, pager: Core) -> None:
        self._pager = pager
        self.native = self.as_before = False
        self._ops = 0  # of an iteration in which nothing that was saved went into pages
        self._open: list[OpenWeight] = []
        self._known: dict[int, weakref.ref[PagedTensor]] = {}  # opened before, by id
        self._lingering: list[OpenWeight] = []  # closed, still in use
        self._lent: list[tuple[torch.nn.Module, list[_Lent]]] = []  # to calls that run
        self.lent_memory: set[int] = set()  # storages of these tensors, as `_cdata`
        self._traced_pages = False  # code was compiled around paged parameters

    def begin(self) -> None:
        """An iteration begins."""
        global _made, _most
        pager = self._pager
        self._keep_native(pager.fits and pager.after_op is None)
        if self.native and self._traced_pages and not _is_called_by_compiled():
            # Code that was not worth compiling then is never looked at again.
            self._traced_pages = False
            torch.compiler.reset()
        with pager.lock, _no_overrides():
            self.close()
            if not self.native:
                return
            with torch.inference_mode(False), torch.enable_grad():
                again, gone = [], []
                for key, known in self._known.items():
                    paged = known()
                    if paged is None or not _still_opens(paged):
                        gone.append(key)
                    elif self._can_open(paged):
                        again.append(paged)
                for key in gone:
                    del self._known[key]
                same = all(p._opens_as.requires_grad is p.requires_grad for p in again)
                self.as_before = same and self._ops > 0
                _made, _most = 0, self._ops + 1
                self._open_now(again)

    def _keep_native(self, native: bool) -> None:
        self.native = native
        if native:
            NATIVE[id(self)] = weakref.ref(self)
        else:
            NATIVE.pop(id(self), None)

    def end(self) -> None:
        """The iteration is over."""
        self._take_back()
        if self.native and self._pager.saved.kept_all:
            self._ops = max(self._ops, _made)
        self._keep_native(False)
        if self._open or self._lingering:
            with self._pager.lock:
                self.close()

    def stop(self) -> None:
        """The pager is being closed, under its lock: nothing is opened any more."""
        self._take_back()
        self._keep_native(False)
        self.close()

    def disown(self) -> None:
        """In a forked child, which has no arena: nothing is open. Without the lock, which a thread
        of the parent may have held."""
        self._keep_native(False)
        for weight in self._open:
            assert weight.paged is not None
            weight.paged._open = None
        self._open.clear()

    def open(self, paged: PagedTensor) -> OpenWeight | None:
        """Open a candidate (:func:`is_candidate`); ``None`` where that cannot be now. To be called
        without torch functions of subclasses."""
        self.as_before = False
        self._pager.profile_run.does_more()
        with self._pager.lock:
            if not self._can_open(paged):
                return None
            before = paged._open
            if before is not None:  # for another value of requires_grad
                self._open.remove(before)
                self._close([before])
            with torch.inference_mode(False), torch.enable_grad():
                self._open_now([paged])
            opened: OpenWeight = paged._open
            return opened

    # -- in what is compiled ---------------------------------------------------------------------
    def lend(self, model: torch.nn.Module) -> None:
        """``model`` is called: what is compiled of it has plain tensors for parameters until
        :meth:`called`."""
        parts = [model] if _is_called_by_compiled() else _compiled_parts(model)
        if not parts or not self._pager.turns.is_home():
            return
        if _modes() or _functorch_level() is not None:  # somebody traces, or transforms
            return
        if not self.native:
            self._traced_pages = True
            return
        with _no_overrides():
            modules = (module for part in parts for module in part.modules())
            lent = [one for module in modules for one in self._to_lend(module)]
            for one in lent:
                one.module._parameters[one.name] = one.tensor  # type: ignore[assignment]
                self.lent_memory.add(one.tensor.untyped_storage()._cdata)
        self._lent.append((model, lent))

    def _to_lend(self, module: torch.nn.Module) -> Iterator[_Lent]:
        parameters: dict[str, Any] = module._parameters
        for name, parameter in parameters.items():
            if type(parameter) is PagedTensor and is_candidate(parameter):
                weight = parameter._open or self.open(parameter)
                if weight is not None and weight.tensor is not None:
                    yield _Lent(module, name, parameter, weight.tensor, parameter._version)

    def called(self, model: torch.nn.Module) -> None:
        """The call is over, or has raised."""
        if any(other is model for other, _ in self._lent):
            self._take_back(model)

    def _take_back(self, model: torch.nn.Module | None = None) -> None:
        """From the latest call of ``model`` and those inside of it, or from all."""
        while self._lent:
            called, lent = self._lent.pop()
            written = []
            for module, name, paged, tensor, version in lent:
                parameters: dict[str, Any] = module._parameters
                if parameters.get(name) is tensor:
                    parameters[name] = paged
                if paged._version != version:
                    written.append(paged._storage.run)
            if written:
                with self._pager.hold(written, written):
                    pass
            if called is model:
                break
        if not self._lent:
            self.lent_memory.clear()

    def _can_open(self, paged: PagedTensor) -> bool:
        pager = self._pager
        return paged._storage.run.base >= 0 and pager.fits and not pager.sees_ops

    def _open_now(self, several: list[PagedTensor]) -> None:
        learn = []
        for paged in several:
            weight: OpenWeight | None = paged._opens_as
            if weight is None or weight.generation != paged._storage.run.generation:
                weight = paged._opens_as = OpenWeight(paged)
                self._known[id(paged)] = weakref.ref(paged)
            weight.requires_grad = paged.requires_grad
            if weight.requires_grad:
                learn.append(paged)
        leaves = _in_place_of(learn) if learn else iter(())
        for paged in several:
            weight = paged._open = paged._opens_as
            weight.paged = paged
            weight.tensor = next(leaves) if weight.requires_grad else _as_view_of(paged)
            weight.run.pins += 1  # at hand, which is no use of it
            self._open.append(weight)

    def forget(self, paged: PagedTensor) -> None:
        """``paged`` has another geometry now."""
        with self._pager.lock:
            paged._opens_as = None
            self._known.pop(id(paged), None)
            if paged._open is not None:
                self.close()

    def close(self) -> None:
        """Close all, under the pager's lock: pages may move again, but for what is in use."""
        opened, self._open = self._open, []
        self._close(opened)

    def _close(self, opened: list[OpenWeight]) -> None:
        """And those that were closed before, and were in use."""
        for weight in opened:
            assert weight.paged is not None
            weight.paged._open = weight.paged = weight.tensor = None
        closed, self._lingering = self._lingering + opened, []
        for weight in closed:
            if _uses(weight.storage._cdata) > _OWN_USES:
                self._lingering.append(weight)
            else:
                weight.run.pins -= 1

    @property
    def in_use(self) -> bool:
        """After :meth:`close`: somebody still has a tensor over pages."""
        return bool(self._lingering)


def _is_called_by_compiled() -> bool:
    """Whether compiled code is in the stack."""
    frame = sys._getframe(1) if "torch._dynamo.eval_frame" in sys.modules else None
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILED):
            return True
        frame = frame.f_back
    return False


def _compiled_parts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Each once. For each call of a model, so without the generators of ``modules()``."""
    if "torch._dynamo.eval_frame" not in sys.modules:
        return []
    found: dict[torch.nn.Module, None] = {}
    left: list[torch.nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is None:
            continue
        parts = module._modules
        if "_compiled_call_impl" in module.__dict__ or "_orig_mod" in parts:
            found[module] = None
        left += parts.values()
    return [*found]


def is_candidate(tensor: PagedTensor) -> bool:
    """Whether ``tensor`` is opened in iterations in which everything fits. Always says the same of
    a tensor while a graph has it. To be called without torch functions of subclasses."""
    return (
        _still_opens(tensor)
        and tensor._storage.pager.opened.native
        and not (tensor.dtype.is_complex or tensor.is_neg() or tensor.is_inference())
    )


def _still_opens(paged: PagedTensor) -> bool:
    """Whether one that was a candidate, and has its geometry still, is one still."""
    return paged.is_leaf and (paged._storage.run.kind == "parameter" or paged.requires_grad)


def run_opened(func: Any, args: Any, kwargs: dict[str, Any] | None) -> Any:
    """An op of ``TAKE_OPEN`` with weights opened; ``NotImplemented``, and nothing done, where there
    are none, or somebody wants to see, or to change, what the op is made of.

    Weights that cannot be opened now, and other paged operands, are used through the dispatcher.
    """
    global _made
    _made += 1
    if _made == _most:
        for opened in [*NATIVE.values()]:
            if (weights := opened()) is not None:
                weights._pager.profile_run.does_more()
    with _no_overrides():
        if _modes() or _any_autocast() or _functorch_level() is not None:
            return NotImplemented
        found = _with_opened(args, native=False)
        if found is None:
            return NotImplemented
        given, native = found
        if not kwargs and func is not F.embedding:
            return func(*given) if native else NotImplemented
        kwargs = kwargs or {}
        if _may_write(func, given, kwargs):
            return NotImplemented
        found = _with_opened(kwargs.values(), native=native)
        if found is None or not found[1]:
            return NotImplemented
        return func(*given, **dict(zip(kwargs, found[0])))


def _may_write(func: Any, given: list[Any], kwargs: dict[str, Any]) -> bool:
    """Into an operand, which would have to be known as a write to pages."""
    if "out" in kwargs or kwargs.get("max_norm") is not None:
        return True
    return func is F.embedding and len(given) > 3 and given[3] is not None


def _with_opened(values: Iterable[Any], *, native: bool) -> tuple[list[Any], bool] | None:
    """``values`` with weights as plain tensors; and whether a pager among theirs keeps to PyTorch's
    nodes, or ``native``. ``None`` if the first one does not."""
    given = []
    for value in values:
        if type(value) is PagedTensor:
            weight = value._open
            if weight is None or weight.requires_grad is not value.requires_grad:
                opened = value._storage.pager.opened
                if not native and not opened.native:
                    return None
                weight = opened.open(value) if is_candidate(value) else None
            native = True
            if weight is not None and (tensor := weight.tensor) is not None:
                value = tensor
        given.append(value)
    return given, native
