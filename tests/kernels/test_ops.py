"""Every page kernel as an op: `opcheck`, derivatives, refusals, and none forgotten."""

import importlib
from typing import Any

import pytest
import torch
from ops_cases import CASES, PAGE, VARIANTS, Args, Memory, linear, ops, table, tensors, values
from page_suite import kernels_in_folder

from tensorpager.kernels import ops_define
from tensorpager.kernels.ops_define import NAMESPACE, define
from tensorpager.kernels.paged_matrix import PagedMatrix

# No input of these is floating-point, so none can require a gradient.
INTEGERS_ONLY = {
    *("move_pages", "slide_pages", "fill_pages", "page_checksums", "gather_pages"),
    *("gather_rows", "group_rows"),
}
DIFFERENTIABLE = {"linear", "linear_input_grad"}
WITHOUT_COMPILING = ("test_schema", "test_autograd_registration", "test_faketensor")
TRACED = {"gather_pages", "elementwise", "adam_step", "linear", "add_rows"}  # in the quick run
WRITERS = ("scatter_pages", "elementwise", "adam_step", "add_rows", "softmax_update")
SLOW = {False: (), True: pytest.mark.slow}

# Public functions beside kernels that have no op of their own, and why.
WITHOUT_AN_OP = {
    "adam.adam_step_again": "adam_step once more, on tables that are on the device already",
    "combine.combine": "second pass of reduce and total_norm, over numbers that are not in pages",
    "linear_tma.linear_forward_tma": "linear chooses it where the device and the shape have it",
    "rows.pages_of_rows": "on the host, before the pages are there: what to bring in",
    "softmax_slabs.new_state": "torch's ops alone, which compile as they are",
    "softmax_slabs.gradient_factors": "torch's ops alone, which compile as they are",
    "softmax_slabs.loss_of": "torch's ops alone, which compile as they are",
}
RENAMED = {
    "linear_forward": "linear",
    "softmax_grad_": "softmax_grad",  # an op that ends in _ would have to return its input
}


def _op(name: str) -> Any:
    return getattr(ops, name).default


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name: str) -> None:
    """Schema, autograd and fake implementation."""
    torch.library.opcheck(_op(name), CASES[name](), test_utils=WITHOUT_COMPILING)


@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW[n not in TRACED]) for n in CASES])
def test_opcheck_traced(name: str) -> None:
    """And that AOTAutograd traces it, with symbolic sizes, to the same results and gradients."""
    torch.library.opcheck(_op(name), CASES[name](), test_utils="test_aot_dispatch_dynamic")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck_of_variants(variant: str) -> None:
    name, make = VARIANTS[variant]
    torch.library.opcheck(_op(name), make())


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["gather_pages", "elementwise", "linear", "add_rows"])
def test_opcheck_of_kernels(name: str) -> None:
    torch.library.opcheck(_op(name), CASES[name]())


@pytest.mark.interpreter
@pytest.mark.slow
@pytest.mark.parametrize("variant", [*CASES, *VARIANTS])
def test_opcheck_of_all_kernels(variant: str) -> None:
    name, make = VARIANTS[variant] if variant in VARIANTS else (variant, CASES[variant])
    torch.library.opcheck(_op(name), make())


@pytest.mark.parametrize("lie", ["writes_unsaid", "wrong_shape", "returns_its_input"])
def test_opcheck_notices(lie: str) -> None:
    """The check can fail: ops defined as ours are, but for one untruth each."""
    arena = torch.zeros(PAGE, dtype=torch.uint8)
    name = f"test_{lie}"
    if not hasattr(ops, name):
        if lie == "writes_unsaid":
            define(f"{name}(Tensor arena) -> ()", lambda call: call.arena.fill_(1) and None)
        elif lie == "wrong_shape":
            define(
                f"{name}(Tensor arena) -> Tensor",
                lambda call: call.arena[:7] + 1,
                lambda call: call.arena.new_empty(8),
            )
        else:
            define(
                f"{name}(Tensor arena) -> Tensor",
                lambda call: call.arena[:8],
                lambda call: call.arena[:8],
            )
    with pytest.raises(Exception, match="opcheck"):
        torch.library.opcheck(_op(name), (arena,))


