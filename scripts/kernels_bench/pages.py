"""Tensors in pages whose frames are in random order, written and read without any page kernel."""

from __future__ import annotations

import torch

from tensorpager.kernels.blockwise import BLOCK, Blockwise
from tensorpager.kernels.paged_matrix import PagedMatrix
from tensorpager.kernels.pieces import Paged
from tensorpager.kernels.quantize import quantize_reference

from .case import ResultError, Setting

POISON = 0xA5
SPARE_SHARE = 8  # one spare frame for so many pages, at least one


class Pages:
    """`values` in pages of an arena of its own; no two neighbours but by chance, some spare frames.

    Frames that no page is in, and what follows the end in the last one, hold POISON.
    """

    def __init__(self, values: torch.Tensor, page_bytes: int, seed: int = 0) -> None:
        pages = -(-values.nbytes // page_bytes)
        count = pages + max(1, pages // SPARE_SHARE)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        self.shape = values.shape
        self.page_bytes, self.nbytes, self.dtype = page_bytes, values.nbytes, values.dtype
        self.arena = torch.empty(count * page_bytes, dtype=torch.uint8, device=values.device)
        self.arena.fill_(POISON)
        self.frame_of = order[:pages].int().to(values.device)
        self._frames = order[:pages].long().to(values.device)
        self._spare = order[pages:].long().to(values.device)
        whole = values.nbytes // page_bytes
        content = values.contiguous().view(-1).view(torch.uint8)
        by_frame = self.arena.view(count, page_bytes)
        by_frame[self._frames[:whole]] = content[: whole * page_bytes].view(whole, page_bytes)
        if whole < pages:
            tail = content[whole * page_bytes :]
            by_frame[int(self._frames[-1]), : tail.numel()] = tail
        self.paged = Paged(
            self.arena, order[:pages].int().numpy(), page_bytes, values.dtype, values.numel()
        )

    def matrix(self) -> PagedMatrix:
        rows, columns = self.shape
        return PagedMatrix(self.arena, self.frame_of, self.page_bytes, self.dtype, rows, columns)

    def read(self, name: str = "pages") -> torch.Tensor:
        """What the pages hold. Raises `ResultError` if bytes outside of them changed."""
        by_frame = self.arena.view(-1, self.page_bytes)
        content = by_frame[self._frames].view(-1)
        beyond = (by_frame[self._spare].view(-1), content[self.nbytes :])
        if any(bool((memory != POISON).any()) for memory in beyond):
            raise ResultError(f"{name}: bytes outside of the pages were written")
        return content[: self.nbytes].view(self.dtype).view(self.shape)


class BlockwisePages:
    """`values` in 8 bits, with codes and scales in pages, and the same densely."""

    def __init__(
        self, values: torch.Tensor, setting: Setting, *, root: bool, seed: int = 0
    ) -> None:
        codes = torch.zeros(values.numel(), dtype=torch.uint8, device=values.device)
        scales = torch.zeros(-(-values.numel() // BLOCK), device=values.device)
        self.dense = Blockwise(codes, scales)
        quantize_reference([values], [self.dense], root)
        self.codes = Pages(codes, setting.page_bytes, seed)
        self.scales = Pages(scales, setting.page_bytes, seed + 1)
        self.state = Blockwise(self.codes.paged, self.scales.paged)
        self.nbytes = codes.nbytes + scales.nbytes
