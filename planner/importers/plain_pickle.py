"""Pickles of plain data, read without running anything that they name.

Python's unpickler calls what a pickle asks for, and even one that resolves no names may be made to
reserve any amount of memory. Here ``pickletools`` only takes the file apart; of the instructions
those are followed that build None, booleans, numbers, strings, bytes, lists, tuples and dicts with
string keys. So time and memory stay in proportion to the file, and no depth of nesting recurses.
"""

from __future__ import annotations

import pickle
import pickletools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import TraceError
from ..files import reading
from ..shown import what_it_is
from .json_file import read_at_most

MAX_BYTES = 2 << 30
_LONGEST = 80  # characters of what Python says of a damaged file
_CUT_OFF = (
    "exhausted",
    "remain",
    "not enough data",
    "no newline",
    "maxsize",
)  # in what pickletools says


def load_plain(path: Path, wanted: str = "one of plain data", max_bytes: int = MAX_BYTES) -> Any:
    """The plain object in the pickle at ``path``.

    Raises ``TraceError`` naming the file and, for a pickle that asks for a class or a function, its
    name; of a file of another kind, that ``wanted`` is meant.
    """
    path = Path(path)
    with reading(path, TraceError, "recording"), path.open("rb") as file:
        content = read_at_most(file, max_bytes + 1)
    if len(content) > max_bytes:
        raise TraceError(f"{path}: more than {max_bytes} bytes; record fewer events")
    at = 0
    machine = _Machine()
    try:
        with warnings.catch_warnings():
            # Of damaged strings; what pickletools reads from them is only data.
            warnings.simplefilter("ignore", DeprecationWarning)
            for opcode, argument, position in pickletools.genops(content):
                at = position or 0
                if opcode.name == "STOP":
                    if machine.outer or len(machine.stack) != 1:
                        raise ValueError("it does not end with one object")
                    break
                follow = _INSTRUCTIONS.get(opcode.name)
                if follow is None:
                    raise TraceError(f"{path}: {machine.refusal(opcode, argument, at)}")
                follow(machine, argument)
        return machine.stack[0]
    except (IndexError, KeyError, ValueError, TypeError, MemoryError) as error:
        if content[:1] != pickle.PROTO:
            raise TraceError(f"{path}: {what_it_is(content)}, no pickle; give {wanted}") from error
        reason = str(error)  # may quote all of a damaged file
        if any(word in reason for word in _CUT_OFF):
            reason = "it is cut off"
        elif len(reason) > _LONGEST:
            reason = reason[:_LONGEST] + "…"
        raise TraceError(f"{path}: not a whole pickle at byte {at} ({reason})") from error


class _Machine:
    """Pickle's stack machine, reduced to data."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []  # stacks below the open marks
        self.memo: dict[int, Any] = {}

    def refusal(self, opcode: pickletools.OpcodeInfo, argument: Any, at: int) -> str:
        name = str(argument).replace(" ", ".") if opcode.name in ("GLOBAL", "INST") else None
        if opcode.name == "STACK_GLOBAL":
            name = ".".join(part for part in self.stack[-2:] if isinstance(part, str))
        if name is None:
            return (
                f"instruction {opcode.code.encode('latin-1')!r} at byte {at} is refused; only "
                "pickles of plain lists, dicts, numbers and strings are read"
            )
        return (
            f"the pickle asks for {name[:200]!r} at byte {at}; refused, because only plain lists, "
            "dicts, numbers and strings are read"
        )

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop_to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.outer.pop()
        return items

    def push_marked(self, kind: Callable[[list[Any]], Any]) -> None:
        items = self.pop_to_mark()
        self.push(kind(items))

    def push_tuple(self, count: int) -> None:
        items = self.stack[-count:]
        if len(items) != count:
            raise ValueError("too few objects for a tuple")
        self.stack[-count:] = [tuple(items)]

    def extend_list(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError("items for something that is not a list")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError("keys for something that is not a dict")
        for key in items[::2]:
            # Numbers can be chosen to collide, and a nested tuple to take for ever to hash.
            if not isinstance(key, str):
                raise ValueError(f"a dict key of type {type(key).__name__}; keys are strings")
        target.update(zip(items[::2], items[1::2]))

    def pop_pair(self) -> list[Any]:
        value = self.stack.pop()
        return [self.stack.pop(), value]

    def new_dict(self) -> None:
        items = self.pop_to_mark()
        self.push({})
        self.set_items(items)

    def open_mark(self) -> None:
        self.outer.append(self.stack)
        self.stack = []

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.stack = self.outer.pop()

    def put(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def check_protocol(self, version: int) -> None:
        if version > pickle.HIGHEST_PROTOCOL:
            raise ValueError(f"pickle protocol {version} is newer than this Python")


_PUSHED = (  # whose argument is the value
    "BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 "
    "SHORT_BINBYTES BINBYTES BINBYTES8"
)
_INSTRUCTIONS: dict[str, Callable[[_Machine, Any], Any]] = {
    **dict.fromkeys(_PUSHED.split(), _Machine.push),
    "PROTO": _Machine.check_protocol,
    "FRAME": lambda m, _: None,
    "MARK": lambda m, _: m.open_mark(),
    "POP": lambda m, _: m.pop(),
    "POP_MARK": lambda m, _: m.pop_to_mark(),
    "DUP": lambda m, _: m.push(m.stack[-1]),
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "LIST": lambda m, _: m.push_marked(list),
    "APPEND": lambda m, _: m.extend_list([m.stack.pop()]),
    "APPENDS": lambda m, _: m.extend_list(m.pop_to_mark()),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "DICT": lambda m, _: m.new_dict(),
    "SETITEM": lambda m, _: m.set_items(m.pop_pair()),
    "SETITEMS": lambda m, _: m.set_items(m.pop_to_mark()),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "TUPLE1": lambda m, _: m.push_tuple(1),
    "TUPLE2": lambda m, _: m.push_tuple(2),
    "TUPLE3": lambda m, _: m.push_tuple(3),
    "TUPLE": lambda m, _: m.push_marked(tuple),
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": lambda m, _: m.put(len(m.memo)),
    "BINGET": lambda m, key: m.push(m.memo[key]),
    "LONG_BINGET": lambda m, key: m.push(m.memo[key]),
}
