"""Whether a kernel multiplies with a weight in pages where it is, or torch with a dense copy.

What is compared is computed from rates, not measured: a gather reads and writes the weight once
more, `2 * bytes / bandwidth`, and the direct kernel is some fraction slower than cuBLAS. On an H200
in half precision a gather costs 367 / M of the product, which is 72 % at M = 512 and 9 % at
M = 4096. A run on a GPU replaces the constants: pass `Rates` with what it measured, or with the
crossover itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .launch import runs_triton

__all__ = ["Rates", "reads_directly"]

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


def reads_directly(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    *,
    device_type: str = "cuda",
    rates: Rates | None = None,
) -> bool:
    """Whether x [m, k] times a weight [n, k] in scattered frames, or one of its slabs, goes by the
    kernel on pages. The gradients have the same bytes and operations, and the same answer.

    rates : None means the defaults, which are computed, not measured. Without the compiled kernel
    one large product is faster than many small ones; where rows are not whole vectors of 16 bytes,
    it would read them in narrow pieces.
    """
    if not runs_triton(torch.device(device_type)) or k * dtype.itemsize % VECTOR_BYTES:
        return False
    rates = rates or Rates()
    if dtype in rates.crossover:
        return m <= rates.crossover[dtype]
    single = dtype == torch.float32
    flops = rates.single_flops if single else rates.half_flops
    share = rates.direct_single if single else rates.direct_half
    moving = (m * k + m * n + n * k) * dtype.itemsize / rates.bytes_per_second
    product = max(2 * m * n * k / flops, moving)
    gather = 2 * n * k * dtype.itemsize / rates.bytes_per_second
    return product / share <= gather + product
