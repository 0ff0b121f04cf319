"""Code quality of the paged matrix products on GPUs that are not there.

Half precision runs on tensor cores, float32 (which is to be exact) does not. Matrices are read 128
bits at a time; all other reads are words of the page table. Nothing spills.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from aot_gate import TARGETS, MachineCode, Variant, _specialise, read_amdgcn, read_sass
from page_suite import KIB, MIB

from tensorpager.kernels import linear, linear_grad
from tensorpager.kernels.paged_matrix import PagedMatrix

pytestmark = pytest.mark.aot
GATED = {
    "linear.linear_forward",
    "linear_grad.linear_input_grad",
    "linear_grad.linear_weight_grad",
}
TENSOR_CORES = r"\bHMMA\b|\bHGMMA\b|\bUTC\w*MMA\b|\bv_mfma_f32_\w+_(?:b?f16)"
SINGLE, BRAIN = torch.float32, torch.bfloat16
MACHINES = ("sm_80", "sm_90", "sm_100", "gfx942")
# What a block may have: the compiler does not refuse more, the launch would. 99 KiB is all that
# sm_86 and sm_89 have, which run the pointer kernels too.
SHARED_BYTES = {"sm_80": 99 * KIB, "sm_90": 227 * KIB, "sm_100": 227 * KIB, "gfx942": 64 * KIB}
# Per thread, prefetches included; 64-lane warps read a row's word once for each of its vectors.
TABLE_WORDS = {"cuda": 16, "hip": 48}


@dataclass(frozen=True)
class Code:
    """Machine code of one variant, and what the gate counts in it."""

    costs: MachineCode
    tensor_core_ops: int
    shared_bytes: int


def _matrix(rows: int, columns: int, dtype: torch.dtype) -> PagedMatrix:
    page_bytes = 2 * MIB
    pages = -(-rows * columns * dtype.itemsize // page_bytes)
    arena = torch.empty(page_bytes, dtype=torch.uint8)
    return PagedMatrix(
        arena, torch.zeros(pages, dtype=torch.int32), page_bytes, dtype, rows, columns
    )


def _record(module: Any, call: Callable[[], None]) -> Variant:
    """The one launch that `call` makes, as the JIT would specialise it."""
    recorded: list[Variant] = []

    def record(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
        assert 0 < programs < 2**31
        recorded.append(_specialise(kernel, args, constants))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "launch", record)
        patch.setattr(module, "use_triton", lambda _arena: True)
        call()
    (variant,) = recorded
    return variant


def _forward(dtype: torch.dtype, m: int, columns: int, rows: int = 256) -> Variant:
    weight = _matrix(rows, columns, dtype)
    x, out = torch.empty(m, columns, dtype=dtype), torch.empty(m, rows, dtype=dtype)
    return _record(linear, lambda: linear.linear_forward(x, weight, out))


def _input_grad(dtype: torch.dtype, m: int, columns: int, rows: int = 256) -> Variant:
    weight = _matrix(rows, columns, dtype)
    grad, out = torch.empty(m, rows, dtype=dtype), torch.empty(m, columns)
    return _record(
        linear_grad, lambda: linear_grad.linear_input_grad(grad, weight, out, accumulate=True)
    )


def _weight_grad(dtype: torch.dtype, m: int, columns: int, rows: int = 256) -> Variant:
    weight_grad = _matrix(rows, columns, dtype)
    grad, x = torch.empty(m, rows, dtype=dtype), torch.empty(m, columns, dtype=dtype)
    return _record(
        linear_grad,
        lambda: linear_grad.linear_weight_grad(grad, x, weight_grad, accumulate=True),
    )


@cache
def _compile(variant: Variant, target: str) -> Code:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    gpu = TARGETS[target]
    names = variant.kernel.arg_names
    source = ASTSource(
        fn=variant.kernel,
        signature=dict(variant.signature),
        constexprs={(names.index(name),): value for name, value in variant.constants},
        attrs={
            (names.index(name),): [list(pair) for pair in gpu.pointer_attributes]
            for name in variant.aligned
        },
    )
    compiled = triton.compile(
        source,
        target=GPUTarget(gpu.backend, gpu.arch, gpu.threads_per_warp),
        options=dict(variant.options),
    )
    if gpu.backend == "hip":
        text = compiled.asm["amdgcn"]
        costs = read_amdgcn(text)
    else:
        text, usage = _disassembled(compiled.asm["cubin"])
        costs = read_sass(text, usage)
    return Code(
        costs,
        len(re.findall(TENSOR_CORES, text)),
        compiled.metadata.shared,
    )


def _disassembled(cubin: bytes) -> tuple[str, str]:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        commands = ([tools / "nvdisasm", "-c"], [tools / "cuobjdump", "-res-usage"])
        sass, usage = (
            subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout
            for command in commands
        )
    return sass, usage


@dataclass(frozen=True)
class Gate:
    """How to make a launch, and the registers that its code may take on NVIDIA's GPUs.

    With 256 threads a block that leaves room for one block of 255 registers on an SM, for two of
    128; so the limits are what the code takes, rounded up, for the gate to notice growth.
    """

    launched: Callable[[torch.dtype, int, int], Variant]
    registers: int


GATES = {
    "linear.linear_forward": Gate(_forward, 176),
    "linear_grad.linear_input_grad": Gate(_input_grad, 232),
    "linear_grad.linear_weight_grad": Gate(_weight_grad, 176),
}


def _check(code: Code, gate: Gate, dtype: torch.dtype, target: str) -> None:
    """Assert that `code`, whose operands are whole vectors, keeps to `gate`."""
    costs = code.costs
    assert costs.spilled_bytes == 0
    assert costs.local_accesses == 0
    assert (code.tensor_core_ops > 0) == (dtype != torch.float32)
    narrow = [bits for bits in costs.load_bits if bits < 128]
    assert set(narrow) <= {32}, "a narrow read is a word of the page table"
    assert len(narrow) <= TABLE_WORDS[TARGETS[target].backend]
    assert costs.wide_loads() > 0
    # 64-lane warps hold half as much of a tile per lane.
    assert min(costs.store_bits) >= (64 if TARGETS[target].backend == "hip" else 128)
    assert code.shared_bytes <= SHARED_BYTES[target]
    if TARGETS[target].backend == "cuda":
        assert costs.registers <= gate.registers


def _cases() -> list[Any]:
    """Name, dtype, rows of x, columns, target: a few in every run, all of them in the full one."""
    quick = {
        ("linear.linear_forward", BRAIN, 2000, 4096, "sm_80"),
        ("linear.linear_forward", BRAIN, 2000, 768, "gfx942"),
        ("linear.linear_forward", SINGLE, 2000, 768, "sm_80"),
        ("linear_grad.linear_input_grad", BRAIN, 2000, 4096, "sm_90"),
        ("linear_grad.linear_weight_grad", BRAIN, 2000, 768, "sm_80"),
    }
    every = [
        (name, dtype, m, columns, target)
        for name in GATES
        for dtype in (SINGLE, BRAIN)
        for m in (16, 100, 2000)
        for columns in (4096, 768, 104)
        for target in MACHINES
    ]
    assert quick <= set(every)
    return [
        pytest.param(
            *case,
            marks=[] if case in quick else pytest.mark.slow,
            id="-".join(str(part).removeprefix("torch.") for part in case),
        )
        for case in every
    ]


def test_gates_are_those_of_the_modules() -> None:
    assert set(GATES) == GATED


@pytest.mark.parametrize(("name", "dtype", "m", "columns", "target"), _cases())
def test_code(name: str, dtype: torch.dtype, m: int, columns: int, target: str) -> None:
    gate = GATES[name]
    _check(_compile(gate.launched(dtype, m, columns), target), gate, dtype, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", MACHINES)
@pytest.mark.parametrize("columns", [100, 101])
@pytest.mark.parametrize("dtype", [SINGLE, BRAIN], ids=str)
@pytest.mark.parametrize("name", list(GATES))
def test_narrow_operands_do_not_spill(
    name: str, dtype: torch.dtype, columns: int, target: str
) -> None:
    code = _compile(GATES[name].launched(dtype, 2000, columns), target)
    assert code.shared_bytes <= SHARED_BYTES[target]
    assert code.costs.spilled_bytes == 0
    assert code.costs.local_accesses == 0
    assert (code.tensor_core_ops > 0) == (dtype != torch.float32)


def test_gate_notices_missing_alignment() -> None:
    variant = _forward(BRAIN, 2000, 4096).without_alignment()
    with pytest.raises(AssertionError, match="a narrow read is a word"):
        _check(_compile(variant, "sm_80"), GATES["linear.linear_forward"], BRAIN, "sm_80")


def test_gate_notices_spills() -> None:
    variant = _forward(BRAIN, 2000, 4096).with_option("maxnreg", 64)
    code = _compile(variant, "sm_80")
    assert code.costs.spilled_bytes > 0
    with pytest.raises(AssertionError):
        _check(code, GATES["linear.linear_forward"], BRAIN, "sm_80")


def test_gate_notices_products_without_tensor_cores() -> None:
    code = _compile(_forward(SINGLE, 2000, 768), "sm_80")
    with pytest.raises(AssertionError, match="tensor_core_ops"):
        _check(code, GATES["linear.linear_forward"], BRAIN, "sm_80")


def test_few_variants_for_all_numbers_of_rows() -> None:
    variants = {_forward(BRAIN, m, 4096) for m in (1, 2, 15, 16, 17, 32, 33, 128, 129, 4096)}
    assert len(variants) == 3, "one for each tile"
