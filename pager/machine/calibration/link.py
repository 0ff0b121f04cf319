"""How fast bytes move between the device and host memory, and what a copy costs beyond them."""

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ...devices.accelerator import on_stream
from ...devices.device import Bytes, Device
from ...errors import PagerError
from .disk_rates import median_seconds, since

_SMALL_BYTES = 4096  # hardly any time for the bytes: what is left is the cost of a copy
_SMALL_ROUNDS = 31

TimedCopies = Callable[[bool, Sequence[Bytes]], float]
"""(out of the device?, pieces of host memory) → seconds for all of them, one after another."""


class LinkRates(NamedTuple):
    """Bytes per second from and to the device; µs of a copy beyond its bytes."""

    out: float
    in_: float
    latency_us: float


def measure_link(backend: Device, source: Bytes, pieces: Sequence[Bytes]) -> LinkRates:
    """Rates of copies between device memory and ``pieces`` of host memory, each no longer than
    ``source``. On an accelerator the device side is a copy of ``source`` there, in RAM it is
    ``source``.

    Raises ``PagerError`` if the device has no room for that copy.
    """
    timed = _in_ram(source) if backend.host_addressable else _by_streams(backend, source)
    timed(True, pieces)  # memory that was never used costs extra the first time
    nbytes = sum(map(len, pieces))
    small = [pieces[0][:_SMALL_BYTES]]
    rates: list[float] = []
    latency_us = 0.0
    for out in (True, False):
        rates.append(nbytes / median_seconds(lambda out=out: timed(out, pieces)))  # type: ignore[misc]
        seconds = median_seconds(lambda out=out: timed(out, small), _SMALL_ROUNDS)  # type: ignore[misc]
        latency_us = max(latency_us, (seconds - len(small[0]) / rates[-1]) * 1e6)
    return LinkRates(rates[0], rates[1], latency_us)


def _in_ram(source: Bytes) -> TimedCopies:
    here = source.ctypes.data

    def timed(out: bool, pieces: Sequence[Bytes]) -> float:
        there = [(piece.ctypes.data, len(piece)) for piece in pieces]
        began = time.perf_counter()
        for address, nbytes in there:
            ctypes.memmove(*((address, here) if out else (here, address)), nbytes)
        return since(began)

    return timed


def _by_streams(backend: Device, source: Bytes) -> TimedCopies:
    try:
        on_device = torch.from_numpy(source).to(backend.device)
    except torch.OutOfMemoryError as error:
        raise PagerError(
            f"the link cannot be measured: no {len(source)} bytes are free on {backend.device}; "
            "raise device_budget, or free device memory that other processes hold"
        ) from error
    stream = torch.Stream(backend.device)
    stream.wait_stream(torch.accelerator.current_stream(backend.device))  # which fills it

    def timed(out: bool, pieces: Sequence[Bytes]) -> float:
        began, ended = (torch.Event(backend.device, enable_timing=True) for _ in range(2))
        with on_stream(stream):
            began.record(stream)
            for piece in pieces:
                there, here = torch.from_numpy(piece), on_device[: len(piece)]
                target, origin = (there, here) if out else (here, there)
                target.copy_(origin, non_blocking=True)
            ended.record(stream)
        ended.synchronize()  # so nothing uses the memory on either side any more
        return max(began.elapsed_time(ended) / 1e3, 1e-9)

    return timed
