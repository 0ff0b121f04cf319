"""GradScaler's check: gradients in pages, multiplied by 1 / scale, and whether all were finite."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import torch

from .buckets import Bucket, bucketed, check_floats
from .launch import launch, tl, triton, upload, use_triton
from .pieces import Operand, dtype_name, memory_of, stretches
from .rounding import load_as, store_as

__all__ = ["non_finite_check_and_unscale"]


@triton.jit(
    do_not_specialize=["pieces", "tiles"],
    do_not_specialize_on_alignment=["table_ptr", "found_inf_ptr", "inv_scale_ptr"],
)
def _non_finite_check_and_unscale_kernel(
    table_ptr,
    found_inf_ptr,
    inv_scale_ptr,
    pieces,
    tiles,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Program t does tile t % tiles of piece t // tiles, if the piece has so many.

    table : int64 [2, pieces]: address, length in elements. Programs that find a number that is not
    finite all store the same 1.0, so their order does not matter.
    """
    piece = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    length = tl.load(table_ptr + pieces + piece).to(tl.int32)
    if tile * TILE < length:
        inv_scale = tl.load(inv_scale_ptr)
        address = tl.load(table_ptr + piece)
        at = tile * TILE + tl.arange(0, TILE)
        if (tile + 1) * TILE <= length:
            x = load_as(address, at, length, DTYPE, ALIGNED, False)
            bad = tl.max((tl.abs(x) < float("inf")).to(tl.int32) ^ 1, 0)
            store_as(address, at, x * inv_scale, length, DTYPE, ALIGNED, False)
        else:  # what is outside is loaded as 0
            x = load_as(address, at, length, DTYPE, ALIGNED, True)
            bad = tl.max((tl.abs(x) < float("inf")).to(tl.int32) ^ 1, 0)
            store_as(address, at, x * inv_scale, length, DTYPE, ALIGNED, True)
        if bad > 0:
            tl.store(found_inf_ptr, 1.0)


@torch.no_grad()
def non_finite_check_and_unscale(
    operands: Sequence[Operand], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """Multiply every element by `inv_scale`, in place, and note whether one was not finite.

    operands : float16, bfloat16, float32 or float64, in any mixture, paged or dense and contiguous;
        no element twice.
    found_inf : float32, one element, on their device; becomes 1.0 if an element is inf or NaN
        before the product, else stays as it is.
    inv_scale : float32, one element, on their device.

    As `aten::_amp_foreach_non_finite_check_and_unscale_`, in one launch for each dtype: halves are
    multiplied in float32 and rounded to the nearest, so the result has torch's bits. On CUDA the
    work is queued on the current stream of the device and the call does not wait. Raises ValueError
    for arguments that are not as above, before anything is written.
    """
    check_floats(operands)
    if operands:
        _check_device("operand 0", memory_of(operands[0]), found_inf)
    for name, scalar in (("found_inf", found_inf), ("inv_scale", inv_scale)):
        if scalar.dtype != torch.float32 or scalar.numel() != 1:
            raise ValueError(
                f"{name} is {scalar.dtype} with {scalar.numel()} elements; pass one float32"
            )
        _check_device(name, scalar, found_inf)
    if not use_triton(found_inf):
        non_finite_check_and_unscale_reference(operands, found_inf, inv_scale)
        return
    for bucket in bucketed(operands):
        _queue(bucket, found_inf, inv_scale)


@torch.no_grad()
def non_finite_check_and_unscale_reference(
    operands: Sequence[Operand], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """`non_finite_check_and_unscale` by torch's own op on every stretch."""
    views = [view for operand in operands for (view,) in stretches([operand])]
    torch._amp_foreach_non_finite_check_and_unscale_(views, found_inf, inv_scale)


def _tile(bucket: Bucket) -> int:
    """Elements that one program does: two to four 128-bit loads for each thread."""
    return 2048 if bucket.dtype == torch.float64 else 4096


def _queue(bucket: Bucket, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    pieces = bucket.pieces
    tile = _tile(bucket)
    tiles = -(-pieces.longest // tile)
    table = torch.cat([pieces.addresses[0], pieces.lengths.to(torch.int64)])
    launch(
        _non_finite_check_and_unscale_kernel,
        pieces.count * tiles,
        upload(table, found_inf.device),
        found_inf,
        inv_scale,
        pieces.count,
        tiles,
        DTYPE=dtype_name(bucket.dtype),
        TILE=tile,
        ALIGNED=pieces.aligned,
        num_warps=8,
        enable_fp_fusion=False,
    )


def _check_device(name: str, tensor: torch.Tensor, found_inf: torch.Tensor) -> None:
    if tensor.device != found_inf.device:
        raise ValueError(
            f"{name} is on {tensor.device}, found_inf on {found_inf.device}; move it there"
        )
