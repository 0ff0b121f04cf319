"""Pickles of plain data, read without running anything that they name.

Python's unpickler calls what a pickle asks for, and even one that resolves no names may be made to
reserve any amount of memory. This one knows only the instructions that build None, booleans,
numbers, strings, bytes, lists, tuples and dicts with string keys, so time and memory stay in
proportion to the file. It keeps its own stack: no depth of nesting makes it recurse.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ..errors import TraceError
from .json_file import read_at_most

MAX_BYTES = 2 << 30
_U32 = struct.Struct("<I")


def load_plain(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    """The plain object in the pickle at ``path``.

    Raises ``TraceError`` naming the file and, for a pickle that asks for a class or a function, its
    name.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            content = read_at_most(file, max_bytes + 1)
    except FileNotFoundError as error:
        raise TraceError(f"{path}: no such file") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > max_bytes:
        raise TraceError(f"{path}: more than {max_bytes} bytes; record fewer events")
    return _Machine(content, str(path)).run()


class _Machine:
    """Pickle's stack machine, reduced to data."""

    def __init__(self, content: bytes, where: str) -> None:
        self.content = content
        self.where = where
        self.position = 0
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []  # stacks below the open marks
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        content, handlers = self.content, _HANDLERS
        try:
            while (code := content[self.position]) != _STOP:
                self.position += 1
                handler = handlers[code]
                if handler is None:
                    self.refuse_instruction(code)
                handler(self)
            if self.outer or len(self.stack) != 1:
                raise ValueError("it does not end with one object")
            return self.stack[0]
        except (IndexError, KeyError, ValueError, TypeError, struct.error, MemoryError) as error:
            reason = "it is cut off" if self.position >= len(content) else str(error)
            raise TraceError(
                f"{self.where}: not a whole pickle at byte {self.position} ({reason})"
            ) from error

    def refuse_instruction(self, code: int) -> NoReturn:
        name, instruction = None, bytes([code])
        if instruction in (pickle.GLOBAL, pickle.INST):
            lines = self.content[self.position : self.position + 400].split(b"\n", 2)
            name = b".".join(lines[:2]).decode("utf-8", "replace")
        elif instruction == pickle.STACK_GLOBAL:
            name = ".".join(part for part in self.stack[-2:] if isinstance(part, str))
        if name is not None:
            raise TraceError(
                f"{self.where}: the pickle asks for {name[:200]!r} at byte {self.position - 1}; "
                "refused, because only plain lists, dicts, numbers and strings are read"
            )
        raise TraceError(
            f"{self.where}: instruction {instruction!r} at byte {self.position - 1} is refused; "
            "only pickles of plain lists, dicts, numbers and strings are read"
        )

    def take(self, count: int) -> bytes:
        begin = self.position
        if not 0 <= count <= len(self.content) - begin:
            self.position = len(self.content)
            raise ValueError
        self.position = begin + count
        return self.content[begin : begin + count]

    def whole(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def pop_to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.outer.pop()
        return items

    def push_tuple(self, count: int) -> None:
        items = self.stack[-count:]
        if len(items) != count:
            raise ValueError("too few objects for a tuple")
        self.stack[-count:] = [tuple(items)]

    def push_marked_list(self) -> None:
        items = self.pop_to_mark()
        self.stack.append(items)

    def push_marked_tuple(self) -> None:
        items = self.pop_to_mark()
        self.stack.append(tuple(items))

    def put(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def get_short(self) -> None:  # most of a file is this and the next
        self.stack.append(self.memo[self.content[self.position]])
        self.position += 1

    def get_long(self) -> None:
        self.stack.append(self.memo[_U32.unpack_from(self.content, self.position)[0]])
        self.position += 4

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

    def open_mark(self) -> None:
        self.outer.append(self.stack)
        self.stack = []

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.stack = self.outer.pop()

    def check_protocol(self) -> None:
        version = self.whole(1)
        if version > pickle.HIGHEST_PROTOCOL:
            raise ValueError(f"pickle protocol {version} is newer than this Python")


def _text(width: int) -> Callable[[_Machine], None]:
    def push(m: _Machine) -> None:
        m.stack.append(m.take(m.whole(width)).decode("utf-8", "surrogatepass"))

    return push


def _bytes(width: int) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(m.take(m.whole(width)))


def _signed(width: int) -> Callable[[_Machine], None]:
    """An integer of as many bytes as the next ``width`` bytes say."""
    return lambda m: m.stack.append(int.from_bytes(m.take(m.whole(width)), "little", signed=True))


def _constant(value: Any) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(value)


_STOP = pickle.STOP[0]
_INSTRUCTIONS: dict[bytes, Callable[[_Machine], Any]] = {
    pickle.PROTO: _Machine.check_protocol,
    pickle.FRAME: lambda m: m.take(8),
    pickle.MARK: _Machine.open_mark,
    pickle.POP: _Machine.pop,
    pickle.POP_MARK: _Machine.pop_to_mark,
    pickle.DUP: lambda m: m.stack.append(m.stack[-1]),
    pickle.NONE: _constant(None),
    pickle.NEWTRUE: _constant(True),
    pickle.NEWFALSE: _constant(False),
    pickle.BININT: lambda m: m.stack.append(struct.unpack("<i", m.take(4))[0]),
    pickle.BININT1: lambda m: m.stack.append(m.whole(1)),
    pickle.BININT2: lambda m: m.stack.append(m.whole(2)),
    pickle.LONG1: _signed(1),
    pickle.LONG4: _signed(4),
    pickle.BINFLOAT: lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),
    pickle.SHORT_BINUNICODE: _text(1),
    pickle.BINUNICODE: _text(4),
    pickle.BINUNICODE8: _text(8),
    pickle.SHORT_BINBYTES: _bytes(1),
    pickle.BINBYTES: _bytes(4),
    pickle.BINBYTES8: _bytes(8),
    pickle.EMPTY_LIST: lambda m: m.stack.append([]),
    pickle.LIST: _Machine.push_marked_list,
    pickle.APPEND: lambda m: m.extend_list([m.stack.pop()]),
    pickle.APPENDS: lambda m: m.extend_list(m.pop_to_mark()),
    pickle.EMPTY_DICT: lambda m: m.stack.append({}),
    pickle.DICT: lambda m: _new_dict(m, m.pop_to_mark()),
    pickle.SETITEM: lambda m: m.set_items(m.pop_pair()),
    pickle.SETITEMS: lambda m: m.set_items(m.pop_to_mark()),
    pickle.EMPTY_TUPLE: _constant(()),
    pickle.TUPLE1: lambda m: m.push_tuple(1),
    pickle.TUPLE2: lambda m: m.push_tuple(2),
    pickle.TUPLE3: lambda m: m.push_tuple(3),
    pickle.TUPLE: _Machine.push_marked_tuple,
    pickle.BINPUT: lambda m: m.put(m.whole(1)),
    pickle.LONG_BINPUT: lambda m: m.put(m.whole(4)),
    pickle.MEMOIZE: lambda m: m.put(len(m.memo)),
    pickle.BINGET: _Machine.get_short,
    pickle.LONG_BINGET: _Machine.get_long,
}


def _new_dict(machine: _Machine, items: list[Any]) -> None:
    machine.stack.append({})
    machine.set_items(items)


_HANDLERS = [_INSTRUCTIONS.get(bytes([code])) for code in range(256)]
