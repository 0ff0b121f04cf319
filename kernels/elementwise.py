"""Elementwise ops on lists of tensors, paged or dense, in one launch: torch's `_foreach_*`."""
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: SIM300 (TYPE == tl.uint16 reads as it should)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .elementwise_call import Batch, Input, Kind, Value, batches
from .launch import INTERPRETED, launch, tl, triton, upload, use_triton
from .pieces import Operand, Paged, Pieces, cut, dtype_name, memory_of, stretches

__all__ = ["elementwise"]

LARGE_TILE, SMALL_TILE = 2048, 512
ELEMENTS_PER_THREAD = 16  # in warps of 32: as many bytes make one 128-bit access
LONGEST_PIECE = 1 << 16  # a program without work costs little, but should be rare
SCRATCH_ELEMENTS = 1 << 16


@triton.jit
def _widen(data, TYPE: tl.constexpr, COMPUTE: tl.constexpr):
    """What was read, in the type to compute in."""
    if TYPE == tl.uint16:  # bf16 in the interpreter, which gets its arithmetic wrong
        return (data.to(tl.uint32) << 16).to(tl.float32, bitcast=True).to(COMPUTE)
    else:
        return data.to(COMPUTE)


@triton.jit
def _narrow(value, TYPE: tl.constexpr):
    """What is written: rounded to nearest even, and to 16 bits by way of float32, as in torch."""
    if TYPE == tl.uint16:
        single = value.to(tl.float32)
        bits = single.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(single != single, 0x7FC0, rounded).to(tl.uint16)
    elif TYPE == tl.float16 or TYPE == tl.bfloat16:
        return value.to(tl.float32).to(TYPE)
    else:
        return value.to(TYPE)


