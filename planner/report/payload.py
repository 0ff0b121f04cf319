"""The report's data as one string that any HTML file can hold.

A JSON header and binary columns, compressed and in base64: of the names that a trace brings along
nothing is left that a browser could take for markup. ``web/payload.js`` reads it.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

TYPES = ("u1", "u4", "i4", "f8")  # what web/payload.js knows
ALIGNMENT = 8


def encode(header: Mapping[str, Any], columns: Mapping[str, npt.NDArray[Any]]) -> str:
    """``columns`` are one-dimensional, of one of ``TYPES``. Equal data give equal strings.

    Layout, before compression: length of the JSON as little-endian u32, the JSON (its ``columns``
    say name, type, offset and length), then the columns, each at a multiple of 8 bytes from the
    end of the JSON, which is filled up with blanks so that it too ends at one.
    """
    table, parts, offset = [], [], 0
    for name, column in columns.items():
        kind = column.dtype.str.lstrip("<|")
        assert kind in TYPES, (name, column.dtype)
        assert column.ndim == 1, (name, column.shape)
        content = column.astype(column.dtype.newbyteorder("<")).tobytes()
        table.append([name, kind, offset, len(column)])
        padding = -len(content) % ALIGNMENT
        parts += [content, bytes(padding)]
        offset += len(content) + padding
    text = json.dumps({**header, "columns": table}, allow_nan=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 4) % ALIGNMENT)
    whole = b"".join([struct.pack("<I", len(text)), text, *parts])
    return base64.b64encode(zlib.compress(whole, 6)).decode()


def decode(payload: str) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """What :func:`encode` was given."""
    whole = zlib.decompress(base64.b64decode(payload))
    (length,) = struct.unpack_from("<I", whole)
    header = json.loads(whole[4 : 4 + length])
    columns = {
        name: np.frombuffer(whole, f"<{kind}", count, 4 + length + offset)
        for name, kind, offset, count in header.pop("columns")
    }
    return header, columns
