"""Cases that read and move whole pages."""

from __future__ import annotations

import torch

from tensorpager.kernels.checksum import page_checksums
from tensorpager.kernels.copies import gather_pages, scatter_pages

from .case import Case, Job, Setting, Work, same
from .pages import Pages

WORDS_AT_ONCE = 1 << 22


def random_bytes(setting: Setting) -> torch.Tensor:
    values = torch.empty(setting.nbytes, dtype=torch.uint8, device=setting.device)
    return values.random_(generator=setting.generator())


def _gather(setting: Setting) -> Job:
    dense = random_bytes(setting)
    pages = Pages(dense, setting.page_bytes, setting.seed)
    out, twin = torch.zeros_like(dense), torch.ones_like(dense)
    return Job(
        run=lambda: gather_pages(pages.arena, pages.frame_of, out, setting.page_bytes),
        peer=lambda: twin.copy_(dense),
        compare=lambda: same("out", out, twin),
        work=Work(2 * setting.nbytes),
    )


def _scatter(setting: Setting) -> Job:
    dense = random_bytes(setting)
    twin = torch.zeros_like(dense)
    pages = Pages(twin, setting.page_bytes, setting.seed)
    return Job(
        run=lambda: scatter_pages(dense, pages.frame_of, pages.arena, setting.page_bytes),
        peer=lambda: twin.copy_(dense),
        compare=lambda: same("pages", pages.read(), twin),
        work=Work(2 * setting.nbytes),
    )


def checksums(pages: torch.Tensor) -> torch.Tensor:
    """`page_checksums` of uint8 [pages, page_bytes], from the formula in its module alone."""
    low = (1 << 32) - 1
    count, page_bytes = pages.shape
    words = pages.view(torch.int32)
    place = torch.arange(page_bytes // 4, device=pages.device) * 0x9E3779B1 & low
    sums = []
    for some in words.split(max(1, WORDS_AT_ONCE // words.shape[1])):
        x = some.long() & low ^ place
        x = ((x ^ x >> 16) * 0x85EBCA6B + place) & low
        x = (x ^ x >> 13) * 0xC2B2AE35 & low
        sums.append((x ^ x >> 16).sum(1))
    assert len(torch.cat(sums)) == count
    return torch.cat(sums)


def _checksum(setting: Setting) -> Job:
    count = max(1, setting.nbytes // setting.page_bytes)
    whole = Setting(setting.device, count * setting.page_bytes, setting.page_bytes, setting.seed)
    dense = random_bytes(whole)
    pages = Pages(dense, setting.page_bytes, setting.seed)
    got: list[torch.Tensor] = []

    def run() -> None:
        got[:] = [page_checksums(pages.arena, pages.frame_of, setting.page_bytes)]

    expected = checksums(dense.view(count, setting.page_bytes))
    return Job(
        run=run, compare=lambda: same("sums", got[0], expected), work=Work(dense.nbytes + 8 * count)
    )


COPIES = (
    Case("gather", frozenset({"copies.copy_pages"}), "copy_", _gather),
    Case("scatter", frozenset({"copies.copy_pages"}), "copy_", _scatter),
    Case("checksum", frozenset({"checksum.page_checksums"}), "", _checksum),
)
