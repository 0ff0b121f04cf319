"""Where a run keeps its tensors: dense on the device, or in a pager's pages.

Training code talks to ``Memory`` and does not know which of the two it has.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

import tensorpager as tp
from tensorpager.pager.tensor.sharded import local_of

MEASURED_ITERATIONS = 2  # the second one has the optimizer states from its start


@dataclass(frozen=True)
class MemoryReport:
    """Bytes by tier (device, host, disk). ``needed_bytes``: a device budget that fits it all."""

    peak_bytes: dict[str, int]
    budget_bytes: dict[str, int] | None
    needed_bytes: int | None
    pager: dict[str, Any] | None


class Memory(Protocol):
    """What a training run asks of the place that holds its tensors."""

    def place(self, model: nn.Module) -> None:
        """Give the parameters of a meta-device model memory, uninitialised, in place."""

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer to call; its states will live where the parameters do."""

    def iteration(self) -> AbstractContextManager[None]:
        """Wraps one training step."""

    def report(self) -> MemoryReport: ...


class PlainMemory:
    """Dense tensors. Measures the peak from outside: no counter of the pager takes part.

    On CUDA the peak is the caching allocator's. On the CPU it is the sum of the profiler's
    allocation events in the first two iterations, on top of the tensors that were there before.
    """

    def __init__(self, device: str, *, measure: bool = True) -> None:
        self._device = device
        self._measure = measure and device == "cpu"
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._profiler: torch.profiler.profile | None = None
        self._iterations = 0
        self._peak = 0
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def place(self, model: nn.Module) -> None:
        model.to_empty(device=self._device)
        self._model = model

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._optimizer = optimizer
        return optimizer

    @contextmanager
    def iteration(self) -> Iterator[None]:
        if self._measure and self._iterations == 0:
            self._peak = self._standing_bytes()
            self._profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            )
            self._profiler.start()
        yield
        self._iterations += 1
        if self._iterations == MEASURED_ITERATIONS:
            self._stop_profiler()

    def _standing_bytes(self) -> int:
        assert self._model is not None
        states = self._optimizer.state.values() if self._optimizer is not None else []
        values = [value for state in states for value in state.values() if torch.is_tensor(value)]
        return sum(local_of(tensor).nbytes for tensor in [*self._model.parameters(), *values])

    def _stop_profiler(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._peak += _peak_of_allocations(self._profiler)
            self._profiler = None

    def report(self) -> MemoryReport:
        self._stop_profiler()
        if self._device == "cuda":
            self._peak = torch.cuda.max_memory_allocated()
        peaks = {"device": self._peak, "host": 0, "disk": 0}
        return MemoryReport(peaks, budget_bytes=None, needed_bytes=self._peak, pager=None)


def _peak_of_allocations(profiler: torch.profiler.profile) -> int:
    """Largest running sum of the allocations and frees that the profiler saw, in bytes."""
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    events = [event for event in results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()  # type: ignore[attr-defined]
        peak = max(peak, live)
    return peak


class PagedMemory:
    """Pages of ``pager``, which the caller opened and closes."""

    def __init__(self, pager: tp.Pager, *, host_step: bool | str = False) -> None:
        self._pager, self._host_step = pager, host_step

    def place(self, model: nn.Module) -> None:
        self._pager.page_module(model)

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        return self._pager.optimizer(optimizer, host_step=self._host_step)

    def iteration(self) -> AbstractContextManager[None]:
        return self._pager.iteration()

    def report(self) -> MemoryReport:
        stats = self._pager.stats()
        return MemoryReport(
            peak_bytes=stats["peak_bytes"],
            budget_bytes=stats["budget_bytes"],
            needed_bytes=stats.get("needed_bytes"),
            pager=stats,
        )