def test_every_launcher_has_an_op() -> None:
    modules = {launcher.partition(".")[0] for launcher in kernels_in_folder()}
    without = set()
    for module in sorted(modules):
        loaded = importlib.import_module(f"tensorpager.kernels.{module}")
        public = [name for name in loaded.__all__ if not name.endswith("_reference")]
        for name in public:
            value = getattr(loaded, name)
            launches = callable(value) and not isinstance(value, type)
            if launches and RENAMED.get(name, name) not in CASES:
                without.add(f"{module}.{name}")
    assert without == set(WITHOUT_AN_OP)
    assert {"elementwise", "adam_step", "linear", "gather_rows"} <= set(CASES)


def test_every_op_has_a_case() -> None:
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith(NAMESPACE)}
    defined = {name.partition("::")[2] for name in names}
    assert {name for name in defined if not name.startswith("test_")} == set(CASES)


def _with_gradients(args: Args) -> list[tuple[Args, int]]:
    """The call with one of its floating-point tensors requiring a gradient, for each of them."""
    count = len(tensors(args))
    found = []
    for chosen in range(count):
        numbers = iter(range(count))

        def requiring(value: Any, chosen: int = chosen, numbers: Any = numbers) -> Any:
            if isinstance(value, list):
                return [requiring(each) for each in value]
            if not isinstance(value, torch.Tensor):
                return value
            here = next(numbers) == chosen and value.dtype.is_floating_point
            return value.detach().clone().requires_grad_(here)

        call = tuple(requiring(value) for value in args)
        if any(tensor.requires_grad for tensor in tensors(call)):
            found.append((call, chosen))
    return found


@pytest.mark.parametrize("name", sorted(set(CASES) - DIFFERENTIABLE))
def test_ops_without_a_derivative_say_so(name: str) -> None:
    calls = _with_gradients(CASES[name]())
    assert bool(calls) == (name not in INTEGERS_ONLY)
    for args, _ in calls:
        with pytest.raises(RuntimeError, match=f"tensorpager::{name} cannot be differentiated"):
            _op(name)(*args)
        with torch.no_grad():
            _op(name)(*args)


def test_the_error_names_the_tensor_and_the_remedy() -> None:
    memory = Memory()
    xs = [values(3), values(3).requires_grad_()]
    none = [torch.empty(0, dtype=torch.int32)] * 2
    with pytest.raises(RuntimeError, match=r"xs\[1\] requires a gradient; .*torch\.no_grad\(\)"):
        ops.reduce(memory.arena, PAGE, [3, 3], xs, none, "sum")
    x, *weight, _rows, _bias = linear()
    with pytest.raises(RuntimeError, match="use tensorpager::linear,"):
        ops.linear_into(x.view(6, 65), *weight, torch.zeros(6, 40))


@pytest.mark.parametrize(
    "name",
    [
        *CASES,
        # Kernels write by address, which nobody counts but the op; references are torch's own ops.
        *(pytest.param(n, marks=pytest.mark.interpreter, id=f"kernel-{n}") for n in WRITERS),
    ],
)
def test_versions_count_up_for_what_is_written_and_nothing_else(name: str) -> None:
    args = CASES[name]()
    schema = _op(name)._schema
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    groups = list(zip([tensors([value]) for value in args], written, strict=False))
    writes = {id(tensor) for group, write in groups for tensor in group if write}
    before = [(tensor, tensor._version) for tensor in tensors(args)]
    with torch.no_grad():
        _op(name)(*args)
    for tensor, version in before:
        assert (tensor._version > version) == (id(tensor) in writes)


