"""Makes PagedTensors: empty ones, copies of dense tensors and of paged ones, larger storages."""

from __future__ import annotations

from contextlib import closing, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...kernels.launch import upload
from ...kernels.scatter import scatter_pages
from ..budget.fits import frames_anyway
from ..core import PagedStorage
from ..errors import InfeasibleBudget
from ..memory.frame_pool import merge
from ..memory.page_table import Int32
from .paged_tensor import PagedTensor
from .plain_copies import dense_twin
from .slabs import fair_share, pages_of, stream

if TYPE_CHECKING:
    from ..core import Core


def page_copy(pager: Core, tensor: torch.Tensor) -> PagedTensor:
    """See ``Pager.page``."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"cannot page an object of {type(tensor).__name__}; pass page() a tensor, or a module "
            "to page_module()"
        )
    if type(tensor) is PagedTensor and tensor._storage.pager is pager:
        return tensor
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(
            f"cannot page a tensor with layout {tensor.layout}, dtype {tensor.dtype}: only "
            "strided tensors of ordinary dtypes have pages; call .to_dense() on it first"
        )
    paged = copy_in(pager, tensor.detach(), "user")
    if isinstance(tensor, torch.nn.Parameter):
        paged._is_param = True
    return paged.requires_grad_(tensor.requires_grad)  # type: ignore[return-value]


def empty_like_geometry(
    pager: Core, like: torch.Tensor, kind: str, *, overwritten: bool = False, apart: str = ""
) -> PagedTensor:
    """A PagedTensor with ``like``'s shape, dtype and (dense) strides; zeros. ``overwritten``: the
    caller writes all of it before anyone reads it, so the values may be anything. ``apart``: what
    sets it apart from small ones of its kind, with which it may share a page."""
    pager.check_open()
    dense = torch.ops.aten.is_non_overlapping_and_dense(like)
    shape = like if dense else torch.empty(like.size(), dtype=like.dtype, device="meta")
    nbytes = like.numel() * like.element_size()
    storage = _new_storage(pager, nbytes, kind, overwritten=overwritten, apart=apart)
    return PagedTensor(storage, shape.size(), shape.stride(), 0, like.dtype)


def copy_in(pager: Core, dense: torch.Tensor, kind: str, *, apart: str = "") -> PagedTensor:
    """A PagedTensor with the values of plain, strided ``dense``."""
    if not torch.ops.aten.is_non_overlapping_and_dense(dense):
        dense = dense.contiguous()
    dense = dense.resolve_conj().resolve_neg()
    paged = empty_like_geometry(pager, dense, kind, overwritten=True, apart=apart)
    if dense.numel():
        flat = dense.as_strided((dense.numel(),), (1,), dense.storage_offset())
        write(pager, paged._storage, flat.view(torch.uint8))
    return paged


def store_bytes(pager: Core, source: torch.Tensor, kind: str) -> PagedStorage:
    """A new storage that holds the bytes of ``source`` (uint8, one-dimensional)."""
    storage = _new_storage(pager, source.numel(), kind, overwritten=True)
    write(pager, storage, source)
    return storage


def write(pager: Core, storage: PagedStorage, source: torch.Tensor) -> None:
    """The bytes of a new ``storage`` become those of ``source`` (uint8, one-dimensional)."""
    watch = pager.watch
    with watch.filling(storage.run) if watch is not None else nullcontext():
        _write(pager, storage, source)


def _write(pager: Core, storage: PagedStorage, source: torch.Tensor) -> None:
    run, residency = storage.run, pager.residency
    needs = residency.needs
    if run.count > max(1, frames_anyway(pager.budget)):  # one page may hold other storages
        _write_in_parts(pager, storage, source)
        return
    try:
        pager.take([run])
    except InfeasibleBudget:  # larger than what others have left of the arena
        _write_in_parts(pager, storage, source)
        return
    if pager.turns.is_home() and not pager.budget.metering:
        residency.needs = needs  # it could do with less, in parts
    try:
        pager.will_write([run])
        if run.base >= 0:
            start = run.base * pager.page_size + storage.offset
            pager.backend.arena[start : start + source.numel()].copy_(source)
        else:
            _put(pager, source, pager.table.frame[run.first : run.first + run.count])
    finally:
        pager.release([run])


def _write_in_parts(pager: Core, storage: PagedStorage, source: torch.Tensor) -> None:
    """The same a few pages at a time. Raises ``InfeasibleBudget`` if not one page has room."""
    size = pager.page_size
    step = max(1, fair_share(pager))
    count = storage.run.count
    spans = [range(at, min(at + step, count)) for at in range(0, count, step)]
    wanted = ([pages_of(storage, span, write=True)] for span in spans)
    needs = pager.residency.needs
    with closing(stream(pager, wanted, noted=True)) as pinned:
        for span, (frames,) in zip(spans, pinned):
            _put(pager, source[span.start * size : span.stop * size], frames)
    if not pager.budget.metering:
        pager.residency.needs = max(needs[0], 1), max(needs[1], 1)  # a page at a time would do


def _put(pager: Core, source: torch.Tensor, frames: Int32) -> None:
    """The bytes of ``source`` into pinned ``frames``, without a copy of them beside the arena: what
    comes from the host goes straight into its frames, a stretch of neighbours at a time."""
    size, arena = pager.page_size, pager.residency.arena
    if source.device.type != "cpu":
        scatter_pages(source, upload(torch.from_numpy(frames.copy()), pager.device), arena, size)
        return
    for frame, page, count in merge(frames, np.arange(len(frames), dtype=np.int32)):
        piece = source[page * size : (page + count) * size]
        arena[frame * size : frame * size + piece.numel()].copy_(piece)


def enlarge(storage: PagedStorage, nbytes: int) -> None:
    """Give ``storage`` room for ``nbytes``; its contents stay, new bytes are undefined. All
    PagedTensors that share it see the larger one."""
    pager = storage.pager
    larger = _new_storage(pager, nbytes, storage.run.kind)
    old = PagedTensor(storage, (storage.nbytes,), (1,), 0, torch.uint8)
    PagedTensor(larger, (storage.nbytes,), (1,), 0, torch.uint8).copy_(old)
    for name in ("run", "offset", "nbytes"):  # what it had is freed as `larger`
        mine, other = getattr(storage, name), getattr(larger, name)
        setattr(storage, name, other)
        setattr(larger, name, mine)
    storage.untyped = None  # it has another size
    with pager.lock:
        pager.opened.close()  # what is open lies in the smaller one


def duplicate(tensor: PagedTensor) -> PagedTensor:
    """What ``copy.deepcopy`` of a leaf gives: its own pages, the same attributes."""
    pager, kind = tensor._storage.pager, tensor._storage.run.kind
    twin = copy_in(pager, dense_twin(tensor).detach(), kind)
    if getattr(tensor, "_is_param", False):
        twin._is_param = True
    if tensor.requires_grad:
        twin.requires_grad_(True)
        if kind == "parameter":
            twin.register_post_accumulate_grad_hook(pager.page_grad)  # type: ignore[no-untyped-call]
    if tensor.grad is not None:
        grad = tensor.grad
        twin.grad = duplicate(grad) if type(grad) is PagedTensor else grad.clone()
    return twin


def _new_storage(
    pager: Core, nbytes: int, kind: str, *, overwritten: bool = False, apart: str = ""
) -> PagedStorage:
    """What another tensor left in memory is never seen in it: frames are erased when it gets them
    (``Residency.fill``), its part of a page that it shares is at once; not if it is to be
    ``overwritten`` as a whole."""
    with pager.lock:
        pager.residency.collect()
        storage = PagedStorage(pager, nbytes, kind, apart)
    if storage.run.small is None:
        storage.run.overwritten = overwritten
    elif not overwritten:
        write(pager, storage, torch.zeros(storage.nbytes, dtype=torch.uint8, device=pager.device))
    return storage
