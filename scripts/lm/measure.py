"""One measurement of ``bench_train.py``: a training under one memory system, in this process."""

import ctypes
import gc
import importlib
import json
import os
import re
import signal
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import tensorpager as tp

from .data import Corpus, load_corpus
from .memory import Memory, PagedMemory, PlainMemory
from .options import Options, parse_options
from .peers import Fsdp2Offload, OverlapMemory, UnavailableError, make_peer
from .report import write_json
from .slow_disk import slow_down, slow_link
from .trainer import Trainer

# Who takes the optimizer's steps: the device, whom the plan says, or the host.
JOINT: dict[str, bool | str] = {"recompute": False, "joint": "auto", "host_steps": True}
PLANNED = ("planned", *JOINT, "overlap")
OURS = (*PLANNED, "demand")

WARM_UP_STEPS = 3
MOST_WARM_UP_STEPS = 16  # of planned modes
SETTLED_ITERATIONS = 3  # that followed the plan in use
PR_SET_PDEATHSIG = 1
_LINK_BYTES = 1 << 26
_LINK_COPIES = 8


@dataclass(frozen=True)
class Case:
    """One row of the table. ``share``, and ``disk_rate`` and ``link_rate`` (MB/s, 0: no limit), are
    our modes'."""

    mode: str
    share: str | None = None
    disk_rate: float = 0.0
    link_rate: float = 0.0

    @property
    def name(self) -> str:
        parts = [self.mode, *([self.share] if self.share else [])]
        parts += [f"{self.disk_rate:g} MB/s"] if self.disk_rate else []
        return " ".join([*parts, *([f"link {self.link_rate:g} MB/s"] if self.link_rate else [])])


@dataclass(frozen=True)
class Spec:
    """What one child measures. ``flags`` are of train_lm.py. ``needed``: measure the need too."""

    case: Case
    flags: list[str]
    warm_up: int
    steps: int
    needed: bool = False
    budgets: dict[str, int] | None = None
    disk_path: str | None = None
    page_size: str = "2MiB"


class Outside:
    """Memory of this process as the operating system and PyTorch's allocators count it."""

    def __init__(self, device: str) -> None:
        """Before the model is made; libraries have loaded what they load."""
        self._cuda = device == "cuda"
        gc.collect()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        self._rss = _status_bytes("VmRSS")
        self._used = self._device_used()

    def _device_used(self) -> int:
        if not self._cuda:
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free

    def warmed_up(self) -> None:
        """Timed steps begin."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_peak_host_memory_stats()

    def peaks(self, arena: int) -> dict[str, int]:
        """Bytes. ``arena``: the pager's, which no allocator of PyTorch counts. On CUDA ``device``
        is what was allocated, ``device_reserved`` with the allocator's cache, ``device_driver``
        what the driver says was taken since the start, and is still."""
        growth = _status_bytes("VmHWM") - self._rss
        if not self._cuda:
            return {"device": growth, "process": growth}
        return {
            "device": torch.cuda.max_memory_allocated() + arena,
            "device_reserved": torch.cuda.max_memory_reserved() + arena,
            "device_driver": self._device_used() - self._used,
            "pinned": torch.cuda.host_memory_stats()["active_bytes.peak"],
            "process": growth,
        }


def _status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise UnavailableError(f"/proc/self/status does not say {name} on this system")
    return int(found[1]) * 1024


def open_memory(spec: Spec, options: Options, stack: ExitStack) -> tuple[Memory, tp.Pager | None]:
    """The case's memory system, closed by ``stack``, and its pager if it has one."""
    mode = spec.case.mode
    if mode == "plain":
        return PlainMemory(options.device, measure=spec.needed), None
    if mode not in OURS:
        peer = make_peer(mode, options)
        if isinstance(peer, Fsdp2Offload):
            stack.callback(peer.close)
        return peer, None
    if mode == "overlap" and options.clip > 0:
        raise UnavailableError("gradients are gone before they could be clipped; add --clip 0")
    assert spec.budgets is not None
    pager = tp.Pager(
        device_budget=spec.budgets["device"],
        host_budget=spec.budgets["host"],
        disk_budget=spec.budgets["disk"],
        disk_path=spec.disk_path,
        page_size=spec.page_size,
        policy="joint" if mode in JOINT else "lp" if mode in PLANNED else "lru",
        device=options.device,
    )
    stack.enter_context(pager)
    if pager.core.disk is not None and spec.case.disk_rate:
        slow_down(pager.core.disk, spec.case.disk_rate * 1e6)
    if spec.case.link_rate:
        slow_link(pager.core, spec.case.link_rate * 1e6)
    if mode == "overlap":
        return OverlapMemory(pager), pager
    return PagedMemory(pager, host_step=JOINT.get(mode, False)), pager


