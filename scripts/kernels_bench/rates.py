"""What this machine can do: the rates that floors are computed from, measured in the same run."""

from __future__ import annotations

import torch

from .case import Rates
from .clock import Clock, take_turns

COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
LINK_BYTES = 512 << 20


def measure_rates(clock: Clock, seconds: float) -> Rates:
    """Copy and link rates, `seconds` for each measurement. On a CPU only the copy's.

    A copy in RAM stands for the link there.
    """
    memory = _copy_rate(clock, seconds)
    if clock.device == "cpu":
        return Rates(memory, memory / 2)
    return Rates(memory, _link_rate(clock, seconds))


def _copy_rate(clock: Clock, seconds: float) -> float:
    """Bytes read plus bytes written per second, of one large dense copy."""
    source = torch.ones(COPY_BYTES[clock.device], dtype=torch.uint8, device=clock.device)
    source.random_()
    target = torch.zeros_like(source)
    times = take_turns({"copy": lambda: clock.call(lambda: target.copy_(source))}, seconds)
    return 2 * source.numel() / times["copy"].median


def _link_rate(clock: Clock, seconds: float) -> float:
    """Bytes per second of one large copy from page-locked memory."""
    source = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True).random_()
    target = torch.zeros_like(source, device=clock.device)
    copy = {"copy": lambda: clock.call(lambda: target.copy_(source, non_blocking=True))}
    return LINK_BYTES / take_turns(copy, seconds)["copy"].median
