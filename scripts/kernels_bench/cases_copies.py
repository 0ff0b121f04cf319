"""Cases that move bytes: whole pages, rows of tables, checksums."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tensorpager.kernels.checksum import page_checksums
from tensorpager.kernels.copies import gather_pages, scatter_pages
from tensorpager.kernels.row_sums import add_rows, group_rows
from tensorpager.kernels.rows import gather_rows

from .case import Case, Job, Setting, Work, close, same
from .pages import Pages

SUM_ERROR = 2.0**-20  # of the sum of magnitudes, for sums of up to 8 float32
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


def _width(setting: Setting) -> int:
    """Elements in a row: 4 or 8 KiB, or few enough that a tiny table has many."""
    return 2048 if setting.nbytes >= 1 << 20 else 100


def _rows(setting: Setting, dtype: torch.dtype) -> tuple[torch.Tensor, int, int]:
    """A table of random rows, how many there are, and their width."""
    width = _width(setting)
    count = max(4, setting.elements(dtype) // width)
    return setting.randn(count, width, dtype=dtype), count, width


def _gather_rows(setting: Setting) -> Job:
    table, count, _ = _rows(setting, torch.bfloat16)
    pages = Pages(table, setting.page_bytes, setting.seed)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(setting.seed + 1))
    indices = order.to(setting.device)
    out = torch.zeros_like(table)
    twin: list[torch.Tensor] = []

    def peer() -> None:
        twin[:] = [F.embedding(indices, table)]

    return Job(
        run=lambda: gather_rows(pages.paged, indices, out),
        peer=peer,
        compare=lambda: same("rows", out, twin[0]),
        work=Work(2 * table.nbytes + indices.nbytes),
    )


def _lookups(setting: Setting, lookups: int, distinct: int) -> torch.Tensor:
    """On the host. Every row at least once where there are enough, up to 8 times, in random
    order."""
    generator = torch.Generator().manual_seed(setting.seed + 1)
    numbers = torch.arange(lookups) % distinct
    return numbers[torch.randperm(lookups, generator=generator)]


def _add_rows(setting: Setting) -> Job:
    table, count, width = _rows(setting, torch.float32)
    distinct = max(1, count // 2)
    lookups = _lookups(setting, count, distinct) * 2 % count
    groups = group_rows(lookups).to(table.device)
    indices = lookups.to(table.device)
    grad = table.flip(0)
    pages = Pages(table, setting.page_bytes, setting.seed)
    before = table.clone()

    def compare() -> None:
        exact = before.double().index_add_(0, indices, grad.double())
        magnitude = before.double().abs().index_add_(0, indices, grad.double().abs())
        close("table", pages.read(), exact, SUM_ERROR * magnitude.view(-1))

    touched = groups.ids.numel() * width * 4
    return Job(
        run=lambda: add_rows(grad, groups, pages.paged),
        peer=lambda: table.index_add_(0, indices, grad),
        compare=compare,
        work=Work(grad.nbytes + 2 * touched),
    )


COPIES = (
    Case("gather", frozenset({"copies.copy_pages"}), "copy_", _gather),
    Case("scatter", frozenset({"copies.copy_pages"}), "copy_", _scatter),
    Case("checksum", frozenset({"checksum.page_checksums"}), "", _checksum),
    Case("gather_rows", frozenset({"rows.gather_rows"}), "F.embedding", _gather_rows),
    Case("add_rows", frozenset({"row_sums.add_rows"}), "index_add_", _add_rows),
)
