"""Bit-for-bit comparison of what an op gave in the plain and in the paged world."""

from collections.abc import Mapping, Sequence

import torch
from torch.utils._pytree import tree_leaves

import tensorpager as tp


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The values as a plain tensor: a copy for a paged tensor, the tensor itself otherwise."""
    with torch.no_grad():
        return tensor.to_dense() if isinstance(tensor, tp.PagedTensor) else tensor.detach()


def difference(plain: object, paged: object, *, values: bool = True, at: str = "") -> str | None:
    """Where ``paged`` first differs from ``plain``, in words; None if it does not.

    Shape, dtype, strides and every bit count, so that -0.0 is not 0.0 and a NaN equals itself.
    With ``values=False`` only shape, dtype and strides count.
    """
    if isinstance(plain, torch.Tensor):
        if not isinstance(paged, torch.Tensor):
            return f"{at}: a tensor became {type(paged).__name__}"
        return _tensor_difference(plain, paged, values, at)
    if isinstance(plain, Mapping):
        if list(plain) != list(paged):
            return f"{at}: keys {list(plain)} became {list(paged)}"
        pairs = [(f"{at}[{key!r}]", plain[key], paged[key]) for key in plain]
    elif isinstance(plain, Sequence) and not isinstance(plain, (str, bytes)):
        if type(plain) is not type(paged) or len(plain) != len(paged):
            return f"{at}: {_kind(plain)} became {_kind(paged)}"
        pairs = [(f"{at}[{i}]", a, b) for i, (a, b) in enumerate(zip(plain, paged))]
    else:
        same = type(plain) is type(paged) and (not values or _same_scalar(plain, paged))
        return None if same else f"{at}: {plain!r} became {paged!r}"
    found = (difference(a, b, values=values, at=where) for where, a, b in pairs)
    return next(filter(None, found), None)


def within(plain: object, paged: object, bound: float) -> bool:
    """Whether two results have the same structure and are equal within a relative ``bound``."""
    a, b = tree_leaves(plain), tree_leaves(paged)
    if len(a) != len(b):
        return False
    pairs = [(x, y) for x, y in zip(a, b) if isinstance(x, torch.Tensor)]
    return all(
        x.shape == y.shape and torch.allclose(dense(y), dense(x), rtol=bound, atol=bound)
        for x, y in pairs
    )


def _tensor_difference(
    plain: torch.Tensor, paged: torch.Tensor, values: bool, at: str
) -> str | None:
    for name in ("dtype", "layout", "device", "requires_grad"):
        if getattr(plain, name) != getattr(paged, name):
            return f"{at}: {name} {getattr(plain, name)} became {getattr(paged, name)}"
    if plain.shape != paged.shape:
        return f"{at}: shape {tuple(plain.shape)} became {tuple(paged.shape)}"
    if plain.layout == torch.sparse_coo:
        return _coo_difference(plain, paged, values, at)
    if plain.layout != torch.strided:
        return _compressed_difference(plain, paged, values, at)
    if _strides(plain) != _strides(paged):
        return f"{at}: strides {plain.stride()} of {tuple(plain.shape)} became {paged.stride()}"
    if not values or plain.is_meta:
        return None
    return _bit_difference(dense(plain), dense(paged), at)


def _bit_difference(plain: torch.Tensor, paged: torch.Tensor, at: str) -> str | None:
    if plain.shape != paged.shape or plain.dtype != paged.dtype:
        return f"{at}: to_dense() gives {tuple(paged.shape)} {paged.dtype} for {plain.shape}"
    if torch.equal(_bits(plain), _bits(paged)):
        return None
    plain, paged = (_comparable(t) for t in (plain, paged))
    wrong = ((plain != paged) & ~(plain.isnan() & paged.isnan())).nonzero()
    if not len(wrong):
        return f"{at}: equal values, but not the same bits (signed zero or NaN payload)"
    first = tuple(wrong[0].tolist())
    return (
        f"{at}: {len(wrong)} of {plain.numel()} elements differ, the first at {first}: "
        f"{plain[first].item()!r} became {paged[first].item()!r}"
    )


def _coo_difference(plain: torch.Tensor, paged: torch.Tensor, values: bool, at: str) -> str | None:
    if plain.is_coalesced() != paged.is_coalesced():
        return f"{at}: coalesced {plain.is_coalesced()} became {paged.is_coalesced()}"
    with torch.no_grad():
        parts = [(t._indices(), t._values()) for t in (plain.detach(), paged.detach())]
    return difference(*parts, values=values, at=f"{at}.sparse")


def _compressed_difference(
    plain: torch.Tensor, paged: torch.Tensor, values: bool, at: str
) -> str | None:
    if plain.layout in (torch.sparse_csr, torch.sparse_bsr):
        names = ("crow_indices", "col_indices", "values")
    elif plain.layout in (torch.sparse_csc, torch.sparse_bsc):
        names = ("ccol_indices", "row_indices", "values")
    else:
        names = ("values",) if plain.is_nested else ("to_dense",)
    with torch.no_grad():
        parts = [[getattr(t, name)() for name in names] for t in (plain.detach(), paged.detach())]
    return difference(*parts, values=values, at=f"{at}.{plain.layout}")


def _strides(tensor: torch.Tensor) -> list[int]:
    """The strides that mean something: those of dimensions with more than one element."""
    if not tensor.numel():
        return []
    return [stride for n, stride in zip(tensor.shape, tensor.stride()) if n > 1]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = _comparable(tensor).reshape(-1)
    if flat.stride() != (1,):
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.int_repr() if tensor.is_quantized else tensor.resolve_conj().resolve_neg()


def _same_scalar(plain: object, paged: object) -> bool:
    return plain == paged or (plain != plain and paged != paged)


def _kind(value: object) -> str:
    return f"{type(value).__name__} of {len(value) if hasattr(value, '__len__') else '?'}"
