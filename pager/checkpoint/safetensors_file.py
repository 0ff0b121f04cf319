"""Safetensors files, written from pages and mapped (https://huggingface.co/docs/safetensors).

::

    | header's length, 8 bytes, little-endian | header, JSON, padded with spaces | data |

    {"weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …,
     "__metadata__": {"format": "pt"}}

Offsets count from the first byte of the data. Tensors lie there row-major and without gaps, those
of wide dtypes first, so that each is aligned.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...planner.shown import shown
from ..errors import PagerError
from ..tensor.tensor_bytes import Read, chunks
from .file import MappedFile, atomic_file, reserve
from .tree import refuse_odd

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32, "C64": torch.complex64,
    "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
_LONGEST_HEADER = 100_000_000  # the library's own limit
_ALIGNMENT = 8


# -- writing -------------------------------------------------------------------------------------
def save_safetensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    read: Read = chunks,
) -> None:
    """Write ``tensors``, in pages or not, to ``path``. Tied ones are written under each name.
    ``read``: where their bytes come from.

    All or nothing, see ``checkpoint/file.py``. Raises ``OSError``, and ``TypeError`` for what the
    format cannot hold.
    """
    order, header = _header(path, tensors, metadata or {})
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    with atomic_file(path) as file:
        reserve(file, 8 + len(header) + nbytes)
        file.write(len(header).to_bytes(8, "little") + header)
        for name in order:
            for chunk in read(tensors[name], row_major=True):
                file.write(chunk)


def _header(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> tuple[list[str], bytes]:
    """Names in the order of the data, and the header with its padding."""
    for key, value in (*tensors.items(), *metadata.items()):
        if not isinstance(key, str):
            raise TypeError(f"{path}: {key!r} is no name; safetensors files have strings for names")
        if key in metadata and not isinstance(value, str):
            raise TypeError(f"{path}: metadata[{key!r}]={value!r} is not a string; use str() on it")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{path}: {name!r} is {type(tensor).__name__}; safetensors files hold tensors "
                "only, flat by their names; save to a '.pt' file"
            )
        refuse_odd(tensor, f"{path}: {name!r}")
        if tensor.dtype not in _NAMES:
            raise TypeError(
                f"{path}: safetensors files cannot hold the {tensor.dtype} of {name!r}; save to a "
                "'.pt' file"
            )
    if _METADATA in tensors:
        raise TypeError(f"{path}: no tensor can be called {_METADATA!r}; rename it")
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    content: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        content[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.size()),
            "data_offsets": [offset, end],
        }
        offset = end
    header = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    if len(header) > _LONGEST_HEADER:
        raise TypeError(f"{path}: names and metadata take {len(header)} bytes, over 100 MB")
    return order, header + b" " * (-len(header) % _ALIGNMENT)


# -- reading -------------------------------------------------------------------------------------
def map_safetensors(
    path: Path,
) -> tuple[dict[str, torch.Tensor], dict[str, str], MappedFile]:
    """Tensors over a map of ``path``, the metadata, and the map.

    Raises ``OSError``, and ``PagerError`` for what is not such a file, naming what is wrong in it.
    """
    mapped = MappedFile.open(path)
    start, content = _read_header(mapped)
    metadata = content.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _broken(path, f"{_METADATA} must be an object of strings")
    spans = {name: _check_entry(path, name, entry) for name, entry in content.items()}
    _check_cover(path, spans, mapped.size - start)
    tensors = {}
    for name, (dtype, shape, begin, _) in spans.items():
        flat = mapped.tensor(start + begin, math.prod(shape), dtype)
        try:
            tensors[name] = flat.view(shape)
        except (RuntimeError, OverflowError):  # of no elements, and numbers beyond 64 bits
            raise _broken(path, f"{shown(name)} has the impossible shape {shown(shape)}") from None
    return tensors, metadata, mapped


def _read_header(mapped: MappedFile) -> tuple[int, dict[str, Any]]:
    """Where the data starts, and the header."""
    path = mapped.what
    length = int.from_bytes(mapped.bytes(0, 8), "little")
    if length > _LONGEST_HEADER:
        raise _broken(path, f"its header would have {length} bytes")
    text = mapped.bytes(8, length)
    try:
        content = json.loads(text.decode(), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise _broken(path, "its header is no object")
    return 8 + length, content


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name is there twice")
    return content


_Span = tuple[torch.dtype, list[int], int, int]


def _check_entry(path: Path, name: str, entry: Any) -> _Span:
    """Its dtype, shape, first and end byte."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _broken(path, f"{shown(name)} lacks dtype, shape or data_offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise _broken(
            path, f"{shown(name)} has dtype {shown(entry['dtype'])}, which is not known here"
        )
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise _broken(
            path, f"{shown(name)} has shape {shown(shape)} and data_offsets {shown(offsets)}"
        )
    begin, end = offsets
    nbytes = math.prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        what = f"{shown(name)}, {entry['dtype']} of shape {shown(shape)}"
        raise _broken(path, f"{what}, takes {shown(nbytes)} bytes and has {end - begin}")
    return dtype, shape, begin, end


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _check_cover(path: Path, spans: Mapping[str, _Span], nbytes: int) -> None:
    """Tensors lie one after another and fill the file."""
    borders = sorted(((begin, end, name) for name, (_, _, begin, end) in spans.items()))
    ends = [0, *(end for _, end, _ in borders)]
    for expected, (begin, _, name) in zip(ends, borders):
        if begin != expected:
            raise _broken(
                path, f"{shown(name)} begins at byte {begin} of the data, not at {expected}"
            )
    if ends[-1] != nbytes:
        raise _broken(path, f"its header describes {ends[-1]} bytes of data, and it has {nbytes}")


def _broken(path: str | os.PathLike[str], why: str) -> PagerError:
    return PagerError(f"{os.fspath(path)} is not a whole safetensors file: {why}; get it again")
