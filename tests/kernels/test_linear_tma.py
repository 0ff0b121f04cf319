"""linear_forward_tma on every implementation, and which operands descriptors can describe."""

import pytest
import torch
from linear_suite import PAGE, Dense, LinearCase, PagedWeight, assert_product, random
from page_suite import Backend

from tensorpager.kernels.launch import HAVE_TRITON
from tensorpager.kernels.linear_tile import Tile
from tensorpager.kernels.linear_tma import (
    descriptors_fit,
    linear_forward_tma,
    shape_fits,
    tile_height,
)
from tensorpager.kernels.paged_matrix import PagedMatrix

# Rows behind the slab are multiplied too, whatever they hold, and the results thrown away.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
HALF, BRAIN = torch.float16, torch.bfloat16


def _skip_without_descriptors(backend: Backend) -> None:
    if backend.name == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("tensor descriptors need sm_90")


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        (LinearCase(5, 40, 64, BRAIN), None),
        (LinearCase(18, 90, 64, HALF), None),
        (LinearCase(18, 90, 64, BRAIN), (32, 77)),
        (LinearCase(3, 70, 128, HALF), (16, 48)),  # half a page, so the tile is half as high
        (LinearCase(1, 300, 8, HALF), (256, 300)),  # fewer columns than the tile has
    ],
    ids=str,
)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no_bias"])
def test_product(
    backend: Backend, case: LinearCase, rows: tuple[int, int] | None, biased: bool
) -> None:
    _skip_without_descriptors(backend)
    x = random(case.m, case.k, dtype=case.dtype, seed=1)
    weight = random(case.n, case.k, dtype=case.dtype, seed=2)
    bias = random(case.n, dtype=case.dtype, seed=3)
    begin, end = rows or (0, case.n)
    paged, dense = PagedWeight(weight, backend, rows), Dense(x, backend)
    out = Dense(torch.full((case.m, case.n), 7.0, dtype=case.dtype), backend)
    added = bias.to(backend.device) if biased else None
    backend.run(
        linear_forward_tma,
        *(dense.tensor, paged.matrix, out.tensor, added, rows),
        # Tiles are read whole, so what is behind the matrix in its last frame is read too.
        reads=[*paged.pages(), dense.memory.tensor, *([added] if biased else [])],
        writes=[out.memory.tensor],
    )
    got = out.tensor.cpu()
    expected_bias = bias[begin:end] if biased else 0.0
    assert_product(got[:, begin:end], (x, weight[begin:end].t()), expected_bias, backend)
    assert got[:, :begin].eq(7).all()
    assert got[:, end:].eq(7).all()
    out.assert_guarded()
    paged.arena.assert_is(paged.before)


def _matrix(columns: int, dtype: torch.dtype = BRAIN, page_bytes: int = PAGE) -> PagedMatrix:
    pages = -(-64 * columns * dtype.itemsize // page_bytes)
    arena = torch.zeros(page_bytes, dtype=torch.uint8)
    frame_of = torch.zeros(pages, dtype=torch.int32)
    return PagedMatrix(arena, frame_of, page_bytes, dtype, 64, columns)


@pytest.mark.parametrize(
    ("columns", "dtype", "begin", "fits"),
    [
        (64, BRAIN, 0, True),
        (64, HALF, 32, True),
        (64, HALF, 16, True),
        (64, HALF, 8, False),  # the slab begins within a tile
        (64, torch.float32, 0, False),
        (96, HALF, 0, False),  # rows straddle pages
        (256, HALF, 0, False),  # eight rows in a page: fewer than a tile
        (4, HALF, 0, False),  # rows of 8 bytes
    ],
)
def test_which_shapes_fit(columns: int, dtype: torch.dtype, begin: int, fits: bool) -> None:
    x, weight = torch.empty(3, columns, dtype=dtype), _matrix(columns, dtype)
    assert shape_fits(x, weight, (begin, 64)) == fits
    assert not descriptors_fit(x, weight, (begin, 64)), "there are none on a CPU"


def test_x_must_be_aligned() -> None:
    memory = torch.empty(3, 72, dtype=BRAIN)
    assert shape_fits(memory[:, 8:], _matrix(64), (0, 64))
    assert not shape_fits(memory[:, 4:68], _matrix(64), (0, 64))
    assert not shape_fits(torch.empty(3, 68, dtype=BRAIN)[:, :64], _matrix(64), (0, 64))


def test_tiles_lie_in_one_frame() -> None:
    weight = _matrix(64)  # 32 rows in a page
    heights = [tile_height(weight, begin, Tile(16, 128, 64, 4, 1)) for begin in range(64)]
    assert heights[:3] == [32, 1, 2]
    assert all(
        begin // 32 == (begin + height - 1) // 32 and 32 % height == 0
        for begin, height in enumerate(heights)
    )


@pytest.mark.interpreter
@pytest.mark.skipif(not HAVE_TRITON, reason="needs Triton")
def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.zeros(3, 96, dtype=HALF), _matrix(96, HALF)
    with pytest.raises(ValueError, match=r"descriptors cannot describe x .*use linear_forward"):
        linear_forward_tma(x, weight, torch.zeros(3, 64, dtype=HALF))
