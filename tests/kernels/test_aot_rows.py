"""Code quality, on GPUs that are not there, of rows."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from aot_gate import TARGETS, MachineCode, Variant, compile_variant, recorded_launches

from tensorpager.kernels.pieces import Paged
from tensorpager.kernels.row_sums import group_rows

pytestmark = pytest.mark.aot
GATED = {
    "rows.gather_rows",
    "row_sums.add_rows",
}
FULL, HALF = torch.float32, torch.bfloat16
Drive = Callable[[Any, torch.dtype, int], None]


@dataclass(frozen=True)
class Gate:
    """How to drive a launcher, and what the code for aligned rows of 16-byte multiples may cost.

    drive : called with the module, a dtype and elements in a row.
    loads, stores : 128-bit accesses at least, in the code of 32-lane warps.
    scalars : loads of less than 128 bits at most: tables, positions.
    """

    drive: Drive
    loads: int
    stores: int
    scalars: int
    registers: int = 64


def _table(dtype: torch.dtype, row: int) -> Paged:
    pages = -(-8 * row * dtype.itemsize // 4096)
    arena = torch.zeros(pages * 4096, dtype=torch.uint8)
    return Paged(arena, np.arange(pages, dtype=np.int32), 4096, dtype, 8 * row)


INDICES = torch.tensor([1, 3, 1])


def _gather(module: Any, dtype: torch.dtype, row: int) -> None:
    module.gather_rows(_table(dtype, row), INDICES, torch.empty(3, row, dtype=dtype))


def _add(module: Any, dtype: torch.dtype, row: int) -> None:
    grad = torch.empty(3, row, dtype=dtype)
    module.add_rows(grad, group_rows(INDICES), _table(dtype, row), row == 1000)


GATES = {
    "rows.gather_rows": Gate(_gather, loads=8, stores=8, scalars=13),
    "row_sums.add_rows": Gate(_add, loads=6, stores=2, scalars=9),
}
assert set(GATES) == GATED


@cache
def _variants(name: str) -> dict[str, Variant]:
    """A variant for each kind of row."""
    module = importlib.import_module(f"tensorpager.kernels.{name.split('.')[0]}")
    kinds = {
        "fp32": (FULL, 768),
        "bf16": (HALF, 1024),
        "bf16_odd": (HALF, 999),
        "fp32_short": (FULL, 64),
        "fp32_by_frequency": (FULL, 1000),
    }
    found = {}
    for kind, (dtype, row) in kinds.items():
        with recorded_launches(module) as recorded:
            GATES[name].drive(module, dtype, row)
        (found[kind],) = recorded
    return found


def _cases(kinds: list[str], targets: list[str]) -> list[Any]:
    return [
        pytest.param(name, kind, target, id=f"{name}-{kind}-{target}")
        for name in GATES
        for kind in kinds
        for target in targets
    ]


def _check(code: MachineCode, gate: Gate, lanes: int) -> None:
    """Assert that code for aligned rows keeps to `gate`.

    With 64 lanes a tile of 1,024 bf16 is 8 bytes for each: 64 bits are wide there.
    """
    assert code.spilled_bytes == 0
    assert code.local_accesses == 0
    assert code.registers <= gate.registers
    if lanes == 64:
        assert sum(bits >= 64 for bits in code.load_bits) >= gate.loads // 2
        assert sum(bits >= 64 for bits in code.store_bits) >= gate.stores // 2
        return
    assert code.wide_loads() >= gate.loads
    assert code.wide_stores() >= gate.stores
    assert code.narrow_loads() <= gate.scalars
    assert code.narrow_stores() == 0


def _check_aligned(name: str, kind: str, target: str) -> None:
    code = compile_variant(_variants(name)[kind], TARGETS[target])
    _check(code, GATES[name], TARGETS[target].threads_per_warp)


@pytest.mark.parametrize(("name", "kind", "target"), _cases(["fp32"], ["sm_90"]))
def test_aligned_rows_are_wide(name: str, kind: str, target: str) -> None:
    _check_aligned(name, kind, target)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "target"),
    _cases(["fp32", "bf16", "fp32_short", "fp32_by_frequency"], ["sm_80", "sm_100", "gfx942"]),
)
def test_aligned_rows_are_wide_everywhere(name: str, kind: str, target: str) -> None:
    _check_aligned(name, kind, target)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "target"), _cases(["bf16_odd"], ["sm_90", "gfx942"]))
def test_odd_rows_do_not_spill(name: str, kind: str, target: str) -> None:
    code = compile_variant(_variants(name)[kind], TARGETS[target])
    assert code.spilled_bytes == 0
    assert code.local_accesses == 0


def test_few_variants() -> None:
    """Counts, row lengths and page sizes make none; alignment, width and dtype do."""
    for name, gate in GATES.items():
        module = importlib.import_module(f"tensorpager.kernels.{name.split('.')[0]}")
        with recorded_launches(module) as recorded:
            for row in (272, 512, 768, 992):
                gate.drive(module, FULL, row)
        assert len(set(recorded)) <= 2, name


def test_gate_notices_rows_without_alignment() -> None:
    aligned = _variants("row_sums.add_rows")["fp32"]
    constants = tuple((k, 1 if k == "TOGETHER" else v) for k, v in aligned.constants)
    code = compile_variant(replace(aligned, constants=constants), TARGETS["sm_90"])
    assert code.wide_loads() == 0
    with pytest.raises(AssertionError):
        _check(code, GATES["row_sums.add_rows"], 32)


def test_gate_notices_spills() -> None:
    aligned = _variants("rows.gather_rows")["fp32"].with_option("maxnreg", 16)
    code = compile_variant(aligned, TARGETS["sm_90"])
    with pytest.raises(AssertionError):
        _check(code, replace(GATES["rows.gather_rows"], registers=255), 32)
