"""Code quality of reductions, GradScaler's check and the page checksum on GPUs that are not there.

Whole tiles move 128 bits at a time when operands are aligned, a last tile's elements one by one;
nothing spills. An SM has 65,536 registers: a launch of 256 threads with 96 each leaves room for two
blocks, 64 KiB in flight.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import aot_gate
import numpy as np
import pytest
import torch
from aot_gate import TARGETS, MachineCode, Variant, compile_variant, recorded_launches
from page_suite import KIB, MIB
from reduce_suite import DTYPES

from tensorpager.kernels import checksum, combine, reduce, unscale
from tensorpager.kernels.pieces import Paged

pytestmark = pytest.mark.aot
GATED = {
    "checksum.page_checksums",
    "combine.combine",
    "reduce.reduce",
    "unscale.non_finite_check_and_unscale",
}
aot_gate.POINTERS.setdefault(torch.float64, "*fp64")
REGISTERS = 96
QUICK = ("sm_90", "gfx942")


@dataclass(frozen=True)
class Gate:
    """What the code of one variant may have, for 32-lane warps; 64-lane warps have half.

    loads, stores : 128-bit accesses.
    element_bits : what accesses to elements one by one may be, for last tiles.
    table_loads : loads of table entries and scalars.
    result_bits : the one store of a result.
    """

    loads: int
    stores: int = 0
    element_bits: int = 0
    table_loads: int = 0
    result_bits: int = 64

    def check(self, code: MachineCode, threads_per_warp: int) -> None:
        assert code.spilled_bytes == 0
        assert code.local_accesses == 0
        assert code.registers <= REGISTERS
        assert code.wide_loads() == self.loads * 32 // threads_per_warp
        assert code.wide_stores() == self.stores * 32 // threads_per_warp
        loads = [bits for bits in code.load_bits if bits not in (128, self.element_bits)]
        assert len(loads) <= self.table_loads
        stores = [bits for bits in code.store_bits if bits not in (128, self.element_bits)]
        assert set(stores) <= {self.result_bits}
        assert len(stores) <= 1


def _operands(dtype: torch.dtype, aligned: bool) -> Iterator[list[Any]]:
    """Lists of many sizes, paged ones in pages of all sizes."""
    for numel in (1, 16, 1000, 100_000):
        memory = torch.zeros(numel + 1, dtype=dtype)
        yield [memory[:-1] if aligned else memory[1:]]
    if aligned:
        for page_bytes in (4 * KIB, 2 * MIB, 16 * MIB):
            arena = torch.empty(page_bytes, dtype=torch.uint8)
            yield [Paged(arena, np.zeros(1, np.int32), page_bytes, dtype, 100)]
            yield [Paged(arena, np.zeros(1, np.int32), page_bytes, dtype, page_bytes // 8)] * 2


def _drive_reduce(dtype: torch.dtype, how: str, p: float, aligned: bool) -> None:
    for operands in _operands(dtype, aligned):
        reduce.reduce(operands, how, p)


def _drive_unscale(dtype: torch.dtype, aligned: bool) -> None:
    for operands in _operands(dtype, aligned):
        for scalars in torch.zeros(2, 1), torch.zeros(4, 1)[1:3]:
            unscale.non_finite_check_and_unscale(operands, *scalars)


def _drive_combine(how: str) -> None:
    for count in (1, 16, 5000):
        partials = torch.zeros(count, dtype=torch.float64)
        combine.combine(partials, np.array([0, count]), how)


def _drive_checksum(page_bytes: int) -> None:
    arena = torch.zeros(2 * page_bytes, dtype=torch.uint8)
    for frames in torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)[1:]:
        checksum.page_checksums(arena, frames, page_bytes)


@dataclass(frozen=True)
class Case:
    """One variant: how a launcher is driven to it, and its gate."""

    name: str
    module: Any
    drive: Callable[..., None]
    args: tuple[Any, ...]
    gate: Gate
    quick: bool = False


def _reduce_case(
    dtype: torch.dtype, how: str, p: float, aligned: bool = True, quick: bool = False
) -> Case:
    tile_bits = (1024 if p == 3 else 4096 if dtype == torch.float64 else 8192) * dtype.itemsize * 8
    vectors = tile_bits // (128 * (128 if p == 3 else 256))
    gate = Gate(vectors if aligned else 0, element_bits=dtype.itemsize * 8, table_loads=3)
    name = f"{how}-{p}-{str(dtype).split('.')[1]}-{'aligned' if aligned else 'unaligned'}"
    return Case(name, reduce, _drive_reduce, (dtype, how, p, aligned), gate, quick)


def _unscale_case(dtype: torch.dtype, aligned: bool = True, quick: bool = False) -> Case:
    tile_bits = (2048 if dtype == torch.float64 else 4096) * dtype.itemsize * 8
    vectors = tile_bits // (128 * 256) if aligned else 0
    gate = Gate(vectors, vectors, dtype.itemsize * 8, table_loads=3, result_bits=32)
    name = f"unscale-{str(dtype).split('.')[1]}-{'aligned' if aligned else 'unaligned'}"
    return Case(name, unscale, _drive_unscale, (dtype, aligned), gate, quick)


CASES = [
    *(_reduce_case(dtype, "norm", 2.0) for dtype in (torch.float16, torch.float64)),
    _reduce_case(torch.float32, "norm", 2.0, quick=True),
    _reduce_case(torch.bfloat16, "norm", 2.0, quick=True),
    _reduce_case(torch.float32, "amax", 2.0, quick=True),
    *(
        _reduce_case(dtype, how, p)
        for dtype in (torch.bfloat16, torch.float32)
        for how, p in (("sum", 2.0), ("isfinite", 2.0), ("norm", 0.0), ("norm", 1.0), ("norm", 3.0))
    ),
    *(_reduce_case(dtype, "norm", 2.0, aligned=False) for dtype in DTYPES),
    *(_unscale_case(dtype) for dtype in (torch.float16, torch.float64)),
    _unscale_case(torch.float32, quick=True),
    _unscale_case(torch.bfloat16, quick=True),
    *(_unscale_case(dtype, aligned=False) for dtype in DTYPES),
    *(
        Case(how, combine, _drive_combine, (how,), Gate(0, 0, 64, table_loads=2), how == "sum")
        for how in ("sum", "max", "min")
    ),
    *(
        Case(
            f"checksum-{page_bytes}",
            *(checksum, _drive_checksum, (page_bytes,)),
            Gate(loads=4, table_loads=1),
            page_bytes == 2 * MIB,
        )
        for page_bytes in (4 * KIB, 2 * MIB)
    ),
]
by_name = {case.name: case for case in CASES}


@cache
def _variant(name: str) -> Variant:
    """The one variant that a case is compiled to."""
    case = by_name[name]
    with recorded_launches(case.module) as recorded:
        case.drive(*case.args)
    assert len(set(recorded)) == 1, f"{name} takes {len(set(recorded))} variants"
    return recorded[0]


def _compiled() -> list[Any]:
    slow = pytest.mark.slow
    return [
        pytest.param(case.name, target, marks=() if case.quick and target in QUICK else slow)
        for case in CASES
        for target in TARGETS
    ]


@pytest.mark.parametrize("name", by_name)
def test_sizes_and_addresses_share_one_variant(name: str) -> None:
    _variant(name)


def test_every_kernel_is_gated() -> None:
    found = {_variant(name).kernel.__name__ for name in by_name}
    assert found == {f"_{name.split('.')[1]}_kernel" for name in GATED}


@pytest.mark.parametrize(("name", "target"), _compiled())
def test_code(name: str, target: str) -> None:
    code = compile_variant(_variant(name), TARGETS[target])
    by_name[name].gate.check(code, TARGETS[target].threads_per_warp)


def _unaligned(variant: Variant) -> Variant:
    if "ALIGNED" not in dict(variant.constants):
        return variant.without_alignment()
    constants = dict(variant.constants) | {"ALIGNED": False}
    return replace(variant, constants=tuple(sorted(constants.items())))


@pytest.mark.parametrize(
    "name", ["norm-2.0-bfloat16-aligned", "unscale-float32-aligned", f"checksum-{2 * MIB}"]
)
def test_gate_notices_missing_alignment(name: str) -> None:
    """On gfx942, where compiling takes least."""
    code = compile_variant(_unaligned(_variant(name)), TARGETS["gfx942"])
    assert code.wide_loads() == 0
    with pytest.raises(AssertionError):
        by_name[name].gate.check(code, 64)


def test_gate_notices_spills() -> None:
    name = "unscale-float32-aligned"
    code = compile_variant(_variant(name).with_option("maxnreg", 24), TARGETS["sm_90"])
    assert code.spilled_bytes > 0
    with pytest.raises(AssertionError):
        by_name[name].gate.check(code, 32)
