"""What the dispatcher needs to know of an op, read once from its schema."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch

aten = torch.ops.aten


class _OurModes(threading.local):
    count = 0


our_modes = _OurModes()
"""Dispatch modes of the pager's own on this thread, which look at ops as they come. Where there are
more, somebody wants to see ops as PyTorch has them, or to change them."""

# Ops that alias their input without saying so in `is_view`.
_VIEWS = {
    aten.detach.default,
    aten.alias.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.lift_fresh.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
}
# Composite functions that take another algorithm (other last bits) as soon as an operand is a
# tensor subclass. Without gradients they run as one op on dense views instead.
BRANCHES_ON_SUBCLASS = {
    torch.matmul,
    torch.linalg.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
    torch.linalg.svdvals,
    torch.linalg.eigvalsh,
    torch.linalg.eigvals,
    torch.linalg.cond,
    torch.linalg.matrix_rank,
    torch.linalg.pinv,
    torch.linalg.norm,
    torch.linalg.matrix_norm,
    torch.pinverse,
    torch.Tensor.pinverse,
    torch.norm,
    torch.Tensor.norm,
    torch.nuclear_norm,
}
_LIKE = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.clone.default,
}


class OpInfo(NamedTuple):
    """``kind``: "plain", "view", "inplace_view", "resize", "elementwise_list", "composite",
    "noted_composite" (autograd notes its views and writes as those of one op), "like", "cast".
    ``writes``: positions of the arguments that the op mutates; ``writes_named``: keyword
    names of such."""

    kind: str
    writes: tuple[int, ...]
    writes_named: tuple[str, ...]


def _is_composite(func: Any) -> bool:
    """Made of other ops on every device, with no kernel of its own that would round differently."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")


def describe(func: Any) -> OpInfo:
    """The facts of OpOverload ``func``."""
    writes, named = [], []
    name = func._schema.name
    for position, argument in enumerate(func._schema.arguments):
        silently = "batch_norm" in name and argument.name in ("running_mean", "running_var")
        if silently or (argument.alias_info is not None and argument.alias_info.is_write):
            named.append(argument.name)
            if not argument.kwarg_only:
                writes.append(position)
    if name in ("aten::set_", "aten::resize_", "aten::resize_as_"):
        kind = "resize"
    elif torch.Tag.inplace_view in func.tags:
        kind = "inplace_view"
    elif _is_composite(func):  # before views: of these many copy when they must
        noted = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "ADInplaceOrView")
        kind = "noted_composite" if noted else "composite"
    elif func in _VIEWS or (func.is_view and "copy" not in name):
        kind = "view"
    elif name.startswith(("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")):
        kind = "elementwise_list"
    elif func in _LIKE:
        kind = "like"
    elif func is aten._to_copy.default:
        kind = "cast"
    else:
        kind = "plain"
    return OpInfo(kind, tuple(writes), tuple(named))
