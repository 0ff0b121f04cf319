"""Which device is meant, and what implements it."""

from __future__ import annotations

import torch

from ..errors import PagerError
from .accelerator import Accelerator
from .cpu import Cpu
from .cuda_memory import CudaMemory
from .device import Device
from .plain_memory import PlainMemory

KITS = {"cuda": CudaMemory}  # device type → its kit; others have the plain one


def kit_of(device_type: str) -> type[CudaMemory] | type[PlainMemory]:
    return KITS.get(device_type, PlainMemory)


def resolve(device: str | torch.device | None) -> torch.device:
    """The device that is meant: an accelerator without an index is the current one, ``None`` the
    accelerator that there is a kit for, or else the CPU.

    Raises ``ValueError`` for what is no device that ops run on, ``PagerError`` for one that PyTorch
    does not see.
    """
    there = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        device = there if there is not None and there.type in KITS else "cpu"
    device = torch.device(device)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "meta":
        raise ValueError(f"device={str(device)!r} has no memory; pass 'cpu' or an accelerator")
    if there is None or there.type != device.type:
        has = "no accelerator" if there is None else f"{there.type!r}"
        raise PagerError(
            f"device={str(device)!r} but PyTorch sees {has}; check the driver (of an NVIDIA GPU: "
            "nvidia-smi) and that this PyTorch is built for it, or pass device='cpu'"
        )
    count = torch.accelerator.device_count()
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    if index >= count:
        raise PagerError(
            f"device={str(device)!r} but PyTorch sees {count} of this type; pass an index below "
            "that"
        )
    return torch.device(device.type, index)


def make_device(device: torch.device, reserved_bytes: int, committed_bytes: int) -> Device:
    """What implements ``device``, which :func:`resolve` gave."""
    if device.type == "cpu":
        return Cpu(reserved_bytes, committed_bytes)
    return Accelerator(device, kit_of(device.type)(device, reserved_bytes, committed_bytes))
