"""JSON documents from other programs, plain or gzip, as a checked top-level object."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import IO, Any

from ..errors import TraceError
from ..files import reading
from ..shown import what_it_is
from ..trace_check import MAX_US

MAX_BYTES = 4 << 30  # unpacked; a small gzip file may unpack to any size
_PIECE_BYTES = 1 << 20


def read_json_object(path: Path, wanted: str) -> dict[str, Any]:
    """The JSON object in ``path`` (gzip is told by its first bytes, not by the name).

    Raises ``TraceError`` naming the file and the reason, and that ``wanted`` is meant.
    """
    with reading(path, TraceError, "recording"), path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        with gzip.open(file) if packed else file as unpacked:
            content = read_at_most(unpacked, MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise TraceError(f"{path}: more than {MAX_BYTES} bytes of JSON; record fewer iterations")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        if content.lstrip()[:1] in (b"{", b"["):
            raise TraceError(f"{path}: not whole JSON ({error}); record it again") from error
        raise TraceError(f"{path}: {what_it_is(content)}, not JSON; give {wanted}") from error
    if not isinstance(document, dict):
        raise TraceError(f"{path}: a JSON {type(document).__name__}, not an object; give {wanted}")
    return document


def read_at_most(file: IO[bytes] | gzip.GzipFile, most: int) -> bytes:
    """All of ``file``, or its first ``most`` bytes. ``file.read(most)`` would reserve as much, for
    a file of a kilobyte too."""
    content = bytearray()
    while len(content) < most and (
        piece := file.read(min(max(len(content), _PIECE_BYTES), most - len(content)))
    ):
        content += piece
    return bytes(content)


def is_number(value: object) -> bool:
    """A JSON number from 0 to ``MAX_US`` (``true`` is none)."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and 0 <= value <= MAX_US  # type: ignore[operator]


def is_whole(value: object) -> bool:
    """An integer ≥ 0 that an int64 holds."""
    return not isinstance(value, bool) and isinstance(value, int) and 0 <= value < 1 << 63
