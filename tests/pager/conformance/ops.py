"""PyTorch's operator database as pytest parameters, one per op and dtype."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from .trials import seed

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64)


def op_params(
    wanted: Callable[[OpInfo], object], dtypes: tuple[torch.dtype, ...] = DTYPES
) -> list[pytest.param]:
    """The first of ``dtypes`` for every op, and for every other op another one, in turns; all that
    an op supports in full runs."""
    found = []
    for number, op in enumerate(op for op in op_db if wanted(op)):
        supported = [dtype for dtype in dtypes if dtype in op.supported_dtypes("cpu")]
        others = supported[1:]
        quick = supported[:1]
        if others and number % 2:
            quick.append(others[number // 2 % len(others)])
        for dtype in supported:
            name = f"{op.full_name}-{dtype_name(dtype)}"
            marks = () if dtype in quick else (pytest.mark.slow,)
            found.append(pytest.param(op, dtype, id=name, marks=marks))
    return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def full_limit(dtype: torch.dtype) -> int | None:
    """Every float32 sample, and three of each other type."""
    return None if dtype == torch.float32 else 3


def samples(
    op: OpInfo, dtype: torch.dtype, *, requires_grad: bool = False
) -> Iterator[SampleInput]:
    seed(0)
    # Not op.sample_inputs: it looks through the whole stack for PyTorch's own test case each time.
    yield from op.sample_inputs_func(op, "cpu", dtype, requires_grad)


def inputs_of(sample: SampleInput) -> tuple[object, tuple, dict]:
    return sample.input, sample.args, sample.kwargs
