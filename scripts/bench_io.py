"""Throughput of the disk tier against dd and fio: overwrite and cold read, same block, same total.

All of them use O_DIRECT on the very file of the tier and take turns, so that neither where a file
lies nor a disk whose speed drifts favours one. Ours moves all of --size from and to memory in huge
pages, as the pager does, with the checksum of every page written and checked. dd has one transfer
in flight, fio as many as we have threads, each from one small buffer. The others' own timings are
used (without the start of the process). Exits with 1 if ours is below 90 % of dd or fio.

fio comes a second time with its buffers in huge pages, to show what the disk can do at best: on a
virtual disk that alone can triple its speed. It still moves the same few MiB of cached memory
again and again, without checksums, so that row is for information.
"""

import json
import mmap
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from tensorpager.pager.disk import DiskTier
from tensorpager.planner.sizes import format_bytes, parse_bytes

GOAL = 0.9
OURS = "tensorpager"
AT_BEST = "fio, huge pages"
OPERATIONS = ("write", "read")

Contender = Callable[[str], float]
"""Does "write" or "read" once and returns bytes per second."""


def ours(tier: DiskTier) -> Contender:
    memory = mmap.mmap(-1, tier.capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)  # as the pager's arenas
    pages = np.frombuffer(memory, np.uint8)
    pages[:] = np.random.default_rng(0).integers(0, 256, pages.nbytes, dtype=np.uint8)

    def run(operation: str) -> float:
        move = tier.write if operation == "write" else tier.read
        begin = time.perf_counter()
        move([(0, pages)])
        return pages.nbytes / (time.perf_counter() - begin)

    return run


def dd(file: Path, size: int, block: int) -> Contender:
    def run(operation: str) -> float:
        ends = {
            "write": ["if=/dev/zero", f"of={file}", "oflag=direct", "conv=notrunc"],
            "read": [f"if={file}", "of=/dev/null", "iflag=direct"],
        }[operation]
        command = ["dd", *ends, f"bs={block}", f"count={size // block}"]
        report = subprocess.run(
            command, check=True, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
        ).stderr
        seconds = re.search(r"copied, ([0-9.e+-]+) s", report)
        if seconds is None:
            raise click.ClickException(f"dd said {report!r}")
        return size / float(seconds[1])

    return run


def fio(file: Path, size: int, block: int, jobs: int, *, huge_pages: bool) -> Contender:
    part = size // block // jobs * block
    environment = dict(os.environ)
    if huge_pages:
        environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"

    def run(operation: str) -> float:
        command = ["fio", "--name=tier", f"--filename={file}", f"--rw={operation}", "--direct=1"]
        command += ["--ioengine=psync", f"--bs={block}", f"--size={part}", f"--numjobs={jobs}"]
        command += [f"--offset_increment={part}", "--thread", "--group_reporting"]
        command += ["--output-format=json", "--fallocate=none", "--iomem_align=2M"]
        report = subprocess.run(
            command, check=True, capture_output=True, text=True, env=environment
        ).stdout
        return float(json.loads(report)["jobs"][0][operation]["bw_bytes"])

    return run


def take_turns(contenders: dict[str, Contender], repeat: int) -> dict[str, dict[str, list[float]]]:
    """Rates in bytes per second by operation and contender. A first round is not counted."""
    rates: dict[str, dict[str, list[float]]] = {
        operation: {name: [] for name in contenders} for operation in OPERATIONS
    }
    names = list(contenders)
    for turn in range(repeat + 1):
        for position in range(len(names)):
            name = names[(turn + position) % len(names)]
            for operation in OPERATIONS:
                rate = contenders[name](operation)
                if turn:
                    rates[operation][name].append(rate)
    return rates


def machine(path: Path) -> dict[str, object]:
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    _, device, kind = max(
        (len(mount), device, kind)
        for device, mount, kind in mounts
        if path.is_relative_to(mount.encode().decode("unicode_escape"))
    )
    return {
        "cpu": model[1] if model else platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "device": device,
        "file_system": kind,
    }


def comparison(rates: dict[str, dict[str, list[float]]], title: str) -> Table:
    table = Table(title=title)
    table.add_column("")
    table.add_column("")
    for column in ("median GB/s", "slowest", "fastest", "ours / this"):
        table.add_column(column, justify="right")
    for operation, by_name in rates.items():
        for name, own in by_name.items():
            ratio = statistics.median(by_name[OURS]) / statistics.median(own)
            figures = (statistics.median(own), min(own), max(own))
            table.add_row(
                operation if name == OURS else "",
                name,
                *(f"{figure / 1e9:.2f}" for figure in figures),
                "" if name == OURS else f"{ratio:.2f}",
            )
        table.add_section()
    return table


@click.command(help=__doc__)
@click.option("--path", default=tempfile.gettempdir(), show_default=True, help="A directory.")
@click.option("--size", default="1GiB", show_default=True)
@click.option("--block", default="2MiB", show_default=True, help="Page size, and bs of the others.")
@click.option("--threads", default=4, show_default=True)
@click.option("--repeat", default=7, show_default=True)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
def main(
    path: str, size: str, block: str, threads: int, repeat: int, json_path: Path | None
) -> None:
    block_bytes = parse_bytes(block, "--block")
    step = block_bytes * threads  # the same total for each of fio's jobs
    size_bytes = parse_bytes(size, "--size") // step * step
    directory = Path(path).resolve()
    tier = DiskTier(directory, size_bytes, block_bytes, threads=threads)
    if not tier.direct:
        raise click.ClickException(f"--path={path} has no O_DIRECT, so no cold read; name a disk")
    file = Path(f"/proc/{os.getpid()}/fd/{tier.fileno()}")
    contenders = {OURS: ours(tier), "dd": dd(file, size_bytes, block_bytes)}
    if shutil.which("fio"):
        for name, huge_pages in (("fio", False), (AT_BEST, True)):
            contenders[name] = fio(file, size_bytes, block_bytes, threads, huge_pages=huge_pages)
    rates = take_turns(contenders, repeat)
    tier.close()
    medians = {
        operation: {name: statistics.median(own) for name, own in by_name.items()}
        for operation, by_name in rates.items()
    }
    ratios = {
        operation: {name: own[OURS] / rate for name, rate in own.items() if name != OURS}
        for operation, own in medians.items()
    }
    title = (
        f"{format_bytes(size_bytes)} in blocks of {format_bytes(block_bytes)}, {threads} threads, "
        f"median of {repeat}, {directory}"
    )
    Console().print(comparison(rates, title))
    if json_path is not None:
        result = {
            "command": shlex.join(["python", *sys.argv]),
            "date": date.today().isoformat(),
            "machine": machine(directory),
            "size_bytes": size_bytes,
            "block_bytes": block_bytes,
            "threads": threads,
            "bytes_per_s": rates,
            "median_bytes_per_s": medians,
            "ours_over": ratios,
        }
        json_path.write_text(json.dumps(result, indent=2) + "\n")
    judged = [by_name[name] for by_name in ratios.values() for name in by_name if name != AT_BEST]
    if min(judged) < GOAL:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
