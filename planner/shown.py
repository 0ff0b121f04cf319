"""What error messages say of files: what they are, and their values on one line, and short."""

from __future__ import annotations

import reprlib

MAX_CHARACTERS = 80

PARQUET, GZIP = b"PAR1", b"\x1f\x8b"

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = MAX_CHARACTERS


def shown(value: object) -> str:
    """``repr(value)`` with its middle left out where it is long; numbers of any length too."""
    try:
        text = _repr.repr(value)
    except ValueError:  # a whole number with more digits than Python writes
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else "a value"
    return text if len(text) <= 2 * MAX_CHARACTERS else text[: 2 * MAX_CHARACTERS] + "…"


def what_it_is(content: bytes) -> str:
    """What a file with this content looks like: ``"an empty file"``, ``"JSON"``, …"""
    start = content[:256].lstrip()
    if not content:
        return "an empty file"
    if content.startswith(PARQUET):
        return "a Parquet file, as traces are"
    if content.startswith(GZIP):
        return "a gzip file"
    if start[:1] in (b"{", b"["):
        return "a plan" if b'"moves"' in content else "JSON"
    plain = all(32 <= byte < 127 or byte in b"\t\r\n" for byte in start)
    return "a text file" if plain else "a binary file"
