"""Zero copy: small blocks straight out of page-locked host memory, without a copy for each.

A copy engine takes some microseconds of the CPU for each block, however small: rows of an embedding
on a page in host memory would spend them on a kilobyte each. A kernel reads page-locked memory by
its address and fetches thousands of blocks in one launch. A few programs saturate the bus, and the
other multiprocessors stay free. From some block size on the copy engines win; where that is depends
on the machine, so `calibrate_crossover` finds it at start.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import ctypes
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .launch import launch, tl, triton, upload, use_triton

__all__ = [
    "MAX_BLOCK_BYTES",
    "Blocks",
    "Crossover",
    "block_table",
    "calibrate_crossover",
    "fetch_blocks",
    "row_blocks_of",
]

MAX_BLOCK_BYTES = 28 << 10
PROGRAMS = 12
TILE_BYTES = 16 << 10  # in flight in each program
SMALL_BLOCK_BYTES = 2 << 10
BLOCK_SIZES = (*(1 << shift for shift in range(8, 15)), MAX_BLOCK_BYTES)

Integers = npt.NDArray[np.int64] | Sequence[int]


@dataclass(frozen=True, eq=False)
class Blocks:
    """What to fetch.

    addresses : int64 [2, n], where each block comes from and where it goes.
    lengths : int32 [n], bytes, 1 to MAX_BLOCK_BYTES.
    aligned : whether all addresses are multiples of 16.
    longest : bytes of the longest block; 0 if there is none.
    """

    addresses: torch.Tensor
    lengths: torch.Tensor
    aligned: bool
    longest: int

    def to(self, device: torch.device) -> Blocks:
        """The same on `device`; from the host the copies are queued on the current stream."""
        addresses, lengths = upload(self.addresses, device), upload(self.lengths, device)
        return Blocks(addresses, lengths, self.aligned, self.longest)


def block_table(sources: Integers, destinations: Integers, lengths: Integers) -> Blocks:
    """Blocks from addresses and bytes, [n] each, on the host. Empty blocks are left out.

    Raises ValueError where a block has more than MAX_BLOCK_BYTES, or less than none.
    """
    columns = [np.asarray(x, np.int64).reshape(-1) for x in (sources, destinations, lengths)]
    if len({len(column) for column in columns}) > 1:
        counts = ", ".join(str(len(column)) for column in columns)
        raise ValueError(f"{counts} sources, destinations and lengths; pass as many of each")
    size = columns[2]
    if len(size) and (size.min() < 0 or size.max() > MAX_BLOCK_BYTES):
        bad = int(np.argmax((size < 0) | (size > MAX_BLOCK_BYTES)))
        raise ValueError(
            f"block {bad} has {size[bad]} bytes; use 0 to {MAX_BLOCK_BYTES}, and a copy engine "
            "for larger ones"
        )
    addresses = np.stack([column[size > 0] for column in columns[:2]])
    size = size[size > 0]
    return Blocks(
        torch.from_numpy(addresses),
        torch.from_numpy(size.astype(np.int32)),
        bool((addresses % 16 == 0).all()),
        int(size.max(initial=0)),
    )


def row_blocks_of(
    indices: Integers,
    row_bytes: int,
    page_bytes: int,
    page_addresses: npt.NDArray[np.int64],
    out_address: int,
    places: Integers | None = None,
) -> Blocks:
    """The blocks that a lookup of rows consists of, cut at page borders and MAX_BLOCK_BYTES.

    indices : rows, [n]. page_addresses : int64 [pages], where each page is, in page-locked host
        memory or on the device; those of pages that hold no row looked up do not matter.
    out_address : of dense rows, row_bytes each. places : [n], which of them takes each row; by
        default they take the rows in order.
    """
    rows = np.asarray(indices, np.int64).reshape(-1)
    begin = rows * row_bytes
    if places is None:
        places = np.arange(len(rows), dtype=np.int64)
    at = out_address + np.asarray(places, np.int64).reshape(-1) * row_bytes
    left = np.full(len(rows), row_bytes, np.int64)
    blocks: list[list[npt.NDArray[np.int64]]] = [[], [], []]
    while len(begin) and row_bytes:
        page, inside = np.divmod(begin, page_bytes)
        length = np.minimum(np.minimum(left, page_bytes - inside), MAX_BLOCK_BYTES)
        for column, part in zip(blocks, (page_addresses[page] + inside, at, length), strict=True):
            column.append(part)
        more = left > length
        begin, at, left = (begin + length)[more], (at + length)[more], (left - length)[more]
    return block_table(*(np.concatenate([np.empty(0, np.int64), *column]) for column in blocks))


@triton.jit(
    do_not_specialize=["count", "longest"],
    do_not_specialize_on_alignment=["addresses_ptr", "lengths_ptr"],
)
def _fetch_blocks_kernel(
    addresses_ptr,
    lengths_ptr,
    count,
    longest,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """BLOCKS blocks side by side, then those that all programs together are further on."""
    word_bytes: tl.constexpr = 4 if ALIGNED else 1
    first = tl.program_id(0) * BLOCKS
    while first < count:
        block = first + tl.arange(0, BLOCKS)
        live = block < count
        src = tl.load(addresses_ptr + block, mask=live, other=0)
        dst = tl.load(addresses_ptr + count + block, mask=live, other=0)
        nbytes = tl.load(lengths_ptr + block, mask=live, other=0)
        start = 0
        while start < longest:
            each = start // word_bytes + tl.arange(0, WORDS)
            if ALIGNED:
                # The mask holds for four words at a time, so accesses stay 128 bits wide.
                mask = (each // 4)[None, :] < (nbytes // 16)[:, None]
                at = tl.multiple_of(src.to(tl.pointer_type(tl.int32)), 16)[:, None] + each[None, :]
                to = tl.multiple_of(dst.to(tl.pointer_type(tl.int32)), 16)[:, None] + each[None, :]
            else:
                mask = each[None, :] < nbytes[:, None]
                at = src.to(tl.pointer_type(tl.uint8))[:, None] + each[None, :]
                to = dst.to(tl.pointer_type(tl.uint8))[:, None] + each[None, :]
            tl.store(to, tl.load(at, mask=mask), mask=mask)
            start += WORDS * word_bytes
        if ALIGNED:
            rest = (nbytes // 16 * 16)[:, None] + tl.arange(0, 16)[None, :]
            mask = rest < nbytes[:, None]
            at = src.to(tl.pointer_type(tl.uint8))[:, None] + rest
            to = dst.to(tl.pointer_type(tl.uint8))[:, None] + rest
            tl.store(to, tl.load(at, mask=mask), mask=mask)
        first += tl.num_programs(0) * BLOCKS


def fetch_blocks(blocks: Blocks, programs: int = PROGRAMS) -> None:
    """Copy each block from its source to its destination, which overlap nothing else.

    blocks : on the device that does it. For CUDA sources are in page-locked host memory that is
        mapped there (`cudaHostRegister`, `pin_memory()`) or on the device, destinations on the
        device; on a CPU all is plain memory. Nothing checks the addresses.
    programs : at most so many work at a time; a few saturate the bus.

    On CUDA queued on the current stream of the device without waiting: sources must stay as they
    are until it has run. On a CPU the call returns when the copies are done. No blocks: nothing
    happens.
    """
    count = blocks.lengths.numel()
    if not count:
        return
    if not use_triton(blocks.addresses):
        fetch_blocks_reference(blocks)
        return
    small = blocks.longest <= SMALL_BLOCK_BYTES
    side_by_side = TILE_BYTES // SMALL_BLOCK_BYTES if small else 1
    tile_bytes = TILE_BYTES if blocks.aligned else TILE_BYTES // 4
    launch(
        _fetch_blocks_kernel,
        min(programs, -(-count // side_by_side)),
        blocks.addresses,
        blocks.lengths,
        count,
        blocks.longest,
        BLOCKS=side_by_side,
        WORDS=tile_bytes // side_by_side // (4 if blocks.aligned else 1),
        ALIGNED=blocks.aligned,
        num_warps=8,
    )


def fetch_blocks_reference(blocks: Blocks, programs: int = PROGRAMS) -> None:
    """`fetch_blocks` without Triton, in memory that the CPU can reach."""
    sources, destinations = blocks.addresses.tolist()
    for source, destination, nbytes in zip(
        sources, destinations, blocks.lengths.tolist(), strict=True
    ):
        ctypes.memmove(destination, source, nbytes)


class Crossover(NamedTuple):
    """Where the kernel beats the copy engine: small blocks, and enough of them.

    block_bytes : the largest block that the kernel copies faster; 0 if none.
    blocks : the fewest blocks for which a launch is worth it.
    """

    block_bytes: int
    blocks: int

    def kernel_wins(self, block_bytes: int, count: int) -> bool:
        return block_bytes <= self.block_bytes and count >= self.blocks


Measure = Callable[[Literal["kernel", "engine"], int, int], float]


def calibrate_crossover(
    measure: Measure, count: int = 256, repeats: int = 5, sizes: Sequence[int] = BLOCK_SIZES
) -> Crossover:
    """Find where the copy engine starts to win on this machine.

    measure : called as measure("kernel" | "engine", block_bytes, count), gives the seconds that
        fetching `count` blocks takes, from queueing to arrival.
    count : blocks in each measurement of the block size.
    repeats : measurements of each, both ways in turn; their median counts, so a minority of
        disturbed ones changes nothing.
    sizes : bytes, ascending; by default the powers of two from 256 on and the kernel's limit.

    Between the two sizes where the winner changes the size is halved down to 1/16. Should the
    winner change more than once, as noise makes it, the border that gives away the least time is
    taken.
    """
    lead = [_lead(measure, nbytes, count, repeats) for nbytes in sizes]
    wins = _split(lead)
    if wins == 0:
        return Crossover(0, 1)
    low = sizes[wins - 1]
    if wins < len(sizes):
        high = sizes[wins]
        while high - low > max(16, low // 16):
            middle = (low + high) // 2 // 16 * 16
            if _lead(measure, middle, count, repeats) > 0:
                low = middle
            else:
                high = middle
    counts = [1 << shift for shift in range(count.bit_length())]
    lead = [_lead(measure, max(sizes[0], low // 2), blocks, repeats) for blocks in counts]
    losses = len(counts) - _split(lead[::-1])
    return Crossover(low, counts[losses] if losses < len(counts) else count)


def _lead(measure: Measure, block_bytes: int, count: int, repeats: int) -> float:
    """How far the kernel is ahead: log of engine over kernel time."""
    kernel, engine = [], []
    for _ in range(repeats):
        kernel.append(measure("kernel", block_bytes, count))
        engine.append(measure("engine", block_bytes, count))
    if min(*kernel, *engine) <= 0:
        raise ValueError(
            f"{count} blocks of {block_bytes} bytes took {min(*kernel, *engine)} s; measure must "
            "give seconds above 0: use a finer clock"
        )
    return math.log(statistics.median(engine) / statistics.median(kernel))


def _split(lead: list[float]) -> int:
    """How many of the first the kernel should take, so that the time given away is least."""
    gained = np.concatenate([[0.0], np.cumsum(lead)])
    return int(np.argmax(gained))
