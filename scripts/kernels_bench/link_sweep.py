"""Copies between host and device: pages in random order against one large copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .case import ResultError, Setting
from .clock import Clock, take_turns

PAGE_BYTES = 2 << 20


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
