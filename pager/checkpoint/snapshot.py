"""Ordinary tensors with the values that pages have now, outside of memory where they are many.

A copy of a whole model in memory is what paging is there to avoid. So the copy is made in a file
without a name, a slab at a time, and its tensors are a map of that file: the kernel reads them when
they are used, and drops them from memory when it wants to. The file goes with the last of them.
Few bytes are in a file that is memory (``memfd``).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from ..disk.file import open_scratch_files
from ..tensor.sharded import local_of, with_local
from ..tensor.tensor_bytes import chunks
from .file import MappedFile
from .tree import is_odd, layout_of, tensors_of, with_tensors

if TYPE_CHECKING:
    from ..core import Core

IN_MEMORY_BYTES = 64 << 20
"""Up to here a snapshot is in memory."""
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
        descriptor = os.memfd_create("tensorpager-state")
    try:
        os.ftruncate(descriptor, most)
        return _in_file(tree, descriptor)
    finally:
        os.close(descriptor)


def _room(tensor: torch.Tensor) -> int:
    tensor = local_of(tensor)
    nbytes = tensor.numel() * tensor.element_size()
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _in_file(tree: Any, descriptor: int) -> Any:
    mapped = MappedFile(descriptor, "state_dict()")
    end = 0

    def copy(whole: torch.Tensor) -> torch.Tensor:
        nonlocal end
        tensor = local_of(whole)
        if is_odd(tensor):
            return whole.detach().clone()
        start = offset = end
        end += _room(tensor)
        for chunk in chunks(tensor):
            rest = chunk
            while rest:
                written = os.pwrite(descriptor, rest, offset)
                rest, offset = rest[written:], offset + written
        layout, flat = layout_of(tensor), mapped.tensor(start, tensor.numel(), tensor.dtype)
        made = flat.as_strided(layout.size(), layout.stride())
        return made if tensor is whole else with_local(whole, made)

    return with_tensors(tree, copy)
