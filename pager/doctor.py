"""``tensorpager doctor``: what this machine can do, and how fast."""

import os
import resource
import shutil
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..planner.commands.output import emit_json, emit_text
from ..planner.sizes import format_bytes
from .errors import PagerError

if TYPE_CHECKING:
    from .calibration import Calibration
    from .disk import DiskTier

_PROBE_PAGES, _PROBE_PAGE_BYTES = 2, 64 << 10
_PAGE_BYTES = 2 << 20  # what rates are measured with: the default page
_ARENA_BYTES, _HOST_BYTES, _DISK_BYTES = 256 << 20, 32 << 20, 64 << 20
_LEAST_FREE_BYTES = 4 * _PAGE_BYTES
_COLORS = {"ok": "green", "warning": "yellow", "problem": "red"}


@dataclass(frozen=True)
class Finding:
    """One line of ``doctor``. ``state``: "ok", "warning" (works, but slower or with less) or
    "problem" (will not work)."""

    what: str
    state: str
    detail: str


@click.command()
@click.option(
    "--disk-path",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder that a paging file would be in (default: the current one).",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_context
def doctor(context: click.Context, disk_path: Path, as_json: bool) -> None:
    """Say what this machine can do for tensorpager, and how fast pages move on it.

    The rates are measured now, in a second or two, with a file of 64 MiB or less that is gone
    afterwards. Runs with the default page size use them for a week.

    \b
    Example:
      tensorpager doctor --disk-path /nvme

    Exits with 1 if something would not work.
    """
    findings = [_torch(), _triton(), *_gpu(), _page_locking(), _disk(disk_path)]
    findings += _rates(disk_path if findings[-1].state != "problem" else None)
    if as_json:
        emit_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            label = click.style(f"{finding.state:<8}", fg=_COLORS[finding.state])
            emit_text(f"{label} {finding.what}: {finding.detail}")
    if any(finding.state == "problem" for finding in findings):
        context.exit(1)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _torch() -> Finding:
    import torch

    cuda = torch.version.cuda
    return Finding("PyTorch", "ok", f"{torch.__version__}" + (f", CUDA {cuda}" if cuda else ""))


def _triton() -> Finding:
    found = _installed("triton")
    if found is None:
        return Finding(
            "Triton", "warning", "not installed; needed on a GPU only (pip install triton)"
        )
    return Finding("Triton", "ok", found)


def _gpu() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        return [
            Finding("GPU", "warning", "none that PyTorch can use; the device arena will be in RAM")
        ]
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    findings = [Finding("GPU", "ok", f"{name}, {format_bytes(free)} of {format_bytes(total)} free")]
    if _installed("cuda-bindings") is None:
        remedy = "not installed; the GPU arena needs it (pip install cuda-bindings)"
        findings.append(Finding("cuda-bindings", "problem", remedy))
    return findings


def _page_locking() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("page-locked memory", "ok", "no limit (ulimit -l)")
    return Finding("page-locked memory", "ok", f"limited to {format_bytes(soft)} (ulimit -l)")


def _disk(folder: Path) -> Finding:
    from .disk import DiskTier

    what = f"disk path {os.fspath(folder.absolute())}"
    try:
        tier = DiskTier(folder, _PROBE_PAGES * _PROBE_PAGE_BYTES, _PROBE_PAGE_BYTES)
    except PagerError as error:
        return Finding(what, "problem", str(error))
    direct = tier.direct
    tier.close()
    free = format_bytes(shutil.disk_usage(folder).free)
    if not direct:
        return Finding(
            what, "warning", f"{free} free; no O_DIRECT, so transfers go through the page cache"
        )
    return Finding(what, "ok", f"{free} free, O_DIRECT works")


def _rates(folder: Path | None) -> list[Finding]:
    """How fast pages move over the link and, with a file in ``folder``, to and from the disk."""
    what = "transfer rates"
    try:
        tier = None if folder is None else _small_tier(folder)
        try:
            rates = _calibrated(tier)
        finally:
            if tier is not None:
                tier.close()
    except PagerError as error:
        return [Finding(what, "warning", f"not measured: {error}")]
    link = (
        f"{_rate(rates.d2h_bytes_per_s)} out, {_rate(rates.h2d_bytes_per_s)} in, "
        f"{rates.transfer_latency_us:.1f} µs per transfer"
    )
    findings = [Finding("link", "ok", link)]
    if folder is not None and tier is None:
        needed = format_bytes(_LEAST_FREE_BYTES)
        lacking = Finding("disk rates", "warning", f"not measured: less than {needed} is free")
        return [*findings, lacking]
    return [*findings, *_disk_rates(rates)]


def _disk_rates(rates: "Calibration") -> list[Finding]:
    if not rates.has_disk:
        return []
    alone = rates.disk_write_alone_bytes_per_s, rates.disk_read_alone_bytes_per_s
    both = rates.disk_write_bytes_per_s, rates.disk_read_bytes_per_s
    return [
        Finding(what, "ok", f"{_rate(write)} write, {_rate(read)} read")
        for what, (write, read) in (
            ("disk, one way at a time", alone),
            ("disk, both at once", both),
        )
    ]


def _small_tier(folder: Path) -> "DiskTier | None":
    """A disk tier that leaves most of what is free on the disk; ``None`` if that is no room."""
    from .disk import DiskTier

    nbytes = min(_DISK_BYTES, shutil.disk_usage(folder).free // 2)
    return DiskTier(folder, nbytes, _PAGE_BYTES) if 2 * nbytes >= _LEAST_FREE_BYTES else None


def _calibrated(disk: "DiskTier | None") -> "Calibration":
    """The rates, measured now and put into the cache. Raises PagerError if that cannot be done."""
    import torch

    from .backend import make_backend
    from .calibration import calibrate
    from .host import HostTier

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with ExitStack() as stack:
        backend = make_backend(device, _ARENA_BYTES, _PAGE_BYTES)
        stack.callback(backend.close)
        host = HostTier(_HOST_BYTES, _PAGE_BYTES)
        stack.callback(host.close)
        backend.register_host(host.bytes)
        stack.callback(backend.unregister_host, host.bytes)
        return calibrate(backend=backend, host=host, disk=disk, page_size=_PAGE_BYTES, fresh=True)


def _rate(bytes_per_s: float | None) -> str:
    rate = bytes_per_s or 0.0
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.2f} MB/s"
