"""Small trainings on the simulated device, plain and paged, and what is wrong with one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tensorpager as tp
from tensorpager.pager.debug.chaos import chaos, scattered
from tensorpager.pager.debug.check import check_invariants

from ..pager.models import run_again
from .device import NAME, Machine, on

PAGE_BYTES = 64 << 10
WIDTH = 256  # each matrix in the middle takes 4 pages, an AdamW step of one touches 16
HOST = {"host_budget": "32MiB"}
DISK = {"host_budget": "512KiB", "disk_budget": "32MiB"}


def again(core: Any) -> Any:
    """All blocks run again in backward."""
    run_again(core)
    return nullcontext()


def both(core: Any) -> Any:
    run_again(core)
    return chaos(core)


@dataclass(frozen=True)
class Case:
    """A training under a budget. ``like_plain``: it has the bits of plain PyTorch; what does not,
    has those of itself where all work is done as soon as it is queued."""

    frames: int = 28
    reserve_bytes: int = 48 << 20  # dense memory: two large segments of the allocator, and a bit
    steps: int = 4
    tiers: dict[str, Any] = field(default_factory=lambda: HOST)
    policy: str = "lru"
    around: Callable[[Any], Any] = lambda core: nullcontext()
    optimizer: dict[str, Any] = field(default_factory=dict)
    body: str = "plain"
    batches: tuple[int, ...] = (48,)
    resume: bool = False
    must_move: bool = True
    like_plain: bool = True

    def pager(self, folder: Path) -> tp.Pager:
        limits: dict[str, Any] = {
            "device_budget": self.reserve_bytes + self.frames * PAGE_BYTES,
            "dense_reserve": self.reserve_bytes,
        }
        if "disk_budget" in self.tiers:
            limits["disk_path"] = folder
        limits |= {"page_size": PAGE_BYTES, "device": NAME, "policy": self.policy}
        return tp.Pager(**(limits | self.tiers))


CASES = {
    "host": Case(),
    "tight": Case(frames=18),
    "disk": Case(tiers=DISK),
    "lp": Case(policy="lp", steps=5),
    "lp-disk": Case(policy="lp", tiers=DISK, steps=5),
    "overlap": Case(optimizer={"overlap": True}),
    "8bit": Case(steps=3, optimizer={"states": "8bit"}, like_plain=False),
    "activations": Case(frames=40, batches=(512,)),
    "checkpointing": Case(body="checkpoint"),
    "streaming": Case(frames=10, steps=3, body="large", like_plain=False),
    "scattered": Case(around=scattered),
    "fits": Case(frames=400, must_move=False),
    "resume": Case(resume=True),
    "side stream": Case(frames=18, body="side"),
    "shapes": Case(batches=(32, 64)),
    "reading": Case(frames=18, policy="lp", steps=2, body="deep"),
    "reading from disk": Case(frames=18, policy="lp", tiers=DISK, steps=2, body="deep"),
    "again": Case(policy="joint", steps=5, frames=60, batches=(512,), around=again),
    "again under chaos": Case(policy="joint", frames=160, steps=2, batches=(512,), around=both),
    "host steps": Case(optimizer={"host_step": True}),
    "host steps by a plan": Case(policy="joint", steps=6, optimizer={"host_step": True}),
    "host steps in backward": Case(optimizer={"host_step": True, "overlap": True}),
    "chaos": Case(frames=100, steps=2, around=chaos),
}


class Net(nn.Module):
    def __init__(self, body: str) -> None:
        super().__init__()
        self.body = body
        self.table = nn.Embedding(2000 if body == "large" else 32, 64)
        self.first = nn.Linear(64, WIDTH)
        self.middle = nn.ModuleList(
            nn.Sequential(nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
            for _ in range(9 if body == "deep" else 3)
        )
        self.last = nn.Linear(WIDTH, 2000 if body == "large" else 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.first(self.table(tokens))
        for number, block in enumerate(self.middle):
            if self.body == "checkpoint":
                x = checkpoint(block, x, use_reentrant=False)
            elif self.body == "side" and number == 1:
                x = on_side_stream(block, x)
            else:
                x = block(x)
        return self.last(x)


def on_side_stream(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """``block`` twice, the second time beside the first. As a program does that orders its own
    tensors, and knows nothing of pages: the weights may have come in behind what it waits for."""
    here, side, ready = torch.accelerator.current_stream(), torch.Stream(NAME), torch.Event(NAME)
    ready.record(here)
    first = block(x)
    side.wait_event(ready)
    with on(side):
        second = block(x)
    here.wait_stream(side)
    x.record_stream(side)
    second.record_stream(here)
    return first + second


@dataclass
class Outcome:
    losses: list[float]
    parameters: list[torch.Tensor]
    stats: dict[str, Any] = field(default_factory=dict)

    def same(self, other: Outcome) -> bool:
        return self.losses == other.losses and all(
            map(torch.equal, self.parameters, other.parameters)
        )


class Training:
    """One model and optimizer; ``step(number)`` may be called again where it has failed."""

    def __init__(self, case: Case, pager: tp.Pager | None, seed: int = 0) -> None:
        self.case, self.pager = case, pager
        torch.manual_seed(seed)
        self.net = Net(case.body).to(NAME)
        if pager is not None:
            pager.page_module(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3, foreach=False)
        if pager is not None:
            pager.optimizer(self.optimizer, **case.optimizer)
        self.activation_pages = 0

    def step(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        size = self.case.batches[number % len(self.case.batches)]
        tokens = torch.randint(0, 32, (size,), generator=generator).to(NAME)
        labels = torch.randint(0, 16, (size,), generator=generator).to(NAME)
        pager = self.pager
        with nullcontext() if pager is None else pager.iteration():
            loss = F.cross_entropy(self.net(tokens), labels)
            if pager is not None:
                held = pager.core.space.kind_pages["activation"]
                self.activation_pages = max(self.activation_pages, held)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        loss = loss.detach()
        if self.case.body == "deep":
            loss = loss + self.read(tokens)
        if pager is not None:
            check_invariants(pager.core)
        return loss

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Passes of several sizes between two steps, of which more weights move than stay; inside
        of ``inference()`` and outside."""
        inside = nullcontext() if self.pager is None else self.pager.inference()
        with torch.no_grad():
            with inside:
                found = [self.net(tokens[: 8 + size]).square().mean() for size in (30, 3, 17)]
            found += [self.net(tokens[: 8 + size]).square().mean() for size in (8, 40, 25)]
        return torch.stack(found).sum()

    def parameters(self) -> list[torch.Tensor]:
        dense = (p if self.pager is None else p.to_dense() for p in self.net.parameters())
        return [parameter.detach().cpu() for parameter in dense]


