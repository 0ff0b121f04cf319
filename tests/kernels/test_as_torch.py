"""PyTorch's own elementwise ops on pages of a CPU: its bits, with as many threads as it has."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tensorpager.kernels.as_torch import can_be_cut, elementwise_as_torch
from tensorpager.kernels.cpu_split import Place
from tensorpager.kernels.elementwise_ops import OPS
from tensorpager.kernels.pieces import Operand, Paged

PAGE = 4096
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
THREADS = pytest.mark.parametrize("threads", [1, 2, 4], ids="{}-threads".format)

# op -> torch's expression of a, b and positive c, and what the op is given.
Case = tuple[str, Callable[..., torch.Tensor], Callable[..., list[Any]]]
CASES: list[Case] = [
    ("add", lambda a, b, c: a.add(b, alpha=0.3), lambda a, b, c: [a, b, 0.3]),
    ("add", lambda a, b, c: a.add(0.7, alpha=0.3), lambda a, b, c: [a, 0.7, 0.3]),
    ("add", lambda a, b, c: a + 0.1, lambda a, b, c: [a, 0.1, 1]),
    ("sub", lambda a, b, c: 1 - a, lambda a, b, c: [1, a, 1]),
    ("sub", lambda a, b, c: torch.rsub(a, b, alpha=0.3), lambda a, b, c: [b, a, 0.3]),
    ("mul", lambda a, b, c: a * 0.1, lambda a, b, c: [a, 0.1]),
    ("div", lambda a, b, c: a / c, lambda a, b, c: [a, c]),
    ("sqrt", lambda a, b, c: c.sqrt(), lambda a, b, c: [c]),
    ("rsqrt", lambda a, b, c: c.rsqrt(), lambda a, b, c: [c]),
    ("reciprocal", lambda a, b, c: c.reciprocal(), lambda a, b, c: [c]),
    ("lerp", lambda a, b, c: a.lerp(b, 0.9), lambda a, b, c: [a, b, 0.9]),
    ("lerp", lambda a, b, c: a.lerp(b, c), lambda a, b, c: [a, b, c]),
    (
        "addcmul",
        lambda a, b, c: a.addcmul(b, c, value=0.01),
        lambda a, b, c: [a, b, c, 0.01],
    ),
    (
        "addcdiv",
        lambda a, b, c: a.addcdiv(b, c, value=-0.01),
        lambda a, b, c: [a, b, c, -0.01],
    ),
    ("clamp", lambda a, b, c: a.clamp(-0.3, 0.3), lambda a, b, c: [a, -0.3, 0.3]),
    ("clamp", lambda a, b, c: a.clamp_min(0.3), lambda a, b, c: [a, 0.3, float("inf")]),
    ("maximum", lambda a, b, c: torch.maximum(a, b), lambda a, b, c: [a, b]),
    ("where", lambda a, b, c: torch.where(a > b, a, 0.5), lambda a, b, c: [a > b, a, 0.5]),
    ("copy", lambda a, b, c: a.to(BF16).to(a.dtype), lambda a, b, c: [a.to(BF16)]),
]


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.node.callspec.params.get("threads", 1))
    yield
    torch.set_num_threads(before)


def _values(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    a, b, c = (torch.randn(count, generator=generator) for _ in range(3))
    return [a.to(dtype), b.to(dtype), (c.abs() + 0.1).to(dtype)]


def _paged(values: torch.Tensor) -> Paged:
    """In scattered frames, some of them side by side."""
    data = values.clone().view(torch.uint8)
    pages = -(-len(data) // PAGE)
    order = np.random.default_rng(pages).permutation(pages + 3)[:pages]
    order[: pages // 2].sort()
    frames = order.astype(np.int32)
    arena = torch.zeros((pages + 3) * PAGE, dtype=torch.uint8)
    for frame, part in zip(frames, data.split(PAGE), strict=True):
        arena[int(frame) * PAGE :][: len(part)] = part
    return Paged(arena, frames, PAGE, values.dtype, values.numel())


def _dense(paged: Paged) -> torch.Tensor:
    pages = paged.arena.view(-1, PAGE)[torch.from_numpy(paged.frames).long()]
    return pages.view(-1)[: paged.numel * paged.dtype.itemsize].view(paged.dtype)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize])


@THREADS
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, FP64], ids=str)
@pytest.mark.parametrize("count", [117, 70_037])
def test_bits_are_torchs(count: int, dtype: torch.dtype, threads: int) -> None:
    given = _values(count, dtype)
    for op, torchs, inputs in CASES:
        expected = torchs(*given)
        out = _paged(torch.zeros_like(expected))
        values = [_paged(x) if isinstance(x, torch.Tensor) else x for x in inputs(*given)]
        elementwise_as_torch(op, [out], [[x] for x in values])
        assert torch.equal(_bits(_dense(out)), _bits(expected)), op


@THREADS
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_parts_have_the_bits_of_the_whole(dtype: torch.dtype, threads: int) -> None:
    """Slabs that begin at page borders, one after the other."""
    given = _values(100_003, dtype)
    per_slab = 3 * PAGE // dtype.itemsize
    for op, torchs, inputs in CASES[:2] + CASES[8:9]:
        expected = torchs(*given)
        parts = []
        for first in range(0, len(expected), per_slab):
            here = slice(first, first + per_slab)
            out = _paged(torch.zeros_like(expected[here]))
            values = [x[here] if isinstance(x, torch.Tensor) else x for x in inputs(*given)]
            place = Place(first, len(expected))
            elementwise_as_torch(op, [out], [[x] for x in values], [place])
            parts.append(_dense(out))
        assert torch.equal(_bits(torch.cat(parts)), _bits(expected)), op


@THREADS
def test_lists_and_operands_of_several_dtypes(threads: int) -> None:
    a, b, c = _values(40_005, BF16)
    wide = [x.float() for x in (a, b, c)]
    outs: list[Operand] = [_paged(torch.zeros_like(a)), _paged(torch.zeros_like(wide[0]))]
    elementwise_as_torch("mul", outs, [[a, wide[0]], [wide[1], b]])
    assert torch.equal(_dense(outs[0]), a.mul_(wide[1]))  # type: ignore[arg-type]
    assert torch.equal(_dense(outs[1]), wide[0] * b)  # type: ignore[arg-type]


@pytest.mark.parametrize("op", OPS)
def test_which_ops_can_be_cut(op: str) -> None:
    """In this machine's own dtypes all; where bodies and tails differ, in one memory order only."""
    named = OPS[op]
    x = torch.ones(3)
    values = [x.bool() if named.condition and i == 0 else x for i in range(len(named.inputs))]
    values[len(values) - named.parameters :] = [1] * named.parameters
    assert can_be_cut(op, FP32, values, reordered=False)
    if op in ("mul", "copy", "neg", "maximum", "where"):
        assert can_be_cut(op, FP32, values, reordered=True)