def measure(spec: Spec) -> dict[str, Any]:
    """Train as ``spec`` says. Seconds, bytes and losses as JSON can hold them."""
    options = parse_options([*spec.flags, "--no-pager"])
    corpus = load_corpus(options.data, options.seq)
    load_libraries(options, corpus)
    outside = Outside(options.device)
    with ExitStack() as stack:
        memory, pager = open_memory(spec, options, stack)
        trainer = Trainer(options, memory, corpus)
        losses = warm_up(trainer, spec, pager)
        warm_up_steps = len(losses)
        outside.warmed_up()
        watch = PagerWatch.of(pager) if pager is not None else None
        # Nothing between the steps: moves that one leaves behind take the time of the next.
        clock, before = [time.perf_counter()], time.process_time()
        for _ in range(spec.steps):
            losses.append(trainer.step())
            clock.append(time.perf_counter())
        cpu_seconds = (time.process_time() - before) / spec.steps
        peaks = outside.peaks(pager.stats()["arena_bytes"] if pager is not None else 0)
        return {
            "link_bytes_per_s": link_rates() if options.device == "cuda" else None,
            "step_seconds": [end - begin for begin, end in pairwise(clock)],
            "step_cpu_seconds": cpu_seconds,  # of all threads; what else runs here is not in it
            "warm_up_steps": warm_up_steps,
            "losses": losses,
            "needed_bytes": memory.report().needed_bytes if spec.needed else None,
            "peak_bytes": peaks,
            "pager": watch.record(spec.case.mode, spec.steps) if watch is not None else None,
        }


