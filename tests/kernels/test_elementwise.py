"""elementwise on every implementation.

The oracle is torch on dense tensors, and never the op table. Where IEEE 754 leaves one result it is
expected bit for bit; where products are added, within a bound that counts roundings (`_slack`).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from address_checker import checked_addresses
from page_suite import GUARD_BYTES, SENTINEL, Backend

from tensorpager.kernels import elementwise as module
from tensorpager.kernels import launch
from tensorpager.kernels.elementwise import elementwise, elementwise_reference
from tensorpager.kernels.elementwise_ops import OPS
from tensorpager.kernels.pieces import Operand, Paged, stretches

PAGE = 4096
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FLOATS = [F16, BF16, F32, F64]
INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on NaN and overflow


class Held:
    """Values in scattered frames, or in dense memory `offset` bytes off; sentinels all around."""

    def __init__(
        self,
        values: torch.Tensor,
        backend: Backend,
        paged: bool = False,
        offset: int = 0,
        page_bytes: int = PAGE,
    ) -> None:
        data = values.clone().view(torch.uint8)
        if paged:
            pages = -(-data.numel() // page_bytes)
            order = np.random.default_rng(pages).permutation(pages)
            frames = (2 * order + 1).astype(np.int32)  # no two side by side
            starts = [int(frame) * page_bytes for frame in frames]
            whole = (2 * pages + 1) * page_bytes
        else:
            page_bytes = max(1, data.numel())
            starts, whole = [GUARD_BYTES + offset], 2 * GUARD_BYTES + offset + data.numel()
        self.memory = torch.full((whole,), SENTINEL, dtype=torch.uint8, device=backend.device)
        parts = data.split(page_bytes) if data.numel() else ()
        self.places = [slice(start, start + len(part)) for start, part in zip(starts, parts)]
        for place, part in zip(self.places, parts, strict=True):
            self.memory[place] = part.to(backend.device)
        self._dtype = values.dtype
        self.operand: Operand
        if paged:
            self.operand = Paged(self.memory, frames, page_bytes, values.dtype, values.numel())
        else:
            end = starts[0] + data.numel()
            self.operand = self.memory[starts[0] : end].view(values.dtype)

    def pieces(self) -> list[torch.Tensor]:
        """The memory that is the operand's."""
        return [self.memory[place] for place in self.places]

    def values(self) -> torch.Tensor:
        """What it holds, on the CPU, after a look at all that is not its own."""
        rest = self.memory.clone()
        for place in self.places:
            rest[place] = SENTINEL
        assert rest.eq(SENTINEL).all(), "wrote outside the operand"
        empty = torch.empty(0, dtype=torch.uint8)
        return torch.cat([empty, *(piece.cpu() for piece in self.pieces())]).view(self._dtype)