def run(case: Case, machine: Machine, folder: Path, *, paged: bool = True) -> Outcome:
    """The whole training, under the schedule that is set."""
    with ExitStack() as stack:
        pager = stack.enter_context(case.pager(folder)) if paged else None
        if pager is not None:
            stack.enter_context(case.around(pager.core))
            note_disk(machine, pager)
        training = Training(case, pager)
        losses = []
        for number in range(case.steps):
            if case.resume and number == case.steps // 2:
                training = resumed(training, folder / f"half-{paged}.pt")
            losses.append(training.step(number))
        parameters = training.parameters()
        values = [loss.item() for loss in losses]
        stats = {} if pager is None else pager.stats()
        stats["activation pages"] = training.activation_pages
        del training
    return Outcome(values, parameters, stats)


def resumed(training: Training, path: Path) -> Training:
    """Another training, of other numbers, that goes on where this one is."""
    pager = training.pager
    if pager is None:
        torch.save([training.net.state_dict(), training.optimizer.state_dict()], path)
        other = Training(training.case, None, seed=1)
        weights, states = torch.load(path, map_location=NAME)
        other.net.load_state_dict(weights)
        other.optimizer.load_state_dict(states)
        return other
    pager.save(path)
    case = training.case
    training.net, training.optimizer = nn.Module(), None  # type: ignore[assignment]
    gc.collect()
    other = Training(case, pager, seed=1)
    pager.load(path)
    return other


class NotedEngine:
    """Tells the machine which page-locked memory the disk's engine reads and writes."""

    def __init__(self, machine: Machine, inner: Any) -> None:
        self._machine, self._inner = machine, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, buffers: Any, offset: int) -> None:
        self._note(buffers, write=False)
        self._inner.write(buffers, offset)

    def read(self, buffers: Any, offset: int) -> None:
        self._note(buffers, write=True)
        self._inner.read(buffers, offset)

    def _note(self, buffers: Any, *, write: bool) -> None:
        for buffer in buffers:
            self._machine.touch(buffer.ctypes.data, buffer.nbytes, write=write)


def note_disk(machine: Machine, pager: tp.Pager) -> None:
    if pager.core.disk is not None:
        watched: Any = pager.core.disk.engine
        watched.inner = NotedEngine(machine, watched.inner)


@contextmanager
def nothing_is_left(machine: Machine) -> Iterator[None]:
    """Device memory and page-locked memory are what they were before."""

    def held() -> tuple[int, int]:
        gc.collect()
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        torch.zeros(1).pin_memory()  # PyTorch gives back what it kept for copies that are over
        return torch.accelerator.memory_allocated(), machine.page_locked_bytes()

    before = held()
    yield
    after = held()
    assert after == before, f"device, page-locked bytes: {before} before, {after} after"


def expected_of(case: Case, machine: Machine, folder: Path) -> Outcome:
    if case.like_plain:
        machine.schedule("lazy")
        return run(case, machine, folder, paged=False)
    machine.schedule("random", probability=0.99)
    return run(case, machine, folder)
