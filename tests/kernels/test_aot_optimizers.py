"""Code quality of optimizers and 8-bit codes on GPUs that are not there.

Whole tiles move 128 bits at a time for every operand of which a thread has so many; nothing spills.
Codes of 8 bits are read four to a thread, 32 bits: a warp's 128 bytes are one line of the cache.
The narrow accesses counted besides are those of the last, partial tile of a tensor.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from aot_gate import TARGETS, MachineCode, Variant, _specialise, compile_variant

from tensorpager.kernels import adam, launch, quantize, sgd, update
from tensorpager.kernels.blockwise import Blockwise

pytestmark = pytest.mark.aot
GATED = {"update.step", "quantize.convert"}
BF16, F32, U8 = torch.bfloat16, torch.float32, torch.uint8
N = 4096


@dataclass(frozen=True)
class Gate:
    """How to drive a launcher to one variant, and what its code may cost.

    reads, writes : bytes of an element in each operand that a whole tile reads and writes.
    registers : at most, of 32-lane warps; 64-lane warps have half the elements.
    quick : targets of every run; the others are for the full run.
    """

    drive: Callable[[], None]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    registers: int
    quick: tuple[str, ...] = ()


def _state(dtype: torch.dtype) -> Any:
    state = torch.zeros(N, dtype=dtype)
    return [Blockwise(state, torch.zeros(N // 256)) if dtype is U8 else state]


def _drive_adam(
    dtype: torch.dtype = F32, state: torch.dtype = F32, masters: bool = False, amsgrad: bool = False
) -> None:
    adam.adam_step(
        *([torch.zeros(N, dtype=dtype)], [torch.zeros(N, dtype=dtype)]),
        *(_state(state), _state(state)),
        max_exp_avg_sqs=_state(state) if amsgrad else None,
        masters=[torch.zeros(N)] if masters else None,
        steps=[1],
        lr=1e-3,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.1,
        decoupled=not amsgrad,
        amsgrad=amsgrad,
        seeds=None if state is F32 else [1],
    )


def _drive_sgd(state: torch.dtype | None = F32) -> None:
    sgd.sgd_step(
        *([torch.zeros(N)], [torch.zeros(N)], _state(state) if state else None),
        lr=1e-3,
        momentum=0.9 if state else 0.0,
        dampening=0.0,
        weight_decay=0.1,
        nesterov=state is not None,
        first=[False],
        seeds=[1] if state is U8 else None,
    )


GATES = {
    "adamw": Gate(_drive_adam, (4, 4, 4, 4), (4, 4, 4), 96, ("sm_80", "sm_90", "sm_100", "gfx942")),
    "adamw,bf16,masters": Gate(
        lambda: _drive_adam(BF16, masters=True), (2, 4, 4, 4), (4, 4, 2, 4), 112, ("sm_90",)
    ),
    "adamw,bf16 states": Gate(lambda: _drive_adam(state=BF16), (4, 4, 2, 2), (2, 2, 4), 96),
    "adamw,8-bit states": Gate(
        lambda: _drive_adam(state=U8), (4, 4, 1, 1), (1, 1, 4), 80, ("sm_90",)
    ),
    "adamw,8-bit states,bf16,masters": Gate(
        lambda: _drive_adam(BF16, U8, masters=True), (2, 4, 1, 1), (1, 1, 2, 4), 80
    ),
    "adam,amsgrad": Gate(lambda: _drive_adam(amsgrad=True), (4,) * 5, (4,) * 4, 112),
    "adam,amsgrad,8-bit states": Gate(
        lambda: _drive_adam(state=U8, amsgrad=True), (4, 4, 1, 1, 1), (1, 1, 1, 4), 96
    ),
    "sgd": Gate(_drive_sgd, (4, 4, 4), (4, 4), 80, ("sm_90",)),
    "sgd,8-bit buffers": Gate(lambda: _drive_sgd(U8), (4, 4, 1), (1, 4), 80),
    "sgd,no momentum": Gate(lambda: _drive_sgd(None), (4, 4), (4,), 80),
}


@contextmanager
def _recorded() -> Iterator[list[Variant]]:
    """Make launchers believe in a device, and keep what they would launch."""
    variants: list[Variant] = []

    def record(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
        assert 0 < programs < 2**31
        variants.append(_specialise(kernel, args, constants))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "launch", record)
        patch.setattr(quantize, "launch", record)
        for module in (adam, sgd, quantize):
            patch.setattr(module, "use_triton", lambda _memory: True)
        yield variants


@cache
def _variant(name: str) -> Variant:
    with _recorded() as variants:
        GATES[name].drive()
    assert len(variants) == 1
    return variants[0]


def _compile(name: str, target: str, variant: Variant | None = None) -> MachineCode:
    variant = variant or _variant(name)
    if TARGETS[target].threads_per_warp == 64:
        options = dict(variant.options) | {"num_warps": 4}  # what the launcher takes there
        variant = replace(variant, options=tuple(sorted(options.items())))
    return compile_variant(variant, TARGETS[target])


def _check(name: str, target: str, code: MachineCode) -> None:
    """Assert that `code` keeps to the gate of that name."""
    gate, variant, lanes = GATES[name], _variant(name), TARGETS[target].threads_per_warp
    warps = 4 if lanes == 64 else dict(variant.options)["num_warps"]
    elements = int(variant.constant("TILE")) // (warps * lanes)

    def wide(operands: tuple[int, ...]) -> int:
        return sum(size * elements // 16 for size in operands)

    def narrow(size: int) -> int:
        """Stores of a partial tile; of a whole one that takes less than 128 bits; of scales."""
        return elements + (size * elements < 16) + 2 * (size == 1)

    print(f"{name} on {target}: {code.registers} registers")
    assert code.spilled_bytes == 0
    assert code.local_accesses == 0
    assert code.wide_loads() == wide(gate.reads)
    assert code.wide_stores() == wide(gate.writes)
    assert code.narrow_stores() <= sum(map(narrow, gate.writes))
    assert code.registers <= gate.registers


def _cases() -> list[Any]:
    if launch.INTERPRETED or not launch.HAVE_TRITON:
        return []
    return [
        pytest.param(
            *(name, target),
            id=f"{name},{target}",
            marks=[] if target in gate.quick else [pytest.mark.slow],
        )
        for name, gate in GATES.items()
        for target in ("sm_80", "sm_90", "sm_100", "gfx942")
    ]


@pytest.mark.parametrize(("name", "target"), _cases())
def test_code(name: str, target: str) -> None:
    _check(name, target, _compile(name, target))


def test_gate_notices_missing_alignment_and_spills() -> None:
    variant = _variant("sgd,no momentum")
    constants = dict(variant.constants) | {"ALIGNED": False}
    unaligned = replace(variant, constants=tuple(sorted(constants.items())))
    code = _compile("sgd,no momentum", "sm_90", unaligned)
    assert code.wide_loads() == code.wide_stores() == 0
    with pytest.raises(AssertionError):
        _check("sgd,no momentum", "sm_90", code)
    code = _compile("sgd,no momentum", "sm_90", variant.with_option("maxnreg", 24))
    assert code.spilled_bytes > 0
    with pytest.raises(AssertionError):
        _check("sgd,no momentum", "sm_90", code)


@pytest.mark.parametrize("root", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("decode", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_codes_alone(decode: bool, root: bool) -> None:
    """Conversions for checkpoints, not for steps: they compile, and do not spill."""
    with _recorded() as variants:
        if decode:
            quantize.dequantize(_state(U8), [torch.zeros(N)], root=root)
        else:
            quantize.quantize([torch.zeros(N)], _state(U8), root=root)
    code = compile_variant(variants[0], TARGETS["sm_90"])
    assert code.spilled_bytes == code.local_accesses == 0
    assert code.registers <= 96


def test_launches_have_few_variants() -> None:
    """One for all sizes, steps, rates and aligned addresses."""
    with _recorded() as variants:
        for numel in (1, 1000, 100_000):
            for step in (1, 16):
                one, state = torch.zeros(numel), torch.zeros(numel)
                sgd.sgd_step(
                    *([one], [one], [state]),
                    lr=1e-3 * step,
                    momentum=0.9,
                    dampening=0.0,
                    weight_decay=0.1 * step,
                    nesterov=False,
                    first=[step == 1],
                )
    assert len(variants) == 6
    assert len(set(variants)) == 1
