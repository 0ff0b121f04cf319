"""Pagers in which no tensor has consecutive frames, and comparisons with plain tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

import tensorpager as tp
from tensorpager.pager.debug.chaos import chaos, scattered
from tensorpager.pager.debug.check import check_invariants

from .models import PAGE_BYTES, assert_same, make_pager, plain

U = 2.0**-24
FLOATS = PAGE_BYTES // 4
SHAPE = (300, 401)  # 8 pages of float32, the last one partial
FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@contextmanager
def scattered_pager(*, frames: int = 80, poisoned: bool = False, **options: Any) -> Iterator[Any]:
    with make_pager(frames=frames, **options) as pager, ExitStack() as stack:
        stack.enter_context(scattered(pager.core))
        if poisoned:
            stack.enter_context(chaos(pager.core))
        yield pager


@contextmanager
def no_gathers(pager: tp.Pager) -> Iterator[None]:
    before = pager.core.gathers
    yield
    assert pager.core.gathers == before, f"{pager.core.gathers - before} dense copies were made"
    check_invariants(pager.core)
    assert pager.core.residency.pinned_pages() == 0


def values(seed: int, dtype: torch.dtype = FP32, shape: Any = SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    """Two of any sign; one positive, far from 0."""
    return [values(1, dtype), values(2, dtype), (values(3).abs() + 0.1).to(dtype)]


def zero_dim(value: float, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


def check_script(
    pager: tp.Pager,
    script: Callable[..., Any],
    raw: list[Any],
    paged: Any,
    *,
    gathers: bool = False,
) -> None:
    """``script`` gives the same bits, and leaves the same in its operands, without dense copies (or
    with them)."""
    expected_in = [t.clone() for t in raw]
    expected = script(*expected_in)
    given = [pager.page(t) if p else t.clone() for t, p in zip(raw, paged, strict=True)]
    before = pager.core.gathers
    result = script(*given)
    assert (pager.core.gathers > before) == gathers, f"{pager.core.gathers - before} dense copies"
    assert pager.core.residency.pinned_pages() == 0
    assert_same(plain([result, given]), plain([expected, expected_in]))
    if type(expected) is torch.Tensor:
        assert result.stride() == expected.stride()
        assert expected.device != pager.device or not pager.core.holds(result)


@contextmanager
def named(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"in {name!r}")
        raise


REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda a: a.sum(),
    "sum of all dims": lambda a: torch.ops.aten.sum.dim_IntList(a, None),
    "mean": lambda a: a.mean(),
    "norm": lambda a: a.norm(),
    "vector_norm": lambda a: torch.linalg.vector_norm(a),
    "linalg.norm": lambda a: torch.linalg.norm(a),
    "torch.norm": lambda a: torch.norm(a, 2),
    "norm inf": lambda a: torch.linalg.vector_norm(a, math.inf),
    "norm 0": lambda a: torch.linalg.vector_norm(a, 0),
    "amax": lambda a: a.amax(),
    "max": lambda a: a.max(),
    "amin": lambda a: a.amin(),
    "min": lambda a: a.min(),
    "foreach norm": lambda a: torch._foreach_norm([a])[0],
    "foreach max": lambda a: torch._foreach_max([a])[0],
}
LESS_EXACT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "norm 1": lambda a: torch.linalg.vector_norm(a, 1),
    "norm 3": lambda a: torch.norm(a, 3),
}


def close(result: torch.Tensor, exact: torch.Tensor, scale: float, units: float = 48 * U) -> bool:
    rounding = torch.finfo(result.dtype).eps * exact.abs()
    return bool((result.double() - exact).abs() <= units * scale + rounding)
