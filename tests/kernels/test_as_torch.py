"""PyTorch's own elementwise ops on pages of a CPU: its bits, with as many threads as it has."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensorpager.kernels.as_torch import can_be_cut, name_of, result_dtype, run_as_torch
from tensorpager.kernels.cpu_split import Place
from tensorpager.kernels.pieces import Paged

aten = torch.ops.aten
PAGE = 4096
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
THREADS = pytest.mark.parametrize("threads", [1, 2, 4], ids="{}-threads".format)

# An op, its first arguments of a, b and positive c, and its others by name.
Case = tuple[Any, Callable[..., list[Any]], dict[str, Any]]
CASES: list[Case] = [
    (aten.add.Tensor, lambda a, b, c: [a, b], {"alpha": 0.3}),
    (aten.add.Tensor, lambda a, b, c: [a, 0.7], {"alpha": 0.3}),
    (aten.add.Tensor, lambda a, b, c: [a, 0.1], {"alpha": 1}),
    (aten.rsub.Scalar, lambda a, b, c: [a, 1], {"alpha": 1}),
    (aten.rsub.Tensor, lambda a, b, c: [a, b], {"alpha": 0.3}),
    (aten.mul.Tensor, lambda a, b, c: [a, 0.1], {}),
    (aten.div.Tensor, lambda a, b, c: [a, c], {}),
    (aten.sqrt.default, lambda a, b, c: [c], {}),
    (aten.rsqrt.default, lambda a, b, c: [c], {}),
    (aten.reciprocal.default, lambda a, b, c: [c], {}),
    (aten.lerp.Scalar, lambda a, b, c: [a, b, 0.9], {}),
    (aten.lerp.Tensor, lambda a, b, c: [a, b, c], {}),
    (aten.addcmul.default, lambda a, b, c: [a, b, c], {"value": 0.01}),
    (aten.addcdiv.default, lambda a, b, c: [a, b, c], {"value": -0.01}),
    (aten.clamp.default, lambda a, b, c: [a, -0.3, 0.3], {}),
    (aten.clamp_min.default, lambda a, b, c: [a, 0.3], {}),
    (aten.maximum.default, lambda a, b, c: [a, b], {}),
    (aten.where.ScalarOther, lambda a, b, c: [a > b, a, 0.5], {}),
    (aten._foreach_addcmul.Scalar, lambda a, b, c: [[a], [b], [c]], {"value": 0.3}),
    (aten.add_.Tensor, lambda a, b, c: [a, b], {"alpha": 0.3}),
    (aten.add_.Tensor, lambda a, b, c: [a, b.float()], {"alpha": 0.3}),
    (aten.copy_.default, lambda a, b, c: [a, b.to(BF16)], {}),
    (aten._foreach_lerp_.List, lambda a, b, c: [[a], [b], [c]], {}),
]


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    callspec = getattr(request.node, "callspec", None)
    torch.set_num_threads(callspec.params.get("threads", 1) if callspec else 1)
    yield
    torch.set_num_threads(before)


def _values(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    a, b, c = (torch.randn(count, generator=generator) for _ in range(3))
    return [a.to(dtype), b.to(dtype), (c.abs() + 0.1).to(dtype)]


def _paged(values: torch.Tensor) -> Paged:
    """In scattered frames, some of them side by side."""
    data = values.clone().view(torch.uint8)
    pages = -(-len(data) // PAGE)
    order = np.random.default_rng(pages).permutation(pages + 3)[:pages]
    order[: pages // 2].sort()
    frames = order.astype(np.int64)
    arena = torch.zeros((pages + 3) * PAGE, dtype=torch.uint8)
    for frame, part in zip(frames, data.split(PAGE), strict=True):
        arena[int(frame) * PAGE :][: len(part)] = part
    return Paged(arena, frames, PAGE, values.dtype, values.numel())


def _dense(paged: Paged) -> torch.Tensor:
    pages = paged.arena.view(-1, PAGE)[torch.from_numpy(paged.frames).long()]
    return pages.view(-1)[: paged.numel * paged.dtype.itemsize].view(paged.dtype)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize])


def _bound(case: Case, given: list[torch.Tensor]) -> dict[str, Any]:
    func, first, named = case
    arguments = func._schema.arguments
    return {
        **{argument.name: argument.default_value for argument in arguments},
        **dict(zip((argument.name for argument in arguments), first(*given), strict=False)),
        **named,
    }


def _mapped(bound: dict[str, Any], change: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    def new(value: Any) -> Any:
        if isinstance(value, list):
            return [new(each) for each in value]
        return change(value) if isinstance(value, torch.Tensor) else value

    return {name: new(value) for name, value in bound.items()}


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def _run(case: Case, given: list[torch.Tensor], slab: int | None = None) -> None:
    """On pages, all at once or so many elements at a time, it has the bits of torch's op."""
    func, bound = case[0], _bound(case, given)
    works_in_place = func._schema.arguments[0].alias_info is not None
    dense = _mapped(bound, torch.Tensor.clone)
    made = func(**dense)
    expected = _first(dense["self"] if works_in_place else made)
    parts, step = [], slab or len(expected)
    for first in range(0, len(expected), step):
        here = slice(first, first + step)
        paged = _mapped(bound, lambda x, here=here: _paged(x[here]))
        out = None if works_in_place else _paged(torch.zeros_like(expected[here]))
        run_as_torch(func, paged, out, None if slab is None else Place(first, len(expected)))
        parts.append(_dense(_first(paged["self"]) if out is None else out))
    assert torch.equal(_bits(torch.cat(parts)), _bits(expected)), case


