"""Runs an op on dense views of its paged operands; no result aliases the arena (rule 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..budget.fits import frames_anyway
from ..budget.refusals import LeftOut
from ..core import Core
from ..errors import CorruptPage, InfeasibleBudget, PagerError
from ..memory.space import Extent
from .op_info import OpInfo
from .page_run import BY_VERDICT, has_verdict, is_too_large, run_in_slabs, run_on_pages
from .paged_tensor import (
    PagedTensor,
    dense_view,
    direct_view,
    plain_copy,
    set_geometry,
    take_over,
    withdraw,
)
from .tensor_bytes import copy_unmoved

LISTS = (list, tuple)
PLAIN = OpInfo("plain", (), ())
NOT_QUICK = object()


def run_quickly(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``run_dense`` for the commonest case: an op that only reads tensors of one pager, none of
    them named, all of them on the device in one piece, or brought there by the plan that is
    followed. ``NOT_QUICK``, and nothing done, otherwise."""
    paged: list[PagedTensor] = []
    runs: list[Extent] = []
    pager, absent = None, 0
    for value in args:
        kind = type(value)
        if kind is PagedTensor:
            storage = value._storage
            run = storage.run
            if pager is None:
                pager = storage.pager
            if storage.pager is not pager or value._is_complex:
                return NOT_QUICK
            if run not in runs:
                runs.append(run)
                absent += run.count if run.base < 0 else 0
            paged.append(value)
        elif kind in LISTS and any(type(item) is PagedTensor for item in value):
            return NOT_QUICK
    if pager is None or pager.budget.metering or (kwargs and paged_in((), kwargs)):
        return NOT_QUICK
    if absent:  # too large an op goes slab by slab
        ahead = pager.follower is not None and pager.follower.is_ahead
        if not ahead or absent > frames_anyway(pager.budget) // 2:
            return NOT_QUICK
    if func in BY_VERDICT and has_verdict(func, paged):
        return NOT_QUICK
    try:
        pager.take(runs)
    except PagerError:
        if not absent:
            raise
        return NOT_QUICK
    plain: list[Any] = []
    views: list[torch.Tensor] = []
    try:
        for value in args:
            if type(value) is PagedTensor:
                run = value._storage.run
                if run.base < 0:
                    return NOT_QUICK
                view = value._view
                if view is None or value._view_generation != run.generation:
                    view = direct_view(value)
                views.append(view)
                plain.append(view)
            else:
                plain.append(value)
        out = func(*plain, **kwargs)
        low, reach = pager.backend.address, pager.reach_bytes
        for one in out if type(out) is tuple else (out,):
            if one is not None and (
                type(one) is not torch.Tensor
                or one.layout is not torch.strided
                or 0 <= one.data_ptr() - low < reach
            ):
                break
        else:
            return out
        operands = Operands(pager)
        operands.twins = {id(view): t for view, t in zip(views, paged)}
        return _restore(out, operands)
    except BaseException:
        withdraw(paged, views)
        raise
    finally:
        pager.release(runs)


def run_dense(func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on dense views of its paged operands; results never alias the arena.

    What page kernels can do is done by them (``page_run.py``) where frames are scattered, or too
    few for all operands; other ops get dense copies then, or raise ``InfeasibleBudget``. Copies
    into plain memory are made without a frame where none can be had (``tensor_bytes.py``). A write
    to a parameter that the budget refuses is left out.
    """
    try:
        return _run_dense(func, info, args, kwargs)
    except LeftOut:
        written = _written_by(info, args, kwargs)
        count = len(func._schema.returns)
        return tuple(written) if count > 1 else written[0] if count else None
    except (InfeasibleBudget, CorruptPage):
        raise
    except PagerError:
        out = copy_unmoved(func, args, kwargs)
        if out is NotImplemented:
            raise
        return out


def _run_dense(func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    paged = paged_in(args, kwargs)
    pagers = {id(t._storage.pager): t._storage.pager for t in paged}
    if len(pagers) > 1:  # operands of another pager become plain copies; written ones must not
        return _run_across(func, info, args, kwargs, list(pagers.values()))
    pager = paged[0]._storage.pager
    operands = Operands(pager)
    runs = operands.runs
    apart = False  # whether some are in scattered frames, or not there
    for tensor in paged:
        run = tensor._storage.run
        if run not in runs:
            runs.append(run)
            if run.base < 0:
                apart = True
    if apart and pager.mover.disk_refuses:  # no page can make way for another
        out = copy_unmoved(func, args, kwargs)
        if out is not NotImplemented:
            return out
    # In a metered iteration it may all be there for want of an op that had to have it so.
    by_rule = pager.budget.metering or has_verdict(func, paged)
    if (apart or by_rule) and is_too_large(pager, func, paged):
        out = run_in_slabs(pager, func, args, kwargs)
        if out is not NotImplemented:
            return out
    writes = _written_by(info, args, kwargs) if info.writes_named else ()
    try:
        pager.take(runs)
    except InfeasibleBudget:  # beside what others have pinned
        out = run_in_slabs(pager, func, args, kwargs)
        if out is NotImplemented:
            raise
        return out
    try:
        written = list({t._storage.run.id: t._storage.run for t in writes}.values())
        pager.will_write(written)
        if apart and any(run.base < 0 for run in runs):
            out = run_on_pages(func, args, kwargs)
            if out is not NotImplemented:
                return out
        new_args, new_kwargs = mapped(operands.dense, args, kwargs)
        try:
            out = _call(func, paged, new_args, new_kwargs)
        except RuntimeError as error:
            if not writes or "not resizable" not in str(error):
                raise
            for tensor in writes:  # PyTorch has given its view the new shape before it refused
                tensor._view = None
            return _run_resizing(func, args, kwargs, list(writes))
        if operands.buffers:
            operands.scatter_back(written)
        for tensor in writes:
            _follow(tensor, operands)
        return _restore(out, operands)
    except BaseException:
        withdraw(paged, operands.views)
        raise
    finally:
        pager.release(runs)


# -- operands and results --------------------------------------------------------------------------
def mapped(
    change: Callable[[PagedTensor], torch.Tensor], args: Any, kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with what ``change`` makes of each PagedTensor, in lists too."""

    def new(value: Any) -> Any:  # that knows itself would be a cycle, and keep the operands alive
        if type(value) in LISTS:
            return [change(item) if type(item) is PagedTensor else item for item in value]
        return change(value) if type(value) is PagedTensor else value

    return [new(a) for a in args], {name: new(a) for name, a in kwargs.items()}


class Operands:
    """The paged operands of one op, pinned while it runs, seen as dense tensors."""

    __slots__ = ("buffers", "pager", "runs", "twins", "views")

    def __init__(self, pager: Core) -> None:
        self.pager = pager
        self.runs: list[Extent] = []
        self.twins: dict[int, PagedTensor] = {}  # id(dense view) -> its PagedTensor
        self.views: list[torch.Tensor] = []
        self.buffers: dict[int, torch.Tensor] = {}  # run id -> gathered bytes

    def dense(self, tensor: PagedTensor) -> torch.Tensor:
        run = tensor._storage.run
        if run.base >= 0:
            view = direct_view(tensor)
        else:
            buffer = self.buffers.get(run.id)
            if buffer is None:
                buffer = self.buffers[run.id] = self.pager.gather(run)
            view = dense_view(tensor, buffer.data_ptr() + tensor._storage.offset)
        self.twins[id(view)] = tensor
        self.views.append(view)
        return view

    def scatter_back(self, written: list[Extent]) -> None:
        for run in written:
            buffer = self.buffers.get(run.id)
            if buffer is not None:
                self.pager.scatter(run, buffer)


def paged_in(args: Any, kwargs: dict[str, Any]) -> list[PagedTensor]:
    """The PagedTensors among the arguments, in lists too."""
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) is PagedTensor:
            found.append(value)
        elif type(value) in LISTS:
            found.extend(item for item in value if type(item) is PagedTensor)
    return found