@triton.jit
def _pointers(word, start, TYPE: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    first = word.to(tl.pointer_type(TYPE)) + start
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    return first + tl.arange(0, TILE)


@triton.jit
def _read(
    word,
    start,
    left,
    KIND: tl.constexpr,
    TYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """TILE values of an input, whose `word` in the table is an address or a number."""
    if KIND == "operand":
        pointers = _pointers(word, start, TYPE, TILE, ALIGNED)
        if WHOLE:
            value = _widen(tl.load(pointers), TYPE, COMPUTE)
        else:
            data = tl.load(pointers, mask=tl.arange(0, TILE) < left)
            value = _widen(data, TYPE, COMPUTE)
    else:
        if KIND == "cell":
            one = _widen(tl.load(word.to(tl.pointer_type(TYPE))), TYPE, COMPUTE)
        elif COMPUTE == tl.float32 or COMPUTE == tl.float64:
            one = word.to(tl.float64, bitcast=True).to(COMPUTE)
        else:
            one = word.to(COMPUTE)
        value = tl.full((TILE,), one, COMPUTE)
    return value


@triton.jit
def _apply(
    words,
    count,
    start,
    left,
    EXPRESSION: tl.constexpr,
    COMPUTE: tl.constexpr,
    OUT: tl.constexpr,
    X_KIND: tl.constexpr,
    X: tl.constexpr,
    Y_KIND: tl.constexpr,
    Y: tl.constexpr,
    Z_KIND: tl.constexpr,
    Z: tl.constexpr,
    W_KIND: tl.constexpr,
    W: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One tile, of which `left` elements remain in the piece; all TILE if WHOLE."""
    x = _read(tl.load(words + 2 * count), start, left, X_KIND, X, COMPUTE, TILE, ALIGNED, WHOLE)
    y = x
    z = x
    w = x
    if Y_KIND != "none":
        word = tl.load(words + 3 * count)
        y = _read(word, start, left, Y_KIND, Y, COMPUTE, TILE, ALIGNED, WHOLE)
    if Z_KIND != "none":
        word = tl.load(words + 4 * count)
        z = _read(word, start, left, Z_KIND, Z, COMPUTE, TILE, ALIGNED, WHOLE)
    if W_KIND != "none":
        word = tl.load(words + 5 * count)
        w = _read(word, start, left, W_KIND, W, COMPUTE, TILE, ALIGNED, WHOLE)
    value = _narrow(EXPRESSION(x, y, z, w), OUT)
    pointers = _pointers(tl.load(words + count), start, OUT, TILE, ALIGNED)
    if WHOLE:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=tl.arange(0, TILE) < left)


@triton.jit(
    do_not_specialize=["count", "tiles"],
    do_not_specialize_on_alignment=["table_ptr"],
)
def _elementwise_kernel(
    table_ptr,
    count,
    tiles,
    EXPRESSION: tl.constexpr,
    COMPUTE: tl.constexpr,
    OUT: tl.constexpr,
    X_KIND: tl.constexpr,
    X: tl.constexpr,
    Y_KIND: tl.constexpr,
    Y: tl.constexpr,
    Z_KIND: tl.constexpr,
    Z: tl.constexpr,
    W_KIND: tl.constexpr,
    W: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Program t does tile t % tiles of piece t // tiles, if the piece is that long.

    table_ptr : int64 [2 + inputs, count], a column for each piece: its length, address of its
        output, and a word for each input (see `_read`).
    """
    words = table_ptr + tl.program_id(0) // tiles
    start = tl.program_id(0) % tiles * TILE
    left = tl.load(words).to(tl.int32) - start
    if left >= TILE:
        _apply(
            words,
            count,
            start,
            left,
            EXPRESSION,
            COMPUTE,
            OUT,
            X_KIND,
            X,
            Y_KIND,
            Y,
            Z_KIND,
            Z,
            W_KIND,
            W,
            TILE,
            ALIGNED,
            True,
        )
    elif left > 0:
        _apply(
            words,
            count,
            start,
            left,
            EXPRESSION,
            COMPUTE,
            OUT,
            X_KIND,
            X,
            Y_KIND,
            Y,
            Z_KIND,
            Z,
            W_KIND,
            W,
            TILE,
            ALIGNED,
            False,
        )


def elementwise(op: str, outs: Sequence[Operand], *inputs: Input) -> None:
    """outs[i] = op(inputs[0][i], inputs[1][i], ...) for each i, all in one launch.

    op : a name in `elementwise_ops.OPS`, which also names its inputs and their defaults.

        ==================================================  =====================================
        fill value                                          `_foreach_zero_`, `Tensor.fill_`
        copy x                                              `_foreach_copy_`
        where condition, x, other
        add x, other, alpha=1; sub; mul x, other; div       also with a number or 0-dim tensor
        addcmul x, tensor1, tensor2, value=1; addcdiv       value may be one for each tensor
        lerp x, end, weight                                 weight per element, tensor, or one
        sqrt x; rsqrt; reciprocal; neg; abs; sign
        maximum x, other; minimum; clamp x, min, max        bounds None: none
        ==================================================  =====================================

    outs : operands, each of any length. One may be an input too (in place), if it is the very same
        elements; nothing else may overlap, also between different i.
    inputs : each is a list of operands as long as their outs, a list of numbers, a list of 0-dim
        tensors, one number, or one 0-dim tensor. A 0-dim tensor on the device is read there, in
        stream order; it must not be among the outs. One on the host beside outs on a device counts
        as a number. alpha, value and fill's value are numbers or 0-dim tensors only; condition is
        operands of bool or uint8.

    Dtypes are float16, bfloat16, float32 and float64 in any mixture, and may differ from i to i,
    which then takes a launch for each mixture. Each op is computed in float32, in float64 if an
    operand (not a 0-dim input) is float64, and its result is rounded to the output's dtype. fill,
    copy and where move elements of any one dtype of 1, 2, 4 or 8 bytes unchanged; copy also
    converts bool and integers to floating point. Other mixtures are a ValueError.

    The kernel rounds add and sub (alpha 1), mul, div, sqrt, reciprocal, neg, abs, sign, maximum,
    minimum and clamp as IEEE 754 says, so these are torch's results bit for bit (of maximum(0, -0)
    either may come; torch's own sqrt may be off by one unit on a CPU). add and sub with alpha,
    addcmul, addcdiv and lerp have torch's formula, their product fused with the sum as in torch's
    CUDA kernels. A number divides; it does not multiply by its reciprocal.

    On CUDA the work is queued on the current stream of the device of outs[0] and the call does not
    wait; frames and operands must not be reused before it has run. On a CPU the call returns when
    it is done. Not differentiable, and unnoticed by autograd's version counters on a device.
    Raises ValueError for arguments that are not as above, before anything is written.
    """
    todo = batches(op, outs, inputs)
    if not todo or not use_triton(memory_of(todo[0].outs[0])):
        elementwise_reference(op, outs, *inputs)
        return
    for batch, pieces in [(batch, cut(batch.groups(), LONGEST_PIECE)) for batch in todo]:
        _launch(batch, pieces)


def elementwise_reference(op: str, outs: Sequence[Operand], *inputs: Input) -> None:
    """`elementwise` in plain torch: an op per stretch of consecutive frames.

    Where dtypes differ, SCRATCH_ELEMENTS at a time are converted. Reads 0-dim tensors on the host.
    """
    todo = batches(op, outs, inputs)
    all_parts = [[list(stretches(group)) for group in batch.groups()] for batch in todo]
    for batch, groups in zip(todo, all_parts, strict=True):
        for values, parts in zip(batch.values, groups, strict=True):
            for out, *operands in parts:
                _compute(batch, values, out, operands)


def _launch(batch: Batch, pieces: Pieces) -> None:
    group = pieces.group.numpy()
    addresses = iter(pieces.addresses.numpy())
    rows = [pieces.lengths.numpy().astype(np.int64), next(addresses)]
    constants: dict[str, Any] = {}
    for name, i in zip("XYZW", range(4), strict=True):
        kind, dtype = batch.slots[i] if i < len(batch.slots) else (None, batch.compute)
        constants |= {f"{name}_KIND": kind.value if kind else "none", name: _triton_type(dtype)}
        if kind is Kind.OPERAND:
            rows.append(next(addresses))
        elif kind:
            words = [_word(values[i], batch.compute) for values in batch.values]
            rows.append(np.array(words, np.int64)[group])
    memory = memory_of(batch.outs[0])
    table = upload(torch.from_numpy(np.stack(rows)), memory.device)
    tile = LARGE_TILE if pieces.longest >= LARGE_TILE else SMALL_TILE
    tiles = -(-pieces.longest // tile)
    launch(
        _elementwise_kernel,
        pieces.count * tiles,
        table,
        pieces.count,
        tiles,
        EXPRESSION=batch.op.expression,
        COMPUTE=_triton_type(batch.compute),
        OUT=_triton_type(batch.out),
        **constants,
        TILE=tile,
        ALIGNED=pieces.aligned,
        num_warps=tile // ELEMENTS_PER_THREAD // 32,
        enable_fp_fusion=False,
    )


def _word(value: Value, compute: torch.dtype) -> int:
    """What the table holds for an input that is the same for a whole piece."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    assert isinstance(value, int | float)
    return int(np.float64(value).view(np.int64)) if compute.is_floating_point else int(value)


def _triton_type(dtype: torch.dtype) -> Any:
    if dtype is torch.bfloat16 and INTERPRETED:
        return tl.uint16
    if dtype is torch.bool:
        return tl.uint8
    return getattr(tl, dtype_name(dtype))


@torch.no_grad()
def _compute(
    batch: Batch, values: list[Value], out: torch.Tensor, operands: list[torch.Tensor]
) -> None:
    """The op on one stretch."""
    exact = all(tensor.dtype is batch.compute for tensor in (out, *operands))
    step = out.numel() if exact else SCRATCH_ELEMENTS
    parameters = len(batch.slots) - batch.op.parameters  # the first one's number
    for start in range(0, out.numel(), step):
        here = slice(start, start + step)
        rest = iter(operands)
        inputs: list[torch.Tensor | float] = []
        for i, (slot, value) in enumerate(zip(batch.slots, values, strict=True)):
            if slot.kind is Kind.OPERAND:
                data = next(rest)[here]
                condition = batch.op.condition and i == 0
                inputs.append(data != 0 if condition else data.to(batch.compute))
                continue
            assert not isinstance(value, Paged)
            one = torch.as_tensor(value, dtype=batch.compute, device=out.device)
            if i >= parameters:
                inputs.append(one.item())
            else:
                inputs.append(one.expand(out[here].numel()))
        if out.dtype is batch.compute:
            batch.op.torch(*inputs, out=out[here])
        else:
            out[here].copy_(batch.op.torch(*inputs))
