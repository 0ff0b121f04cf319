"""Code quality of every kernel on GPUs that are not there.

Data moves 128 bits at a time, nothing spills, and copies take at most 40 registers: six blocks of
256 threads on an SM, each thread with 64 bytes in flight, are 96 KiB in flight.
"""

import ast
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from aot_gate import TARGETS, MachineCode, Variant, compile_variant, recorded_launches
from page_suite import KIB, MIB, kernels_in_folder

from tensorpager.kernels import launch

pytestmark = pytest.mark.aot
PAGE_SIZES = [4 * KIB << shift for shift in range(13)]
assert PAGE_SIZES[-1] == 16 * MIB
QUICK = ("sm_90", "gfx942")  # targets


@dataclass(frozen=True)
class Gate:
    """How to drive a launcher through all its variants, and what its code may cost.

    drive : called with a kernel module, an arena of two frames and its page size.
    variants : how many specialisations the launcher may use, for all page sizes and addresses.
    vectors : 128-bit stores (and loads) in the code of 32-lane warps; 64-lane warps have half.
    narrow_loads, narrow_stores : accesses of less than 128 bits: table entries, and the last 1 to
        15 bytes.
    """

    drive: Callable[[Any, torch.Tensor, int], None]
    variants: int
    vectors: int
    narrow_loads: int
    narrow_stores: int
    registers: int = 40


def _tables() -> list[torch.Tensor]:
    """The same table at a 16-byte aligned and at an unaligned address."""
    return [torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)[1:]]


def _dense_tensors(page_bytes: int) -> list[torch.Tensor]:
    """One page and one byte, at every distance from 16-byte alignment."""
    memory = torch.empty(page_bytes + 16, dtype=torch.uint8)
    ends = [(at, at + nbytes) for at in range(16) for nbytes in (1, page_bytes)]
    return [memory[start:end] for start, end in ends]


def _drive_copies(module: Any, arena: torch.Tensor, page_bytes: int) -> None:
    for dense in _dense_tensors(page_bytes):
        for table in _tables():
            module.gather_pages(arena, table, dense, page_bytes)
            module.scatter_pages(dense, table, arena, page_bytes)


GATES = {
    "copies.copy_pages": Gate(_drive_copies, 6, vectors=8, narrow_loads=2, narrow_stores=1),
}
BYTE_COPY_REGISTERS = 64


@cache
def _variants(name: str) -> list[Variant]:
    module = importlib.import_module(f"tensorpager.kernels.{name.split('.')[0]}")
    with recorded_launches(module) as recorded:
        for page_bytes in PAGE_SIZES:
            arena = torch.empty(2 * page_bytes, dtype=torch.uint8)
            GATES[name].drive(module, arena, page_bytes)
    return list(dict.fromkeys(recorded))


def _all_variants() -> list[Any]:
    if launch.INTERPRETED or not launch.HAVE_TRITON:
        return []
    return [
        pytest.param(name, variant, id=str(variant))
        for name in GATES
        for variant in _variants(name)
    ]


def _check(code: MachineCode, gate: Gate, wide: bool, threads_per_warp: int) -> None:
    """Assert that `code` keeps to `gate`."""
    assert code.spilled_bytes == 0
    assert code.local_accesses == 0
    if wide:
        vectors = gate.vectors * 32 // threads_per_warp
        assert code.wide_stores() == vectors
        assert code.wide_loads() == vectors
        assert code.narrow_stores() <= gate.narrow_stores
        assert code.narrow_loads() <= gate.narrow_loads
        assert code.registers <= gate.registers
    else:
        assert set(code.store_bits) == {8}, "an unaligned copy stores bytes"
        assert [bits for bits in code.load_bits if bits != 8] in ([], [32]), "and loads bytes"
        assert code.registers <= BYTE_COPY_REGISTERS


def _gated() -> set[str]:
    """Kernels with a gate here, or in the `GATED` of another gate file."""
    found = set(GATES)
    for path in Path(__file__).parent.glob("test_aot_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "GATED":
                found |= ast.literal_eval(node.value)
    return found


def test_every_kernel_has_a_gate() -> None:
    assert kernels_in_folder() == _gated()


@pytest.mark.parametrize("name", GATES)
def test_launchers_use_few_variants(name: str) -> None:
    assert len(_variants(name)) == GATES[name].variants


@pytest.mark.parametrize(
    "target",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in TARGETS],
)
@pytest.mark.parametrize(("name", "variant"), _all_variants())
def test_code(name: str, variant: Variant, target: str) -> None:
    wide = bool(dict(variant.constants).get("WIDE", True))
    code = compile_variant(variant, TARGETS[target])
    _check(code, GATES[name], wide, TARGETS[target].threads_per_warp)


@pytest.mark.parametrize("target", QUICK)
@pytest.mark.parametrize("name", GATES)
def test_gate_notices_missing_alignment(name: str, target: str) -> None:
    code = compile_variant(_variants(name)[0].without_alignment(), TARGETS[target])
    assert code.wide_stores() == 0
    with pytest.raises(AssertionError):
        _check(code, GATES[name], True, TARGETS[target].threads_per_warp)


def test_gate_notices_spills() -> None:
    byte_copy = next(v for v in _variants("copies.copy_pages") if not v.constant("WIDE"))
    code = compile_variant(byte_copy.with_option("maxnreg", 24), TARGETS["sm_90"])
    assert code.spilled_bytes > 0
    assert code.local_accesses > 0
    with pytest.raises(AssertionError):
        _check(code, GATES["copies.copy_pages"], False, threads_per_warp=32)