def _written_by(info: OpInfo, args: Any, kwargs: dict[str, Any]) -> list[PagedTensor]:
    values = [args[position] for position in info.writes if position < len(args)]
    values += [kwargs[name] for name in info.writes_named if name in kwargs]
    return paged_in(values, {})


def _call(func: Any, paged: list[PagedTensor], args: Any, kwargs: dict[str, Any]) -> Any:
    """``func`` on dense operands, with lazy conjugation at work where there are complex numbers
    (the dispatcher switches it off below a tensor subclass)."""
    with torch._C.DisableTorchFunctionSubclass():
        is_complex = any(tensor.dtype.is_complex for tensor in paged)
    if not is_complex:
        return func(*args, **kwargs)
    keys = torch._C.DispatchKey
    guard = torch._C._SetExcludeDispatchKeyGuard
    with guard(keys.Conjugate, False), guard(keys.Negative, False):
        return func(*args, **kwargs)


def _follow(tensor: PagedTensor, operands: Operands) -> None:
    """A written operand whose dense view the op has given another shape, or conjugated."""
    view = next((v for v in operands.views if operands.twins.get(id(v)) is tensor), None)
    if view is None:
        return
    if view.size() != tensor.size() or view.stride() != tensor.stride():
        set_geometry(tensor, view)
    if view.is_conj() != tensor.is_conj():
        torch._C._set_conj(tensor, view.is_conj())


def _restore(out: Any, operands: Operands) -> Any:
    """Dense views among the results become their PagedTensors again; aliases are copied."""
    if isinstance(out, torch.Tensor):
        twin = operands.twins.get(id(out))
        if twin is not None:
            return twin
        return out.clone() if operands.pager.holds(out) else out
    if type(out) in LISTS:
        return type(out)(_restore(item, operands) for item in out)
    if isinstance(out, tuple):  # torch.return_types
        return type(out)([_restore(item, operands) for item in out])
    return out


# -- what cannot be run as it is -------------------------------------------------------------------
def _run_across(
    func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any], pagers: list[Core]
) -> Any:
    """Operands of several pagers: those only read become plain copies, one pager's stay."""
    writes = _written_by(info, args, kwargs)
    keep = writes[0]._storage.pager if writes else pagers[0]
    if any(t._storage.pager is not keep for t in writes):
        raise PagerError(
            f"{func} writes to PagedTensors of two pagers at once; page both with the same Pager"
        )

    def near(tensor: PagedTensor) -> torch.Tensor:
        return tensor if tensor._storage.pager is keep else plain_copy(tensor)

    return run_dense(func, info, *mapped(near, args, kwargs))


def _run_resizing(func: Any, args: Any, kwargs: dict[str, Any], writes: list[PagedTensor]) -> Any:
    """The op enlarges what it writes: run it on plain copies that can grow, and take them over."""
    plain = {id(t): plain_copy(t) for t in writes}
    new_args, new_kwargs = mapped(lambda t: plain.get(id(t), t), args, kwargs)
    if paged_in(new_args, new_kwargs):
        out = run_dense(func, PLAIN, new_args, new_kwargs)
    else:
        out = func(*new_args, **new_kwargs)
    for tensor in writes:
        take_over(tensor, plain[id(tensor)])
    return next((t for t in writes if plain[id(t)] is out), out)
