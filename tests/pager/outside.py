"""Memory of a training process by tier, as the kernel has it, sampled over its whole life.

``watch`` starts this file as a script, which trains as a :class:`Job` says, and reads the kernel's
files about it from another process: nothing that the pager counts takes part. The child says only
where its arenas begin, in one line, because addresses have no names.

| what | where the kernel says it |
|---|---|
| arena, host tier | ``smaps``: resident bytes of what is mapped there |
| all private memory | ``status``: RssAnon and RssShmem, less what they were before the model |
| the very peak | ``status``: VmHWM, which misses nothing; it has file pages too |
| disk tier | blocks of the file behind ``fd`` |
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STATUS_SECONDS, MAPS_SECONDS = 0.005, 0.1  # between samples; maps take the kernel longer to list
NEVER_SECONDS = 600
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


@dataclass(frozen=True)
class Job:
    """``steps`` steps of a preset of ``train_lm.py``; budgets in bytes, rates in MB/s."""

    preset: str
    device: int
    host: int
    disk: int
    disk_path: str
    page_size: int
    steps: int
    disk_rate: float = 0.0
    plans: int = 1  # at most, of each kind of iteration: the first one is the quick one
    more: tuple[str, ...] = ()  # flags of train_lm.py
    again: bool = False  # all blocks run again in backward
    host_step: bool = False  # the host takes what steps it can


@dataclass
class Peaks:
    """Most bytes at any sample. ``private``: growth since before the model was made, arena and host
    tier included; ``file``: of pages of files (code, mostly), likewise; ``both``: of the two
    together, from the kernel's own high-water mark, which misses nothing between two samples."""

    arena: int = 0
    host: int = 0
    disk: int = 0
    private: int = 0
    file: int = 0
    both: int = 0
    samples: int = 0
    report: dict[str, Any] = field(default_factory=dict)  # what the child says of itself


def watch(job: Job) -> Peaks:
    """Run ``job`` in a process of its own, and the peaks of its memory."""
    command = [sys.executable, str(Path(__file__)), json.dumps(asdict(job))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as process,
        _killed_if_late(process),
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _expect(process, "ready")
            sampler = _Sampler(process.pid, Path(job.disk_path))
            process.stdin.write("go\n")
            process.stdin.flush()
            sampler.places = _expect(process, "places")
            with sampler:
                sampler.peaks.report = _expect(process, "report")
            sampler.finish()
        finally:
            with suppress(BrokenPipeError):
                process.stdin.close()  # it ends now
    assert process.returncode == 0
    return sampler.peaks


@contextmanager
def _killed_if_late(process: subprocess.Popen[str]) -> Iterator[None]:
    timer = threading.Timer(NEVER_SECONDS, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _expect(process: subprocess.Popen[str], what: str) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the training ended (code {process.wait()}) before it said {what!r}"
    content = json.loads(line)
    assert list(content) == [what], line
    return content[what]


# -- looking on ------------------------------------------------------------------------------------
class _Sampler:
    """``places``: address and reserved bytes of the arena and of the host tier."""

    def __init__(self, pid: int, disk_path: Path) -> None:
        self.peaks = Peaks()
        self.places: dict[str, tuple[int, int]] = {}
        self._proc = Path(f"/proc/{pid}")
        self._disk_path = disk_path
        (self._proc / "clear_refs").write_text("5")  # the high-water mark starts from here
        self._before = self._status()
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=arguments, daemon=True)
            for arguments in (
                (self._look_at_status, STATUS_SECONDS),
                (self._look_at_maps, MAPS_SECONDS),
            )
        ]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def finish(self) -> None:
        """A last look, while the process still has everything."""
        self._look_at_status()
        self._look_at_maps()

    def _repeat(self, look: Any, seconds: float) -> None:
        with suppress(FileNotFoundError, ProcessLookupError):
            while not self._over.wait(seconds):
                look()

    def _status(self) -> dict[str, int]:
        text = (self._proc / "status").read_text()
        names = ("RssAnon", "RssShmem", "RssFile", "VmHWM", "VmRSS")
        found = {name: re.search(rf"^{name}:\s*(\d+) kB$", text, re.MULTILINE) for name in names}
        return {name: int(match[1]) << 10 for name, match in found.items() if match is not None}

    def _look_at_status(self) -> None:
        now, before, peaks = self._status(), self._before, self.peaks
        private = sum(now[name] - before[name] for name in ("RssAnon", "RssShmem"))
        peaks.private = max(peaks.private, private)
        peaks.file = max(peaks.file, now["RssFile"] - before["RssFile"])
        peaks.both = now["VmHWM"] - before["VmRSS"]
        peaks.samples += 1

    def _look_at_maps(self) -> None:
        peaks = self.peaks
        resident = dict.fromkeys(self.places, 0)
        inside: list[str] = []
        for line in (self._proc / "smaps").read_text().splitlines():
            mapping = _MAPPING.match(line)
            if mapping is not None:
                start = int(mapping[1], 16)
                inside = [n for n, (a, size) in self.places.items() if a <= start < a + size]
            elif line.startswith("Rss:"):
                for name in inside:
                    resident[name] += int(line.split()[1]) << 10
        peaks.arena = max(peaks.arena, resident["arena"])
        peaks.host = max(peaks.host, resident["host"])
        peaks.disk = max(peaks.disk, self._disk_blocks())

    def _disk_blocks(self) -> int:
        """Allocated bytes of all files under ``disk_path`` that the process has open."""
        files = {}
        for link in (self._proc / "fd").iterdir():
            with suppress(FileNotFoundError):
                if Path(os.readlink(link)).is_relative_to(self._disk_path):
                    status = link.stat()
                    files[status.st_ino] = status.st_blocks * 512
        return sum(files.values())


