"""How a matrix product reads its paged weight: in place, through the page table, or gathered.

The rules are one table, `RULES`. What they compare is computed from rates, not measured: a gather
reads and writes the weight once more, `2 * bytes / bandwidth`, and the direct kernel is some
fraction slower than cuBLAS. On an H200 in half precision a gather costs 367 / M of the product,
which is 72 % at M = 512 and 9 % at M = 4096. A run on a GPU replaces the constants: pass `Rates`
with what it measured, or with the crossover itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from .launch import runs_triton

__all__ = ["RULES", "Path", "Product", "Rates", "Rule", "choose", "rule"]

Path = Literal["view", "direct", "gather"]
VECTOR_BYTES = 16


@dataclass(frozen=True)
class Rates:
    """What the choice is computed from. The defaults are an H200's, and none was measured by us.

    bytes_per_second : of a copy within device memory, counting bytes read plus bytes written.
    half_flops, single_flops : of cuBLAS on large matrices, in half precision and in float32
        (data sheet) without tf32.
    direct_half, direct_single : speed of the direct kernel as a share of cuBLAS's on a dense
        weight; assumptions.
    crossover : for a dtype, the largest M at which the direct kernel was measured to be faster;
        replaces the computation.
    """

    bytes_per_second: float = 4.3e12
    half_flops: float = 790e12
    single_flops: float = 67e12
    direct_half: float = 0.8
    direct_single: float = 0.6
    crossover: dict[torch.dtype, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Product:
    """x [m, k] times a weight [n, k]; the gradients have the same bytes and operations.

    room_bytes : dense memory that a gathered copy may take; None if there is enough.
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype
    consecutive: bool
    device_type: str
    room_bytes: int | None
    rates: Rates

    @property
    def weight_bytes(self) -> int:
        return self.n * self.k * self.dtype.itemsize

    def has_room(self) -> bool:
        return self.room_bytes is None or self.weight_bytes <= self.room_bytes

    def direct_is_faster(self) -> bool:
        """By the measured crossover, or by the rates."""
        if self.dtype in self.rates.crossover:
            return self.m <= self.rates.crossover[self.dtype]
        single = self.dtype == torch.float32
        flops = self.rates.single_flops if single else self.rates.half_flops
        share = self.rates.direct_single if single else self.rates.direct_half
        elements = self.m * self.k + self.m * self.n + self.n * self.k
        moving = elements * self.dtype.itemsize / self.rates.bytes_per_second
        product = max(2 * self.m * self.n * self.k / flops, moving)
        gather = 2 * self.weight_bytes / self.rates.bytes_per_second
        return product / share <= gather + product


@dataclass(frozen=True)
class Rule:
    """The first rule that holds decides."""

    path: Path
    holds: Callable[[Product], bool]
    reason: str


RULES = (
    Rule(
        "view",
        lambda product: product.consecutive,
        "the frames are consecutive, so torch's own product reads the weight where it is",
    ),
    Rule(
        "direct",
        lambda product: not product.has_room(),
        "a gathered copy does not fit beside the arena",
    ),
    Rule(
        "gather",
        lambda product: not runs_triton(torch.device(product.device_type)),
        "on this device there is no kernel, and one large product is faster than many small ones",
    ),
    Rule(
        "gather",
        lambda product: product.k * product.dtype.itemsize % VECTOR_BYTES != 0,
        "rows are not whole vectors of 16 bytes, so the kernel would read them in narrow pieces",
    ),
    Rule(
        "direct",
        lambda product: product.direct_is_faster(),
        "few rows of x: a gather would cost more than the kernel loses against cuBLAS",
    ),
    Rule(
        "gather",
        lambda _product: True,
        "many rows of x: a gather costs less than the kernel loses against cuBLAS",
    ),
)


def choose(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    consecutive: bool,
    *,
    device_type: str = "cuda",
    room_bytes: int | None = None,
    rates: Rates | None = None,
) -> Path:
    """How to multiply x [m, k] with a paged weight [n, k], or one of its slabs.

    consecutive : whether the frames are. room_bytes : dense memory that a gathered copy may take;
    None means enough. rates : None means the defaults, which are computed, not measured.

    The gradients have the same path: that of the input reads the same weight; where that of the
    weight says gather, read scatter. A CPU never gets "direct" but for want of room; the launchers'
    references then multiply each stretch of whole rows where it is.
    """
    found = rule(
        *(m, n, k, dtype, consecutive),
        device_type=device_type,
        room_bytes=room_bytes,
        rates=rates,
    )
    return found.path


def rule(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    consecutive: bool,
    *,
    device_type: str = "cuda",
    room_bytes: int | None = None,
    rates: Rates | None = None,
) -> Rule:
    """The rule that decides for `choose`; its `reason` says why."""
    product = Product(m, n, k, dtype, consecutive, device_type, room_bytes, rates or Rates())
    return next(each for each in RULES if each.holds(product))
