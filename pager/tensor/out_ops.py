"""Functions with ``out=`` that is paged."""

from __future__ import annotations

from typing import Any

import torch

from .dense_run import LISTS
from .geometry import take_over
from .paged_tensor import PagedTensor


def run_into_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A function with ``out=``: PyTorch may resize, restride or conjugate what it is given, so it
    is given plain tensors, whose shape and values the paged ones take over."""
    given = kwargs["out"]
    targets = list(given) if type(given) in LISTS or isinstance(given, tuple) else [given]
    plain = [
        torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device).copy_(t.detach())
        if type(t) is PagedTensor
        else t
        for t in targets
    ]
    alone = type(given) is PagedTensor
    result = func(*args, **{**kwargs, "out": plain[0] if alone else tuple(plain)})
    with torch.no_grad():
        for target, dense in zip(targets, plain):
            if type(target) is PagedTensor:
                take_over(target, dense)
    if result is None:
        return None
    if alone:
        return given
    return type(result)(targets) if isinstance(result, tuple) else given
