"""Code quality of the page checksum on GPUs that are not there: 128 bits at a time, no spills."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from aot_gate import TARGETS, MachineCode, Variant, compile_variant, recorded_launches
from page_suite import KIB, MIB

from tensorpager.kernels import checksum

pytestmark = pytest.mark.aot
GATED = {"checksum.page_checksums"}
REGISTERS = 96
QUICK = ("sm_90", "gfx942")
PAGE_BYTES = (4 * KIB, 2 * MIB)


@dataclass(frozen=True)
class Gate:
    """What the code may have, for 32-lane warps; 64-lane warps have half.

    loads : 128-bit accesses. table_loads : loads of table entries. result_bits : the one store.
    """

    loads: int = 4
    table_loads: int = 1
    result_bits: int = 64

    def check(self, code: MachineCode, threads_per_warp: int) -> None:
        assert code.spilled_bytes == 0
        assert code.local_accesses == 0
        assert code.registers <= REGISTERS
        assert code.wide_loads() == self.loads * 32 // threads_per_warp
        assert code.wide_stores() == 0
        assert code.narrow_loads() <= self.table_loads
        assert list(code.store_bits) == [self.result_bits]


@cache
def _variant(page_bytes: int) -> Variant:
    """The one variant that pages of a size are compiled to."""
    arena = torch.zeros(2 * page_bytes, dtype=torch.uint8)
    with recorded_launches(checksum) as recorded:
        for frames in torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)[1:]:
            checksum.page_checksums(arena, frames, page_bytes)
    assert len(set(recorded)) == 1, f"{len(set(recorded))} variants"
    return recorded[0]


def _compiled() -> list[Any]:
    return [
        pytest.param(
            page_bytes,
            target,
            marks=() if page_bytes == 2 * MIB and target in QUICK else pytest.mark.slow,
        )
        for page_bytes in PAGE_BYTES
        for target in TARGETS
    ]


def test_every_kernel_is_gated() -> None:
    found = {_variant(page_bytes).kernel.__name__ for page_bytes in PAGE_BYTES}
    assert found == {f"_{name.split('.')[1]}_kernel" for name in GATED}


@pytest.mark.parametrize(("page_bytes", "target"), _compiled())
def test_code(page_bytes: int, target: str) -> None:
    code = compile_variant(_variant(page_bytes), TARGETS[target])
    Gate().check(code, TARGETS[target].threads_per_warp)


def test_gate_notices_missing_alignment() -> None:
    """On gfx942, where compiling takes least."""
    code = compile_variant(_variant(2 * MIB).without_alignment(), TARGETS["gfx942"])
    assert code.wide_loads() == 0
    with pytest.raises(AssertionError):
        Gate().check(code, 64)
