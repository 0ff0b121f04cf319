"""Compile kernels for GPUs that are not there, and read how good the machine code is.

Nothing here lists variants by hand: launchers are called with arguments of every kind, their
launches are recorded, and the recorded arguments are specialised as Triton's JIT would.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

VECTOR_BITS = 128


@dataclass(frozen=True)
class Target:
    """A GPU to compile for. The JIT for AMD has a variant of its own for tensors below 2 GiB."""

    backend: str
    arch: int | str
    threads_per_warp: int
    pointer_attributes: tuple[tuple[str, int], ...] = (("tt.divisibility", 16),)


TARGETS = {
    "sm_80": Target("cuda", 80, 32),
    "sm_90": Target("cuda", 90, 32),
    "sm_100": Target("cuda", 100, 32),
    "gfx942": Target("hip", "gfx942", 64),
    "gfx942_below_2GiB": Target(
        "hip", "gfx942", 64, (("tt.divisibility", 16), ("tt.pointer_range", 32))
    ),
}
POINTERS = {
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
}


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel: what the JIT would compile for one kind of arguments."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int | bool], ...]
    options: tuple[tuple[str, int | bool], ...]
    aligned: frozenset[str]

    def __str__(self) -> str:
        constants = ",".join(f"{name}={value}" for name, value in self.constants)
        return f"{self.kernel.__name__.strip('_')}[{constants}]"

    def constant(self, name: str) -> int | bool:
        return dict(self.constants)[name]

    def without_alignment(self) -> "Variant":
        return replace(self, aligned=frozenset())

    def with_option(self, name: str, value: int) -> "Variant":
        return replace(self, options=(*self.options, (name, value)))


@dataclass(frozen=True)
class MachineCode:
    """Global memory accesses, each by its width in bits, and what the code costs."""

    load_bits: tuple[int, ...]
    store_bits: tuple[int, ...]
    registers: int
    spilled_bytes: int
    local_accesses: int

    def wide_loads(self) -> int:
        return sum(bits >= VECTOR_BITS for bits in self.load_bits)

    def wide_stores(self) -> int:
        return sum(bits >= VECTOR_BITS for bits in self.store_bits)

    def narrow_loads(self) -> int:
        return len(self.load_bits) - self.wide_loads()

    def narrow_stores(self) -> int:
        return len(self.store_bits) - self.wide_stores()


@contextmanager
def recorded_launches(module: Any) -> Iterator[list[Variant]]:
    """Make the launchers of a module believe in a device, and keep what they would launch."""
    variants: list[Variant] = []

    def record(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
        assert 0 < programs < 2**31, f"{kernel.__name__}: a grid of {programs} programs"
        variants.append(_specialise(kernel, args, constants))

    launch, use_triton = module.launch, module.use_triton
    module.launch, module.use_triton = record, lambda _arena: True
    try:
        yield variants
    finally:
        module.launch, module.use_triton = launch, use_triton


def _specialise(kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Variant:
    constants = {name: value for name, value in named.items() if name in kernel.arg_names}
    options = {name: value for name, value in named.items() if name not in kernel.arg_names}
    signature: dict[str, str] = dict.fromkeys(constants, "constexpr")
    aligned = set()
    for param, arg in zip(kernel.params, args, strict=False):
        if isinstance(arg, torch.Tensor):
            signature[param.name] = POINTERS[arg.dtype]
            if arg.data_ptr() % 16 == 0 and not param.do_not_specialize_on_alignment:
                aligned.add(param.name)
        else:
            assert param.do_not_specialize, f"{param.name} makes a variant for 1 and for each 16"
            if isinstance(arg, float):
                signature[param.name] = "fp32"
            else:
                assert -(2**31) <= arg < 2**31, f"{param.name} = {arg} makes a 64-bit variant"
                signature[param.name] = "i32"
    assert list(kernel.arg_names) == [p.name for p in kernel.params if p.name in signature]
    return Variant(
        kernel,
        tuple((name, signature[name]) for name in kernel.arg_names),
        tuple(sorted(constants.items())),
        tuple(sorted(options.items())),
        frozenset(aligned),
    )


def compile_variant(variant: Variant, target: Target) -> MachineCode:
    """Compile for a GPU that need not be there; Triton's wheel brings compiler and disassembler."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    source = ASTSource(
        fn=variant.kernel,
        signature=dict(variant.signature),
        constexprs={(names.index(name),): value for name, value in variant.constants},
        attrs={
            (names.index(name),): [list(pair) for pair in target.pointer_attributes]
            for name in variant.aligned
        },
    )
    gpu = GPUTarget(target.backend, target.arch, target.threads_per_warp)
    compiled = triton.compile(source, target=gpu, options=dict(variant.options))
    if target.backend == "hip":
        return read_amdgcn(compiled.asm["amdgcn"])
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        sass = _output(tools / "nvdisasm", "-c", cubin.name)
        usage = _output(tools / "cuobjdump", "-res-usage", cubin.name)
    return read_sass(sass, usage)


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_sass(sass: str, usage: str) -> MachineCode:
    """From `nvdisasm -c` and `cuobjdump -res-usage`."""
    accesses: dict[str, list[int]] = {"LDG": [], "STG": [], "LDGSTS": [], "LDL": [], "STL": []}
    for name, modifiers in re.findall(r"\b(LDGSTS|LDG|STG|LDL|STL)((?:\.\w+)*) ", sass):
        accesses[name].append(_sass_bits(modifiers.split(".")))
    counts = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    assert counts, f"no resource usage in {usage!r}"
    registers, stack, local = map(int, counts.groups())
    return MachineCode(
        load_bits=tuple(accesses["LDG"] + accesses["LDGSTS"]),
        store_bits=tuple(accesses["STG"]),
        registers=registers,
        spilled_bytes=stack + local,
        local_accesses=len(accesses["LDL"] + accesses["STL"]),
    )


def _sass_bits(modifiers: list[str]) -> int:
    sizes = {"256": 256, "128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}
    return next((sizes[m] for m in modifiers if m in sizes), 32)


def read_amdgcn(assembly: str) -> MachineCode:
    """From the assembly and its metadata; table entries may come through scalar loads."""
    sizes = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "short": 16, "byte": 8}
    accesses: dict[str, list[int]] = {"load": [], "store": []}
    pattern = (
        r"\b(?:global|buffer|flat)_(load|store)_[us]?(dwordx4|dwordx3|dwordx2|dword|short|byte)"
    )
    for verb, size in re.findall(pattern, assembly):
        accesses[verb].append(sizes[size])

    def count(field: str) -> int:
        found = re.search(rf"\.{field}:\s+(\d+)", assembly)
        assert found, f"no .{field} in the assembly's metadata"
        return int(found[1])

    return MachineCode(
        load_bits=tuple(accesses["load"]),
        store_bits=tuple(accesses["store"]),
        registers=count("vgpr_count"),
        spilled_bytes=count("private_segment_fixed_size"),
        local_accesses=count("vgpr_spill_count")
        + count("sgpr_spill_count")
        + len(re.findall(r"\bscratch_(?:load|store)", assembly)),
    )
