"""Code quality of the elementwise family on GPUs that are not there.

A whole tile moves 128 bits at a time, whatever the mixture of dtypes; only a piece's last, partial
tile goes element by element. Nothing spills.
"""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from aot_gate import TARGETS, MachineCode, Variant, compile_variant, recorded_launches

from tensorpager.kernels import elementwise as module
from tensorpager.kernels.elementwise_call import FLOATS
from tensorpager.kernels.elementwise_ops import OPS

pytestmark = pytest.mark.aot
GATED = {"elementwise.elementwise"}

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
REGISTERS = {4: 96, 8: 168}
"""By bytes of what is computed in: 16 elements a thread of up to three operands, and addresses."""


def _variant(
    op: str,
    out: torch.dtype = F32,
    inputs: tuple[torch.dtype, ...] = (F32,),
    numel: int = 5000,
    offset: int = 0,
) -> Variant:
    """What the launcher would launch for dense operands; numbers where the op wants them."""
    memory = torch.empty(numel * 8 + 16, dtype=torch.uint8)

    def operand(dtype: torch.dtype) -> torch.Tensor:
        return memory[offset : offset + numel * dtype.itemsize].view(dtype)

    table = OPS[op]
    tensors = [inputs[i % len(inputs)] for i in range(len(table.inputs) - table.parameters)]
    if table.condition:
        tensors[0] = torch.bool
    arguments = [*([operand(dtype)] for dtype in tensors), *[0.5] * table.parameters]
    with recorded_launches(module) as recorded:
        module.elementwise(op, [operand(out)], *arguments)
    (variant,) = recorded
    return variant


def _operand_bits(variant: Variant) -> tuple[list[int], int]:
    """Bits of an element of each operand that is read, and of the one written."""
    kinds = [(variant.constant(f"{x}_KIND"), variant.constant(x)) for x in "XYZW"]
    reads = [dtype.primitive_bitwidth for kind, dtype in kinds if kind == "operand"]
    return reads, variant.constant("OUT").primitive_bitwidth


def _check(code: MachineCode, variant: Variant, threads_per_warp: int) -> None:
    """Assert 128-bit accesses in the part for whole tiles, and what the rest may cost."""
    assert code.spilled_bytes == 0
    assert code.local_accesses == 0
    reads, written = _operand_bits(variant)
    elements = variant.constant("TILE") // (dict(variant.options)["num_warps"] * threads_per_warp)
    assert code.wide_loads() == sum(elements * bits // 128 for bits in reads)
    assert code.wide_stores() == elements * written // 128
    partial = elements * len(reads) + sum(elements * bits < 128 for bits in reads)
    table = 2 * (2 + sum(variant.constant(f"{x}_KIND") != "none" for x in "XYZW"))
    assert code.narrow_loads() <= partial + table
    assert code.narrow_stores() <= elements
    assert code.registers <= REGISTERS[max(4, variant.constant("COMPUTE").primitive_bitwidth // 8)]


QUICK: dict[str, Callable[[], Variant]] = {
    "addcdiv": lambda: _variant("addcdiv"),
    "mixed": lambda: _variant("lerp", BF16, (F32, BF16, F16)),
}
ALL = QUICK | {
    **{f"{op}": lambda op=op: _variant(op) for op in OPS},
    **{f"addcmul-{dtype}": lambda d=dtype: _variant("addcmul", d, (d,)) for dtype in FLOATS},
    **{f"copy-{a}-{b}": lambda a=a, b=b: _variant("copy", a, (b,)) for a in FLOATS for b in FLOATS},
    "copy from bool": lambda: _variant("copy", F32, (torch.bool,)),
    "small tiles": lambda: _variant("addcmul", numel=module.SMALL_TILE),
    "small tiles, bf16": lambda: _variant("mul", BF16, (BF16,), numel=module.SMALL_TILE),
}


def _cases() -> list[object]:
    quick = {(name, "sm_90") for name in QUICK} | {("mixed", "gfx942")}
    return [
        pytest.param(name, target, marks=() if (name, target) in quick else pytest.mark.slow)
        for name in ALL
        for target in TARGETS
    ]


@pytest.mark.parametrize(("name", "target"), _cases())
def test_code(name: str, target: str) -> None:
    variant = ALL[name]()
    assert variant.constant("ALIGNED")
    _check(compile_variant(variant, TARGETS[target]), variant, TARGETS[target].threads_per_warp)


def test_gate_notices_unaligned_operands() -> None:
    variant = _variant("neg", offset=4)
    assert not variant.constant("ALIGNED")
    code = compile_variant(variant, TARGETS["sm_90"])
    assert code.spilled_bytes == 0
    assert Counter(code.store_bits).keys() == {32}, "an unaligned operand is stored by element"
    with pytest.raises(AssertionError):
        _check(code, variant, threads_per_warp=32)


def test_gate_notices_spills() -> None:
    variant = _variant("addcdiv").with_option("maxnreg", 32)
    code = compile_variant(variant, TARGETS["sm_90"])
    assert code.spilled_bytes > 0
    with pytest.raises(AssertionError):
        _check(code, variant, threads_per_warp=32)


def test_few_variants() -> None:
    """One per op, mixture of dtypes, tile size and alignment, whatever the lengths."""
    variants = {
        _variant("mul", F32, (F32,), numel, offset)
        for numel in (1, 16, 511, 512, 2047, 2048, 5000, 65536, 70000)
        for offset in (0, 4)
    }
    assert len(variants) == 4


def test_only_written_fusions_are_done() -> None:
    """So that every target rounds alike, and as torch does on a device."""
    for op in OPS:
        assert dict(_variant(op).options)["enable_fp_fusion"] is False
