"""``fio`` on the same file with the same settings, if it is installed: what others get there."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess

from ..errors import PagerError
from .bench import BenchFile, Setting


def has_fio() -> bool:
    return shutil.which("fio") is not None


def shares_of_fio(
    file: BenchFile, setting: Setting, *, rounds: int, seconds: float
) -> dict[str, dict[str, float]]:
    """Medians of our rates and fio's in bytes per second, ``{"write": {"ours": …, "fio": …}, …}``.

    The two take turns, so that a drive whose speed drifts favours neither. fio has what it is best
    with: buffers in huge pages (on a virtual disk that alone can triple its speed), one block per
    thread, moved again and again, and no checksums; its own timing is used. ``file`` is as it was
    afterwards. Raises PagerError if fio fails.
    """
    rates: dict[str, dict[str, list[float]]] = {
        way: {"ours": [], "fio": []} for way in ("write", "read")
    }
    with file.engine(setting) as engine:
        for _ in range(rounds):
            rates["write"]["fio"].append(_fio(file, setting, "write", seconds))
            file.fill()
            ours = file.measure(engine, setting, seconds)
            rates["write"]["ours"].append(ours.write)
            rates["read"]["ours"].append(ours.read)
            rates["read"]["fio"].append(_fio(file, setting, "read", seconds))
    return {
        way: {who: statistics.median(values) for who, values in by.items()}
        for way, by in rates.items()
    }


def _fio(file: BenchFile, setting: Setting, way: str, seconds: float) -> float:
    part = file.size_bytes // setting.block_bytes // setting.threads * setting.block_bytes
    command = [
        "fio",
        "--name=tensorpager",
        f"--filename=/proc/{os.getpid()}/fd/{file.fd}",
        f"--rw={way}",
        f"--direct={int(setting.direct)}",
        "--ioengine=psync",
        f"--bs={setting.block_bytes}",
        f"--size={part}",
        f"--offset_increment={part}",
        f"--numjobs={setting.threads}",
        f"--runtime={max(1, round(seconds))}",
        "--thread",
        "--group_reporting",
        "--fallocate=none",
        "--allow_file_create=0",
        "--iomem_align=2M",
        "--output-format=json",
    ]
    if not setting.direct and way == "write":
        command.append("--end_fsync=1")
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    try:
        report = done.stdout[done.stdout.index("{") :]  # warnings may come first
        rate = float(json.loads(report)["jobs"][0][way]["bw_bytes"])
    except (ValueError, LookupError) as error:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise PagerError(
            f"fio ended with {done.returncode}: {said[-1] if said else 'no report'}; pass --no-fio"
        ) from error
    return rate