# -- the training ----------------------------------------------------------------------------------
def _say(**content: Any) -> None:
    print(json.dumps(content), flush=True)


def _use_matrix_library(rows: int, width: int) -> None:
    """MKL keeps buffers for products as large as these (5 MiB for preset 10m), whoever asks for
    them: every process that trains a model of this size has them, so they are there before."""
    import torch

    layer = torch.nn.Linear(width, 4 * width)
    (layer(torch.ones(rows, width, requires_grad=True)) ** 2).sum().backward()
    del layer
    ctypes.CDLL(None).malloc_trim(0)


def _train(job: Job) -> None:
    """In the child. What is loaded late by the libraries is loaded before it says "ready"."""
    sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]
    import torch
    from lm.data import load_corpus
    from lm.measure import load_libraries
    from lm.memory import PagedMemory
    from lm.model import PRESETS
    from lm.options import parse_options
    from lm.slow_disk import slow_down
    from lm.trainer import Trainer

    import tensorpager as tp
    from tests.pager.models import run_again

    torch.set_num_threads(1)
    options = parse_options([f"--preset={job.preset}", "--clip=0", "--no-pager", *job.more])
    corpus = load_corpus(options.data, options.seq)
    load_libraries(options, corpus)
    torch.manual_seed(0)  # torch reads its own source at the second call, and keeps it: 250 KiB
    _use_matrix_library(options.batch * options.seq, PRESETS[job.preset].shape.width)
    gc.collect()
    before = set(sys.modules)
    _say(ready=True)
    sys.stdin.readline()
    with tp.Pager(
        device_budget=job.device,
        host_budget=job.host,
        disk_budget=job.disk,
        disk_path=job.disk_path if job.disk else None,
        page_size=job.page_size,
        device="cpu",
        policy="joint" if job.again or job.host_step else "lp",
    ) as pager:
        arena = pager.core.backend.address, pager.core.backend.arena.numel()
        if pager.core.follower is not None:
            pager.core.follower.most_plans = job.plans
            pager.core.follower.only_if_faster = False
        if job.again:
            run_again(pager.core)
        host = pager.core.host.view(0, 1).ctypes.data if job.host else 0
        _say(places={"arena": arena, "host": (host, pager.core.host.capacity_bytes)})
        if pager.core.disk is not None and job.disk_rate:
            slow_down(pager.core.disk, job.disk_rate * 1e6)
        trainer = Trainer(options, PagedMemory(pager, host_step=job.host_step), corpus)
        losses = []
        for _ in range(job.steps):
            losses.append(trainer.step())
            pager.plan()  # waits for plans that are being made
        stats = pager.stats()
        wanted = ["planned_iterations", "prefetches", "peak_bytes", "budget_bytes", "channel_bytes"]
        wanted += ["arena_bytes", "dense_peak_bytes", "reruns", "host_steps"]
        report = {name: stats[name] for name in wanted}
        late = sorted(n for n in set(sys.modules) - before if n.split(".")[0] != "tensorpager")
        _say(report={**report, "losses": losses, "loaded_late": late})
        sys.stdin.read()  # until everything has been looked at


if __name__ == "__main__":
    fields = json.loads(sys.argv[1])
    _train(Job(**{**fields, "more": tuple(fields["more"])}))
