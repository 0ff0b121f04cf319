"""GPU, driver, CUDA, PyTorch and Triton: do they fit together?"""

from __future__ import annotations

import ctypes
import re
from typing import TYPE_CHECKING

from ....planner.sizes import format_bytes
from ...disk.mounts import text_of
from .finding import Finding, State, installed

if TYPE_CHECKING:
    import torch

_LEAST_TRITON = (3, 6)
_DRIVER = "/proc/driver/nvidia/version"


def gpu_findings() -> list[Finding]:
    return [_torch(), _triton(), *_gpu()]


def has_driver() -> bool:
    return bool(text_of(_DRIVER)) or driver_cuda() is not None


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver serves, as (major, minor); ``None`` without a driver."""
    found = ctypes.c_int(0)
    try:
        code = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    except (OSError, AttributeError):
        return None
    return None if code else (found.value // 1000, found.value % 1000 // 10)


def _torch() -> Finding:
    import torch

    cuda = torch.version.cuda
    if cuda is None and has_driver():
        return Finding(
            "PyTorch",
            "warning",
            f"{torch.__version__}, built without CUDA, on a machine with an NVIDIA driver",
            "install a CUDA build of PyTorch (pytorch.org/get-started)",
        )
    return Finding("PyTorch", "ok", torch.__version__ + (f", CUDA {cuda}" if cuda else ""))


def _triton() -> Finding:
    import torch

    found = installed("triton")
    if found is None:
        state: State = "problem" if torch.cuda.is_available() else "warning"
        detail = "not installed; the page kernels need it, on a GPU only"
        return Finding("Triton", state, detail, "pip install triton")
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if numbers < _LEAST_TRITON:
        return Finding("Triton", "warning", f"{found} is older than 3.6", "pip install -U triton")
    return Finding("Triton", "ok", found)


def _gpu() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        other = torch.accelerator.current_accelerator(check_available=True)
        return [_no_gpu(torch.version.cuda)] if other is None else [_kit(other)]
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    room = f"{name}, {format_bytes(free)} of {format_bytes(total)} free"
    if free < total // 2:
        remedy = "see nvidia-smi for who has the rest; device_budget must fit in what is free"
        findings = [Finding("GPU", "warning", room, remedy)]
    else:
        findings = [Finding("GPU", "ok", room)]
    findings.append(_driver())
    if installed("cuda-bindings") is None:
        detail = "not installed; the arena on the GPU needs it"
        findings.append(Finding("cuda-bindings", "problem", detail, "pip install cuda-bindings"))
    return [*findings, _kit(torch.device("cuda"))]


def _kit(device: torch.device) -> Finding:
    """How the memory of the accelerator is had, and what that leaves out."""
    from ...devices.choice import kit_of, resolve

    kit = kit_of(device.type)
    lacks = kit.lacking(resolve(device))
    if not lacks:
        return Finding("device memory", "ok", f"{device.type}: the {kit.name} kit")
    detail = f"{device.type}: the {kit.name} kit, without " + "; without ".join(lacks)
    return Finding("device memory", "warning", detail, "nothing to do: training works, with less")


def _no_gpu(built_for: str | None) -> Finding:
    what, detail = "GPU", "none that PyTorch can use; the device arena will be in RAM"
    serves = driver_cuda()
    if not has_driver():
        return Finding(what, "warning", detail, "nothing to do, if this machine has no GPU")
    if built_for is None:
        return Finding(what, "warning", detail, "install a CUDA build of PyTorch")
    if serves and built_for and serves[0] < int(built_for.split(".")[0]):
        detail += f" (PyTorch wants CUDA {built_for}, the driver serves {serves[0]}.{serves[1]})"
        return Finding(what, "problem", detail, "update NVIDIA's driver, or use an older PyTorch")
    remedy = (
        "see nvidia-smi; in a container, start it with --gpus all; look at CUDA_VISIBLE_DEVICES"
    )
    return Finding(what, "problem", f"{detail}, though there is an NVIDIA driver", remedy)


def _driver() -> Finding:
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text_of(_DRIVER))
    serves = driver_cuda()
    parts = [found[1] if found else "version unknown"]
    if serves:
        parts.append(f"serves CUDA up to {serves[0]}.{serves[1]}")
    return Finding("NVIDIA driver", "ok", ", ".join(parts))
