"""Optimizer states that are loaded become pages one at a time.

``Optimizer.load_state_dict`` casts and moves all states before anything else is done with them: of
a model in pages, more memory than there is; and in the parameter's dtype, which states in 8 bits
have not. Here it never sees the large ones. They wait where they are saved (mapped from a file,
say), and each goes straight into pages, kept as this optimizer keeps its states.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..tensor.new_pages import empty_like_geometry
from ..tensor.sharded import is_sharded, local_state
from .fused_states import OURS, convert_state, is_big_dense, is_special
from .paged_optimizer import PagedOptimizer, paged_of


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    loaded: Callable[[], None] = lambda: None,
) -> None:
    """``optimizer.load_state_dict(state)`` with one dense state at a time; the optimizer may be
    paged or not. None of the tensors of ``state`` is taken over. ``loaded``: called when those of
    a parameter were copied.

    States of sharded parameters may be sharded or whole (see ``sharded.py``)."""
    if not any(is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
        state = local_state(optimizer, state)  # else its own load_state_dict does so
    with one_at_a_time(optimizer, loaded), torch.no_grad():
        optimizer.load_state_dict(state)


@contextmanager
def one_at_a_time(
    optimizer: torch.optim.Optimizer, loaded: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Inside, ``load_state_dict`` of ``optimizer`` works so; its user's hooks see what they do."""
    paged = paged_of(optimizer)
    kept: list[tuple[int, dict[str, Any]]] = []  # of each parameter: its number in the dict, states
    groups: list[dict[str, Any]] = []
    converted = paged is not None and paged.format.chosen

    def before(_: Any, given: dict[str, Any]) -> dict[str, Any] | None:
        nonlocal converted
        states = given["state"]
        if any(map(is_special, states.values())):
            if paged is None:
                return None
            converted = True
        groups.extend(given["param_groups"])
        rest = dict(states)
        for key in itertools.chain.from_iterable(group["params"] for group in groups):
            state = states.get(key)
            state = state if isinstance(state, dict) else {}
            apart = {
                k: v for k, v in state.items() if (k in OURS if converted else is_big_dense(v))
            }
            kept.append((key, apart))
            if apart:
                rest[key] = {k: v for k, v in state.items() if k not in apart}
        return {**given, "state": rest}

    def after(_: Any) -> None:
        parameters = itertools.chain.from_iterable(g["params"] for g in optimizer.param_groups)
        for parameter, (key, apart) in zip(parameters, kept):
            if converted and paged is not None:
                made = convert_state(paged.pager, apart, parameter, paged.format)
            else:
                made = {k: _own(paged, parameter, v, key, groups, k) for k, v in apart.items()}
            if made:
                optimizer.state[parameter].update(made)
            loaded()
        kept.clear()

    hooks = [
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after, prepend=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _own(
    paged: PagedOptimizer | None,
    parameter: torch.Tensor,
    value: torch.Tensor,
    key: int,
    groups: list[dict[str, Any]],
    name: str,
) -> torch.Tensor:
    """A state with this value: in pages, or a dense copy. PyTorch says of which dtype."""
    cast = torch.optim.Optimizer._process_value_according_to_param_policy
    if paged is None:
        made = cast(parameter, value, key, groups, name)
        return made.clone() if made is value else made
    like = torch.empty(0, dtype=parameter.dtype)
    wanted = cast(like, torch.empty(0, dtype=value.dtype), key, groups, name).dtype
    shape = torch.empty_strided(value.size(), value.stride(), dtype=wanted, device="meta")
    if not torch.ops.aten.is_non_overlapping_and_dense(value):
        shape = torch.empty(value.size(), dtype=wanted, device="meta")
    return empty_like_geometry(paged.pager, shape, "optimizer", overwritten=True).copy_(value)
