"""Sharded tensors (DTensors of FSDP2) in checkpoints: this rank's part, and where it lies.

``torch.distributed`` is not loaded here before there is such a tensor.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ...kernels.blockwise import BLOCK
from ..errors import PagerError


class Piece(NamedTuple):
    """A block of a larger tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def is_sharded(value: Any) -> bool:
    """Whether it is a DTensor."""
    return getattr(value, "_local_tensor", None) is not None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a DTensor; others as they are."""
    local: torch.Tensor | None = getattr(tensor, "_local_tensor", None)
    return tensor if local is None else local


def with_local(tensor: Any, local: torch.Tensor) -> torch.Tensor:
    """A DTensor like ``tensor``, with ``local`` for this rank's part."""
    from torch.distributed.tensor import DTensor

    return DTensor(local, tensor._spec, requires_grad=False)


def piece_of(tensor: Any) -> Piece | None:
    """Where this rank's part of a DTensor lies in it; ``None`` if it has none.

    Raises ``PagerError`` for parts that are no block of it, or not its values.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements = tensor.placements
    if any(type(placement) not in (Shard, Replicate) for placement in placements):
        raise PagerError(
            f"a tensor of shape {tuple(tensor.size())} is placed as {tuple(placements)}, and only "
            "whole blocks of values can be put together in one file; save it with "
            "torch.distributed.checkpoint"
        )
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:
        return None
    shape, offset = compute_local_shape_and_global_offset(tensor.size(), mesh, placements)
    return Piece(tuple(map(int, offset)), tuple(map(int, shape)))


def part_of(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """A view of what this rank has of ``whole``, which is as large as the DTensor ``like``."""
    piece = piece_of(like)
    if piece is None:
        return whole.new_empty(0)
    for dim, (start, length) in enumerate(zip(piece.offset, piece.shape)):
        whole = whole.narrow(dim, min(start, whole.size(dim)), length)
    return whole


# -- into models ---------------------------------------------------------------------------------
def as_sharded(model: torch.nn.Module, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """``tensors`` for ``model.load_state_dict``: where the model has a sharded one and these the
    whole, a DTensor over this rank's part of it. No bytes are copied or sent."""
    if not any(map(is_sharded, model.parameters())):
        return tensors
    mine = model.state_dict()
    parts = OrderedDict((name, _sharded_as(mine.get(name), v)) for name, v in tensors.items())
    if hasattr(tensors, "_metadata"):
        parts._metadata = tensors._metadata  # type: ignore[attr-defined]
    return parts


def _sharded_as(like: Any, value: Any) -> Any:
    if not is_sharded(like) or not _is_whole(value, like):
        return value
    return _dtensor(part_of(value, like), like, like.placements, value.size(), value.stride())


def _dtensor(local: torch.Tensor, like: Any, placements: Any, size: Any, stride: Any) -> Any:
    """On the mesh of ``like``, with ``local`` for this rank's part."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(torch.Size(size), tuple(stride), local.dtype)
    spec = DTensorSpec(like.device_mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def _is_whole(value: Any, like: Any) -> bool:
    plain = isinstance(value, torch.Tensor) and not is_sharded(value)
    return plain and value.dim() > 0 and value.size() == like.size()


# -- into optimizers -----------------------------------------------------------------------------
def local_state(optimizer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """A state dict for ``optimizer`` with this rank's part of each state of its sharded
    parameters, whether it has DTensors or, as one file of all ranks has, whole tensors."""
    return _each_state(optimizer, given, _local)


def sharded_state(optimizer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """A state dict for ``optimizer``, which is not paged, with whole states of its sharded
    parameters divided as these are; copies."""

    def divided(name: str, value: Any, parameter: Any) -> Any:
        found = _sharded_as(parameter, value)
        return found.clone() if is_sharded(found) else found

    return _each_state(optimizer, given, divided)


def _each_state(
    optimizer: Any, given: dict[str, Any], change: Callable[[str, Any, Any], Any]
) -> dict[str, Any]:
    """``given`` with ``change(name, value, parameter)`` of each state."""
    ids = itertools.chain.from_iterable(group["params"] for group in given["param_groups"])
    mine = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    states = dict(given["state"])
    for key, parameter in zip(ids, mine):
        if isinstance(states.get(key), dict):
            states[key] = {k: change(k, v, parameter) for k, v in states[key].items()}
    return {**given, "state": states}


def _local(key: str, value: Any, parameter: Any) -> Any:
    if is_scales(key, value):
        return _part_of_scales(key, value, parameter)
    if is_sharded(value) and is_sharded(parameter):
        return value._local_tensor
    if is_sharded(parameter) and _is_whole(value, parameter):
        return part_of(value, parameter)
    return value


# -- scales of 8-bit states ----------------------------------------------------------------------
# One for each block of elements, and blocks are cut from each shard by itself. So all ranks' scales
# are a tensor [ranks, blocks of a shard]; without shards they are one-dimensional.
def is_scales(key: str, value: Any) -> bool:
    return key.endswith("_scales") and isinstance(value, torch.Tensor)


def scales_as_sharded(scales: torch.Tensor, parameter: Any) -> torch.Tensor:
    """The scales of this rank's shard as its row of all ranks' scales. Shards are all of one
    size."""
    from torch.distributed.tensor import Shard

    placements = [Shard(0) if p.is_shard() else p for p in parameter.placements]
    size = shard_count(parameter), scales.numel()
    found: torch.Tensor = _dtensor(
        scales.view(1, -1), parameter, placements, size, (scales.numel(), 1)
    )
    return found


def shard_count(parameter: Any) -> int:
    """Among how many ranks its elements are divided."""
    count = 1
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard():
            count *= int(parameter.device_mesh.size(dim))
    return count


def _part_of_scales(key: str, scales: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Those of this rank's shard, or of all of a parameter that is not sharded."""
    if is_sharded(scales):
        return local_of(scales).view(-1) if is_sharded(parameter) else scales
    ranks = shard_count(parameter) if is_sharded(parameter) else 1
    whole, mine = parameter.numel(), local_of(parameter).numel()
    saved_by = scales.size(0) if scales.dim() == 2 else 1
    piece = piece_of(parameter) if is_sharded(parameter) else None
    rows = piece is None or piece.shape[1:] == tuple(parameter.size()[1:])
    before = piece.offset[0] * (whole // parameter.size(0)) if piece is not None else 0
    if saved_by == ranks and rows and mine:
        flat = scales.reshape(-1)
        count = flat.numel() // ranks
        return flat.narrow(0, before // mine * count, count)
    ends_well = mine % BLOCK == 0 or before + mine == whole
    if rows and whole % (saved_by * BLOCK) == 0 and before % BLOCK == 0 and ends_well:
        return scales.reshape(-1).narrow(0, before // BLOCK, -(-mine // BLOCK))
    raise PagerError(
        f"the state {key!r} of a parameter of shape {tuple(parameter.size())} was saved by "
        f"{saved_by} ranks in blocks that are not those of {ranks}; resume on {saved_by} ranks, or "
        "save with states='bf16'"
    )
