"""Reduce: each tensor of a list, paged or dense -> one number, in one launch and a short second.

Tiles are summed in float32 (float64 for float64 operands), and their partial results are combined
in float64 in a fixed order, so the error does not grow with the tensor: see `reduce`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .buckets import Bucket, bucketed, check_floats
from .combine import NEUTRAL, combine, join
from .launch import launch, tl, triton, upload, use_triton
from .pieces import Operand, dtype_name, memory_of, numel_of, stretches
from .rounding import load_as

__all__ = ["reduce"]

HOWS = ("sum", "mean", "norm", "amax", "amin", "isfinite")
REFERENCE_ELEMENTS = 1 << 20  # what a reference converts or tests at a time


class Step(NamedTuple):
    """What a tile becomes: `each` element is mapped, then all are joined.

    outside : the element that changes nothing, in place of those beyond the end.
    """

    each: str
    join: str
    outside: float


@triton.jit(
    do_not_specialize=["pieces", "tiles"],
    do_not_specialize_on_alignment=["table_ptr"],
)
def _reduce_kernel(
    table_ptr,
    partials_ptr,
    pieces,
    tiles,
    DTYPE: tl.constexpr,
    EACH: tl.constexpr,
    JOIN: tl.constexpr,
    OUTSIDE: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Program t reduces tile t % tiles of piece t // tiles, if the piece has so many.

    table : int64 [3, pieces]: address, length in elements, number of the first partial result.
    """
    piece = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    length = tl.load(table_ptr + pieces + piece).to(tl.int32)
    if tile * TILE < length:
        address = tl.load(table_ptr + piece)
        at = tile * TILE + tl.arange(0, TILE)
        if (tile + 1) * TILE <= length:
            x = load_as(address, at, length, DTYPE, ALIGNED, False)
        else:
            x = load_as(address, at, length, DTYPE, ALIGNED, True)
            x = tl.where(at < length, x, OUTSIDE)
        if EACH == "abs":
            x = tl.abs(x)
        elif EACH == "square":
            x = x * x
        elif EACH == "nonzero":
            x = tl.where(x == 0, 0.0, 1.0)
        elif EACH == "nonfinite":
            x = tl.where(tl.abs(x) < float("inf"), 0.0, 1.0)
        elif EACH == "power":
            x = tl.exp2(tl.log2(tl.abs(x).to(tl.float64)) * P)
        first = tl.load(table_ptr + 2 * pieces + piece)
        tl.store(partials_ptr + first + tile, join(x, JOIN).to(tl.float64))


