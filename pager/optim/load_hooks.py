"""Functions that run around ``Optimizer.load_state_dict`` for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def around_load(
    optimizer: torch.optim.Optimizer,
    before: Callable[[Any, dict[str, Any]], dict[str, Any] | None],
    after: Callable[[Any], None],
) -> Iterator[None]:
    """Inside, each ``load_state_dict`` first calls ``before(optimizer, state_dict)``, and loads
    what this returns if it is not None; then ``after(optimizer)``, before any hook of the user."""
    hooks = [
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after, prepend=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
