"""What is told when dense memory does not fit: which op asked for it, in which module, beside what.

It is found out on the thread that asked, while the op is still running (``dense_allocator.py``).
"""

from __future__ import annotations

import gc
import linecache
import sys
from types import FrameType
from typing import Any

import torch

from ..planner.sizes import format_bytes

_LARGEST = 3
_OWN = __name__.rpartition(".")[0]


def describe(nbytes: int, blocks: list[tuple[int, int]]) -> str:
    """``blocks``: address and bytes of the largest that are in use. Call it in a callback of the
    allocator, on the thread that runs the op."""
    module = _module(sys._getframe(1))
    where = f" in {module}" if module else ""
    return (
        f"{_op()}{where} asked for {format_bytes(nbytes)} ({nbytes} bytes); the largest dense "
        f"tensors are {_named(blocks)}."
    )


def _op() -> str:
    """The op under way: of backward by autograd's name, else by what was called."""
    node = torch._C._current_autograd_node()
    if node is not None:
        return str(node.name())
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_OWN):
            func = frame.f_locals.get("func")  # an op on pages
            if isinstance(func, torch._ops.OpOverload):
                return str(func)
        else:
            code = frame.f_code
            line = linecache.getline(code.co_filename, frame.f_lineno).strip()
            return f"{code.co_name}() at {line!r}" if line else f"{code.co_name}()"
        frame = frame.f_back
    return "an op"


def _module(frame: FrameType | None) -> str:
    """The innermost module whose code is running."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            return f"{type(owner).__name__}.{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _named(blocks: list[tuple[int, int]]) -> str:
    owners = _owners({address for address, _ in blocks[:_LARGEST]})
    names = [
        f"{format_bytes(nbytes)} ({owners.get(address, 'kept by autograd or by an op')})"
        for address, nbytes in blocks[:_LARGEST]
    ]
    return ", ".join(names) or "all below 64 KiB"


def _owners(addresses: set[int]) -> dict[int, str]:
    """Shape and dtype of a tensor at each of these addresses, of those that Python knows."""
    found: dict[int, str] = {}
    for value in gc.get_objects():
        kind: Any = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if value.layout is not torch.strided or value.device.type != "cpu":
                continue
            address = value.untyped_storage().data_ptr()
            if address in addresses and address not in found:
                found[address] = f"{list(value.shape)}, {value.dtype}"
    return found
