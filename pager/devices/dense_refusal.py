"""What is told when dense memory does not fit: which op asked for it, in which module, beside what.

It is found out on the thread that asked, while the op is still running (``dense_allocator.py``).
Where an iteration is metered nobody is refused until it is known whether the budget is enough. By
then the ops are over, so each large block is noted with the place where it is made. A place holds
code, not frames, and never looks at local variables: both would keep tensors alive.
"""

from __future__ import annotations

import gc
import linecache
import sys
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from ...planner.sizes import format_bytes

_OWN = __name__.rpartition(".devices.")[0]
_CALLS = torch._ops.__name__  # through which an op is called by its name


class Place(NamedTuple):
    """Where a block is made: the node of backward, or the line that called the op; and the code of
    the innermost module around it."""

    node: str
    code: CodeType | None
    line: int
    module: CodeType | None

    def __str__(self) -> str:
        if self.code is None:
            return self.node or "an op"
        where = self.code.co_qualname.rpartition("<locals>.")[2]
        text = linecache.getline(self.code.co_filename, self.line).strip()
        called = f"{where}() at {text!r}" if text else f"{where}()"
        if self.module is None or self.module is self.code:
            return called
        return f"{called} in {self.module.co_qualname.rpartition('<locals>.')[2]}()"


class Block(NamedTuple):
    """``address``: 0 if it is gone or small. ``place``: where it was made, if it is large."""

    nbytes: int
    address: int
    place: Place | None


class Peak(NamedTuple):
    """Of dense bytes. ``place``: what took the last of them. ``blocks``: the largest that were
    there."""

    nbytes: int
    place: Place | None
    blocks: list[Block]

    def __str__(self) -> str:
        owners = _owners({block.address for block in self.blocks if block.address})
        names = []
        for block in self.blocks:
            made = "" if block.place is None else f"made by {block.place}"
            who = owners.get(block.address, made)
            names.append(
                f"{format_bytes(block.nbytes)} ({who})" if who else f"{block.nbytes} bytes"
            )
        last = f"when {self.place} had what it takes" if self.place is not None else "at the peak"
        return (
            f"Dense memory was at its peak of {format_bytes(self.nbytes)} {last}; the largest "
            f"dense tensors were {', '.join(names)}."
        )


def place() -> Place:
    """Where this thread is. Call it in a callback of the allocator."""
    node = torch._C._current_autograd_node()
    name = "" if node is None else str(node.name())
    code, line = None, 0
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_OWN):
            if code is None and not name and frame.f_globals.get("__name__") != _CALLS:
                code, line = frame.f_code, frame.f_lineno
            if frame.f_code.co_name == "forward" and frame.f_code.co_varnames[:1] == ("self",):
                return Place(name, code, line, frame.f_code)
        frame = frame.f_back
    return Place(name, code, line, None)


def describe(nbytes: int, blocks: list[tuple[int, int]]) -> str:
    """What a cap refuses. ``blocks``: address and bytes of the largest that are in use. Call it in
    a callback of the allocator, on the thread that runs the op."""
    owners = _owners({address for address, _ in blocks})
    names = [
        f"{format_bytes(size)} ({owners.get(address, 'kept by autograd or by an op')})"
        for address, size in blocks
    ]
    return (
        f"{place()} asked for {format_bytes(nbytes)} ({nbytes} bytes); the largest dense tensors "
        f"are {', '.join(names) or 'all below 64 KiB'}."
    )


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
