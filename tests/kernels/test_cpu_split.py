"""Where PyTorch cuts an elementwise op on a CPU."""

import random

import pytest
import torch

from tensorpager.kernels.cpu_split import (
    GRAIN,
    Place,
    block_of,
    chunk_elements,
    even_runs,
    runs,
)


def _in_tail(index: int, numel: int, block: int, threads: int) -> bool:
    """The rule itself, one element at a time."""
    step = chunk_elements(numel, threads)
    low = index // step * step
    high = min(low + step, numel)
    return index - low >= (high - low) // block * block


def test_chunks_hand_made() -> None:
    assert chunk_elements(GRAIN, 4) == GRAIN
    assert chunk_elements(GRAIN + 1, 4) == GRAIN // 2 + 1
    assert chunk_elements(3 * GRAIN + 1, 4) == -(-(3 * GRAIN + 1) // 4)
    assert chunk_elements(100 * GRAIN + 3, 2) == 50 * GRAIN + 2
    assert chunk_elements(100 * GRAIN, 1) == 100 * GRAIN
    assert list(runs(100, Place(0, 100), 32, 1)) == [(0, 96, False), (96, 100, False)]
    assert list(runs(40, Place(0, 100), 32, 1)) == [(0, 32, False), (32, 40, True)]
    assert list(runs(40, Place(60, 100), 32, 1)) == [
        (0, 32, False),
        (32, 36, True),
        (36, 40, False),
    ]


def test_runs_keep_body_and_tail_apart() -> None:
    choose = random.Random(1)
    for _ in range(300):
        threads, block = choose.choice([1, 2, 3, 4, 7]), choose.choice([8, 16, 32, 64])
        numel = choose.randint(1, 6 * GRAIN)
        first = choose.randrange(numel)
        count = choose.randint(1, numel - first)
        place, after = Place(first, numel), 0
        for start, stop, padded in runs(count, place, block, threads):
            assert start == after < stop
            after = stop
            tail = _in_tail(first + start, numel, block, threads)
            assert tail == _in_tail(first + stop - 1, numel, block, threads)
            if tail or padded:
                assert stop - start < block
                assert not (tail and padded)
            else:  # in a call of its own nothing is tail
                assert (stop - start) % block == 0
                step = chunk_elements(stop - start, threads)
                assert step % block == 0 or step >= stop - start
        assert after == count


@pytest.mark.parametrize("threads", [1, 2, 3, 64])
def test_even_runs_are_few(threads: int) -> None:
    """As many threads work as in one call, but for the last grains."""
    for count in (1, 32, GRAIN + 40, 2 * GRAIN, 5_000_037, 64 * GRAIN + 32):
        sizes = list(even_runs(count, 32, threads))
        assert sum(sizes) == count // 32 * 32
        assert len(sizes) <= 3


@pytest.mark.parametrize("block", [0, 8, 16, 32, 64, 128, 256])
def test_block_is_found(block: int) -> None:
    """An op that writes 1 in its tail."""

    def function(tensors: object) -> torch.Tensor:
        count = len(tensors[0])  # type: ignore[index]
        result = torch.zeros(count)
        if block:
            result[count - count % block :] = 1
        return result

    assert block_of(function, [torch.float32]) == block


def test_no_block_where_bits_differ_anywhere() -> None:
    assert block_of(lambda tensors: torch.rand(len(tensors[0])), [torch.float32]) is None
