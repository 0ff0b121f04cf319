"""Where PyTorch cuts an elementwise op on a CPU, and so which elements get which of two results.

PyTorch cuts an op into one chunk for each thread. A chunk is computed a block of two vectors at a
time, and what is left at its end (the *tail*) one element at a time. For most ops the two agree;
for some (a half plus a product, a half's inverse root) they round differently, so that the same
op on a part of a tensor has other bits than on the whole. ::

    whole    |==== body ====|tail|==== body ====|tail|==== body ====|tail|     three threads
    part                 |=========================|
    runs                 |==|====|=================|   each in one call that does it as the whole

Whether an op is such a one is tried out once on this machine, with its vectors: nothing here knows
capabilities or widths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

__all__ = ["GRAIN", "Place", "Run", "block_of", "chunk_elements", "even_runs", "runs"]

GRAIN = 32768  # elements below which TensorIterator gives a chunk no thread of its own
_LARGEST_BLOCK = 256  # elements; two vectors have 64 of the narrowest dtype at 512 bits
_WINDOWS = _LARGEST_BLOCK // 2
_SAMPLE = 3 * _LARGEST_BLOCK

Function = Callable[[Sequence[torch.Tensor]], torch.Tensor]


class Place(NamedTuple):
    """Of a part of a tensor: number of its first element, and how many the whole tensor has."""

    first: int
    numel: int


class Run(NamedTuple):
    """Elements ``start … stop`` of a part. ``padded``: fewer than a block, but all of a body; to be
    computed as the beginning of a whole block."""

    start: int
    stop: int
    padded: bool


def chunk_elements(numel: int, threads: int) -> int:
    """Elements of each chunk but the last, of an op on ``numel`` elements."""
    if numel <= GRAIN or threads < 2:
        return max(1, numel)
    return -(-numel // min(threads, -(-numel // GRAIN)))


def runs(
    count: int, place: Place, block: int, threads: int, most: int | None = None
) -> Iterator[Run]:
    """All of a part of ``count`` elements, each element body or tail as in an op on the whole.

    block : elements that are computed together, :func:`block_of`. most : elements of a run, if not
    any number.
    """
    step = chunk_elements(place.numel, threads)
    end = place.first + count
    for low in range(place.first // step * step, end, step):
        high = min(low + step, place.numel)
        tail = high - (high - low) % block
        start, stop = max(low, place.first) - place.first, min(tail, end) - place.first
        if start < stop:
            yield from _body(start, stop, block, threads, most)
        start, stop = max(tail, place.first) - place.first, min(high, end) - place.first
        if start < stop:
            yield Run(start, stop, False)


def _body(start: int, stop: int, block: int, threads: int, most: int | None) -> Iterator[Run]:
    for size in even_runs(stop - start, block, threads, most):
        yield Run(start, start + size, False)
        start += size
    if start < stop:
        yield Run(start, stop, True)


def even_runs(count: int, block: int, threads: int, most: int | None = None) -> Iterator[int]:
    """Numbers of elements, all but fewer than a block of ``count`` and ``most`` each, that PyTorch
    cuts into chunks of whole blocks only, so that an op on so many has no tail."""
    count -= count % block
    while count:
        size = min(count, most or count)
        workers = _workers(size, threads)
        size -= size % (workers * block)
        if _workers(size, threads) != workers or not size:
            size = min(count, max(1, workers - 1) * GRAIN)
        yield size
        count -= size


def _workers(numel: int, threads: int) -> int:
    return max(1, min(threads, -(-numel // GRAIN)))


def block_of(function: Function, dtypes: Sequence[torch.dtype], product: float = 1.0) -> int | None:
    """Elements of a block of ``function``, an elementwise op of tensors of these dtypes; 0 if its
    tails have the bits of its bodies, ``None`` if bits differ elsewhere than in tails.

    product : about what the op adds to the first tensor, if it adds a number. Sums close to 0 tell
        whether it was rounded before.
    """
    generator = torch.Generator().manual_seed(1)
    sample = [
        torch.rand(_SAMPLE + _WINDOWS, generator=generator, dtype=torch.float64) * 2 + 0.1
        for _ in dtypes
    ]
    sample[0][1::4] = (sample[0][1::4] * 1e-3 + 1) * product
    sample[0][3::4] = (sample[0][3::4] * 1e-3 + 1) * -product
    sample = [x.to(dtype) for x, dtype in zip(sample, dtypes, strict=True)]
    body = function(sample)[:_SAMPLE]  # its own tail is after that
    length = 2 * _LARGEST_BLOCK - 1  # the tail is all of a block but one element
    first = length
    for start in range(_WINDOWS):
        got = function([x[start : start + length] for x in sample])
        expected = body[start : start + length]
        wrong = ((got != expected) & ~(got.isnan() & expected.isnan())).nonzero()
        if len(wrong):
            first = min(first, int(wrong[0]))
    tail = length - first
    if tail >= _LARGEST_BLOCK:
        return None
    return 1 << tail.bit_length() if tail else 0
