"""FSDP2: the shards of ``fully_shard`` in pages.

::

    sharded parameter (DTensor)  -> local shard: pages on device, host or disk
        all-gather: shards are copied in, one after another -> dense, for as long as FSDP2 keeps it
        reduce-scatter -> dense gradient of the shard -> pages, before anybody sees it
                                                      -> or it is updated (``in_backward.py``)
    optimizer.step(): on the local shards (``optim/shards.py``)

Where the CPU is the device, gathers and reduce-scatters are accesses of their own, of no pages: a
plan knows how long they take, and moves pages meanwhile. (An accelerator has them on streams of
their own; what ops wait for them is a part of these.)

A sharded parameter stays the DTensor that FSDP2 made; only the memory of its shard is replaced. So
optimizers, ``clip_grad_norm_`` and ``state_dict`` go on finding what they know. FSDP2 keeps the
shard twice, as a flat tensor that it gathers from and as the DTensor's local tensor; both become
views of the same pages.

What FSDP2 gathers is dense and freed by FSDP2, which counts on autograd holding the very memory
that it frees and fills again. So saved tensors leave that memory alone.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import PagerError
from ..tensor.dispatcher import serve_kind
from ..tensor.new_pages import copy_in, empty_like_geometry
from ..tensor.op_info import OpInfo
from ..tensor.paged_tensor import PagedTensor
from .agreement import note_meeting, plan_together, timeout_of

if TYPE_CHECKING:
    from ..core import Core

_COPY_IN = torch.ops.fsdp.all_gather_copy_in.default
_KIND = "all_gather_copy_in"
_COMMS = {"_all_gather_comm": "gather", "_reduce_scatter_comm": "reduce"}  # of FSDP2's groups
_MOMENT = 1.0  # seconds


def fsdp_groups(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Any]]:
    """Parameters that FSDP2 gathers together, and the module that ``fully_shard`` was called on."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            state = child._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # several since PyTorch 2.13
            for group in [state._fsdp_param_group] if groups is None else groups:
                if group is not None:
                    yield child, group


def fsdp_params(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, FSDPParam]]:
    """What ``fully_shard`` keeps for each parameter, and the module that it was called on."""
    for child, group in fsdp_groups(module):
        for param in group.fsdp_params:
            yield child, param


def page_shards(pager: Core, module: torch.nn.Module) -> None:
    """The local shards of all parameters of ``module`` go into pages.

    Raises ``PagerError``, with nothing paged, for DTensors that are not ``fully_shard``'s, and for
    parameters that are gathered at the moment.
    """
    known = {id(param.sharded_param): param for _, param in fsdp_params(module)}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and id(parameter) not in known:
            raise PagerError(
                f"parameter {name!r} is a DTensor that fully_shard did not make (or a gathered "
                "one); page_module pages the shards of fully_shard only: call it after fully_shard "
                "and before tensor parallelism is applied, or keep this module unpaged"
            )
    for _, param in fsdp_params(module):
        if param.sharded_state is not ShardedState.SHARDED:
            raise PagerError(
                "page_module found parameters that fully_shard has gathered; call "
                "model.reshard() on each FSDP module first, or page_module before the first forward"
            )
        if param.offload_to_cpu:
            raise PagerError(
                "fully_shard has CPUOffloadPolicy, and pages are the pager's way to the same end; "
                "use fully_shard without offload_policy"
            )
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    meshes = {_ranks_of(param) for _, param in fsdp_params(module)}
    if len(meshes) == 1:  # else who meets whom differs from gather to gather
        plan_together(pager, meshes.pop(), timeout_of(None))
    if pager.backend.host_addressable:
        for _, group in fsdp_groups(module):
            _watch_collectives(pager, group)
    hooked = set()
    for child, param in fsdp_params(module):
        sharded: Any = param.sharded_param
        if type(sharded._local_tensor) is PagedTensor:
            continue
        _page(pager, param, names.get(id(sharded), "parameter"))
        if child not in hooked:
            hooked.add(child)
            child.register_forward_pre_hook(_LeaveGathered(pager))


def _ranks_of(param: FSDPParam) -> tuple[int, ...]:
    mesh: Any = param.mesh_info.mesh
    return tuple(sorted(map(int, mesh.mesh.flatten())))


def _page(pager: Core, param: FSDPParam, label: str) -> None:
    flat = param._sharded_param_data
    if flat.is_meta:
        paged = empty_like_geometry(pager, flat, "parameter")
    else:
        paged = copy_in(pager, flat.detach(), "parameter")
    paged._storage.label = label
    sharded: Any = param.sharded_param
    dim = param.fsdp_placement.dim
    length = sharded._local_tensor.size(dim) if sharded._local_tensor.numel() else 0
    shaped = paged.view(param.padded_sharded_param_size)
    param._sharded_param_data = paged
    shard = shaped.narrow(dim, 0, length)
    if flat.is_meta:  # a DTensor says itself on which device it is, and FSDP2 asks it
        made = torch.nn.Parameter(param.to_sharded_dtensor(shard), sharded.requires_grad)
        torch.utils.swap_tensors(sharded, made)
    else:
        sharded._local_tensor = shard
    param.reset_sharded_param = _Reset(pager, param)  # type: ignore[method-assign]
    if sharded.requires_grad:
        sharded.register_post_accumulate_grad_hook(_page_gradient(pager))
    if sharded.grad is not None:
        _page_gradient(pager)(sharded)