@THREADS
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, FP64], ids=str)
@pytest.mark.parametrize(
    "count", [117, pytest.param(70_037, marks=pytest.mark.slow), 140_003], ids=str
)
def test_bits_are_torchs(count: int, dtype: torch.dtype, threads: int) -> None:
    given = _values(count, dtype)
    for case in CASES:
        _run(case, given)


@THREADS
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_parts_have_the_bits_of_the_whole(dtype: torch.dtype, threads: int) -> None:
    """Slabs that begin at page borders, one after the other."""
    for case in [*CASES[:5], CASES[8], *CASES[-5:]]:
        if dtype is FP32 or case[0] is not aten.copy_.default:
            _run(case, _values(100_003, dtype), 3 * PAGE // 2)


def test_what_is_made_beside_the_result_is_small() -> None:
    """Ops that cannot write to ``out=`` directly go by pieces: the result may be a slab."""
    made: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is aten.rsub.Scalar:
                made.append(result.numel())
            return result

    x = torch.randn(200_000).to(BF16)
    out = torch.empty_like(x)
    with Watch():
        run_as_torch(aten.rsub.Scalar, {"self": x, "other": 1, "alpha": 0.3}, out)
    assert sum(made) >= 200_000
    assert max(made) <= 1 << 16
    assert torch.equal(out, torch.rsub(x, 1, alpha=0.3))


def test_which_ops_can_be_cut() -> None:
    """In this machine's own dtypes all; where bodies and tails differ, in one memory order only."""
    x = torch.ones(3)
    for case in CASES:
        bound = _bound(case, [x, x, x])
        assert can_be_cut(case[0], bound, reordered=False), case
        if name_of(case[0]) in ("mul", "copy", "maximum", "where"):
            assert can_be_cut(case[0], bound, reordered=True), case


def test_dtypes_of_results() -> None:
    x, half = torch.ones(3), torch.ones(3, dtype=BF16)
    add = {"self": half, "other": x, "alpha": 1}
    assert result_dtype(aten.add.Tensor, add) is FP32
    assert result_dtype(aten.add_.Tensor, add) is BF16
    assert result_dtype(aten.mul.Tensor, {"self": half, "other": torch.tensor(0.5)}) is BF16
    assert result_dtype(aten.mul.Tensor, {"self": x, "other": 2j}).is_complex
    with pytest.raises(RuntimeError, match="dtype"):
        result_dtype(aten.lerp.Scalar, {"self": half, "end": x, "weight": 0.5})
