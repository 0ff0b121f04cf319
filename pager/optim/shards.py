"""An optimizer's step on the local shards of FSDP2's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..errors import PagerError
from ..tensor.sharded import is_scales, local_of, scales_as_sharded, shard_count
from .fused_states import SMALL
from .optimizer import page_state

_WHOLE_TENSORS = ("Adafactor", "Muon")  # of torch.optim; they look at rows, columns or matrices


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
