"""Checkpoints as ``torch.save`` files of ordinary tensors, written and read one at a time.

A model in pages may be larger than the memory of the machine, so nothing here holds more than
one of its tensors densely: ``torch.save`` first lays out a file with holes in place of tensor
data, then each tensor is copied into its hole; loading maps the file. The file's own check sums
(of its zip container) are those of the holes; PyTorch does not read them.
"""

import os
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from .options import UsageError


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write nested dicts, lists, tensors and plain values to ``path``, mode 0600.

    All or nothing: a failure leaves an older file at ``path`` untouched and no other behind.
    """
    folder = path.absolute().parent
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w+b") as file:
            _write(file, content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    folder_descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(folder_descriptor)
    finally:
        os.close(folder_descriptor)


def _write(file: IO[bytes], content: dict[str, Any]) -> None:
    mode = FakeTensorMode()
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(_without_data(content, mode), file)
    file.flush()
    file.seek(0)
    with mode:
        layout = torch.load(file, weights_only=True)
    for hole, tensor in zip(_tensors(layout), _tensors(content), strict=True):
        offset = hole.untyped_storage()._checkpoint_offset
        assert offset is not None
        file.seek(offset)
        file.write(dense_bytes(tensor))


def dense_bytes(tensor: Tensor) -> memoryview:
    """The tensor's elements in row-major order, whether it is dense, in pages, or on a GPU."""
    dense = tensor.detach().to_dense().cpu().contiguous()
    return memoryview(dense.reshape(-1).view(torch.uint8).numpy())


def _without_data(content: Any, mode: FakeTensorMode) -> Any:
    if isinstance(content, Tensor):
        with mode:
            return torch.empty(content.shape, dtype=content.dtype)
    if isinstance(content, dict):
        return {key: _without_data(value, mode) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return type(content)(_without_data(value, mode) for value in content)
    return content


def _tensors(content: Any) -> Iterator[Tensor]:
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, dict | list | tuple):
        for value in content.values() if isinstance(content, dict) else content:
            yield from _tensors(value)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The content of ``path``; its tensors are mapped from the file and read when used.

    Raises ``UsageError`` for a file that is missing or is not a checkpoint.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise UsageError(f"--resume={path} cannot be read: {error.strerror or error}") from None
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        reason = str(error).split("\n", 1)[0]
        raise UsageError(f"--resume={path} is not a PyTorch checkpoint: {reason}") from None
    if not isinstance(content, dict) or "format" not in content:
        raise UsageError(f"--resume={path} is not a checkpoint of train_lm.py")
    return content
