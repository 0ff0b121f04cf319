"""Ordinary tensors with the values that pages have now, outside of memory where they are many.

A copy of a whole model in memory is what paging is there to avoid. So the copy is made in a file
without a name, a slab at a time, and its tensors are a map of that file: the kernel reads them when
they are used, and drops them from memory when it wants to. The file goes with the last of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from ..core import Core
from ..disk.file import open_scratch_files, transfer
from ..tensor.sharded import local_of, with_local
from ..tensor.tensor_bytes import chunks, fill
from .file import MappedFile
from .tree import is_odd, layout_of, tensors_of, with_tensors

IN_MEMORY_BYTES = 64 << 20
"""Up to here a snapshot is plain memory."""
_ALIGNMENT = 64


def snapshot(pager: Core, tree: Any) -> Any:
    """``tree`` with copies of all its tensors, on the CPU (but for sparse ones and their like); of
    sharded ones of this rank's part.

    They take memory where they are few, or where no file can be had: neither in the folder of the
    disk tier nor in that for temporary files (``TMPDIR``) is there a disk with room for them.
    """
    folder = pager.disk.directory if pager.disk is not None else None
    most = sum(_room(tensor) for tensor in tensors_of(tree))
    descriptor = None if most <= IN_MEMORY_BYTES else next(open_scratch_files(folder, most), None)
    if descriptor is None:
        return with_tensors(tree, _of_local(_in_memory))
    try:
        return with_tensors(tree, _of_local(_InFile(descriptor)))
    finally:
        os.close(descriptor)


def _room(tensor: torch.Tensor) -> int:
    tensor = local_of(tensor)
    nbytes = tensor.numel() * tensor.element_size()
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _of_local(copy: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    """``copy`` makes a consecutive copy; what is made of it has the tensor's geometry."""

    def copy_of(whole: torch.Tensor) -> torch.Tensor:
        tensor = local_of(whole)
        if is_odd(tensor):
            return whole.detach().clone()
        layout = layout_of(tensor)
        made = copy(tensor).as_strided(layout.size(), layout.stride())
        return made if tensor is whole else with_local(whole, made)

    return copy_of


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    fill(flat.view(torch.uint8).numpy(), chunks(tensor))
    return flat


class _InFile:
    """Copies that lie in a file, one after the other."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.end = descriptor, 0
        self.mapped = MappedFile(descriptor, "state_dict()")

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        start = offset = self.end
        self.end += _room(tensor)
        for chunk in chunks(tensor):
            transfer(os.pwritev, self.descriptor, [chunk], offset)
            offset += len(chunk)
        return self.mapped.tensor(start, tensor.numel(), tensor.dtype)
