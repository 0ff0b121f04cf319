"""Nested dicts, lists and tuples with tensors in them: what a checkpoint is made of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from ..tensor.paged_tensor import PagedTensor
from ..tensor.sharded import is_sharded, local_of
from ..tensor.tensor_bytes import is_dense


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors, in order; one that is there twice comes twice."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_of(value)


def with_tensors(tree: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same, with ``make(tensor)`` in the place of each tensor. What shares its memory (tied
    weights) is made once, and is one tensor in the result."""
    return _copy(tree, make, {})


def _copy(
    node: Any,
    make: Callable[[torch.Tensor], torch.Tensor],
    made: dict[Hashable, torch.Tensor],
) -> Any:
    if isinstance(node, torch.Tensor):
        key = memory_of(node)
        if key not in made:
            made[key] = make(node)
        return made[key]
    if isinstance(node, dict):
        copied = {key: _copy(value, make, made) for key, value in node.items()}
        if not isinstance(node, OrderedDict):
            return copied
        ordered = OrderedDict(copied)
        if hasattr(node, "_metadata"):  # versions of modules, which loading asks for
            ordered._metadata = node._metadata  # type: ignore[attr-defined]
        return ordered
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*(_copy(value, make, made) for value in node))
    if isinstance(node, list | tuple):
        return type(node)(_copy(value, make, made) for value in node)
    return node


def memory_of(tensor: torch.Tensor) -> Hashable:
    """Equal for two tensors that live now and are the same elements of the same memory."""
    shape = tuple(tensor.size()), tensor.dtype
    if not tensor.numel() or tensor.layout is not torch.strided:
        return id(tensor)
    if is_sharded(tensor):
        return memory_of(local_of(tensor)), shape
    place = tensor.stride(), tensor.is_conj(), tensor.is_neg()
    if type(tensor) is PagedTensor:
        return id(tensor._storage), int(tensor.storage_offset()), shape, place
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
        return id(tensor)
    return tensor.data_ptr(), shape, place, tensor.device


def is_odd(tensor: torch.Tensor) -> bool:
    """Whether its elements are no plain bytes in memory."""
    tensor = local_of(tensor)
    return tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta


def refuse_odd(tensor: torch.Tensor, path: str) -> None:
    """``TypeError`` for such tensors."""
    if is_odd(tensor):
        what = "on the meta device" if local_of(tensor).is_meta else f"of layout {tensor.layout}"
        what = "quantized" if tensor.is_quantized else what
        raise TypeError(
            f"{path}: a tensor of shape {tuple(tensor.size())} {what} cannot be saved; only "
            "strided tensors of ordinary dtypes can"
        )


def layout_of(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor with the size, dtype and strides that ``tensor`` has once it is saved."""
    if not is_sharded(tensor) and is_dense(tensor):
        stride = tensor.stride()
        return torch.empty_strided(tensor.size(), stride, dtype=tensor.dtype, device="meta")
    return torch.empty(tensor.size(), dtype=tensor.dtype, device="meta")
