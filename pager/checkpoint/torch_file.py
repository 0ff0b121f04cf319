"""PyTorch's own files, written and mapped without their tensors in memory.

Written: ``torch.save`` lays out a file with holes in place of tensor data, then the bytes of one
tensor after another go into their holes, a slab at a time. It is an ordinary file of
``torch.save``, with the check sums of its zip container.

Read: ``torch.load(weights_only=True)``, so that nothing in the file is run, gives tensors without
data that know where in the file it is; these become tensors over a map of the file.
"""

from __future__ import annotations

import os
import pickle
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...planner.shown import what_it_is
from ..errors import PagerError
from ..tensor.tensor_bytes import Read, chunks
from .file import MappedFile, atomic_file, reserve
from .tree import layout_of, refuse_odd, tensors_of, with_tensors


def save_torch(path: Path, content: Any, read: Read = chunks) -> None:
    """Write nested dicts, lists, tensors and plain values, in pages or not, to ``path``.

    ``read``: where the bytes of its tensors come from. All or nothing, see ``checkpoint/file.py``.
    Raises ``OSError``, and ``TypeError`` for what ``torch.load(weights_only=True)`` would refuse to
    read.
    """
    for tensor in tensors_of(content):
        refuse_odd(tensor, os.fspath(path))
    with atomic_file(path) as file:
        write_torch(file, content, path, read)


def write_torch(file: Any, content: Any, path: Path, read: Read) -> None:
    """:func:`save_torch` into a file that is open; of ``content`` that may be so saved."""
    mode = FakeTensorMode()

    def hole(tensor: torch.Tensor) -> torch.Tensor:
        shape = layout_of(tensor)
        with mode:
            return torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)

    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(with_tensors(content, hole), file)
    file.flush()
    reserve(file, os.fstat(file.fileno()).st_size)
    file.seek(0)
    try:
        with mode:
            layout = torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).split("\n") if "GLOBAL" in line), str(error))
        raise TypeError(
            f"{path}: only tensors, numbers, strings, None, and lists, tuples and dicts of these "
            f"can be saved, so that loading runs no code ({' '.join(reason.split())})"
        ) from None
    sums: dict[int, int] = {}
    for place, tensor in zip(tensors_of(layout), tensors_of(content), strict=True):
        offset = place.untyped_storage()._checkpoint_offset
        if not tensor.numel() or offset in sums:
            continue
        assert offset is not None
        file.seek(offset)
        total = 0
        for chunk in read(tensor):
            file.write(chunk)
            total = zlib.crc32(chunk, total)
        sums[offset] = total
    file.flush()
    _set_sums(file, sums)


def _set_sums(file: Any, sums: dict[int, int]) -> None:
    """Put the check sums of records, by their offsets, where the container says the holes' own.

    A zip file has it in the central directory (16 bytes into an entry that starts ``PK 1 2``), and
    before the data, or in a descriptor (``PK 7 8``) right after it.
    """
    with zipfile.ZipFile(file) as container:
        entries = container.infolist()
        position = container.start_dir
    for entry in entries:
        file.seek(entry.header_offset)
        header = file.read(30)
        name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        data = entry.header_offset + 30 + name + extra
        file.seek(position)
        central = file.read(46)
        assert central[:4] == b"PK\x01\x02"
        lengths = (int.from_bytes(central[at : at + 2], "little") for at in (28, 30, 32))
        if data in sums and entry.file_size:
            value = sums[data].to_bytes(4, "little")
            _put(file, position + 16, value)
            if entry.flag_bits & 8:
                file.seek(data + entry.file_size)
                if file.read(4) == b"PK\x07\x08":
                    _put(file, data + entry.file_size + 4, value)
            else:
                _put(file, entry.header_offset + 14, value)
        position += 46 + sum(lengths)


def _put(file: Any, position: int, value: bytes) -> None:
    file.seek(position)
    file.write(value)


def map_torch(path: Path) -> tuple[Any, MappedFile]:
    """The content of ``path``, its tensors mapped. Raises ``OSError``, and ``PagerError`` for what
    is not a file of ``torch.save`` or holds more than tensors and plain values."""
    mapped = MappedFile.open(path)
    try:
        start = mapped.bytes(0, min(256, mapped.size))
        if not start.startswith(b"PK\x03\x04"):
            raise PagerError(
                f"{path} is {what_it_is(start)} and not a PyTorch checkpoint, or one of a version "
                "before 1.6: name a checkpoint, or torch.load and torch.save it again, where you "
                "trust it"
            )
        _check_byte_order(path)
        with FakeTensorMode():
            layout = torch.load(path, map_location="cpu", weights_only=True)
        return with_tensors(layout, lambda hole: mapped_tensor(hole, mapped)), mapped
    except (OSError, PagerError):
        raise
    except Exception as error:  # what a broken file makes PyTorch's unpickler stumble over
        lines = str(error).strip().split("\n")
        reason = " ".join(lines[0].split())[:300] or type(error).__name__
        if "central directory" in reason:  # which a zip file has at its end
            raise PagerError(
                f"{path} is damaged: its end is missing; take an older checkpoint, or copy it again"
            ) from None
        raise PagerError(
            f"{path} cannot be read as a PyTorch checkpoint of tensors and plain values: {reason}"
        ) from None


def _check_byte_order(path: Path) -> None:
    reader: Any = torch._C.PyTorchFileReader(os.fspath(path))
    order = reader.get_record("byteorder") if reader.has_record("byteorder") else b"little"
    if order.decode("ascii", "replace") != sys.byteorder:
        raise PagerError(f"{path} was written on a {order!r}-endian machine; save it again here")


def mapped_tensor(hole: torch.Tensor, mapped: MappedFile, start: int = 0) -> torch.Tensor:
    """What ``hole``, of a file that begins at byte ``start`` of ``mapped``, stands for."""
    shape = tuple(hole.size()), tuple(hole.stride())
    offset = getattr(hole.untyped_storage(), "_checkpoint_offset", None)
    if hole.layout is not torch.strided or hole.is_quantized or offset is None:
        if not hole.numel():
            return torch.empty(shape[0], dtype=hole.dtype)
        raise PagerError(
            f"{mapped.what} has a tensor of shape {shape[0]}, layout {hole.layout}, that cannot be "
            "mapped; torch.load the file and load its parts yourself"
        )
    width = hole.element_size()
    # As far as it is used: PyTorch 2.10 gives the storage too many bytes, by the element's size.
    reach = int(hole.storage_offset()) + sum((n - 1) * step for n, step in zip(*shape)) + 1
    count = min(hole.untyped_storage().nbytes() // width, reach) if hole.numel() else 0
    if (start + offset) % width:  # others do not align tensors
        flat = mapped.tensor(start + offset, count * width, torch.uint8).clone().view(hole.dtype)
    else:
        flat = mapped.tensor(start + offset, count, hole.dtype)
    if not flat.numel():
        return torch.empty_strided(*shape, dtype=hole.dtype)
    return flat.as_strided(*shape, hole.storage_offset())
