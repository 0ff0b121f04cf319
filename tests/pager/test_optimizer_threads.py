"""Steps by the for-loop have PyTorch's bits with any number of threads: each of them ends amid
pages and vectors, where PyTorch rounds some ops otherwise."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import tensorpager as tp
from tensorpager.pager.debug.chaos import scattered
from tensorpager.pager.tensor.new_pages import empty_like_geometry

from .models import PAGE_BYTES, assert_same, make_pager, plain

pytestmark = pytest.mark.usefixtures("one_thread")

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FRAMES = 16
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=False),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, foreach=False),
}
IN_PARTS = ("adamw", "adam", "sgd")
QUICK = [("adamw", FP32, "scattered", 2), ("sgd", BF16, "scattered", 4)]


def _cases() -> list[Any]:
    return [
        pytest.param(
            *(kind, dtype, lane, threads),
            marks=() if (kind, dtype, lane, threads) in QUICK else pytest.mark.slow,
            id=f"{kind}-{str(dtype).removeprefix('torch.')}-{lane}-{threads}",
        )
        for kind in KINDS
        for dtype in (FP32, BF16, FP64, FP16)
        for lane in ("plain", "scattered")
        for threads in (2, 4)
    ]


def _values(step: int, number: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(size, generator=generator).to(dtype)


def _run(pager: tp.Pager | None, kind: str, dtype: torch.dtype, sizes: list[int]) -> Any:
    """Parameters and states after some steps with gradients that are given."""

    def put(values: torch.Tensor) -> torch.Tensor:
        if pager is None:
            return values
        paged = empty_like_geometry(pager.core, values.to("meta"), "user")
        paged.copy_(values)
        return paged

    parameters = [put(_values(0, i, size, dtype)).requires_grad_() for i, size in enumerate(sizes)]
    optimizer = KINDS[kind](parameters)
    if pager is not None:
        pager.optimizer(optimizer)
    for step in range(1, 4):
        for i, parameter in enumerate(parameters):
            parameter.grad = put(_values(step, i, parameter.numel(), dtype))
        optimizer.step()
    results = [parameters, [dict(optimizer.state[p]) for p in parameters]]
    with torch.no_grad():
        return plain(results) if pager is not None else results


@pytest.mark.parametrize(("kind", "dtype", "lane", "threads"), _cases())
def test_bits(kind: str, dtype: torch.dtype, lane: str, threads: int) -> None:
    """The largest parameter is larger than the arena where the class is known in parts."""
    torch.set_num_threads(threads)
    page = PAGE_BYTES // dtype.itemsize
    large = FRAMES if kind in IN_PARTS and dtype in (FP32, FP64) else FRAMES // 6
    sizes = [page + 37, 100, 1, large * page + 1037]
    expected = _run(None, kind, dtype, sizes)
    with make_pager(frames=FRAMES) as pager:
        with pager.iteration():
            pass
        with scattered(pager.core) if lane == "scattered" else nullcontext():
            assert_same(_run(pager, kind, dtype, sizes), expected)
