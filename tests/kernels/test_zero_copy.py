"""Blocks fetched by address, on every implementation; and where the copy engine takes over."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from page_suite import KIB, Backend, Guarded

from tensorpager.kernels.zero_copy import (
    MAX_BLOCK_BYTES,
    Blocks,
    block_table,
    calibrate_crossover,
    fetch_blocks,
    row_blocks_of,
)

# (offset in the source, offset in the destination, bytes) of each block
CASES = {
    "one_byte": [(0, 0, 1)],
    "aligned": [(64, 4096, 256), (512, 0, 2048), (0, 2048, 48)],
    "aligned_with_rests": [(0, 32, 17), (512, 0, 31), (16, 1024, 15), (2048, 2048, 2047)],
    "unaligned": [(1, 3, 100), (200, 201, 513), (1000, 996, 1), (1204, 1007, 999)],
    "aligned_large": [(0, 32 * KIB, MAX_BLOCK_BYTES), (29 * KIB, 0, 16 * KIB + 5)],
    "unaligned_large": [(5, 3, 9000), (10_001, 20_000, 2049)],
    "empty_between": [(0, 0, 16), (16, 16, 0), (32, 32, 16)],
    "more_than_programs": [(16 * i, 32 * (140 - i), 16) for i in range(140)],
    "none": [],
}


def _source(backend: Backend, nbytes: int) -> torch.Tensor:
    memory = Guarded(nbytes, Backend("reference"), seed=1).tensor
    return memory.pin_memory() if backend.device == "cuda" else memory


def _fetch(backend: Backend, blocks: Blocks, reads: list, writes: list, *rest: int) -> None:
    backend.run(
        fetch_blocks,
        *(blocks.to(torch.device(backend.device)), *rest),
        reads=[blocks.addresses, blocks.lengths, *reads],
        writes=writes,
    )


@pytest.mark.parametrize("case", CASES)
def test_blocks_arrive(backend: Backend, case: str) -> None:
    spans = CASES[case]
    source = _source(backend, 64 * KIB)
    out = Guarded(64 * KIB, backend, seed=2)
    expected = bytearray(out.bytes())
    data = bytes(source.numpy())
    for at, to, nbytes in spans:
        expected[to : to + nbytes] = data[at : at + nbytes]
    columns = [[span[i] for span in spans] for i in range(3)]
    sources = [source.data_ptr() + at for at in columns[0]]
    destinations = [out.tensor.data_ptr() + at for at in columns[1]]
    _fetch(
        backend,
        block_table(sources, destinations, columns[2]),
        reads=[source[at : at + nbytes] for at, _, nbytes in spans],
        writes=[out.tensor[to : to + nbytes] for _, to, nbytes in spans],
    )
    out.assert_is(bytes(expected))


@pytest.mark.parametrize("programs", [1, 3])
def test_few_programs_do_all_blocks(backend: Backend, programs: int) -> None:
    source, out = _source(backend, 40 * 100), Guarded(40 * 100, backend)
    starts = np.arange(40, dtype=np.int64) * 100
    blocks = block_table(source.data_ptr() + starts, out.tensor.data_ptr() + starts, [100] * 40)
    _fetch(backend, blocks, [source], [out.tensor], programs)
    out.assert_is(bytes(source.numpy()))


@pytest.mark.parametrize("row_bytes", [64, 400, 1536, 40_000])
def test_rows_of_pages(backend: Backend, row_bytes: int) -> None:
    """Rows that straddle pages, and are longer than a block may be."""
    page, rows = 4 * KIB, [7, 0, 7, 3]
    table = _source(backend, 8 * row_bytes)
    pages = -(-table.numel() // page)
    # Pages lie in reverse, with a page between each two.
    memory = _source(backend, 2 * pages * page)
    places = [2 * (pages - 1 - i) * page for i in range(pages)]
    for i, at in enumerate(places):
        part = table[i * page : (i + 1) * page]
        memory[at : at + part.numel()] = part
    out = Guarded(len(rows) * row_bytes, backend)
    addresses = memory.data_ptr() + np.array(places, dtype=np.int64)
    blocks = row_blocks_of(rows, row_bytes, page, addresses, out.tensor.data_ptr())
    _fetch(backend, blocks, [memory], [out.tensor])
    data = bytes(table.numpy())
    out.assert_is(b"".join(data[row * row_bytes : (row + 1) * row_bytes] for row in rows))


def test_rows_to_any_places() -> None:
    """Each row goes to the place that is said, in all its pieces."""
    addresses = np.array([10_000, 50_000], np.int64)
    blocks = row_blocks_of([0, 40, 3], 100, 4 * KIB, addresses, 1000, places=[7, 0, 2])
    pieces = zip(*blocks.addresses.tolist(), blocks.lengths.tolist())
    assert sorted(pieces) == [
        (10_000, 1700, 100),
        (10_300, 1200, 100),
        (14_000, 1000, 96),
        (50_000, 1096, 4),
    ]


@pytest.mark.parametrize("rows", [[], [0, 0]])
def test_no_bytes(rows: list[int]) -> None:
    assert row_blocks_of(rows, 0, 4 * KIB, np.zeros(1, np.int64), 0).longest == 0
    fetch_blocks(row_blocks_of([], 64, 4 * KIB, np.zeros(1, np.int64), 0))


def test_table() -> None:
    blocks = block_table([32, 64, 100], [160, 320, 480], [16, 0, 5])
    assert blocks.addresses.tolist() == [[32, 100], [160, 480]]
    assert blocks.lengths.tolist() == [16, 5]
    assert (blocks.aligned, blocks.longest) == (False, 16)
    assert block_table([32], [160], [5]).aligned
    with pytest.raises(ValueError, match=r"block 1 has 28673 bytes; use 0 to 28672"):
        block_table([0, 0], [0, 0], [1, MAX_BLOCK_BYTES + 1])
    with pytest.raises(ValueError, match="block 0 has -1 bytes"):
        block_table([0], [0], [-1])
    with pytest.raises(ValueError, match="2, 1, 1 sources"):
        block_table([0, 0], [0], [1])


@pytest.mark.interpreter
def test_checker_sees_a_block_that_is_too_long() -> None:
    backend = Backend("interpreter")
    source, out = _source(backend, 64), Guarded(64, backend)
    blocks = block_table([source.data_ptr()], [out.tensor.data_ptr()], [64])
    with pytest.raises(AssertionError, match="not the kernel's"):
        _fetch(backend, blocks, [source], [out.tensor[:60]])


class Machine:
    """Synthetic times: a launch costs `start`, then bytes at a rate; the engine pays by block."""

    def __init__(self, start: float, kernel_rate: float, per_block: float, engine_rate: float):
        self.start, self.kernel_rate = start, kernel_rate
        self.per_block, self.engine_rate = per_block, engine_rate
        self.calls = 0

    def __call__(self, way: str, block_bytes: int, count: int) -> float:
        self.calls += 1
        if way == "kernel":
            return self.start + count * block_bytes / self.kernel_rate
        return count * (self.per_block + block_bytes / self.engine_rate)

    def crossover(self, count: int) -> float:
        """Block size at which both take as long."""
        slope = 1 / self.kernel_rate - 1 / self.engine_rate
        return (self.per_block - self.start / count) / slope


@pytest.mark.parametrize(
    ("kernel_rate", "per_block"), [*itertools.product([4e9, 12e9, 20e9], [0.5e-6, 1e-6, 2e-6])]
)
def test_crossover_of_a_plain_machine(kernel_rate: float, per_block: float) -> None:
    """Within a sixteenth, or at the largest block that the kernel takes."""
    machine = Machine(8e-6, kernel_rate, per_block, 50e9)
    found = calibrate_crossover(machine)
    exact = min(machine.crossover(256), MAX_BLOCK_BYTES)
    assert exact * (1 - 1 / 8) <= found.block_bytes <= exact
    assert machine.calls < 300


def test_fewest_blocks() -> None:
    """A launch of 8 us against 1 us a block: worth it from 16 blocks on, tried in powers of two."""
    found = calibrate_crossover(Machine(8e-6, 50e9, 1e-6, 50e9))
    assert found.block_bytes == MAX_BLOCK_BYTES
    assert found.blocks in (8, 16)
    assert found.kernel_wins(256, found.blocks)
    assert not found.kernel_wins(256, found.blocks - 1)
    assert not found.kernel_wins(MAX_BLOCK_BYTES + 1, 1000)


def test_other_sizes() -> None:
    """Only these, and what lies between two of them, are tried."""
    machine = Machine(0, 12e9, 1e-6, 50e9)
    exact = machine.crossover(16)
    tried: set[int] = set()

    def measure(way: str, nbytes: int, count: int) -> float:
        tried.add(nbytes)
        return machine(way, nbytes, count)

    found = calibrate_crossover(measure, 16, 1, [1 << 12, 1 << 16, 1 << 20])
    assert exact * (1 - 1 / 8) <= found.block_bytes <= exact
    assert min(tried) >= 1 << 12
    assert calibrate_crossover(measure, 16, 1, [64]).block_bytes == 64
    assert calibrate_crossover(measure, 16, 1, [1 << 20]) == (0, 1)


def test_engine_always_wins() -> None:
    found = calibrate_crossover(Machine(1e-3, 1e9, 1e-6, 50e9))
    assert found.block_bytes == 0
    assert not found.kernel_wins(1, 10_000)


def test_kernel_always_wins() -> None:
    found = calibrate_crossover(Machine(1e-9, 50e9, 1e-5, 50e9))
    assert found == (MAX_BLOCK_BYTES, 1)


def test_disturbed_measurements() -> None:
    """One in five measurements ten times too long, and all of them off by up to 3 %."""
    machine = Machine(8e-6, 12e9, 1e-6, 50e9)
    random_numbers = random.Random(4)

    def measure(way: str, block_bytes: int, count: int) -> float:
        disturbed = 10 if machine.calls % 5 == 2 else 1
        return machine(way, block_bytes, count) * disturbed * random_numbers.uniform(1, 1.03)

    found = calibrate_crossover(measure, repeats=5)
    assert abs(math.log(found.block_bytes / machine.crossover(256))) < 0.2


def test_a_clock_that_stands_still() -> None:
    with pytest.raises(ValueError, match=r"took 0\.0 s; measure must"):
        calibrate_crossover(lambda _way, _block_bytes, _count: 0.0)
