"""Optimizer states that are loaded become pages one at a time.

``Optimizer.load_state_dict`` casts and moves all states before anything else is done with them: of
a model in pages, more memory than there is. Here it never sees the large ones. They wait where
they are saved (mapped from a file, say), and each goes straight into pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..tensor.new_pages import empty_like_geometry
from ..tensor.sharded import is_sharded, local_state
from .fused_states import is_big_dense, is_special
from .load_hooks import around_load


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    loaded: Callable[[], None] = lambda: None,
) -> None:
    """``optimizer.load_state_dict(state)`` with one dense state at a time; the optimizer may be
    paged or not. None of the tensors of ``state`` is taken over. ``loaded``: called after each.

    States of sharded parameters may be sharded or whole (see ``sharded.py``)."""
    if not any(is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
        state = local_state(optimizer, state)  # else its own load_state_dict does so
    with one_at_a_time(optimizer, loaded), torch.no_grad():
        optimizer.load_state_dict(state)


@contextmanager
def one_at_a_time(optimizer: Any, loaded: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside, ``load_state_dict`` of ``optimizer`` works so. States that ``fused_states.loading``
    keeps apart (in 8 bits, with masters, …) are left to it: it takes them one at a time too."""
    kept: dict[int, dict[str, torch.Tensor]] = {}  # by the position of the parameter
    groups: list[dict[str, Any]] = []

    def before(self: Any, given: dict[str, Any]) -> dict[str, Any] | None:
        states = given["state"]
        chosen = getattr(self, "_tp_format", None)
        if (chosen is not None and chosen.chosen) or any(map(is_special, states.values())):
            return None
        groups.extend(given["param_groups"])
        ids = list(itertools.chain.from_iterable(group["params"] for group in groups))
        rest = dict(states)
        for position, key in enumerate(ids):
            state = states.get(key)
            if isinstance(state, dict):
                kept[position] = {n: v for n, v in state.items() if is_big_dense(v)}
                rest[key] = {n: v for n, v in state.items() if n not in kept[position]}
        return {**given, "state": rest}

    def after(self: Any) -> None:
        parameters = itertools.chain.from_iterable(g["params"] for g in self.param_groups)
        pager = getattr(self, "_tp_pager", None)
        ids = itertools.chain.from_iterable(group["params"] for group in groups)
        for position, (parameter, key) in enumerate(zip(parameters, ids)):
            for name, value in kept.pop(position, {}).items():
                self.state[parameter][name] = _own(pager, parameter, value, key, groups, name)
                loaded()

    with around_load(optimizer, before, after):
        yield


def _own(
    pager: Any,
    parameter: torch.Tensor,
    value: torch.Tensor,
    key: int,
    groups: list[dict[str, Any]],
    name: str,
) -> torch.Tensor:
    """A state with this value: in pages, or a dense copy. PyTorch says of which dtype."""
    cast = torch.optim.Optimizer._process_value_according_to_param_policy
    if pager is None:
        made = cast(parameter, value, key, groups, name)
        return made.clone() if made is value else made
    like = torch.empty(0, dtype=parameter.dtype)
    wanted = cast(like, torch.empty(0, dtype=value.dtype), key, groups, name).dtype
    shape = torch.empty_strided(value.size(), value.stride(), dtype=wanted, device="meta")
    if not torch.ops.aten.is_non_overlapping_and_dense(value):
        shape = torch.empty(value.size(), dtype=wanted, device="meta")
    paged: torch.Tensor = empty_like_geometry(pager, shape, "optimizer", overwritten=True)
    return paged.copy_(value)
