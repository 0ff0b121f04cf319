"""FSDP2: the shards of ``fully_shard`` in pages.

::

    sharded parameter (DTensor)  -> local shard: pages on device, host or disk
        all-gather: shards are copied in, one after another -> dense, for as long as FSDP2 keeps it
        reduce-scatter -> dense gradient of the shard -> pages, before anybody sees it
                                                      -> or the shard is updated (``overlap.py``)
    optimizer.step(): on the local shards (see ``local_step``)

A sharded parameter stays the DTensor that FSDP2 made; only the memory of its shard is replaced. So
optimizers, ``clip_grad_norm_`` and ``state_dict`` go on finding what they know. FSDP2 keeps the
shard twice, as a flat tensor that it gathers from and as the DTensor's local tensor; both become
views of the same pages.

What FSDP2 gathers is dense and freed by FSDP2, which counts on autograd holding the very memory
that it frees and fills again. So saved tensors leave that memory alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import PagerError
from ..optim.fused_states import SMALL
from ..optim.optimizer import PagedOptimizer, page_state
from ..tensor.dispatcher import serve_kind
from ..tensor.new_pages import copy_in, empty_like_geometry
from ..tensor.op_info import OpInfo
from ..tensor.paged_tensor import PagedTensor
from ..tensor.sharded import (
    is_scales,
    local_of,
    local_state,
    scales_as_sharded,
    shard_count,
)

if TYPE_CHECKING:
    from ..core import Core

_COPY_IN = torch.ops.fsdp.all_gather_copy_in.default
_KIND = "all_gather_copy_in"
_WHOLE_TENSORS = ("Adafactor", "Muon")  # of torch.optim; they look at rows, columns or matrices


def fsdp_params(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, FSDPParam]]:
    """What ``fully_shard`` keeps for each parameter, and the module that it was called on."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            state = child._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # several since PyTorch 2.13
            for group in [state._fsdp_param_group] if groups is None else groups:
                for param in group.fsdp_params if group is not None else ():
                    yield child, param


