"""Copies between host and device: pages in random order against one large copy, and zero copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from tensorpager.kernels.zero_copy import (
    MAX_BLOCK_BYTES,
    block_table,
    calibrate_crossover,
    fetch_blocks,
)

from .case import ResultError, Setting
from .clock import Clock, take_turns

PAGE_BYTES = 2 << 20
BLOCK_SIZES = (256, 1 << 10, 4 << 10, 8 << 10, 16 << 10, MAX_BLOCK_BYTES)
BLOCKS = 256


def page_copies(setting: Setting) -> tuple[dict[str, Callable[[], None]], Callable[[], None]]:
    """Copies of all bytes in and out, at once and by pages; a check that raises `ResultError`.

    Pages go from a random place on the host to a random frame. Host memory is page-locked.
    """
    count = max(1, setting.nbytes // setting.page_bytes)
    size = count * setting.page_bytes
    host = torch.empty(size, dtype=torch.uint8, pin_memory=setting.device != "cpu")
    host.random_(generator=torch.Generator().manual_seed(setting.seed))
    device = torch.zeros(size, dtype=torch.uint8, device=setting.device)
    there, here = host.view(count, -1), device.view(count, -1)
    order = torch.Generator().manual_seed(setting.seed + 1)
    pages, frames = (torch.randperm(count, generator=order).tolist() for _ in range(2))

    def one_in() -> None:
        device.copy_(host, non_blocking=True)

    def one_out() -> None:
        host.copy_(device, non_blocking=True)

    def pages_in() -> None:
        for page, frame in zip(pages, frames, strict=True):
            here[frame].copy_(there[page], non_blocking=True)

    def pages_out() -> None:
        for page, frame in zip(pages, frames, strict=True):
            there[page].copy_(here[frame], non_blocking=True)

    def check() -> None:
        original = host.clone()
        pages_in()
        if not torch.equal(here[frames].cpu(), original.view(count, -1)[pages]):
            raise ResultError("pages that were copied in differ")
        host.zero_()
        pages_out()
        if setting.device != "cpu":
            torch.cuda.synchronize()
        if not torch.equal(host, original):
            raise ResultError("pages that were copied out differ")

    ways = {"one copy in": one_in, "pages in": pages_in}
    return {**ways, "one copy out": one_out, "pages out": pages_out}, check


def sweep_link(clock: Clock, setting: Setting, seconds: float) -> dict[str, Any]:
    """Times of all four copies, and what share of a large copy's rate pages have."""
    copies, check = page_copies(setting)
    check()
    turns = {name: lambda run=run: clock.call(run) for name, run in copies.items()}
    times = take_turns(turns, seconds)
    shares = {
        f"share_{way}": times[f"one copy {way}"].median / times[f"pages {way}"].median
        for way in ("in", "out")
    }
    record = {name: one.record() for name, one in times.items()}
    return {"nbytes": setting.nbytes, "page_bytes": setting.page_bytes, **record, **shares}


class Fetches:
    """`measure` for `calibrate_crossover`: blocks at random places of page-locked memory."""

    def __init__(self, device: str, blocks: int = BLOCKS) -> None:
        self._device = device
        size = 4 * blocks * MAX_BLOCK_BYTES
        self.host = torch.empty(size, dtype=torch.uint8, pin_memory=device != "cpu")
        self.host.random_(generator=torch.Generator().manual_seed(0))
        self.out = torch.zeros(blocks * MAX_BLOCK_BYTES, dtype=torch.uint8, device=device)
        self._known: dict[tuple[int, int], list[int]] = {}

    def places(self, block_bytes: int, count: int) -> list[int]:
        """Where `count` blocks begin on the host, at multiples of their size; remembered."""
        if (block_bytes, count) not in self._known:
            places = self.host.numel() // block_bytes
            order = torch.randperm(places, generator=torch.Generator().manual_seed(count))
            self._known[block_bytes, count] = (order[:count] * block_bytes).tolist()
        return self._known[block_bytes, count]

    def fetch(self, how: Literal["kernel", "engine"], block_bytes: int, count: int) -> None:
        """Queue it."""
        places = self.places(block_bytes, count)
        if how == "engine":
            for number, place in enumerate(places):
                target = self.out[number * block_bytes : (number + 1) * block_bytes]
                target.copy_(self.host[place : place + block_bytes], non_blocking=True)
            return
        table = block_table(
            self.host.data_ptr() + np.array(places),
            self.out.data_ptr() + np.arange(count) * block_bytes,
            np.full(count, block_bytes),
        )
        fetch_blocks(table.to(self.out.device))

    def measure(self, how: Literal["kernel", "engine"], block_bytes: int, count: int) -> float:
        """Seconds from queueing to arrival, host time included."""
        self.places(block_bytes, count)
        self._wait()
        began = time.perf_counter()
        self.fetch(how, block_bytes, count)
        self._wait()
        return max(time.perf_counter() - began, 1e-9)

    def check(self, block_bytes: int, count: int) -> None:
        """Raises `ResultError` unless both ways fetch the same right bytes."""
        expected = torch.stack(
            [self.host[place : place + block_bytes] for place in self.places(block_bytes, count)]
        ).view(-1)
        for how in ("kernel", "engine"):
            self.out.zero_()
            self.fetch(how, block_bytes, count)
            if not torch.equal(self.out[: expected.numel()].cpu(), expected):
                raise ResultError(f"{how}: {count} blocks of {block_bytes} bytes differ")

    def _wait(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()


def sweep_fetches(
    device: str, sizes: tuple[int, ...] = BLOCK_SIZES, repeats: int = 5, blocks: int = BLOCKS
) -> dict[str, Any]:
    """Both ways by block size, and the crossover that the runtime would calibrate."""
    fetches = Fetches(device, blocks)
    rows = []
    for nbytes in sizes:
        fetches.check(nbytes, blocks)
        turns = {
            how: lambda how=how, nbytes=nbytes: fetches.measure(how, nbytes, blocks)
            for how in ("kernel", "engine")
        }
        times = take_turns(turns, 0.0, least=repeats)
        record = {how: one.record() for how, one in times.items()}
        rows.append({"block_bytes": nbytes, "blocks": blocks, **record})
    found = calibrate_crossover(fetches.measure, count=blocks, repeats=repeats)
    crossover = {"block_bytes": found.block_bytes, "blocks": found.blocks}
    return {"rows": rows, "crossover": crossover}