@torch.no_grad()
def reduce(
    operands: Sequence[Operand], how: str, p: float = 2.0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Reduce every operand to one number: a tensor [operands] on their device.

    operands : float16, bfloat16, float32 or float64, in any mixture, paged or dense and contiguous.
    how : "sum", "mean", "norm", "amax", "amin", or "isfinite" (whether all elements are).
    p : order of the norm, any number, inf and -inf too.
    dtype : of the result; by default the operands', promoted. "isfinite" gives bool.

    NaN, inf and empty operands do as in torch; "amax", "amin" and the norms without a value for no
    elements (p < 0 or inf) raise ValueError for an empty one, as do other dtypes, operands on
    several devices and pages that are not in the arena.

    Error: with u half of the unit in the last place (2^-24; 2^-53 for float64), a sum is off by at
    most 48 u sum |x|, a norm of order 0, 1, 2 or inf by at most 48 u of itself, and the result is
    rounded; amax and amin are exact. float64 operands: 80 u. Norms of other orders take float64
    logarithms, another 2^-40 at most for p >= 1/2. Squares overflow in float32 from 1.8e19 on, as
    in torch. The same elements in pages of one size give the same bits, wherever the pages are; so
    does a dense tensor, 16-byte aligned, if these pages have 64 KiB or more.

    On CUDA the work is queued on the current stream of the device and the call does not wait; the
    frames must not be reused before it has run. On a CPU see `reduce_reference`.
    """
    common = check(operands, how, p)
    if not operands:
        return torch.empty(0, dtype=torch.bool if how == "isfinite" else dtype or common)
    memory = memory_of(operands[0])
    if not use_triton(memory):
        return reduce_reference(operands, how, p, dtype)
    step = step_of(how, p)
    partials, bounds = reduce_tiles(operands, step, p)
    values = combine(partials, bounds, step.join)
    if how == "isfinite":
        return values <= 0  # -inf of an empty one
    if how == "mean":
        counts = torch.tensor([numel_of(x) for x in operands], dtype=torch.float64)
        values = values / upload(counts, memory.device)
    elif how == "norm":
        values = root(values, p)
    return values.to(dtype or common)


@torch.no_grad()
def reduce_reference(
    operands: Sequence[Operand], how: str, p: float = 2.0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`reduce` in plain torch.

    An operand in one stretch (dense, or in consecutive frames) gives exactly what torch's own op
    gives on a dense tensor. In several, each stretch is reduced by torch's op to float32 (float64
    for float64), at most 2^20 elements at a time, and these are combined in float64: the relative
    error of a norm, and that of a sum against sum |x|, is at most the largest of torch's own on the
    parts, and a rounding.
    """
    common = check(operands, how, p)
    if how == "isfinite":
        results = [_all_finite(x) for x in operands]
        return torch.stack(results) if results else torch.empty(0, dtype=torch.bool)
    values = [_reduce_one(x, how, p, dtype or common) for x in operands]
    return torch.stack(values) if values else torch.empty(0, dtype=dtype or common)


def check(operands: Sequence[Operand], how: str, p: float) -> torch.dtype:
    """The dtype of all operands, promoted. Raises ValueError as `reduce` says."""
    if how not in HOWS:
        raise ValueError(f"how is {how!r}; use one of {', '.join(HOWS)}")
    name = f"norm of order {p}" if how == "norm" else how
    has_no_identity = how in ("amax", "amin") or (how == "norm" and (p < 0 or p == math.inf))
    check_floats(operands)
    for number, operand in enumerate(operands):
        if has_no_identity and not numel_of(operand):
            raise ValueError(f"operand {number} is empty and has no {name}; leave it out")
    dtypes = [operand.dtype for operand in operands]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.get_default_dtype()


def step_of(how: str, p: float) -> Step:
    """How a tile is reduced; of a norm, up to the root of order p."""
    if how in ("amax", "amin"):
        return Step("same", how[1:], NEUTRAL[how[1:]])
    if how == "isfinite":
        return Step("nonfinite", "max", 0.0)
    if how in ("sum", "mean"):
        return Step("same", "sum", 0.0)
    if math.isinf(p):
        return Step("abs", "max", 0.0) if p > 0 else Step("abs", "min", math.inf)
    known = {0.0: "nonzero", 1.0: "abs", 2.0: "square"}
    return Step(known.get(p, "power"), "sum", 0.0 if p >= 0 else math.inf)


def root(values: torch.Tensor, p: float) -> torch.Tensor:
    """Norms of order p from what `step_of` adds up."""
    if p == 2:
        return values.sqrt()
    return values if p in (0.0, 1.0) or math.isinf(p) else values.pow(1 / p)


def reduce_tiles(
    operands: Sequence[Operand], step: Step, p: float
) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
    """Queue the first pass; float64 partial results, and which are whose (bounds, on the host)."""
    buckets = bucketed(operands)
    tiles = [-(-bucket.pieces.lengths.numpy() // _tile(bucket, step)) for bucket in buckets]
    counts = np.zeros(len(operands), np.int64)
    for bucket, of_piece in zip(buckets, tiles, strict=True):
        np.add.at(counts, bucket.operands[bucket.pieces.group.numpy()], of_piece)
    bounds = np.concatenate([[0], np.cumsum(counts)])
    device = memory_of(operands[0]).device
    partials = torch.empty(int(bounds[-1]), dtype=torch.float64, device=device)
    for bucket, of_piece in zip(buckets, tiles, strict=True):
        of_operand = counts[bucket.operands]
        shift = bounds[bucket.operands] - (np.cumsum(of_operand) - of_operand)
        first = np.cumsum(of_piece) - of_piece + shift[bucket.pieces.group.numpy()]
        _queue(bucket, first, step, p, partials)
    return partials, bounds


def _tile(bucket: Bucket, step: Step) -> int:
    """Elements that one program reduces: four to eight 128-bit loads for each thread."""
    if step.each == "power":
        return 1024  # float64 logarithms take many registers
    if bucket.dtype == torch.float64 or not bucket.pieces.aligned:
        return 4096  # one address for each element takes registers too
    return 8192


def _queue(
    bucket: Bucket,
    first: npt.NDArray[np.int64],
    step: Step,
    p: float,
    partials: torch.Tensor,
) -> None:
    pieces, tile = bucket.pieces, _tile(bucket, step)
    rows = [pieces.addresses[0], pieces.lengths.to(torch.int64), torch.from_numpy(first)]
    tiles = -(-pieces.longest // tile)
    launch(
        _reduce_kernel,
        pieces.count * tiles,
        upload(torch.cat(rows), partials.device),
        partials,
        pieces.count,
        tiles,
        DTYPE=dtype_name(bucket.dtype),
        EACH=step.each,
        JOIN=step.join,
        OUTSIDE=step.outside,
        P=float(p) if step.each == "power" else 0.0,
        TILE=tile,
        ALIGNED=pieces.aligned,
        num_warps=4 if step.each == "power" else 8,
        enable_fp_fusion=False,
    )


def _reduce_one(operand: Operand, how: str, p: float, dtype: torch.dtype) -> torch.Tensor:
    views = [view for (view,) in stretches([operand])]
    if not views:
        views = [torch.empty(0, dtype=operand.dtype, device=memory_of(operand).device)]
    if len(views) == 1:
        return _torch_reduce(views[0], how, p, None if dtype == operand.dtype else dtype).to(dtype)
    wide = torch.promote_types(operand.dtype, torch.float32)
    parts = [part for view in views for part in view.split(REFERENCE_ELEMENTS)]
    inner = "sum" if how == "mean" else how
    each = torch.stack([_torch_reduce(part, inner, p, wide) for part in parts]).double()
    if how == "norm" and p == 0:
        return each.sum().to(dtype)
    value = _torch_reduce(each, inner, p, None)
    return (value / numel_of(operand) if how == "mean" else value).to(dtype)


def _torch_reduce(x: torch.Tensor, how: str, p: float, dtype: torch.dtype | None) -> torch.Tensor:
    if how == "norm":
        norm: torch.Tensor = torch.linalg.vector_norm(x, p, dtype=dtype)
        return norm
    if how in ("amax", "amin"):
        return x.amax() if how == "amax" else x.amin()
    return x.sum(dtype=dtype) if how == "sum" else x.mean(dtype=dtype)


def _all_finite(operand: Operand) -> torch.Tensor:
    device = memory_of(operand).device
    parts = [part for (x,) in stretches([operand]) for part in x.split(REFERENCE_ELEMENTS)]
    finite = [torch.isfinite(part).all() for part in parts]
    return torch.stack(finite).all() if finite else torch.tensor(True, device=device)