def page_shards(pager: Core, module: torch.nn.Module) -> None:
    """The local shards of all parameters of ``module`` go into pages.

    Raises ``PagerError``, with nothing paged, for DTensors that are not ``fully_shard``'s, and for
    parameters that are gathered at the moment.
    """
    pager.overlap.one_shard = one_shard
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
    hooked = set()
    for child, param in fsdp_params(module):
        sharded: Any = param.sharded_param
        if type(sharded._local_tensor) is PagedTensor:
            continue
        _page(pager, param, names.get(id(sharded), "parameter"))
        if child not in hooked:
            hooked.add(child)
            child.register_forward_pre_hook(_LeaveGathered(pager))


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
    sharded._local_tensor = shaped.narrow(dim, 0, length)
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
        ``overlap.py`` allows it, or else its dense gradient, a view of all its group's, moves into
        pages."""
        pager, grad = weak(), parameter.grad
        if pager is None or grad is None or pager.fits or pager.closed_reason is not None:
            return
        if pager.overlap.update(parameter):
            return
        if type(grad._local_tensor) is torch.Tensor:
            grad._local_tensor = copy_in(pager, grad._local_tensor, "gradient")
            pager.overlap.paged(parameter)

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


# -- FSDP2's op that copies all shards of a group: one shard on the device at a time ---------------
def _copy_in(func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    shards, gathered, sizes, count, rank = args
    mine = gathered.narrow(0, count * rank, count)
    with torch.no_grad():
        torch._foreach_copy_(torch.split(mine, sizes), shards)
    return mine, gathered


serve_kind(_KIND, _copy_in, ops=[_COPY_IN])


# -- an optimizer's step ---------------------------------------------------------------------------
@contextmanager
def local_step(optimizer: Any) -> Iterator[None]:
    """Within it ``optimizer`` has the local shards as its parameters, with their gradients and
    states, all of them PagedTensors; outside, the sharded parameters and states that are sharded
    alike. An update is of each element by itself, so it is the same either way."""
    local: dict[int, torch.Tensor] = {}
    sharded: dict[int, DTensor] = {}
    for parameter in _sharded(optimizer):
        shard = local[id(parameter)] = parameter._local_tensor
        sharded[id(shard)] = parameter
    if not local:
        yield
        return
    _refuse_unsuitable(optimizer)
    _swap(optimizer, local, _shard_of)
    for parameter in sharded.values():
        if parameter.grad is not None:
            local[id(parameter)].grad = parameter.grad._local_tensor  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for shard in local.values():
            shard.grad = None
        _swap(optimizer, sharded, _shard_alike)


def _sharded(optimizer: Any) -> list[Any]:
    return [p for g in optimizer.param_groups for p in g["params"] if isinstance(p, DTensor)]


def _refuse_unsuitable(optimizer: Any) -> None:
    """``PagerError`` for what cannot be done to each shard by itself."""
    name = type(optimizer).__mro__[2].__name__
    if name in _WHOLE_TENSORS:
        raise PagerError(
            f"{name} updates an element by others of its matrix, which are in other ranks' shards; "
            "use an optimizer that updates each element by itself, such as AdamW, with fully_shard"
        )
    if optimizer._tp_format.states != "8bit":
        return
    for parameter in _sharded(optimizer):
        ranks, largest = shard_count(parameter), local_of(parameter).numel()
        for dim in _sharded_dims(parameter):
            rows = parameter.size(dim)
            largest = -(-rows // ranks) * (parameter.numel() // max(1, rows))
        if largest * ranks != parameter.numel() and largest >= SMALL:
            raise PagerError(
                f"states='8bit' keeps a scale for each block of a shard, and those of a parameter "
                f"of shape {tuple(parameter.size())} on {ranks} ranks are not of one size; use "
                "states='bf16', or pad it to a multiple of the ranks"
            )


def _sharded_dims(parameter: Any) -> set[int]:
    return {placement.dim for placement in parameter.placements if placement.is_shard()}


def _shard_alike(key: str, value: Any, parameter: Any) -> Any:
    if not torch.is_tensor(value) or not value.dim():
        return value
    if is_scales(key, value):
        return scales_as_sharded(value, parameter)
    if value.size() != parameter._local_tensor.size():
        return value
    return DTensor(value, parameter._spec, requires_grad=False)


def _shard_of(key: str, value: Any, _: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    local: torch.Tensor = value._local_tensor
    return local.view(-1) if is_scales(key, value) else local


def _swap(optimizer: Any, to: dict[int, Any], convert: Callable[[str, Any, Any], Any]) -> None:
    """Parameters become what ``to`` says, by their ids, and their states go with them."""
    for group in optimizer.param_groups:
        group["params"] = [to.get(id(parameter), parameter) for parameter in group["params"]]
    for parameter, state in list(optimizer.state.items()):
        other = to.get(id(parameter))
        if other is not None:
            del optimizer.state[parameter]
            state = {key: convert(key, value, other) for key, value in state.items()}
            optimizer.state[other] = state
            page_state(optimizer._tp_pager, state)  # what was loaded is dense


@contextmanager
def one_shard(optimizer: Any, parameters: list[Any], position: int) -> Iterator[torch.Tensor]:
    """:func:`local_step` for one of a group's ``parameters``, that at ``position``; its shard. If
    that has no gradient at the end, neither has the parameter."""
    parameter = parameters[position]
    shard = parameters[position] = parameter._local_tensor
    state = optimizer.state.get(parameter)  # its place among the others' stays
    if state:
        optimizer.state[shard] = {k: _shard_of(k, v, shard) for k, v in state.items()}
    shard.grad = parameter.grad._local_tensor
    try:
        yield shard
    finally:
        if shard.grad is None:
            parameter.grad = None
        shard.grad = None
        parameters[position] = parameter
        made = optimizer.state.pop(shard, None)
        if made:
            optimizer.state[parameter] = {k: _shard_alike(k, v, parameter) for k, v in made.items()}


def _load_into_shards(load: Callable[..., Any]) -> Callable[..., Any]:
    def load_into_shards(self: Any, state_dict: dict[str, Any]) -> None:
        if not _sharded(self):
            load(self, state_dict)
            return
        mine = local_state(self, state_dict)
        with local_step(self):
            load(self, mine)

    load_into_shards.__doc__ = load.__doc__
    return load_into_shards


def _step_on_shards(step: Callable[..., Any]) -> Callable[..., Any]:
    def step_on_shards(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        if not _sharded(self):
            return step(self, closure)
        loss = None
        if closure is not None:  # it computes gradients, which are of the sharded parameters
            with torch.enable_grad():
                loss = closure()
        with local_step(self):
            step(self)
        return loss

    step_on_shards.__doc__ = step.__doc__
    return step_on_shards


PagedOptimizer.step = _step_on_shards(PagedOptimizer.step)  # type: ignore[method-assign]
PagedOptimizer.load_state_dict = _load_into_shards(  # type: ignore[method-assign]
    PagedOptimizer.load_state_dict
)
