"""combine: partial results of ranges, in one pass and in several."""

import itertools
import math

import numpy as np
import pytest
import torch
from page_suite import Backend
from reduce_suite import checked_launches

from tensorpager.kernels import combine as module
from tensorpager.kernels.combine import combine, combine_reference

SIZES = {4096: [0, 1, 5, 4095, 4096, 4097, 0, 9000], 16: [0, 1, 5, 15, 16, 17, 0, 300]}
blocks = pytest.mark.parametrize("block", SIZES)


def _run(backend: Backend, partials: torch.Tensor, bounds: np.ndarray, how: str) -> torch.Tensor:
    if backend.name == "reference":
        return combine_reference(partials, bounds, how)
    if backend.name == "interpreter":
        with checked_launches([partials], []):
            return combine(partials, bounds, how)
    return combine(partials.to(backend.device), bounds, how).cpu()


def _bounds(counts: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)])


def _partials(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@blocks
def test_sums_keep_to_their_bound(
    backend: Backend, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 16 make three passes of the longest range."""
    monkeypatch.setattr(module, "PARTIALS_PER_PROGRAM", block)
    bounds = _bounds(SIZES[block])
    partials = _partials(int(bounds[-1]))
    sums = _run(backend, partials, bounds, "sum").tolist()
    assert len(sums) == len(SIZES[block])
    for got, start, end in zip(sums, bounds[:-1], bounds[1:], strict=True):
        values = partials[start:end].tolist()
        size = math.fsum(map(abs, values))
        assert abs(got - math.fsum(values)) <= 3 * 40 * 2**-53 * size


@pytest.mark.parametrize("how", ["max", "min"])
@blocks
def test_extremes_are_exact_and_nan_wins(
    backend: Backend, how: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PARTIALS_PER_PROGRAM", block)
    bounds = _bounds(SIZES[block])
    partials = _partials(int(bounds[-1]))
    partials[int(bounds[4]) - 1] = math.nan
    partials[int(bounds[4]) + 3] = -math.inf
    partials[int(bounds[6]) - 1] = math.inf
    partials[int(bounds[-2]) :] = math.nan
    got = _run(backend, partials, bounds, how).tolist()
    empty = -math.inf if how == "max" else math.inf
    pick = max if how == "max" else min
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        values = partials[start:end].tolist()
        expected = pick(values, default=empty)
        if number in (3, 7):
            expected = math.nan
        assert got[number] == expected or (math.isnan(expected) and math.isnan(got[number]))


def test_no_ranges(backend: Backend) -> None:
    assert _run(backend, _partials(0), np.zeros(1, np.int64), "sum").tolist() == []


def test_hand_made(backend: Backend) -> None:
    partials = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    bounds = np.array([0, 3, 3, 4])
    assert _run(backend, partials, bounds, "sum").tolist() == [7, 0, 8]
    assert _run(backend, partials, bounds, "max").tolist() == [4, -math.inf, 8]
    assert _run(backend, partials, bounds, "min").tolist() == [1, math.inf, 8]