def _assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Within 1e-4 of the largest: three sums in a row of at most 65 float32 terms each."""
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def _dense_weight(args: Args) -> torch.Tensor:
    _x, arena, frames, page_bytes, dtype, rows, _bias = args
    matrix = PagedMatrix(arena, frames, page_bytes, dtype, rows, 65)
    pages = [arena[frame * page_bytes :][:page_bytes] for frame in frames.tolist()]
    return torch.cat(pages)[: rows * matrix.row_bytes].view(dtype).view(rows, 65).clone()


def test_gradients_of_linear_are_those_of_a_dense_weight() -> None:
    """Also the second ones: those of a penalty on the gradient of x."""
    args = linear()
    results = []
    for paged in (True, False):
        x, bias = (t.detach().clone().requires_grad_() for t in (args[0], args[-1]))
        if paged:
            y = ops.linear(x, *args[1:-1], bias)
        else:
            y = torch.nn.functional.linear(x, _dense_weight(args), bias)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (y.sin().sum() + dx.square().sum()).backward()
        results.append((y.detach(), dx.detach(), x.grad, bias.grad))
    for ours, theirs in zip(*results, strict=True):
        _assert_near(ours, theirs)


def test_the_weight_gradient_goes_to_pages() -> None:
    memory = Memory()
    weight, gradient = memory.page(values(40, 65)), memory.page(torch.zeros(40, 65))
    x, w = values(6, 65, seed=1).requires_grad_(), values(40, 65).requires_grad_()
    y = ops.linear(x, memory.arena, table(weight), PAGE, torch.float32, 40, None)
    grad = torch.autograd.grad(y.square().sum(), [y, x])
    with torch.no_grad():
        ops.linear_weight_grad(grad[0], x, memory.arena, table(gradient), PAGE, torch.float32)
    dense = torch.nn.functional.linear(x, w)
    dense.square().sum().backward()
    _assert_near(memory.dense(gradient).view(40, 65), w.grad)
    _assert_near(grad[1], x.grad)


def test_backward_does_not_mind_that_other_pages_were_written() -> None:
    x, arena, frames, page_bytes, dtype, rows, bias = linear()
    y = ops.linear(x, arena, frames, page_bytes, dtype, rows, bias)
    y.mul_(2)
    free = next(f for f in range(20) if f not in frames.tolist())
    ops.fill_pages(arena, torch.tensor([free], dtype=torch.int32), page_bytes, 255)
    y.sum().backward()
    weight = _dense_weight((x, arena, frames, page_bytes, dtype, rows, bias))
    _assert_near(x.grad, 2 * weight.sum(0).expand_as(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"numels": [1500]}, "xs has 2 tensors, 2 tables of frames and 1 numels"),
        ({"numels": [1500, 31]}, r"xs\[1\] has 30 elements, but numels says 31"),
        ({"numels": [5000, 30]}, "take 5 pages of 4096 bytes, but frames has 2 entries"),
        ({"dense": [1500, 30]}, r"xs\[0\] has 1500 dense elements and 2 frames"),
        ({"page_bytes": 5000}, "page_bytes is 5000; use a power of two"),
        ({"frames": torch.int64}, r"the frames of xs\[0\] are torch.int64"),
    ],
    ids=str,
)
def test_lists_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    memory = Memory()
    paged = memory.page(values(1500))
    frames = [table(paged).to(change.get("frames", torch.int32)), torch.empty(0)]
    sizes = change.get("dense", [0, 30])
    with pytest.raises(ValueError, match=message):
        ops.reduce(
            *(memory.arena, change.get("page_bytes", PAGE), change.get("numels", [1500, 30])),
            *([torch.zeros(size) for size in sizes], frames, "sum"),
        )


def test_encoding_and_decoding_are_inverse() -> None:
    memory = Memory()
    operands = [memory.page(values(1500)), values(30), memory.page(values(9).half())]
    lists = ops_define.encoded(operands)
    again = ops_define.decoded("xs", memory.arena, PAGE, [1500, 30, 9], *lists)
    for one, other in zip(operands, again, strict=True):
        assert type(one) is type(other)
        assert one.dtype == other.dtype
    assert torch.equal(memory.dense(again[0]), values(1500))
    assert torch.equal(again[1], values(30))
    assert torch.equal(memory.dense(again[2]), values(9).half())
