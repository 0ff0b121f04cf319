"""``DistributedDataParallel`` around a paged model: what it holds beside the pages.

DDP reads each gradient, paged or not, into flat *buckets*, reduces these and writes the result back
into the gradient. Its buckets are dense, as large as all gradients together, and there before the
first iteration is metered; so they are counted here, as buffers are, in the dense reserve. Right
before the second forward pass DDP makes them anew, in the order in which gradients came, and these
are not to be counted a second time.

DDP knows parameters by the objects that it was given. So a model is paged first and wrapped then;
``fully_shard`` is the other way round, because it makes parameters of its own (``shards.py``).
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from ..errors import PagerError
from ..optim.paged_optimizer import paged_of
from ..tensor.interop import refuse_sharding
from ..tensor.paged_tensor import PagedTensor
from ..tensor.sharded import is_sharded

if TYPE_CHECKING:
    from ..core import Core

# A storage that stands for the buckets of a wrapper, and lives as long: ``saved.skip`` counts both.
_buckets: weakref.WeakKeyDictionary[torch.nn.Module, torch.UntypedStorage] = (
    weakref.WeakKeyDictionary()
)
_rebuilt: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # whose new buckets were noticed


def refuse_wrapped(module: torch.nn.Module) -> None:
    """Before anything is paged: wrappers that would not notice, ``PagerError``."""
    for child in module.modules():
        if isinstance(child, DistributedDataParallel):
            _refuse_order(type(child).__name__)
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is not None and isinstance(child, fsdp.FullyShardedDataParallel):
            raise PagerError(
                "page_module cannot page the flat parameters of FullyShardedDataParallel (FSDP1), "
                "which it re-creates; use FSDP2: fully_shard(model), then page_module(model)"
            )


def _refuse_order(wrapper: str) -> NoReturn:
    raise PagerError(
        f"{wrapper} was made before page_module, and goes on reducing the gradients of the "
        "parameters that were replaced; call page_module(model) first, then "
        "DistributedDataParallel(model)"
    )


def watch_forward(pager: Core) -> None:
    """Look for wrappers of paged models when these run."""

    def note(module: torch.nn.Module, first: bool) -> None:
        note_replicas(pager)
        if first:
            _refuse_dense_shards(module)

    pager.on_forward.append(note)


def note_replicas(pager: Core) -> None:
    """In the forward pass of a paged model: count the buckets of the DDP around it, if any.

    Raises ``PagerError`` for a DDP that cannot work with pages, before anything is computed.
    """
    ddp: Any = DistributedDataParallel._active_ddp_module
    if ddp is None:
        return
    if ddp.training and ddp.require_backward_grad_sync and torch.is_grad_enabled():
        _note_meeting(pager, ddp)
    known = _buckets.get(ddp)
    if known is not None and known._cdata in pager.saved.skip:
        if pager.inside and ddp._has_rebuilt_buckets and ddp not in _rebuilt:
            _rebuilt.add(ddp)
            pager.budget.made_anew -= pager.saved.skip[known._cdata][1]
            pager.budget.count_from_here()
        return
    _refuse_unsuitable(ddp)
    wanted = [p for p in _reduced(ddp) if p.requires_grad]
    memory = _buckets.setdefault(ddp, torch.UntypedStorage(0))
    nbytes = sum(p.numel() * p.element_size() for p in wanted)
    pager.saved.skip[memory._cdata] = StorageWeakRef(memory), nbytes
    if (ddp.static_graph or not ddp.find_unused_parameters) and ddp not in _rebuilt:
        pager.budget.made_anew += nbytes
    pager.saved.count()
    for ref in pager.optimizers:
        paged = paged_of(ref())
        if paged is not None and paged.in_backward is not None:
            paged.in_backward.stop(
                "DistributedDataParallel reduces gradients after they are accumulated"
            )


def _note_meeting(pager: Core, ddp: Any) -> None:
    from .agreement import note_meeting, plan_together, timeout_of  # torch.distributed

    if not getattr(ddp._join_config, "enable", False):  # ranks may run out of data then
        ranks = torch.distributed.get_process_group_ranks(ddp.process_group)
        plan_together(pager, ranks, timeout_of(ddp.process_group))
        note_meeting(pager)


def _reduced(ddp: Any) -> list[torch.Tensor]:
    ignored = ddp.parameters_to_ignore
    return [p for name, p in ddp.module.named_parameters() if name not in ignored]


def _refuse_unsuitable(ddp: Any) -> None:
    given = {id(parameter) for parameter in ddp._module_parameters}
    if any(type(p) is PagedTensor and id(p) not in given for p in _reduced(ddp)):
        _refuse_order(type(ddp).__name__)
    if ddp.gradient_as_bucket_view:
        raise PagerError(
            "DistributedDataParallel(gradient_as_bucket_view=True) wants gradients to be views of "
            "its dense buckets, and the pager keeps them in pages; make it without that argument"
        )


def _refuse_dense_shards(module: torch.nn.Module) -> None:
    """Of parameters in pages before; where PyTorch lets ``fully_shard`` be refused, it was."""
    for parameter in module.parameters():
        if type(getattr(parameter, "_local_tensor", None)) is torch.Tensor:
            refuse_sharding(parameter)


def page_sharded(pager: Core, module: torch.nn.Module) -> None:
    """The shards of ``module``, if it is sharded."""
    if _is_sharded(module):
        from .shards import page_shards  # torch.distributed, which others need not load

        page_shards(pager, module)


def _is_sharded(module: torch.nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # loaded where it was used
    if fsdp is not None and any(isinstance(child, fsdp.FSDPModule) for child in module.modules()):
        return True
    return any(is_sharded(parameter) for parameter in module.parameters())
