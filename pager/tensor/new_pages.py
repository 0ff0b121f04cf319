"""Makes PagedTensors: empty ones, copies of dense tensors and of paged ones, larger storages."""

from __future__ import annotations

import torch

from ..budget.fits import frames_anyway
from ..core import Core, PagedStorage
from ..errors import InfeasibleBudget
from .paged_tensor import Form, PagedTensor, blank, blank_storage
from .slabs import Held, put_bytes


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
    pager: Core, like: torch.Tensor, kind: str, *, apart: str = ""
) -> PagedTensor:
    """A PagedTensor with ``like``'s shape, dtype and (dense) strides; zeros. ``apart``: what sets
    it apart from small ones of its kind, with which it may share a page.

    What another tensor left in memory is never seen: frames are erased when a run gets them
    (``Residency.fill``), a part of a page that is shared is at once."""
    paged = blank(pager, like, kind, apart)
    storage = paged._storage
    storage.run.overwritten = False
    if storage.run.small is not None:
        zeros = torch.zeros(storage.nbytes, dtype=torch.uint8, device=pager.device)
        write(pager, storage, zeros)
    return paged


def copy_in(pager: Core, dense: torch.Tensor, kind: str, *, apart: str = "") -> PagedTensor:
    """A PagedTensor with the values of plain, strided ``dense``."""
    if not (dense.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(dense)):
        dense = dense.contiguous()
    dense = dense.resolve_conj().resolve_neg()
    paged = blank(pager, dense, kind, apart)
    if dense.numel():
        flat = dense.as_strided((dense.numel(),), (1,), dense.storage_offset())
        write(pager, paged._storage, flat.view(torch.uint8))
    return paged


def store_bytes(pager: Core, source: torch.Tensor, kind: str) -> PagedStorage:
    """A new storage that holds the bytes of ``source`` (uint8, one-dimensional)."""
    storage = blank_storage(pager, source.numel(), kind)
    write(pager, storage, source)
    return storage


def write(pager: Core, storage: PagedStorage, source: torch.Tensor) -> None:
    """The bytes of a new ``storage`` become those of ``source`` (uint8, one-dimensional)."""
    if pager.sees_ops and pager.watch is not None:
        with pager.watch.filling(storage.run):
            _write(pager, storage, source)
    else:
        _write(pager, storage, source)


def _write(pager: Core, storage: PagedStorage, source: torch.Tensor) -> None:
    run, residency, begin = storage.run, pager.residency, storage.offset
    needs = residency.needs
    # One page may hold other storages.
    in_parts = run.count > 1 and run.count > frames_anyway(pager.budget)
    if not in_parts:
        try:
            pager.take([run])
        except InfeasibleBudget:  # larger than what others have left of the arena
            in_parts = True
    if in_parts:
        needs = residency.needs
        put_bytes(storage, source, begin)
        if not pager.budget.metering:
            residency.needs = max(needs[0], 1), max(needs[1], 1)  # a page at a time would do
        return
    if residency.needs is not needs and not pager.budget.metering and pager.turns.is_home():
        residency.needs = needs  # it could do with less, in parts
    try:
        pager.will_write([run])
        if run.base >= 0:
            start = run.base * pager.page_size + begin
            pager.backend.arena[start : start + source.numel()].copy_(source)
        else:
            frames = pager.table.frame[run.first : run.first + run.count]
            Held(storage, begin, begin + source.numel(), frames).put(source, begin)
    finally:
        pager.release([run])


def enlarge(storage: PagedStorage, nbytes: int) -> None:
    """Give ``storage`` room for ``nbytes``; its contents stay, new bytes are undefined. All
    PagedTensors that share it see the larger one."""
    pager = storage.pager
    like = torch.empty(nbytes, dtype=torch.uint8, device="meta")
    larger = empty_like_geometry(pager, like, storage.run.kind)._storage
    old, new = (Form.of(like[: storage.nbytes]).paged(s) for s in (storage, larger))
    new.copy_(old)
    for name in ("run", "offset", "nbytes"):  # what it had is freed as `larger`
        mine, other = getattr(storage, name), getattr(larger, name)
        setattr(storage, name, other)
        setattr(larger, name, mine)
    storage.untyped = None  # it has another size
    with pager.lock:
        pager.opened.close()  # what is open lies in the smaller one
