"""Values from files as error messages show them: on one line, and short."""

from __future__ import annotations

import reprlib

MAX_CHARACTERS = 80

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = MAX_CHARACTERS


def shown(value: object) -> str:
    """``repr(value)`` with its middle left out where it is long; numbers of any length too."""
    try:
        text = _repr.repr(value)
    except ValueError:  # a whole number with more digits than Python writes
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else "a value"
    return text if len(text) <= 2 * MAX_CHARACTERS else text[: 2 * MAX_CHARACTERS] + "…"