class Run:
    """Calls one implementation; under the interpreter no other memory may be touched."""

    def __init__(self, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backend = backend
        self.launches = 0
        self._monkeypatch = monkeypatch

    def hold(self, values: torch.Tensor, **how: bool | int) -> Held:
        return Held(values, self.backend, **how)  # type: ignore[arg-type]

    def cell(self, value: float, dtype: torch.dtype = F32) -> torch.Tensor:
        return torch.tensor(value, dtype=dtype, device=self.backend.device)

    def __call__(self, op: str, outs: Sequence[Held], *inputs: object) -> None:
        """Inputs are as those of `elementwise`, but with Held for operands."""
        reads, given = [], []
        for each in inputs:
            entries = each if isinstance(each, list) else [each]
            for entry in entries:
                if isinstance(entry, Held):
                    reads += entry.pieces()
                elif isinstance(entry, torch.Tensor):
                    reads.append(entry)
            plain = [entry.operand if isinstance(entry, Held) else entry for entry in entries]
            given.append(plain if isinstance(each, list) else plain[0])
        writes = [piece for out in outs for piece in out.pieces()]

        def checked(kernel, programs, table, *args, **constants):
            self.launches += 1
            if self.backend.name != "interpreter":
                return launch.launch(kernel, programs, table, *args, **constants)
            with checked_addresses([table, *reads], writes):
                return launch.launch(kernel, programs, table, *args, **constants)

        self._monkeypatch.setattr(module, "launch", checked)
        function = elementwise_reference if self.backend.name == "reference" else elementwise
        function(op, [out.operand for out in outs], *given)
        if self.backend.name == "cuda":
            torch.cuda.synchronize()

    @property
    def has_kernel(self) -> bool:
        return self.backend.name in ("interpreter", "cuda")


@pytest.fixture
def run(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(backend, monkeypatch)


ORACLE: dict[str, Callable[..., torch.Tensor]] = {
    "copy": lambda x: x.clone(),
    "where": lambda c, x, y: torch.where(c.bool(), x, y),
    "add": lambda x, y, a: x + a * y,
    "sub": lambda x, y, a: x - a * y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "addcmul": lambda x, y, z, v: x + v * (y * z),
    "addcdiv": lambda x, y, z, v: x + v * (y / z),
    "lerp": torch.lerp,
    "sqrt": torch.sqrt,
    "rsqrt": lambda x: 1 / torch.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clamp": torch.clamp,
}
NUMBERS: dict[str, list[float]] = {
    "add": [-0.37],
    "sub": [0.37],
    "addcmul": [0.73],
    "addcdiv": [-1.3],
    "clamp": [-0.6, 0.4],
}
"""Last inputs, where the tests of all ops give numbers."""

_ROUNDED_TERMS: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda x, y, a: (a * y).abs(),
    "sub": lambda x, y, a: (a * y).abs(),
    "addcmul": lambda x, y, z, v: 2 * (v * y * z).abs(),
    "addcdiv": lambda x, y, z, v: 2 * (v * y / z).abs(),
    "lerp": lambda x, y, w: 3 * torch.where(w.abs() < 0.5, w, 1 - w).abs() * (y - x).abs(),
    "sqrt": lambda x: x.sqrt(),  # torch's own on a CPU is not rounded to nearest
    "rsqrt": lambda x: 2 * x.rsqrt(),
}
"""Roundings before the last one: the sum of their results' magnitudes, each once per rounding."""


def _slack(op: str, inputs: list[torch.Tensor], compute: torch.dtype, out: torch.dtype):
    """How far a result may be from the exact one: u for each rounding, and the output's own."""
    exact = ORACLE[op](*inputs)
    unit = torch.finfo(compute).eps / 2 * (2 if compute is F64 else 1)  # the oracle rounds too
    slack = 1.001 * unit * (_ROUNDED_TERMS[op](*inputs) + exact.abs())
    last = 0.0 if out is compute else 1.001 * torch.finfo(out).eps / 2
    return slack + last * (exact.abs() + slack) + torch.finfo(out).smallest_normal


def _assert_right(
    op: str, got: torch.Tensor, inputs: list[torch.Tensor], exact: bool | None = None
) -> None:
    """Inputs are dense or 0-dim, in the dtypes given to the op."""
    wide = F64 in [got.dtype, *(x.dtype for x in inputs if x.dim())]
    compute = F64 if wide else F32
    first = int(op == "where")
    inputs = [*inputs[:first], *(x.to(compute) for x in inputs[first:])]
    if exact if exact is not None else op not in _ROUNDED_TERMS:
        _assert_same(got, ORACLE[op](*inputs).to(got.dtype))
        return
    inputs = [x.double() for x in inputs]
    off = (got.double() - ORACLE[op](*inputs)).abs()
    assert bool((off <= _slack(op, inputs, compute, got.dtype)).all()), f"off by {off.max()}"


def _assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, but that any NaN will do."""
    assert got.dtype is expected.dtype
    assert got.shape == expected.shape
    same = _bits(got) == _bits(expected)
    if got.is_floating_point():
        same |= got.isnan() & expected.isnan()
    wrong = (~same).nonzero().flatten().tolist()
    assert not wrong, f"{len(wrong)} differ, first {got[wrong[0]]} for {expected[wrong[0]]}"


def _bits(values: torch.Tensor) -> torch.Tensor:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(width[values.element_size()])


def _random(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Floats around 1 in magnitude, away from 0; integers of all sizes."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        signs = torch.randint(2, (count,), generator=generator) * 2 - 1
        return (signs * (0.05 + 2 * torch.rand(count, generator=generator, dtype=F64))).to(dtype)
    nbytes = count * dtype.itemsize
    data = torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)
    return data.view(dtype) if dtype is not torch.bool else data > 100


def _inputs(op: str, count: int, dtypes: Sequence[torch.dtype], seed: int) -> list[torch.Tensor]:
    """Dense values for each input that is not a number."""
    names = OPS[op].inputs[: len(OPS[op].inputs) - len(NUMBERS.get(op, []))]
    values = [_random(count, dtypes[i % len(dtypes)], seed + i) for i in range(len(names))]
    if op == "where":
        values[0] = _random(count, torch.bool, seed)
    if op in ("sqrt", "rsqrt"):
        values[0] = values[0].abs()
    return values


def _numbers(op: str) -> list[torch.Tensor]:
    return [torch.tensor(number, dtype=F64) for number in NUMBERS.get(op, [])]


# Where the output and the inputs lie, for each tensor of a list, and how long it is.
MIXTURES = [
    (1100, (True, True, True, True)),
    (515, (False, True, False, True)),
    (0, (True, True, False, False)),
    (7, (True, False, True, False)),
]
DTYPES = {
    "fp32": (F32, (F32,)),
    "fp64": (F64, (F64,)),
    "fp16": (F16, (F16,)),
    "bf16": (BF16, (BF16,)),
    "bf16-from-fp32": (BF16, (F32, F32, BF16)),
    "fp32-from-16": (F32, (BF16, F32, F16)),
    "fp16-from-fp64": (F16, (F32, F64, BF16)),
}
ORACLE_OPS = pytest.mark.parametrize("op", ORACLE)


def _ops_and_dtypes() -> list[Any]:
    """All pairs; quick are float32 and, op by op in turn, one of the others."""
    others = [name for name in DTYPES if name != "fp32"]
    return [
        pytest.param(
            op,
            name,
            marks=() if name in ("fp32", others[i % len(others)]) else pytest.mark.slow,
        )
        for i, op in enumerate(ORACLE)
        for name in DTYPES
    ]


def _slow_but(quick: Sequence[torch.dtype], *others: torch.dtype) -> list[Any]:
    return [*quick, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in others)]


def test_every_op_has_an_oracle() -> None:
    assert set(ORACLE) | {"fill"} == set(OPS)


@pytest.mark.parametrize(("op", "dtypes"), _ops_and_dtypes())
def test_lists_of_paged_and_dense(run: Run, op: str, dtypes: str) -> None:
    out_dtype, in_dtypes = DTYPES[dtypes]
    values = [_inputs(op, n, in_dtypes, seed=n) for n, _ in MIXTURES]
    held = [
        [run.hold(x, paged=paged) for x, paged in zip(xs, where[1:])]
        for xs, (_, where) in zip(values, MIXTURES)
    ]
    outs = [run.hold(_random(n, out_dtype, 9), paged=where[0]) for n, where in MIXTURES]
    run(op, outs, *map(list, zip(*held)), *NUMBERS.get(op, []))
    for out, xs in zip(outs, values, strict=True):
        _assert_right(op, out.values(), [*xs, *_numbers(op)])
    for hold, x in zip(itertools.chain(*held), itertools.chain(*values), strict=True):
        _assert_same(hold.values(), x)
    assert run.launches == int(run.has_kernel), "the list is one launch"


@ORACLE_OPS
def test_in_place(run: Run, op: str) -> None:
    values = [_inputs(op, n, (F32,), seed=n) for n in (1500, 300)]
    held = [[run.hold(x, paged=n == 0) for x in xs] for n, xs in enumerate(values)]
    which = int(op == "where")
    run(op, [xs[which] for xs in held], *map(list, zip(*held)), *NUMBERS.get(op, []))
    for holds, xs in zip(held, values, strict=True):
        _assert_right(op, holds[which].values(), [*xs, *_numbers(op)])


@pytest.mark.parametrize("op", ["addcmul", "where", "copy"])
@pytest.mark.parametrize("offset", [4, 8])
def test_unaligned_dense_operand(run: Run, op: str, offset: int) -> None:
    values = _inputs(op, 1500, (F32,), seed=1)
    held = [run.hold(x, paged=i == 1) for i, x in enumerate(values)]
    out = run.hold(torch.zeros(1500), offset=offset)
    run(op, [out], *([x] for x in held), *NUMBERS.get(op, []))
    _assert_right(op, out.values(), [*values, *_numbers(op)])


@pytest.mark.parametrize("count", [1, 511, 512, 2047, 2048, 2049, 4096, 8192, 9001])
def test_tiles_and_pages_of_all_sizes(run: Run, count: int) -> None:
    x, y = _random(count, F32, 1), _random(count, BF16, 2)
    out = run.hold(torch.zeros(count), paged=True, page_bytes=4 * PAGE)
    other = run.hold(y, paged=True, page_bytes=4 * PAGE)
    run("mul", [out], [run.hold(x, paged=True, page_bytes=2 * PAGE)], [other])
    _assert_same(out.values(), x * y)


def test_more_elements_than_a_piece(run: Run) -> None:
    x = _random(module.LONGEST_PIECE + module.LARGE_TILE + 3, F32, 1)
    out = run.hold(x)
    run("mul", [out], [out], 3.0)
    _assert_same(out.values(), x * 3.0)


@pytest.mark.parametrize("op", ["add", "sub"])
@pytest.mark.parametrize("dtype", _slow_but([F32, BF16], F16, F64))
def test_sums_without_alpha_are_exact(run: Run, op: str, dtype: torch.dtype) -> None:
    x, y = _random(1100, dtype, 1), _random(1100, dtype, 2)
    out = run.hold(torch.zeros(1100, dtype=dtype), paged=True)
    run(op, [out], [run.hold(x, paged=True)], [run.hold(y)])
    _assert_same(out.values(), x + y if op == "add" else x - y)


def test_root_is_rounded_to_nearest_by_the_kernel(run: Run) -> None:
    x = _random(1500, F32, 3).abs()
    out = run.hold(x, paged=True)
    run("sqrt", [out], [out])
    if run.has_kernel:  # sqrt in float64, rounded again, is the correctly rounded one
        _assert_same(out.values(), torch.from_numpy(np.sqrt(x.double().numpy())).float())
    else:
        _assert_right("sqrt", out.values(), [x])


SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.3, math.inf, -math.inf, math.nan, 1e-42, -1e-42, 3e38, -3e38]


@ORACLE_OPS
def test_special_values(run: Run, op: str) -> None:
    """Signed zeros, subnormals, infinities and NaN; products that are added skip overflow."""
    values = SPECIAL[:8] if op in ("add", "sub", "addcmul", "addcdiv", "lerp") else SPECIAL
    names = len(OPS[op].inputs) - OPS[op].parameters
    table = list(itertools.product(values, repeat=min(names, 3)))
    inputs = [torch.tensor(column, dtype=F32) for column in zip(*table, strict=True)]
    if op == "where":
        inputs[0] = inputs[0] > 0
    if op in ("maximum", "minimum", "clamp"):  # of 0 and -0 either may come
        inputs = [x + 0.0 for x in inputs]
    numbers = NUMBERS[op] if OPS[op].parameters else []
    out = run.hold(torch.zeros(len(table)), paged=True)
    run(op, [out], *([run.hold(x)] for x in inputs), *numbers)
    got, expected = out.values(), ORACLE[op](*inputs, *(torch.tensor(n) for n in numbers))
    if op in _ROUNDED_TERMS:
        assert torch.equal(got.isnan(), expected.isnan())
        close = (got - expected).abs() <= 1e-6 * expected.abs() + 1e-30
        assert bool((close | (got == expected) | expected.isnan()).all())
    else:
        _assert_same(got, expected)


@pytest.mark.parametrize(
    "dtype", _slow_but([BF16, F32, torch.bool, torch.int64], F16, F64, *INTEGERS[1:-1])
)
def test_moves_keep_every_bit(run: Run, dtype: torch.dtype) -> None:
    """NaN payloads too."""
    pattern = _random(1100 * dtype.itemsize, torch.uint8, 1)
    x = pattern.view(dtype) if dtype is not torch.bool else pattern > 100
    y, mask = x.flip(0), _random(1100, torch.uint8, 3) % 3
    copied, chosen = (run.hold(torch.zeros_like(x), paged=True) for _ in range(2))
    run("copy", [copied], [run.hold(x)])
    assert torch.equal(_bits(copied.values()), _bits(x))
    run("where", [chosen], [run.hold(mask, paged=True)], [copied], [run.hold(y)])
    assert torch.equal(_bits(chosen.values()), torch.where(mask != 0, _bits(x), _bits(y)))


@pytest.mark.parametrize("source", _slow_but([*FLOATS, torch.bool, torch.int64], *INTEGERS[1:-1]))
def test_copy_converts(run: Run, source: torch.dtype) -> None:
    x = _random(1100, source, 1)
    if source.is_floating_point:
        x = torch.cat([x, (torch.tensor(SPECIAL, dtype=F64) * 1.1).to(source)])
        x = torch.cat([x, 1 + torch.arange(600, dtype=F64).to(source) * 2**-11])  # ties
    outs = [run.hold(torch.zeros(len(x), dtype=target), paged=True) for target in FLOATS]
    run("copy", outs, [run.hold(x, paged=True) for _ in outs])
    for out, target in zip(outs, FLOATS, strict=True):
        _assert_same(out.values(), x.to(target))
    assert run.launches == 4 * int(run.has_kernel), "a launch for each mixture of dtypes"


@pytest.mark.parametrize(
    "dtype",
    _slow_but([BF16, F32, torch.bool, torch.int64], F16, F64, *INTEGERS[1:-1], torch.float8_e4m3fn),
)
@pytest.mark.parametrize("as_cell", [False, True])
def test_fill(run: Run, dtype: torch.dtype, as_cell: bool) -> None:
    values = [1, 0.0, 1] if dtype is torch.bool else [3.5, 7, 0]
    values = values if dtype.is_floating_point else [int(value) for value in values]
    outs = [
        run.hold(torch.full((n,), 90).to(dtype), paged=paged)
        for n, paged in [(1500, True), (3, False), (0, True)]
    ]
    run("fill", outs, [run.cell(value, dtype) for value in values] if as_cell else values)
    for out, value in zip(outs, values, strict=True):
        expected = torch.full((out.operand.numel if _paged(out) else len(out.operand),), value)
        _assert_same(out.values().view(_bits(out.values()).dtype), _bits(expected.to(dtype)))


def _paged(held: Held) -> bool:
    return isinstance(held.operand, Paged)


def test_fill_from_a_cell_of_another_dtype(run: Run) -> None:
    out = run.hold(torch.zeros(1500, dtype=BF16), paged=True)
    run("fill", [out], run.cell(0.3))
    _assert_same(out.values(), torch.full((1500,), 0.3).to(BF16))


def test_where_takes_numbers(run: Run) -> None:
    x, mask = _random(1500, BF16, 1), _random(1500, torch.bool, 2)
    out = run.hold(x, paged=True)
    run("where", [out], [run.hold(mask)], -0.0, [out])
    _assert_same(out.values(), x.masked_fill(mask, -0.0))


@pytest.mark.parametrize("op", ["mul", "div", "add", "sub", "maximum"])
@pytest.mark.parametrize("dtype", _slow_but([BF16], F32, F64))
def test_numbers_for_an_operand(run: Run, op: str, dtype: torch.dtype) -> None:
    """One for all, or one for each; a number is rounded to what the op is computed in, once."""
    compute = F64 if dtype is F64 else F32
    xs = [_random(n, dtype, n) for n in (1100, 20)]
    for numbers in (0.1, [0.1, -7.3]):
        outs = [run.hold(x, paged=True) for x in xs]
        run(op, outs, outs, numbers)
        for i, (out, x) in enumerate(zip(outs, xs, strict=True)):
            number = numbers[i] if isinstance(numbers, list) else numbers
            other = torch.tensor(number, dtype=compute)
            extra = [torch.ones(())] if op in ("add", "sub") else []
            _assert_right(op, out.values(), [x, other, *extra], exact=True)


@pytest.mark.parametrize("cell_dtype", _slow_but([F32, F64], BF16, torch.int32))
def test_cells_are_read_where_they_are(
    run: Run, cell_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coefficient of gradient clipping: no look at its value on the host, no wider result."""
    if run.has_kernel:

        def refused(_self: torch.Tensor) -> None:
            raise AssertionError("the host looked at a tensor")

        monkeypatch.setattr(torch.Tensor, "item", refused)
        monkeypatch.setattr(torch.Tensor, "__float__", refused)
    xs = [_random(n, F32, n) for n in (1100, 20)]
    cell = torch.tensor(2.7).to(cell_dtype)
    outs = [run.hold(x, paged=True) for x in xs]
    run("mul", outs, outs, cell.to(run.backend.device))
    cells = [cell.to(run.backend.device), run.cell(0.0, F64)]
    run("addcmul", outs, outs, outs, outs, cells)
    scaled = [x * cell.to(F32) for x in xs]
    _assert_right("addcmul", outs[0].values(), [scaled[0]] * 3 + [cell])
    _assert_same(outs[1].values(), scaled[1])


def test_step_counters_are_operands(run: Run) -> None:
    """A list of 0-dim outs: the inputs beside them are operands like any."""
    steps = [torch.tensor(float(i), device=run.backend.device) for i in range(3)]
    function = elementwise_reference if run.backend.name == "reference" else elementwise
    function("add", steps, steps, 1.0)
    function("mul", steps, steps, [steps[1].clone(), *(s.clone() for s in steps[1:])])
    assert [float(step) for step in steps] == [2.0, 4.0, 9.0]


def test_numbers_for_each_tensor(run: Run) -> None:
    """`_foreach_addcdiv_.ScalarList`, and lerp with a weight for each."""
    xs, ys, zs = ([_random(n, F32, n + seed) for n in (1100, 20, 5)] for seed in (0, 1, 2))
    numbers = [0.1, -3.0, 0.75]
    outs = [run.hold(x, paged=i != 1) for i, x in enumerate(xs)]
    others, divisors = ([run.hold(v, paged=i == 2) for i, v in enumerate(vs)] for vs in (ys, zs))
    run("addcdiv", outs, outs, others, divisors, numbers)
    for i, out in enumerate(outs):
        _assert_right("addcdiv", out.values(), [xs[i], ys[i], zs[i], torch.tensor(numbers[i])])
    outs = [run.hold(x, paged=True) for x in xs]
    run("lerp", outs, outs, others, numbers)
    for i, out in enumerate(outs):
        _assert_right("lerp", out.values(), [xs[i], ys[i], torch.tensor(numbers[i])])
    assert run.launches == 2 * int(run.has_kernel)


@pytest.mark.parametrize("bounds", [(None, 0.5), (-0.5, None), (-0.5,), (None, None), (0.5, -0.5)])
def test_clamp_to_either_side(run: Run, bounds: tuple[float | None, ...]) -> None:
    x = torch.cat([_random(1100, F32, 1), torch.tensor([math.nan, math.inf, -math.inf])])
    out = run.hold(x, paged=True)
    run("clamp", [out], [out], *bounds)
    low, high = (*bounds, None)[:2]
    expected = x if low is None and high is None else torch.clamp(x, low, high)
    _assert_same(out.values(), expected)


@pytest.mark.parametrize("op", ["addcmul", "addcdiv", "lerp", "add"])
def test_reference_is_torch_on_each_stretch(op: str) -> None:
    backend = Backend("reference")
    values = _inputs(op, 2500, (F32,), seed=5)
    held = [Held(x, backend, paged=i != 1) for i, x in enumerate(values)]
    torch_op = {
        "addcmul": lambda x, y, z, v: torch.addcmul(x, y, z, value=v),
        "addcdiv": lambda x, y, z, v: torch.addcdiv(x, y, z, value=v),
        "lerp": torch.lerp,
        "add": lambda x, y, a: torch.add(x, y, alpha=a),
    }[op]
    parts = [[part.clone() for part in each] for each in stretches([x.operand for x in held])]
    expected = torch.cat([torch_op(*part, *NUMBERS.get(op, [])) for part in parts])
    out = Held(torch.zeros(2500), backend)
    elementwise_reference(op, [out.operand], *([x.operand] for x in held), *NUMBERS.get(op, []))
    _assert_same(out.values(), expected)


def test_scratch_of_the_reference_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions go piece by piece, and the seams do not show."""
    x, y = _random(1000, BF16, 1), _random(1000, F32, 2)
    monkeypatch.setattr(module, "SCRATCH_ELEMENTS", 64)
    longest: list[int] = []
    to = torch.Tensor.to

    def watched(self: torch.Tensor, *args: object, **named: object) -> torch.Tensor:
        longest.append(self.numel())
        return to(self, *args, **named)

    out = torch.zeros(1000, dtype=BF16)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", watched)
        elementwise_reference("mul", [out], [x], [y])
    assert max(longest) == 64
    _assert_same(out, (x * y).to(BF16))


def test_nothing_to_do(run: Run) -> None:
    run("add", [], [], [])
    run("add", [run.hold(torch.zeros(0), paged=True)], [run.hold(torch.zeros(0))], 1.0)
    assert run.launches == 0


def test_parameters_are_no_hindrance(run: Run) -> None:
    weight = torch.nn.Parameter(torch.ones(20, device=run.backend.device))
    function = elementwise_reference if run.backend.name == "reference" else elementwise
    function("add", [weight], [weight], [torch.ones_like(weight)], -3.0)
    assert weight.tolist() == [-2.0] * 20


def _paged_ones(frame: int = 0, numel: int = 8) -> Paged:
    arena = torch.zeros(2 * PAGE, dtype=torch.uint8)
    return Paged(arena, np.array([frame], np.int32), PAGE, F32, numel)


def _ones(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.ones(shape or (8,), dtype=dtype)


BAD = {
    "unknown op": ("tan", [_ones()], [[_ones()]], "no elementwise op 'tan'; choose from fill, c"),
    "few inputs": ("add", [_ones()], [[_ones()]], "add got 1 inputs; pass x, other, alpha, the la"),
    "many inputs": ("sqrt", [_ones()], [[_ones()], 1.0], "sqrt got 2 inputs; pass x"),
    "no default": ("mul", [_ones()], [[_ones()], None], "other of mul is None; pass a list"),
    "bare out": ("sqrt", _ones(), [[_ones()]], r"outs of sqrt is a torch.float32 tensor .*a list"),
    "bare input": ("sqrt", [_ones()], [_ones()], r"x of sqrt is a torch.float32 tensor of shape"),
    "bare paged": ("sqrt", [_ones()], [_paged_ones()], "x of sqrt is a paged torch.float32 of 8"),
    "short list": ("sqrt", [_ones()] * 2, [[_ones()]], "x of sqrt has 1 entries and outs 2"),
    "no operand": ("sqrt", [_ones()], [["a"]], "x 0 of sqrt is 'a'; pass an operand"),
    "lengths": ("sqrt", [_ones()], [[_ones(9)]], "x 0 of sqrt has 9 elements and its out 8"),
    "empty out": ("sqrt", [_ones(0)], [[_ones(9)]], "x 0 of sqrt has 9 elements and its out 0"),
    "alpha": (
        "add",
        [_ones()],
        [[_ones()]] * 3,
        "alpha 0 of add is a torch.float32 tensor .*0-dim",
    ),
    "device": ("sqrt", [_ones()], [[_ones().to("meta")]], "x 0 of sqrt is on meta, its out on cpu"),
    "devices": ("fill", [_ones(), _ones().to("meta")], [0.0], "out 1 of fill is on meta, out 0 on"),
    "integer": ("sqrt", [_ones()], [[_ones(dtype=torch.int32)]], "x 0 of sqrt is torch.int32; con"),
    "integer out": (
        "copy",
        [_ones(dtype=torch.int32)],
        [[_ones()]],
        "out 0 of copy is torch.int32",
    ),
    "complex": (
        "neg",
        [_ones(dtype=torch.complex64)] * 1,
        [[_ones()]],
        "out 0 of neg is torch.com",
    ),
    "condition": ("where", [_ones()], [[_ones()]] * 3, "condition 0 of where is .*pass bool or ui"),
    "one mask": ("where", [_ones()], [1.0, 2.0, 3.0], "condition 0 of where is 1.0; pass bool or"),
    "fill byte": (
        "fill",
        [_ones(dtype=torch.uint8)],
        [300],
        "value 0 of fill is 300; torch.uint8 holds whole numbers from 0",
    ),
    "fill part": (
        "fill",
        [_ones(dtype=torch.int32)],
        [0.5],
        "value 0 of fill is 0.5; torch.int32 holds whole",
    ),
    "stride": ("sqrt", [_ones(8)], [[_ones(16)[::2]]], r"stride \(2,\); pass it contiguous"),
    "frame": ("neg", [_paged_ones(-1)], [[_ones()]], "page 0 is in frame -1, but the arena has 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case: str) -> None:
    """Before anything is written, also of the good ones in front."""
    op, outs, inputs, message = BAD[case]
    for function in (elementwise, elementwise_reference):
        with pytest.raises(ValueError, match=message):
            function(op, outs, *inputs)
    for out in outs if isinstance(outs, list) else [outs]:
        if isinstance(out, torch.Tensor) and out.device.type == "cpu":
            assert bool((out == 1).all())


def test_a_bad_group_at_the_end_leaves_the_first_as_it_was() -> None:
    """Its dtype is another, so it has a launch of its own."""
    good, half = _ones(), _ones(dtype=F16)
    for function in (elementwise, elementwise_reference):
        with pytest.raises(ValueError, match="pass it contiguous"):
            function("neg", [good, half], [good, _ones(16, dtype=F16)[::2]])
        assert good.tolist() == [1.0] * 8
