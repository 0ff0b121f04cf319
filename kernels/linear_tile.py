"""What the paged matrix products share: tiles, where a weight's elements are, argument checks.

In all three products M counts rows of x, N rows of the weight and K its columns, and a tile is
`m` x `n` x `k` of them. A tile of the weight is n rows by k columns, and how its addresses are
found depends on the shape alone:

| mode | shape | page-table words read |
|---|---|---|
| ROWS | row_bytes divides page_bytes, k divides K | one per row of a tile |
| SEGMENTS | k divides K: no k columns straddle two pages | one per row and k columns |
| ELEMENTS | any other | two per row and k columns, chosen between by element |

K is a power of two in ROWS, a multiple of 32 in SEGMENTS: the shapes of nearly all models. Pages
have a power of two of bytes, so where rows are whole numbers of 16 bytes a 16-byte vector is
always in one page, and all modes read the weight 128 bits at a time.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from .launch import INTERPRETED, tl, triton
from .paged_matrix import PagedMatrix

WIDE_BYTES = 16
SMALLEST_K = 32
ROWS, SEGMENTS, ELEMENTS = 0, 1, 2


class Tile(NamedTuple):
    """Rows of x, rows of the weight and columns of it that one program multiplies at a time."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Tiles of one product, each for up to so many rows of x."""

    half: tuple[tuple[int, Tile], ...]
    single: tuple[tuple[int, Tile], ...]


# Computed to fill shared memory without spilling (the ahead-of-time gate holds that), not measured.
_ANY = 2**31
FORWARD = Tiles(
    half=(
        (32, Tile(32, 64, 64, 4, 5)),
        (128, Tile(64, 64, 64, 4, 4)),
        (_ANY, Tile(128, 128, 64, 8, 3)),
    ),
    single=((32, Tile(32, 64, 32, 4, 3)), (_ANY, Tile(64, 64, 32, 4, 3))),
)
INPUT_GRAD = Tiles(
    half=((32, Tile(32, 64, 64, 4, 5)), (_ANY, Tile(128, 64, 128, 8, 3))),
    single=((32, Tile(32, 32, 64, 4, 3)), (_ANY, Tile(64, 32, 64, 4, 3))),
)
WEIGHT_GRAD = Tiles(
    half=((_ANY, Tile(64, 128, 128, 8, 3)),),
    single=((_ANY, Tile(32, 64, 64, 4, 3)),),
)
# For operands that are read in narrow pieces, and for float32 in mode ELEMENTS: large tiles spill.
SMALL_TILE = Tile(32, 32, 32, 4, 2)
INTERPRETER_TILE = Tile(16, 32, 32, 4, 1)  # small, so that tests have several


def pick_tile(tiles: Tiles, m: int, weight: PagedMatrix, *dense: tuple[torch.Tensor, int]) -> Tile:
    """The tile for `m` rows of x; its `k` divides the columns if a k of 32 or more does.

    dense : operands, and the vectors of how many elements they are read in.
    """
    if INTERPRETED:
        return INTERPRETER_TILE
    full = vector_elements(weight.dtype)
    if weight.columns % full or any(wide < vector_elements(x.dtype) for x, wide in dense):
        return SMALL_TILE
    half = dense[0][0].dtype != torch.float32
    tile = next(tile for most, tile in (tiles.half if half else tiles.single) if m <= most)
    divisor = math.gcd(weight.columns, tile.k)
    if divisor >= SMALLEST_K:
        return tile._replace(k=divisor)
    return tile if half else SMALL_TILE


def vector_elements(dtype: torch.dtype) -> int:
    """Elements in a 128-bit access."""
    return WIDE_BYTES // dtype.itemsize


