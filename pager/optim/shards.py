"""An optimizer's step on the local shards of FSDP2's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..errors import PagerError
from ..tensor.sharded import is_scales, local_of, scales_as_sharded, shard_count
from .fused_states import SMALL, page_state
from .paged_optimizer import PagedOptimizer, in_place

_WHOLE_TENSORS = ("Adafactor", "Muon")  # of torch.optim; they look at rows, columns or matrices


@contextmanager
def on_shards(
    paged: PagedOptimizer, parameters: Iterable[torch.Tensor] | None = None
) -> Iterator[None]:
    """Within it the optimizer has the local shards as its parameters (of these, or of all), with
    their gradients and states, all of them PagedTensors; outside, the sharded parameters and states
    that are sharded alike. An update is of each element by itself, so it is the same either way.

    A parameter whose shard has no gradient at the end has none any more."""
    if parameters is None:
        parameters = [p for group in paged.optimizer.param_groups for p in group["params"]]
        _refuse_unsuitable(paged, parameters)
    shards: dict[torch.Tensor, torch.Tensor]
    shards = {p: p._local_tensor for p in parameters if isinstance(p, DTensor)}
    with in_place(paged.optimizer, shards, _shard_of, _shard_alike):
        for shard in shards.values():
            page_state(paged.pager, paged.optimizer.state.get(shard, {}))  # what is dense so far
        yield


def _refuse_unsuitable(paged: PagedOptimizer, parameters: Iterable[Any]) -> None:
    """``PagerError`` for what cannot be done to each shard by itself."""
    if paged.name in _WHOLE_TENSORS:
        raise PagerError(
            f"{paged.name} updates an element by others of its matrix, which are in other ranks' "
            "shards; use an optimizer that updates each element by itself, such as AdamW, with "
            "fully_shard"
        )
    if paged.format.states != "8bit":
        return
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            continue
        placements: Any = parameter.placements
        ranks, largest = shard_count(parameter), local_of(parameter).numel()
        for dim in {placement.dim for placement in placements if placement.is_shard()}:
            rows = parameter.size(dim)
            largest = -(-rows // ranks) * (parameter.numel() // max(1, rows))
        if largest * ranks != parameter.numel() and largest >= SMALL:
            raise PagerError(
                f"states='8bit' keeps a scale for each block of a shard, and those of a parameter "
                f"of shape {tuple(parameter.size())} on {ranks} ranks are not of one size; use "
                "states='bf16', or pad it to a multiple of the ranks"
            )


def _shard_of(key: str, value: Any, _: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    local: torch.Tensor = value._local_tensor
    return local.view(-1) if is_scales(key, value) else local


def _shard_alike(key: str, value: Any, parameter: Any) -> Any:
    if not torch.is_tensor(value) or not value.dim():
        return value
    if is_scales(key, value):
        return scales_as_sharded(value, parameter)
    if value.size() != parameter._local_tensor.size():
        return value
    return DTensor(value, parameter._spec, requires_grad=False)
