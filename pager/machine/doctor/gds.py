"""KvikIO and GPUDirect Storage: does the disk tier go straight to the GPU, and if not, why?

cuFile goes straight where the driver's part is there (module nvidia-fs, or PCI peer-to-peer DMA
from CUDA 12.8 and Linux 6.2 on), the file system is one that it knows, and nothing forbids it.
Otherwise it, or KvikIO before it, copies through host memory ("compatibility mode"), which works.
"""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path

from ...disk.mounts import Mount, mount_of, text_of
from .finding import Finding, State, installed

_PACKAGES = ("kvikio-cu13", "kvikio-cu12")
_FOLDER = "/proc/driver/nvidia-fs"
_LOCAL = ("ext4", "xfs")
_DISTRIBUTED = ("lustre", "wekafs", "gpfs", "beegfs", "nfs", "nfs4", "scatefs")
_TRUE = ("1", "on", "true", "yes")


def gds_findings(folder: Path, *, on_gpu: bool) -> list[Finding]:
    """``on_gpu``: whether there is a GPU, without which none of this is needed."""
    from ...disk import kvikio as kvikio_engine

    package = next((name for name in _PACKAGES if installed(name)), None)
    if package is None:
        detail = "not installed; the disk tier copies through host memory"
        remedy = "pip install 'tensorpager[gds]'"
        return [Finding("KvikIO", "warning" if on_gpu else "ok", detail, remedy if on_gpu else "")]
    name = f"{package} {installed(package)}"
    reason = kvikio_engine.why_not()
    if reason is not None:
        what, _, remedy = reason.partition("; ")
        state: State = "warning" if on_gpu else "ok"
        detail = f"{name}, not used: {what}"
        return [Finding("KvikIO", state, detail, remedy if on_gpu else "")]
    kvikio = Finding("KvikIO", "ok", f"{name}, works")
    if not on_gpu:
        return [kvikio]
    return [kvikio, _gds(folder, straight=kvikio_engine.has_gds())]


def _gds(folder: Path, *, straight: bool) -> Finding:
    """Whether bytes pass host memory, and the first reason why they do."""
    what = "GPUDirect Storage"
    driver = _driver()
    for detail, remedy in _obstacles(mount_of(folder)):
        return Finding(what, "warning", f"compatibility mode: {detail}", remedy)
    if not straight:
        return Finding(
            what,
            "warning",
            f"compatibility mode: cuFile says no ({driver or 'nvidia-fs is not loaded'})",
            "install nvidia-gds and modprobe nvidia-fs, or, from CUDA 12.8 and Linux 6.2 on, set "
            "use_pci_p2pdma in cufile.json; gdscheck -p has the details",
        )
    return Finding(what, "ok", f"disk and GPU exchange pages directly ({driver or 'P2PDMA'})")


def _driver() -> str:
    """The module and its version; "" if it is not loaded."""
    found = re.search(r"\d+(\.\d+)+", text_of(f"{_FOLDER}/version"))
    if found:
        return f"nvidia-fs {found[0]}"
    loaded = re.search(r"^nvidia_fs ", text_of("/proc/modules"), re.MULTILINE)
    return "nvidia-fs" if loaded or os.path.isdir(_FOLDER) else ""


def _obstacles(mount: Mount | None) -> list[tuple[str, str]]:
    """What is in the way, the most telling first, each with its remedy."""
    found = []
    mode = os.environ.get("KVIKIO_COMPAT_MODE", "")
    if mode.lower() in _TRUE:
        found.append((f"KVIKIO_COMPAT_MODE={mode}", "unset KVIKIO_COMPAT_MODE"))
    elif _kvikio_mode() == "ON":
        found.append(("KvikIO's compat_mode is ON", "kvikio.defaults.set('compat_mode', AUTO)"))
    if "microsoft" in text_of("/proc/version").lower():
        found.append(("Windows' Linux (WSL) has no cuFile", "use Linux itself"))
    if not os.access("/run/udev", os.R_OK):
        found.append(
            (
                "/run/udev cannot be read, so drives are not found",
                "docker run -v /run/udev:/run/udev:ro",
            )
        )
    if mount is not None:
        found += _file_system_obstacles(mount)
    return found


def _file_system_obstacles(mount: Mount) -> list[tuple[str, str]]:
    if mount.kind not in (*_LOCAL, *_DISTRIBUTED):
        return [(f"cuFile does not know {mount.kind}", "use ext4 or XFS on a local NVMe drive")]
    options = mount.options.split(",")
    wrong = [text for text in options if text.startswith("data=") and text != "data=ordered"]
    if mount.kind == "ext4" and wrong:
        return [(f"ext4 is mounted with {wrong[0]}", "mount it with data=ordered")]
    drive = mount.drive or ""
    if mount.kind in _LOCAL and drive and not drive.startswith(("nvme", "md")):
        return [(f"{drive} is no NVMe drive", "name a folder on an NVMe drive")]
    return []


def _kvikio_mode() -> str:
    try:
        mode = import_module("kvikio.defaults").get("compat_mode")
        return str(import_module("kvikio").CompatMode(mode).name)
    except Exception:  # another version of it, or no library
        return ""