def constants(weight: PagedMatrix, tile: Tile) -> dict[str, Any]:
    """Compile-time constants of a launch, but for those that `wide` gives."""
    itemsize = weight.dtype.itemsize
    if tile.k * itemsize > weight.page_bytes:
        raise ValueError(
            f"a tile of {tile.k} columns is {tile.k * itemsize} bytes, more than a page of "
            f"{weight.page_bytes}; use a smaller k"
        )
    if weight.columns % tile.k:
        mode = ELEMENTS
    else:
        mode = ROWS if weight.rows_per_page else SEGMENTS
    return {
        "MODE": mode,
        "WIDE": math.gcd(weight.columns, vector_elements(weight.dtype)),
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "TF32": allow_tf32(weight),
        "INTERPRETED": INTERPRETED,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def wide(tensor: torch.Tensor, *bounds: int) -> int:
    """Elements, at most those in 16 bytes, that a dense operand can be read or written in at once.

    bounds : columns at which accesses begin or end.
    """
    address = tensor.data_ptr() // tensor.element_size()
    return math.gcd(tensor.stride(0), address, *bounds, vector_elements(tensor.dtype))


def allow_tf32(weight: PagedMatrix) -> bool:
    """Whether torch itself would multiply these matrices in tf32."""
    single = weight.dtype == torch.float32
    return single and torch.version.hip is None and torch.backends.cuda.matmul.allow_tf32


def page_shift(weight: PagedMatrix) -> int:
    """log2 of the elements in a page."""
    return weight.page_elements.bit_length() - 1


def check_dense(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, int],
    weight: PagedMatrix,
    dtypes: tuple[torch.dtype, ...] = (),
) -> None:
    """Raise ValueError unless `tensor` is [shape], its rows contiguous, on the weight's device."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; pass {shape}")
    dtypes = dtypes or (weight.dtype,)
    if tensor.dtype not in dtypes:
        raise ValueError(
            f"{name} is {tensor.dtype}, the matrix {weight.dtype}; "
            f"pass {' or '.join(map(str, dict.fromkeys(dtypes)))}"
        )
    if tensor.device != weight.arena.device:
        raise ValueError(
            f"{name} is on {tensor.device}, the arena on {weight.arena.device}; move it there"
        )
    rows, columns = shape
    apart = rows <= 1 or tensor.stride(0) >= columns
    if not (apart and (columns <= 1 or tensor.stride(1) == 1)):
        raise ValueError(
            f"{name} has strides {tensor.stride()}; its rows must be contiguous and not overlap: "
            f"pass {name}.contiguous()"
        )
    if tensor.stride(0) >= 2**31 or rows >= 2**31:
        raise ValueError(f"{name} has {rows} rows, stride {tensor.stride(0)}; 2**31 is too many")


@triton.jit
def tile_of_program(tiles_a, tiles_b):
    """(a, b) of this program's tile: eight tiles of a in turn for each of b, so L2 keeps both."""
    program = tl.program_id(0)
    per_group = 8 * tiles_b
    first_a = program // per_group * 8
    in_group = tl.minimum(tiles_a - first_a, 8)
    return first_a + program % per_group % in_group, program % per_group // in_group


@triton.jit
def whole_vectors(count, WIDE: tl.constexpr):
    """`count`, of which the launcher knows that WIDE divides it, so that the compiler does too."""
    return count // WIDE * WIDE


@triton.jit
def element_offsets(
    frame_of_ptr,
    row,
    first_k,
    columns,
    page_shift,
    BLOCK_K: tl.constexpr,
    MODE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Where columns [first_k, first_k + BLOCK_K) of some rows are in the arena, in elements.

    row : [rows], all rows of the matrix. first_k : a multiple of BLOCK_K.

    Returns int64 [rows, BLOCK_K]; what is beyond `columns` has no meaning (only in mode ELEMENTS).
    """
    step = tl.arange(0, BLOCK_K)[None, :]
    first = row.to(tl.int64) * columns + first_k
    page = first >> page_shift
    # Shifts go from an element's number in the matrix to its number in the arena.
    shift = (tl.load(frame_of_ptr + page).to(tl.int64) - page) << page_shift
    if MODE == 2:
        # A border may be within. The next page's frame is read only if the row goes on there.
        border = (page + 1) << page_shift
        goes_on = first + tl.minimum(columns - first_k, BLOCK_K) > border
        next_frame = tl.load(frame_of_ptr + page + 1, mask=goes_on, other=0).to(tl.int64)
        next_shift = (next_frame - page - 1) << page_shift
        element = first[:, None] + step
        before = element < border[:, None]
        offsets = element + tl.where(before, shift[:, None], next_shift[:, None])
        offsets = tl.max_contiguous(tl.multiple_of(offsets, (1, WIDE)), (1, WIDE))
    else:
        offsets = tl.multiple_of(first + shift, WIDE)[:, None] + step
    return offsets


@triton.jit
def multiply(a, b, total, TF32: tl.constexpr, INTERPRETED: tl.constexpr):
    """total + a @ b; the interpreter would multiply the bits of bfloat16, so it gets float32."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="tf32" if TF32 else "ieee")


@triton.jit
def rounded(value, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 to `dtype`, to nearest, ties to even; the interpreter would cut bfloat16 short."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        bits = tl.where(value == value, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        result = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = value.to(dtype)
    return result