class _Reset:
    """``FSDPParam.reset_sharded_param``, which pads uneven shards anew, in dense memory, when they
    are not the ones that it knows. Ours are padded already; others are paged first."""

    def __init__(self, pager: Core, param: FSDPParam) -> None:
        self._pager, self._param = weakref.ref(pager), weakref.ref(param)

    def __call__(self) -> None:
        pager, param = self._pager(), self._param()
        if param is None or pager is None or pager.closed_reason is not None:
            return
        now: Any = getattr(param._module_info.module, param._module_info.param_name)
        flat: Any = param._sharded_param_data
        local = now._local_tensor
        if type(local) is PagedTensor and local._storage is flat._storage:
            param._sharding_spec = now._spec
            return
        FSDPParam.reset_sharded_param(param)  # load_state_dict(assign=True), to_empty()
        with torch.no_grad():
            _page(pager, param, flat._storage.label)


def _page_gradient(pager: Core) -> Any:
    weak = weakref.ref(pager)

    def hook(parameter: Any) -> None:
        """FSDP2 has reduced the gradient of a shard. The shard is updated at once, where
        ``in_backward.py`` allows it, or else its dense gradient, a view of all its group's, moves
        into pages."""
        pager, grad = weak(), parameter.grad
        if pager is None or grad is None or pager.fits or pager.closed_reason is not None:
            return
        if pager.in_backward.update(parameter):
            return
        if type(grad._local_tensor) is torch.Tensor:
            grad._local_tensor = copy_in(pager, grad._local_tensor, "gradient")
            pager.in_backward.note_paged(parameter)

    return hook


class _LeaveGathered:
    """Forward pre-hook of each FSDP module, after FSDP2's own: what was gathered is not to be
    copied into pages when autograd saves it."""

    def __init__(self, pager: Core | None = None) -> None:
        self._pager = weakref.ref(pager) if pager is not None else None

    def __call__(self, module: Any, args: Any) -> None:
        pager = self._pager() if self._pager is not None else None
        if pager is None:
            return
        note_meeting(pager)
        skip = pager.saved.skip
        for owner, param in fsdp_params(module):
            if owner is module:
                for gathered in param.all_gather_outputs:
                    memory = gathered.untyped_storage()
                    if memory._cdata not in skip:
                        skip[memory._cdata] = StorageWeakRef(memory), 0  # metered while it is there

    def __deepcopy__(self, memo: dict[int, Any]) -> _LeaveGathered:
        return self

    def __reduce__(self) -> Any:
        return _LeaveGathered, ()


# -- collectives -----------------------------------------------------------------------------------
def _watch_collectives(pager: Core, group: Any) -> None:
    for name, what in _COMMS.items():
        comm: Any = getattr(group, name)
        kind: Any = type(comm)
        if not isinstance(comm, _Collective):  # of another pager, or of other groups too
            watched: Any = object.__new__(_watched(kind))
            vars(watched).update(vars(comm))
            comm = watched
            setattr(group, name, comm)
        comm.pager, comm.what = weakref.ref(pager), what


class _Collective:
    """What FSDP2 gathers with, or reduces with: of its own class too, since FSDP2 asks for that."""

    pager: weakref.ref[Core]
    what: str

    def __call__(self, output_tensor: Any, input_tensor: Any, *given: Any, **named: Any) -> Any:
        pager, run = self.pager(), super().__call__  # type: ignore[misc]
        if pager is None or pager.closed_reason is not None:
            return run(output_tensor, input_tensor, *given, **named)
        before = pager.backend.dense_now()
        with pager.collective(self.what):
            found = run(output_tensor, input_tensor, *given, **named)
            # gloo reduces a copy, which its own thread gives back a moment after the op is over.
            # Whether that is still there for what comes next would decide what a plan has left.
            end = time.monotonic() + _MOMENT
            while self.what == "reduce" and time.monotonic() < end:
                if pager.backend.dense_now() - before < input_tensor.nbytes:
                    break
                time.sleep(1e-5)
        return found


@cache
def _watched(kind: type) -> type:
    return type(kind.__name__, (_Collective, kind), {})


# -- FSDP2's op that copies all shards of a group: one shard on the device at a time ---------------
def _copy_in(func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    shards, gathered, sizes, count, rank = args
    mine = gathered.narrow(0, count * rank, count)
    with torch.no_grad():
        torch._foreach_copy_(torch.split(mine, sizes), shards)
    return mine, gathered


serve_kind(_KIND, _copy_in, ops=[_COPY_IN])
