"""Makes PagedTensors: empty ones, copies of dense tensors and of paged ones, larger storages."""

from __future__ import annotations

import torch

from ..budget.fits import frames_anyway
from ..core import Core, PagedStorage
from ..devices.device import bytes_of
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
        write(pager, storage, zeros.untyped_storage())
    return paged


def copy_in(pager: Core, dense: torch.Tensor, kind: str, *, apart: str = "") -> PagedTensor:
    """A PagedTensor with the values of plain, strided ``dense``."""
    if not (dense.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(dense)):
        dense = dense.contiguous()
    if dense.is_conj() or dense.is_neg():
        dense = dense.resolve_conj().resolve_neg()
    paged = blank(pager, dense, kind, apart)
    if dense.numel():
        start = int(dense.storage_offset()) * dense.element_size()
        write(pager, paged._storage, dense.untyped_storage(), start)
    return paged


def store_bytes(
    pager: Core, memory: torch.UntypedStorage, start: int, nbytes: int, kind: str
) -> PagedStorage:
    """A new storage that holds so many bytes of ``memory``, from ``start`` on."""
    storage = blank_storage(pager, nbytes, kind)
    write(pager, storage, memory, start)
    return storage


def write(pager: Core, storage: PagedStorage, memory: torch.UntypedStorage, start: int = 0) -> None:
    """The bytes of a new ``storage`` become those of ``memory`` from ``start`` on."""
    if pager.sees_ops and pager.watch is not None:
        with pager.watch.filling(storage.run):
            _write(pager, storage, memory, start)
    else:
        _write(pager, storage, memory, start)


def _write(pager: Core, storage: PagedStorage, memory: torch.UntypedStorage, start: int) -> None:
    run, residency = storage.run, pager.residency
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
        put_bytes(storage, bytes_of(memory, start, storage.nbytes), storage.offset)
        if not pager.budget.metering:
            residency.needs = max(needs[0], 1), max(needs[1], 1)  # a page at a time would do
        return
    if residency.needs is not needs and not pager.budget.metering and pager.turns.is_home():
        residency.needs = needs  # it could do with less, in parts
    try:
        pager.will_write([run])
        begin, nbytes = storage.offset, storage.nbytes
        if run.base >= 0:
            pager.backend.fill(run.base * pager.page_size + begin, memory, start, nbytes)
        else:
            frames = pager.table.frame[run.first : run.first + run.count]
            held = Held(storage, begin, begin + nbytes, frames)
            held.put(bytes_of(memory, start, nbytes), begin)
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
    pager.changed_in_place += 1
    with pager.lock:
        pager.opened.close()  # what is open lies in the smaller one
