#!/usr/bin/env python3
"""Our disk tier beside fio, on the same file with the same settings: what others get there.

The settings are those that ``tensorpager bench-io`` finds best. The two take turns, so that a drive
whose speed drifts favours neither. fio has what it is best with: buffers in huge pages (on a
virtual disk that alone can triple its speed), one block per thread, moved again and again, and no
checksums; its own timing is used.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import click

from tensorpager.pager.disk.tier import DiskTier
from tensorpager.pager.machine.bench import LARGEST, Setting, measure, open_tier, sweep


def compare(
    path: Path, size_bytes: int, setting: Setting, rounds: int, seconds: float
) -> dict[str, dict[str, float]]:
    """Medians in bytes per second, ``{"write": {"ours": …, "fio": …}, …}``. Raises
    ``click.ClickException`` if fio fails."""
    rates: dict[str, dict[str, list[float]]] = {
        way: {"ours": [], "fio": []} for way in ("write", "read")
    }
    with closing(open_tier(path, size_bytes, setting)) as tier:
        for _ in range(rounds):
            rates["write"]["fio"].append(fio(tier, "write", seconds))
            ours = measure(tier, seconds)
            rates["write"]["ours"].append(ours.write_alone)
            rates["read"]["ours"].append(ours.read_alone)
            rates["read"]["fio"].append(fio(tier, "read", seconds))
    return {
        way: {who: statistics.median(values) for who, values in by.items()}
        for way, by in rates.items()
    }


def fio(tier: DiskTier, way: str, seconds: float) -> float:
    block, threads = tier.page_size, tier.threads
    part = tier.capacity_bytes // block // threads * block
    command = [
        "fio",
        "--name=tensorpager",
        f"--filename=/proc/{os.getpid()}/fd/{tier.fileno()}",
        f"--rw={way}",
        f"--direct={int(tier.direct)}",
        "--ioengine=psync",
        f"--bs={block}",
        f"--size={part}",
        f"--offset_increment={part}",
        f"--numjobs={threads}",
        f"--runtime={max(1, round(seconds))}",
        *("--thread", "--group_reporting", "--fallocate=none", "--allow_file_create=0"),
        *("--iomem_align=2M", "--output-format=json"),
        *(["--end_fsync=1"] if way == "write" and not tier.direct else []),
    ]
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    try:
        report = done.stdout[done.stdout.index("{") :]  # warnings may come first
        return float(json.loads(report)["jobs"][0][way]["bw_bytes"])
    except (ValueError, LookupError) as error:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise click.ClickException(
            f"fio ended with {done.returncode}: {said[-1] if said else 'no report'}"
        ) from error


@click.command(help=__doc__)
@click.argument("path", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--size", "mib", type=click.IntRange(1), default=1024, show_default=True, help="MiB.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--seconds", type=click.FloatRange(0.01), default=1.0, show_default=True)
def main(path: Path, mib: int, rounds: int, seconds: float) -> None:
    if shutil.which("fio") is None:
        sys.exit("fio is not installed (apt-get install fio)")
    size = max(LARGEST, (mib << 20) // LARGEST * LARGEST)
    _, best, _ = sweep(path, size, ["posix"], rounds=rounds, seconds=seconds)
    found = compare(path, size, best, rounds, seconds)
    print(best)
    for way, by in found.items():
        share = by["ours"] / by["fio"]
        print(f"{way}: ours {by['ours']:.3g}, fio {by['fio']:.3g} bytes/s; {share:.0%} of fio's")


if __name__ == "__main__":
    main()