def link_rates() -> dict[str, float]:
    """Bytes per second that page-locked copies reach now, each way alone and both at once (then of
    each way): measured beside the steps, since machines share links. Nothing of the pager's is
    used."""
    torch.cuda.synchronize()
    host = [torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(_LINK_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def rate(ways: tuple[int, ...]) -> float:
        began = time.perf_counter()
        for _ in range(_LINK_COPIES):
            for way in ways:  # 0 is to the device
                target, source = (device, host) if way == 0 else (host, device)
                with torch.cuda.stream(streams[way]):
                    target[way].copy_(source[way], non_blocking=True)
        torch.cuda.synchronize()
        return _LINK_COPIES * _LINK_BYTES / (time.perf_counter() - began)

    rate((0, 1))  # the first use of memory costs extra
    return {"to_device": rate((0,)), "from_device": rate((1,)), "both": rate((0, 1))}


def load_libraries(options: Options, corpus: Corpus) -> None:
    """Train a toy, so that code, thread pools and the GPU's context are not taken for the model.
    The pager imports its planner's side late, and that would be."""
    for module in ("machine.calibration.measure", "plan.planning"):
        importlib.import_module(f"tensorpager.pager.{module}")
    toy = replace(options, preset="tiny", batch=1, seq=8)
    Trainer(toy, PlainMemory(options.device, measure=False), corpus).step()
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()


def warm_up(trainer: Trainer, spec: Spec, pager: tp.Pager | None) -> list[float]:
    """The losses of steps that are not timed."""
    if pager is None or spec.case.mode not in PLANNED:
        return [trainer.step() for _ in range(spec.warm_up)]
    losses: list[float] = []
    while len(losses) < MOST_WARM_UP_STEPS and (len(losses) < spec.warm_up or not settled(pager)):
        losses.append(trainer.step())
        pager.plan()  # waits for plans that are being made
    return losses


def settled(pager: tp.Pager) -> bool:
    """Whether the latest kind of iteration has its second, full plan and has followed it, or will
    never have one."""
    if pager.core.fits:
        return True
    kind = pager.core.follower.current if pager.core.follower is not None else None
    if kind is None or kind.process is not None:
        return False
    if kind.refused is not None or kind.turned_down is not None:
        return True
    return kind.ways.is_settled and not kind.is_due(kind.plans + 1)


def _counters(pager: tp.Pager) -> dict[str, float]:
    """Numbers that only grow."""
    stats = pager.stats()
    names = ("stall_us", "prefetches", "prefetch_hits", "faults", "departures", "gathers")
    names = (*names, "reruns", "recompute_us", "host_steps", "host_step_us")
    kinds = pager.core.follower.signatures.all if pager.core.follower is not None else []
    return {
        **{name: stats[name] for name in (*names, "compactions", "planned_iterations")},
        "disk_bytes_written": stats["disk_bytes_written"],
        "plans": sum(kind.plans for kind in kinds),
        "early_updates": pager.core.in_backward.updates,
    }


@dataclass(frozen=True)
class PagerWatch:
    """A pager's counters when the timed steps began."""

    pager: tp.Pager
    counters: dict[str, float]
    channel_bytes: dict[str, int]

    @classmethod
    def of(cls, pager: tp.Pager) -> "PagerWatch":
        return cls(pager, _counters(pager), pager.stats()["channel_bytes"])

    def record(self, mode: str, steps: int) -> dict[str, Any]:
        """What happened in the ``steps`` since then."""
        pager, stats, after = self.pager, self.pager.stats(), _counters(self.pager)
        timed = {name: after[name] - before for name, before in self.counters.items()}
        moved = stats["channel_bytes"]
        return {
            "timed": timed,
            "per_step": {name: value / steps for name, value in timed.items()},
            "channel_bytes_per_step": {
                name: (moved[name] - before) / steps for name, before in self.channel_bytes.items()
            },
            "notes": _notes(pager, mode, timed),
            "disk_file_bytes": os.fstat(pager.core.disk.fileno()).st_size if pager.core.disk else 0,
            "disk_direct": pager.core.disk.direct if pager.core.disk is not None else None,
            "stats": stats,
        }


def _notes(pager: tp.Pager, mode: str, timed: dict[str, float]) -> list[str]:
    """What makes the timed steps other than their mode's name says."""
    notes = []
    if pager.core.fits:
        notes.append("everything fits")
    elif mode in PLANNED and pager.plan(wait=False) is None:
        notes.append(pager.explain().split("\n")[0])
    elif mode in PLANNED and timed["departures"]:
        notes.append(f"left the plan {timed['departures']:.0f} times")
    if mode in PLANNED and timed["plans"]:
        notes.append("planned again meanwhile")
    if mode == "overlap" and not pager.core.fits and not timed["early_updates"]:
        notes.append("no parameter was updated early")
    if pager.core.disk is not None and not pager.core.disk.direct:
        notes.append("disk without O_DIRECT")
    return notes


def run_request(request: str, result: Path) -> None:
    """Measure a ``Spec`` (JSON) and write the record to ``result``. An error is a record too: one
    line, and ``refused`` if it is no fault of ours. This process ends when its parent does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    fields = json.loads(request)
    spec = Spec(**{**fields, "case": Case(**fields["case"])})
    try:
        record = measure(spec)
    except (UnavailableError, tp.InfeasibleBudget, tp.TierFull) as error:
        record = _error_record(error, refused=True)
    except Exception as error:
        record = _error_record(error, refused=spec.case.mode not in OURS)
    write_json(result, record)


def _error_record(error: Exception, *, refused: bool) -> dict[str, Any]:
    name = "" if isinstance(error, UnavailableError) else f"{type(error).__name__}: "
    return {"error": " ".join(f"{name}{error}".split()), "refused": refused}
