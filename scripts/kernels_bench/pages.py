"""Tensors in pages whose frames are in random order, written and read without any page kernel."""

from __future__ import annotations

from typing import Any

import torch

from tensorpager.kernels.blockwise import BLOCK, Blockwise
from tensorpager.kernels.pieces import Paged
from tensorpager.kernels.quantize import quantize_reference

from .case import ResultError, Setting, close, rounding

POISON = 0xA5
DIFFERENT_CODES = 1e-3
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
        self._root = root
        quantize_reference([values], [self.dense], root)
        self.codes = Pages(codes, setting.page_bytes, seed)
        self.scales = Pages(scales, setting.page_bytes, seed + 1)
        self.state = Blockwise(self.codes.paged, self.scales.paged)
        self.nbytes = codes.nbytes + scales.nbytes

    def compare(self, name: str) -> None:
        """Raise `ResultError` unless pages and dense hold the same, but for rounding.

        torch divides on a device by multiplying, so scales differ in their last bits, and with
        them a code here and there by one step.
        """
        scales, codes = self.scales.read(f"{name} scales"), self.codes.read(f"{name} codes")
        assert isinstance(self.dense.scales, torch.Tensor)
        close(f"{name} scales", scales, self.dense.scales, rounding(scales, 16, torch.float32))
        got, expected = self._steps(codes), self._steps(self.dense.codes)
        close(f"{name} codes", got, expected, 1.0)
        share = float((got != expected).double().mean())
        if share > DIFFERENT_CODES:
            raise ResultError(f"{name} codes: {share:.2%} are off by one")

    def _steps(self, codes: Any) -> torch.Tensor:
        """Codes as numbers of steps from 0, in the order of what they mean."""
        code = codes.int()
        return code if self._root else torch.where(code > 127, 128 - code, code)
