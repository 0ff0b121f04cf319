"""Pickles of plain data, read without running anything that they name.

Python's unpickler calls what a pickle asks for, and even one that resolves no names may be made to
reserve any amount of memory. Here it follows only those instructions that build None, booleans,
numbers, strings, bytes, lists, tuples and dicts with string keys, and reads no more than there is.
So time and memory stay in proportion to the file, and no depth of nesting recurses. (It is the one
of Python's two that is written in Python: the other one's memo is as long as a file says.)
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import TraceError
from ..files import reading
from ..shown import what_it_is
from .json_file import read_at_most

MAX_BYTES = 2 << 30
_ALL = pickle._Unpickler.dispatch
_PLAIN = (
    "PROTO STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 "
    "BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 EMPTY_LIST "
    "LIST APPEND APPENDS EMPTY_DICT EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE BINPUT LONG_BINPUT "
    "MEMOIZE BINGET LONG_BINGET"
)


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
    whole = io.BytesIO(content)
    machine = _Unpickler(whole)
    try:
        found = machine.load()
        if machine.stack or machine.metastack:
            raise ValueError("it does not end with one object")
        return found
    except KeyError as error:
        if error.args[0] in _ALL:
            raise TraceError(f"{path}: {machine.refusal(error.args[0], whole)}") from error
        reason = "there is no such instruction"
    except (EOFError, struct.error):  # whoever got less than asked for has nothing to go on with
        reason = "it is cut off"
    except (pickle.UnpicklingError, IndexError, AttributeError, ValueError, TypeError) as error:
        reason = str(error)
    if content[:1] != pickle.PROTO:
        raise TraceError(f"{path}: {what_it_is(content)}, no pickle; give {wanted}")
    raise TraceError(f"{path}: not a whole pickle; read to byte {whole.tell()} ({reason})")


def _with_string_keys(name: str, keys: slice) -> Callable[[Any], None]:
    """The instruction, if ``keys`` on the stack are strings: numbers can be chosen to collide, and
    a nested tuple to take for ever to hash."""

    def follow(machine: Any) -> None:
        for key in machine.stack[keys]:
            if not isinstance(key, str):
                raise ValueError(f"a dict key of type {type(key).__name__}; keys are strings")
        _ALL[getattr(pickle, name)[0]](machine)

    return follow


class _Unpickler(pickle._Unpickler):
    """Raises ``KeyError`` with the code of an instruction that it does not follow."""

    stack: list[Any]
    metastack: list[list[Any]]
    dispatch = {
        **{code: _ALL[code] for code in (getattr(pickle, name)[0] for name in _PLAIN.split())},
        pickle.FRAME[0]: lambda machine: machine.read(8),  # type: ignore[attr-defined]
        pickle.DICT[0]: _with_string_keys("DICT", slice(0, None, 2)),
        pickle.SETITEMS[0]: _with_string_keys("SETITEMS", slice(0, None, 2)),
        pickle.SETITEM[0]: _with_string_keys("SETITEM", slice(-2, -1)),
    }

    def refusal(self, code: int, file: io.BytesIO) -> str:
        """What is said of the instruction ``code``, the last byte that was read of ``file``."""
        at, instruction = file.tell() - 1, bytes([code])
        if instruction in (pickle.GLOBAL, pickle.INST):
            name = b".".join(file.readline().strip() for _ in range(2)).decode("utf-8", "replace")
        elif instruction == pickle.STACK_GLOBAL:
            name = ".".join(part for part in self.stack[-2:] if isinstance(part, str))
        else:
            return (
                f"instruction {instruction!r} at byte {at} is refused; only pickles of plain "
                "lists, dicts, numbers and strings are read"
            )
        return (
            f"the pickle asks for {name[:200]!r} at byte {at}; refused, because only plain lists, "
            "dicts, numbers and strings are read"
        )
