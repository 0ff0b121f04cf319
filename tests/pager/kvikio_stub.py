"""KvikIO without a GPU: a CUDA driver that says "not initialised".

KvikIO loads ``libcuda.so.1`` before it does anything, and treats memory as host memory where the
driver says that it was never initialised. So with this library in its place it does real file I/O
on host memory. For processes of its own, by LD_PRELOAD, and never on a machine that has a driver.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

_FUNCTIONS = """
    MemHostAlloc MemFreeHost MemHostRegister_v2 MemHostUnregister MemcpyHtoDAsync_v2
    MemcpyDtoHAsync_v2 MemcpyAsync PointerGetAttribute PointerGetAttributes CtxCreate_v2
    CtxCreate_v4 CtxCreate CtxDestroy_v2 CtxPushCurrent_v2 CtxPopCurrent_v2 CtxGetCurrent
    CtxGetDevice MemGetAddressRange_v2 DeviceGet DeviceGetCount DeviceGetAttribute
    DevicePrimaryCtxRetain DevicePrimaryCtxRelease_v2 StreamSynchronize StreamCreate
    StreamDestroy_v2 EventSynchronize EventCreate EventDestroy_v2 EventRecord EventQuery
    LaunchHostFunc
"""
_NOT_INITIALISED = 3  # CUDA_ERROR_NOT_INITIALIZED


def why_not() -> str | None:
    """Why KvikIO cannot be tested with the stub here; ``None`` if it can."""
    if importlib.util.find_spec("kvikio") is None:
        return "KvikIO is not installed (scripts/env.sh does that)"
    if shutil.which("gcc") is None:
        return "no gcc to build a stand-in for the CUDA driver"
    if _has_driver():
        return "this machine has a CUDA driver, which the stand-in must not replace"
    return None


def _has_driver() -> bool:
    if os.path.exists("/dev/nvidiactl") or os.path.exists("/proc/driver/nvidia"):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return "libcuda.so.1" not in os.environ.get("LD_PRELOAD", "")


def build(folder: Path) -> Path:
    """The library, compiled in ``folder``."""
    lines = [
        "int cuDriverGetVersion(int *v) { *v = 12000; return 0; }",
        'int cuGetErrorName(int e, const char **s) { *s = "not initialised"; return 0; }',
        'int cuGetErrorString(int e, const char **s) { *s = "not initialised"; return 0; }',
        *(f"int cu{name}(void) {{ return {_NOT_INITIALISED}; }}" for name in _FUNCTIONS.split()),
    ]
    source, library = folder / "cuda_stub.c", folder / "libcuda.so.1"
    source.write_text("\n".join(lines) + "\n")
    options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["gcc", *options, "-o", str(library), str(source)], check=True)
    return library
