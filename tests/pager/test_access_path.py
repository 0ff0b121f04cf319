"""The way of one weight access, as ``pager/README.md`` has it: how much Python of ours it takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tensorpager as tp

from .models import make_pager

ROOT = Path(tp.__file__).resolve().parents[1]
OURS = (ROOT / "pager", ROOT / "kernels")


def calls_of(call: Callable[[], Any]) -> list[Path]:
    """The file of each call of a Python function of ours."""
    found: list[Path] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            path = Path(frame.f_code.co_filename).resolve()
            if any(path.is_relative_to(folder) for folder in OURS):
                found.append(path)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize(("fits", "most_calls", "most_files"), [(False, 12, 6), (True, 5, 3)])
def test_a_linear_whose_weight_is_there(fits: bool, most_calls: int, most_files: int) -> None:
    """Forward, with gradients and a bias, in an iteration that is logged: its views are at hand."""
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    inputs = torch.ones(4, 32)
    calls: list[Path] = []
    with make_pager(fits=fits, policy="lp") as pager:
        pager.page_module(model)
        weight, bias = model[3].weight, model[3].bias
        for _ in range(3):
            with pager.iteration():
                F.linear(inputs, weight, bias)
                calls = calls_of(lambda: F.linear(inputs, weight, bias))
                model(inputs).sum().backward()
        assert pager.core.fits is fits
    assert 0 < len(calls) <= most_calls, calls
    assert len(set(calls)) <= most_files, set(calls)
