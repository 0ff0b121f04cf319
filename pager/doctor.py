"""``tensorpager doctor``: what this machine can do."""

import os
import resource
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from ..planner.commands.output import emit_json, emit_text
from ..planner.sizes import format_bytes
from .errors import PagerError

_PROBE_PAGES, _PROBE_PAGE_BYTES = 2, 64 << 10
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
    """Say what this machine can do for tensorpager.

    \b
    Example:
      tensorpager doctor --disk-path /nvme

    Exits with 1 if something would not work.
    """
    findings = [_torch(), _triton(), *_gpu(), _page_locking(), _disk(disk_path)]
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
