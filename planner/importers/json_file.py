"""JSON documents from other programs, plain or gzip, as a checked top-level object."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from pathlib import Path
from typing import Any

from ..errors import TraceError

MAX_BYTES = 4 << 30  # unpacked; a small gzip file may unpack to any size


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path`` (gzip is told by its first bytes, not by the name).

    Raises ``TraceError`` naming the file and the reason.
    """
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if packed:
                with gzip.open(file) as unpacked:
                    content = unpacked.read(MAX_BYTES + 1)
            else:
                content = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise TraceError(f"{path}: no such file") from error
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    if len(content) > MAX_BYTES:
        raise TraceError(f"{path}: more than {MAX_BYTES} bytes of JSON; record fewer iterations")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not JSON ({error})") from error
    if not isinstance(document, dict):
        raise TraceError(f"{path}: a JSON {type(document).__name__}, not an object")
    return document


def is_number(value: object) -> bool:
    """A JSON number ≥ 0 that a float holds (``true`` is none)."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and 0 <= value <= sys.float_info.max  # type: ignore[operator]


def is_whole(value: object) -> bool:
    """An integer ≥ 0 that an int64 holds."""
    return not isinstance(value, bool) and isinstance(value, int) and 0 <= value < 1 << 63
