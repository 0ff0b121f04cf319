"""The page kernels on the simulated device: their plain-torch references, each as one piece of
queued work.

A kernel on a device reads its tables when it runs, in the order of its stream. A reference that is
called at once has to wait for them on the host, and every such wait hides one that is missing
elsewhere. So it runs when the stream gets there, on the bytes behind the device's addresses, and
what its ops read and write there is what the check of races sees.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_iter

from tensorpager import kernels

from .device import NAME, Machine

# Ops that access their first argument only in the rows that another one names: the number of that.
_BY_ROWS = {"index_select": 2, "index_copy_": 2, "index_add_": 2, "embedding": 1}


def queue_references(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    """Until ``patch`` is undone, references that return nothing are queued."""
    found: dict[Any, Any] = {}
    for info in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        for name, value in vars(import_module(info.name)).items():
            if name.endswith("_reference") and _returns_nothing(value):
                found[value] = _queued(machine, value)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("tensorpager."):
            for name, value in list(vars(module).items()):
                if inspect.isfunction(value) and value in found:
                    patch.setattr(module, name, found[value])


def _returns_nothing(function: Any) -> bool:
    if not inspect.isfunction(function):
        return False
    return inspect.signature(function).return_annotation in (None, "None")


def _queued(machine: Machine, reference: Callable[..., None]) -> Callable[..., None]:
    @wraps(reference)
    def call(*args: Any, **kwargs: Any) -> None:
        if _Accesses.watching():  # part of one that runs
            reference(*args, **kwargs)
            return
        touched = _Twins(machine)
        twins = touched.of(args), touched.of(kwargs)
        if not touched.any:
            reference(*args, **kwargs)
            return

        def run() -> None:
            with _Accesses(machine):
                reference(*twins[0], **twins[1])

        machine.queue(reference.__name__, run)

    return call


class _Twins:
    """Arguments of a kernel as its launch takes them: device memory by its address, which keeps
    nothing alive, and what the host has as it is now."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.any = False

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return value.copy()
        if isinstance(value, dict):
            return {key: self.of(item) for key, item in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.of, value))
        if isinstance(value, list | tuple):
            return type(value)(map(self.of, value))
        if is_dataclass(value) and not isinstance(value, type):
            return type(value)(**{f.name: self.of(getattr(value, f.name)) for f in fields(value)})
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != NAME:
            return tensor.detach().clone()
        self.any = True
        storage = tensor.untyped_storage()
        twin = torch.empty(0, dtype=tensor.dtype)
        if not storage.nbytes():
            return twin.new_empty(tensor.shape)
        bytes_ = torch._C._construct_storage_from_data_pointer(
            self._machine.bytes_of(storage.data_ptr()), twin.device, storage.nbytes()
        )
        return twin.set_(bytes_, tensor.storage_offset(), tensor.shape, tensor.stride())


class _Accesses(TorchDispatchMode):
    """Tells the machine what the ops inside read and write."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    @classmethod
    def watching(cls) -> bool:
        """Whether the calling thread is inside one."""
        return any(isinstance(mode, cls) for mode in _get_current_dispatch_mode_stack())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not func.is_view:
            schema = func._schema.arguments
            named = _BY_ROWS.get(func.overloadpacket.__name__)
            rows = None if named is None else args[named]
            for number, argument in enumerate(schema):
                value = args[number] if number < len(args) else kwargs.get(argument.name)
                for tensor in tree_iter(value):
                    if isinstance(tensor, torch.Tensor) and tensor.numel():
                        self._note(tensor, argument.is_write, None if number else rows)
        return func(*args, **kwargs)

    def _note(self, tensor: torch.Tensor, write: bool, rows: torch.Tensor | None) -> None:
        start = tensor.data_ptr()
        if rows is not None:
            stride = tensor.stride(0) * tensor.itemsize
            for row in rows.unique().tolist():
                self._machine.touch(start + row * stride, stride, write=write)
            return
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        self._machine.touch(start, (last + 1) * tensor.itemsize, write=write)
