"""Optimizer states in less memory: fp32, bf16, or 8 bits with a scale for each block.

What ``optimizer.state[parameter]`` has, and so ``state_dict()``:

=====================  =============================================================
``exp_avg`` etc.       a tensor like the parameter, in its dtype, float32 or bfloat16
``exp_avg_codes``      in 8 bits: uint8, a code for each element
``exp_avg_scales``     and float32 [blocks]: a scale for each 256 elements
``master``             float32, of a parameter in bfloat16 or float16
=====================  =============================================================
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...kernels.blockwise import BLOCK
from ...kernels.pieces import stretches
from ...kernels.quantize import dequantize, quantize
from ...kernels.update import CHUNK
from ..tensor.new_pages import copy_in
from ..tensor.operands import Coded, Value, has_no_gaps, same_order, spans
from ..tensor.paged_tensor import PagedTensor, blank

if TYPE_CHECKING:
    from ..core import Core

STATE_THRESHOLD_BYTES = 512  # what is smaller, as step counters are, stays dense
SMALL = 4096  # a parameter of fewer elements keeps its states in fp32
MASTER = "master"
_ROOTS = {  # keys of torch.optim, and whether the 8-bit code is that of the square root
    "exp_avg": False,
    "exp_avg_sq": True,
    "max_exp_avg_sq": True,
    "momentum_buffer": False,
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
_RANDOM = (torch.bfloat16, torch.uint8)
_HALVES = (torch.bfloat16, torch.float16)
OURS = {MASTER, *(key + end for key in _ROOTS for end in ("", "_codes", "_scales"))}


class Format(NamedTuple):
    """How one optimizer keeps states. ``states``: "fp32", "bf16", "8bit", or ``None`` as torch
    does. ``masters``: parameters in 16 bits have a float32 copy, which is what is updated."""

    states: str | None = None
    masters: bool = False

    @property
    def chosen(self) -> bool:
        """Not what torch does itself."""
        return self.states is not None or self.masters

    @property
    def asked(self) -> str:
        """In words of ``Pager.optimizer``."""
        states = [f"states={self.states!r}"] * (self.states is not None)
        return ", ".join([*states, *["master_weights=True"] * self.masters])

    def dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """Of the states of ``parameter``; uint8 means 8 bits with scales."""
        if parameter.dtype is torch.float64 or not self.chosen:
            return parameter.dtype
        if self.states in (None, "fp32") or parameter.numel() < SMALL:
            return torch.float32
        return _DTYPES[self.states]

    def rounds_at_random(self, parameter: torch.Tensor) -> bool:
        """Its states, so that small changes count."""
        return self.states in ("bf16", "8bit") and self.dtype(parameter) in _RANDOM

    def has_master(self, parameter: torch.Tensor) -> bool:
        return self.masters and parameter.dtype in _HALVES


def check_format(kind: type, supported: tuple[type, ...], chosen: Format) -> None:
    """Raise unless an optimizer of class ``kind`` can keep states so."""
    if chosen.states is not None and chosen.states not in _DTYPES:
        raise ValueError(f"states={chosen.states!r}; choose one of {', '.join(_DTYPES)}, or None")
    if chosen.chosen and kind not in supported:
        names = ", ".join(cls.__name__ for cls in supported)
        raise TypeError(
            f"{chosen.asked} is for torch.optim's {names} themselves, not for {kind.__name__}; use "
            "one of these, or leave it out: then the states are as the optimizer makes them"
        )


# -- values in a state ---------------------------------------------------------------------------
def read(state: dict[str, Any], key: str) -> Value | None:
    """State ``key``, in 8 bits or not, if it is there."""
    codes = state.get(f"{key}_codes")
    return state.get(key) if codes is None else Coded(codes, state[f"{key}_scales"])


def entry(key: str, value: Value) -> dict[str, torch.Tensor]:
    """What a state dict has for it."""
    if isinstance(value, Coded):
        return {f"{key}_codes": value.codes, f"{key}_scales": value.scales}
    return {key: value}


def geometry(like: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Meta tensors of what a state of ``dtype`` takes for a parameter: with uint8 two."""
    shape = torch.empty_strided(like.size(), like.stride(), dtype=dtype, device="meta")
    if dtype is not torch.uint8:
        return [shape]
    blocks = -(-like.numel() // BLOCK)
    return [shape, torch.empty(blocks, dtype=torch.float32, device="meta")]


def is_big_dense(value: Any) -> bool:
    """What goes into pages as a state."""
    return _is_plain(value) and not stays_dense(value)


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided


def stays_dense(shape: torch.Tensor) -> bool:
    return shape.numel() * shape.element_size() < STATE_THRESHOLD_BYTES


def new_value(pager: Core | None, like: torch.Tensor, dtype: torch.dtype) -> Value:
    """For a parameter like ``like``; the caller writes all of its values. In pages unless they are
    few; all dense without a pager."""
    made = [
        torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype, device=like.device)
        if pager is None or stays_dense(shape)
        else blank(pager, shape, "optimizer")
        for shape in geometry(like, dtype)
    ]
    return Coded(made[0], made[1]) if dtype is torch.uint8 else made[0]


