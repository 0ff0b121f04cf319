"""``tensorpager bench-io``: how fast a disk takes pages and gives them back."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...planner.commands.failures import in_one_line
from ...planner.commands.options import json_option, size
from ...planner.commands.output import emit, emit_json, progress_bar
from ...planner.commands.tables import table
from ...planner.sizes import format_bytes
from ..errors import PagerError

if TYPE_CHECKING:
    from .bench import Results, Setting


LEFT_FREE = 10  # one part in so many of what is free on the disk stays so


@click.command("bench-io")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--size",
    "size_bytes",
    type=size,
    metavar="SIZE",
    default="1GiB",
    show_default=True,
    help="Of the file; more than the drive's own cache, if it has one.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    default=3,
    show_default=True,
    help="Medians of so many rounds are shown.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="How long one measurement may take.",
)
@json_option
@click.pass_context
def bench_io(
    context: click.Context,
    path: Path,
    size_bytes: int,
    rounds: int,
    seconds: float,
    as_json: bool,
) -> None:
    """Measure how fast pages move to and from a disk.

    Writes and reads a nameless file in the folder PATH, one way at a time and both at once, and
    varies page size, threads and engine. Checksums are made and checked, as in training.
    The file is gone when the command ends, however it ends.

    Nothing is read from the page cache where the file system has O_DIRECT, as in training. A
    drive's own cache counts as the drive.

    \b
    Example:
      tensorpager bench-io /nvme
      tensorpager bench-io /nvme --size 8GiB --json > nvme.json
    """
    with in_one_line(context):
        from ..disk.kvikio import why_not
        from .bench import LARGEST, sweep, together

        size_bytes -= size_bytes % LARGEST
        _refuse(path, size_bytes, least=LARGEST)
        why_no_kvikio = why_not()
        engines = ["posix"] if why_no_kvikio else ["posix", "kvikio"]
        with progress_bar() as report:
            results, best, direct = sweep(
                path, size_bytes, engines, rounds=rounds, seconds=seconds, report=report
            )
        if as_json:
            emit_json(
                {
                    "path": os.fspath(path.absolute()),
                    "size_bytes": size_bytes,
                    "cores": os.cpu_count(),
                    "direct": direct,
                    "bytes_per_s": [
                        {**asdict(setting), **rates._asdict(), "together": together(rates)}
                        for setting, rates in results.items()
                    ],
                    "recommended": asdict(best),
                    "kvikio_missing": why_no_kvikio,
                }
            )
        else:
            emit(*_lines(path, size_bytes, results, best))
            if not direct:
                emit("There is no O_DIRECT here, so the page cache is measured with the disk.")
            if why_no_kvikio:
                emit(f"kvikio was not measured: {why_no_kvikio}.")


def _refuse(path: Path, size_bytes: int, *, least: int) -> None:
    """Raises PagerError for what could not be measured, before anything is written."""
    from ..disk.mounts import IN_RAM, mount_of
    from .bench import buffer_bytes
    from .free_memory import meminfo

    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise PagerError(f"{path} {what}; name the folder that the paging file would be in")
    if size_bytes < least:
        raise PagerError(f"--size is less than {format_bytes(least)}; give that or more")
    free = shutil.disk_usage(path).free
    if size_bytes > free - free // LEFT_FREE:
        raise PagerError(
            f"--size {format_bytes(size_bytes)} does not fit in {path}: {format_bytes(free)} are "
            "free, and some must stay so; give a smaller --size, or make room"
        )
    mount = mount_of(path)
    memory = buffer_bytes(size_bytes)
    if mount is not None and mount.kind in IN_RAM:
        memory += size_bytes
    available = meminfo().get("MemAvailable", memory)
    if memory > available:
        raise PagerError(
            f"--size {format_bytes(size_bytes)} takes {format_bytes(memory)} of memory to measure "
            f"in {path}, and {format_bytes(available)} are free; give a smaller --size"
        )
    if not os.access(path, os.W_OK):
        raise PagerError(f"{path} cannot be written; make it writable, or name another folder")


def _lines(path: Path, size_bytes: int, results: Results, best: Setting) -> list[Any]:
    columns = ("<engine", "page", "threads", "write", "read", "write", "read", "<")
    rows = [
        (
            setting.engine,
            f"{setting.block_bytes >> 10} KiB",
            str(setting.threads),
            *map(_gb, (found.write_alone, found.read_alone, found.write_beside, found.read_beside)),
            "best" if setting == best else "",
        )
        for setting, found in results.items()
    ]
    title = f"{path.absolute()}, {format_bytes(size_bytes)}: GB/s one way alone, then both at once"
    kib = best.block_bytes >> 10
    page = f"{kib >> 10}MiB" if kib % 1024 == 0 else f"{kib}KiB"
    arguments = f'page_size="{page}", io_engine="{best.engine}"'
    return [table(columns, rows, title=title), "", f"Recommended: Pager(..., {arguments})"]


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f}" if bytes_per_s >= 1e7 else f"{bytes_per_s / 1e9:.1e}"