def zeros(pager: Core | None, like: torch.Tensor, dtype: torch.dtype) -> Value:
    """Zeros; in 8 bits these are zero bytes too."""
    value = new_value(pager, like, dtype)
    for tensor in value if isinstance(value, Coded) else (value,):
        tensor.zero_()
    return value


def converted(
    pager: Core, source: Value, like: torch.Tensor, dtype: torch.dtype, *, key: str, dense: bool
) -> Value:
    """A copy of ``source`` as a state ``key`` of ``like``, rounded to the nearest."""
    target = new_value(None if dense else pager, like, dtype)
    if isinstance(source, Coded):
        source = Coded(*(_there(pager, tensor, like) for tensor in source))
        if not same_order(source.codes, like):
            raise ValueError(
                f"{key}_codes has stride {source.codes.stride()} and its parameter "
                f"{like.stride()}; blocks follow the order in memory, so load it into a parameter "
                "of the same memory format"
            )
        if isinstance(target, Coded):
            target.codes.copy_(source.codes)
            target.scales.copy_(source.scales)
            return target
        if dtype is torch.float64:
            plain = converted(pager, source, like, torch.float32, key=key, dense=dense)
            return target.copy_(plain)  # type: ignore[arg-type]
    else:
        source = _there(pager, source, like)
        if not isinstance(target, Coded):
            return target.copy_(source)
        if source.dtype is torch.float64 or not same_order(source, like) or not has_no_gaps(source):
            single = new_value(None if dense else pager, like, torch.float32)
            source = single.copy_(source)  # type: ignore[union-attr]
    change: Any = dequantize if isinstance(source, Coded) else quantize
    with closing(spans(pager, [source, target], [False, True])) as walk:  # type: ignore[type-var]
        for span in walk:
            from_, to = span.operands
            change([from_], [to], root=_ROOTS.get(key, False))
    return target


def _there(pager: Core, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """In pages of this pager, or dense on the parameter's device."""
    tensor = tensor.detach()
    if type(tensor) is PagedTensor:
        return tensor if tensor._storage.pager is pager else tensor.to_dense()
    return tensor.to(like.device)


def follow(pager: Core, master: torch.Tensor, parameter: torch.Tensor) -> None:
    """Where ``parameter`` is not ``master`` rounded, somebody has written to it: the master takes
    its value over."""
    with closing(spans(pager, [master, parameter], [True, False])) as walk:  # type: ignore[type-var]
        for span in walk:
            for kept, seen in stretches(span.operands):  # type: ignore[arg-type]
                for wide, narrow in zip(kept.split(CHUNK), seen.split(CHUNK)):
                    same = wide.to(narrow.dtype) == narrow
                    wide.copy_(torch.where(same, wide, narrow.to(wide.dtype)))


def convert_state(
    pager: Core, saved: dict[str, Any], like: torch.Tensor, chosen: Format, *, dense: bool = False
) -> dict[str, Any]:
    """What ``saved`` holds of one parameter as ``chosen`` wants it; other keys as they are.

    A master that is not wanted is dropped, one that is missing is made by the next step.
    """
    state = {key: value for key, value in saved.items() if key not in OURS}
    for key in _ROOTS:
        value = read(saved, key)
        if value is not None:
            kept = converted(pager, value, like, chosen.dtype(like), key=key, dense=dense)
            state |= entry(key, kept)
    if saved.get(MASTER) is not None and chosen.has_master(like):
        kept = converted(pager, saved[MASTER], like, torch.float32, key=MASTER, dense=dense)
        state |= entry(MASTER, kept)
    return state


def is_special(state: Any) -> bool:
    """Whether plain torch could not use the state of a parameter."""
    if not isinstance(state, dict):
        return False
    return MASTER in state or any(f"{key}_codes" in state for key in _ROOTS)


def page_state(pager: Core, state: dict[str, Any], *, small: bool = False) -> None:
    """Dense tensors of one parameter's state move into pages. ``small``: of any size, but for
    single numbers. A metered iteration that leaves the step out does not see what it makes."""
    for key, value in state.items():
        its = is_big_dense(value) or (small and _is_plain(value) and value.numel() > 1)
        if its and value.device.type == pager.device.type:
            state[key] = copy_in(pager, value.detach(), "optimizer")
