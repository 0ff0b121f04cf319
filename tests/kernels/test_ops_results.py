"""What ops compute, against torch on dense tensors: that each argument reaches its place."""

from typing import Any

import pytest
import torch
from ops_cases import CASES, PAGE, Memory, lists, ops, optimizer_args, table, values

from tensorpager.kernels.adam import adam_step
from tensorpager.kernels.blockwise import Blockwise
from tensorpager.kernels.checksum import page_checksums
from tensorpager.kernels.pieces import Operand, Paged
from tensorpager.kernels.softmax_slabs import new_state

NO_FRAMES = torch.empty(0, dtype=torch.int32)


def _dense(memory: Memory, operand: Operand) -> torch.Tensor:
    return memory.dense(operand) if isinstance(operand, Paged) else operand.view(-1)


def test_pages_come_go_move_and_fill() -> None:
    memory = Memory()
    paged = memory.page(values(30, 50))
    frames, call = table(paged), (table(paged), PAGE)
    assert torch.equal(
        ops.gather_pages(memory.arena, *call, [30, 50], torch.float32), values(30, 50)
    )
    ops.scatter_pages(values(30, 50, seed=1), memory.arena, *call)
    assert torch.equal(memory.dense(paged), values(1500, seed=1))
    elsewhere = torch.tensor([2, 0], dtype=torch.int32)
    sums = ops.page_checksums(memory.arena, *call)
    assert torch.equal(sums, page_checksums(memory.arena, *call))
    ops.move_pages(memory.arena, frames, elsewhere, PAGE)
    assert torch.equal(ops.page_checksums(memory.arena, elsewhere, PAGE), sums)
    ops.fill_pages(memory.arena, frames, PAGE, 9)
    assert memory.dense(paged).view(torch.uint8).eq(9).all()
    out = torch.zeros(30, 50)
    ops.gather_pages_into(memory.arena, elsewhere, PAGE, out)
    assert torch.equal(out, values(1500, seed=1).view(30, 50))


def _elementwise(op: str, kinds: str, tensors: list[Operand], numbers: list[float]) -> Any:
    """Two outs, one paged, one dense; `tensors` are their pairs, and those for both."""
    memory = Memory()
    outs: list[Operand] = [memory.page(torch.zeros(1500)), torch.zeros(30)]
    paged = [memory.page(x) if x.numel() == 1500 and i % 4 else x for i, x in enumerate(tensors)]
    ops.elementwise(
        *(op, memory.arena, PAGE, [1500, 30], *lists(*outs), kinds, *lists(*paged), numbers)
    )
    return [_dense(memory, out) for out in outs]


def test_inputs_of_every_kind() -> None:
    x, y = ([values(n, seed=seed) for n in (1500, 30)] for seed in (1, 2))
    two = torch.tensor(2.0)
    calls: list[tuple[Any, Any]] = [
        (("fill", "n", [], [7.0]), lambda a, b, m: torch.full_like(a, 7.0)),
        (("sub", "nt", x, [3.0]), lambda a, b, m: 3.0 - a),
        (("mul", "tm", x, [3.0, 5.0]), lambda a, b, m: a * m),
        (("div", "tc", [*x, two], []), lambda a, b, m: a / 2.0),
        (("maximum", "tt", [*x, *y], []), lambda a, b, m: torch.maximum(a, b)),
        (("mul", "tt", [*x, two, two], []), lambda a, b, m: a * 2.0),
        (("clamp", "tnn", x, [-0.5, 0.25]), lambda a, b, m: a.clamp(-0.5, 0.25)),
        (
            ("clamp", "ctn", [two, *x], [1.5]),
            lambda a, b, m: torch.clamp(two, a, torch.tensor(1.5)),
        ),
    ]
    for call, expected in calls:
        results = _elementwise(*call)
        for i, number in enumerate((3.0, 5.0)):
            assert torch.equal(results[i], expected(x[i], y[i], number)), call[:2]
    masks = [each > 0 for each in x]
    for result, mask, each in zip(_elementwise("where", "tnt", [*masks, *x], [9.0]), masks, x):
        assert torch.equal(result, torch.where(mask, 9.0, each))


@pytest.mark.parametrize(
    ("kinds", "message"),
    [("tx", "use one of t, c, m, n"), ("tt", "takes 4 inputs and 0 numbers, but there are 2")],
)
def test_kinds_that_do_not_fit(kinds: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _elementwise("mul", kinds, [values(1500), values(30)], [])


def test_reductions_and_unscaling() -> None:
    memory = Memory()
    xs = [values(1500), values(30, seed=1)]
    call = (memory.arena, PAGE, [1500, 30], *lists(memory.page(xs[0]), xs[1].clone()))
    sums = ops.reduce(*call, "sum", dtype=torch.float64)
    assert sums.dtype == torch.float64
    torch.testing.assert_close(
        sums, torch.stack([x.double().sum() for x in xs]), rtol=1e-5, atol=1e-4
    )
    norms = ops.reduce(*call, "norm", 1.0)
    torch.testing.assert_close(norms, torch.stack([x.norm(1) for x in xs]))
    torch.testing.assert_close(ops.total_norm(*call), torch.cat(xs).norm())
    torch.testing.assert_close(ops.total_norm(*call, 3.0), torch.cat(xs).norm(3))
    found = torch.zeros(1)
    ops.non_finite_check_and_unscale(*call, found, torch.full((1,), 0.25))
    assert found.item() == 0
    assert torch.equal(call[3][1], xs[1] * 0.25)
    call[3][1][7] = torch.inf
    assert ops.reduce(*call, "isfinite").tolist() == [True, False]
    ops.non_finite_check_and_unscale(*call, found, torch.full((1,), 1.0))
    assert found.item() == 1


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam_is_torchs(amsgrad: bool) -> None:
    memory, sizes = Memory(), [1500, 300]
    dense = [values(n, seed=n).requires_grad_() for n in sizes]
    grads = [values(n, seed=n + 1) for n in sizes]
    params = [memory.page(dense[0].detach()), dense[1].detach().clone()]
    zeros: list[Operand] = []
    for _ in range(3 if amsgrad else 2):
        zeros += [torch.zeros(1500), memory.page(torch.zeros(300))]
    optimizer = torch.optim.AdamW(dense, lr=0.01, amsgrad=amsgrad, foreach=False)
    for number in (1, 2, 3):
        for param, grad in zip(dense, grads, strict=True):
            param.grad = grad * number
        optimizer.step()
        ops.adam_step(
            *(memory.arena, PAGE, sizes, *lists(*params)),
            *lists(*(grad * number * 4 for grad in grads)),
            *(*lists(*zeros), [], [], [], []),
            *([torch.tensor(float(number))] * 2, torch.tensor(0.01, dtype=torch.float64)),
            *(torch.tensor(0.25), torch.zeros(1), 0.9, 0.999, 1e-8, 0.01, True, amsgrad),
        )
    for param, paged in zip(dense, params, strict=True):
        assert torch.equal(param, _dense(memory, paged))


def test_adam_in_8_bits_is_the_launchers() -> None:
    numbers = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    memory, other = Memory(), Memory()
    call = optimizer_args(memory, 2, in_8_bits=True)
    ops.adam_step(
        *(memory.arena, *call[1:]),
        *([torch.tensor(1.0)] * 2, torch.tensor(1e-3, dtype=torch.float64), None, None),
        *(*numbers.values(), True, False, False, [3, 4], [0, 4096]),
    )
    params_there = [other.page(values(1500)), values(300, seed=1)]
    grads = [other.page(values(1500, dtype=torch.bfloat16, seed=2)), values(300, seed=3)]
    states = []
    for _ in range(2):
        codes = [other.page(torch.zeros(1500, dtype=torch.uint8)), torch.zeros(300).byte()]
        scales = [other.page(torch.zeros(6)), torch.zeros(2)]
        states.append([Blockwise(c, s) for c, s in zip(codes, scales, strict=True)])
    adam_step(
        *(params_there, grads, *states),
        steps=[1.0, 1.0],
        lr=1e-3,
        decoupled=True,
        seeds=[3, 4],
        firsts=[0, 4096],
        **numbers,
    )
    assert torch.equal(memory.arena, other.arena)
    params, codes, scales = call[3], call[7], call[9]
    assert torch.equal(params[1], params_there[1])
    assert torch.equal(codes[3], states[1][1].codes)
    assert torch.equal(scales[1], states[0][1].scales)
    assert scales[1].count_nonzero() == 2


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs(momentum: float) -> None:
    memory = Memory()
    dense = values(1500).requires_grad_()
    param, master = memory.page(dense.detach().half()), memory.page(dense.detach())
    buffer = lists(memory.page(torch.zeros(1500))) if momentum else ([], [])
    optimizer = torch.optim.SGD(
        [dense], lr=0.1, momentum=momentum, weight_decay=0.01, foreach=False
    )
    for number in range(3):
        dense.grad = values(1500, seed=number)
        optimizer.step()
        ops.sgd_step(
            *(memory.arena, PAGE, [1500], *lists(param), *lists(dense.grad), *buffer, [], []),
            *(*lists(master), torch.tensor(1.0), torch.tensor(0.1, dtype=torch.float64)),
            *(None, None, [number == 0], momentum, 0.0, 0.01, False),
        )
    assert torch.equal(memory.dense(master), dense)
    assert torch.equal(memory.dense(param), dense.half())


def test_8_bits_there_and_back() -> None:
    """Signed codes are off by less than 1/144 of the block's largest."""
    memory, x = Memory(), values(1500)
    state = *lists(memory.page(torch.zeros(1500).byte())), *lists(memory.page(torch.zeros(6)))
    call, out = (memory.arena, PAGE, [1500]), torch.zeros(1500)
    ops.quantize(*call, *lists(memory.page(x)), *state, False)
    ops.dequantize(*call, *state, *lists(out), False)
    assert out.count_nonzero() > 1400
    assert (out - x).abs().max() < x.abs().max() / 144


def test_slabs_of_linear() -> None:
    """Rows 5 to 32 only, forward and both ways back; half the pages are enough for them."""
    memory = Memory()
    w, x, grad = values(40, 65), values(6, 65, seed=1), values(6, 40, seed=2)
    weight = table(memory.page(w)), PAGE, torch.float32
    out, dx = torch.full((6, 40), 7.0), values(6, 65, seed=3)
    ops.linear_into(x, memory.arena, *weight, out, values(40), 5, 33)
    expected = torch.full((6, 40), 7.0)
    expected[:, 5:33] = (x @ w.t() + values(40))[:, 5:33]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)
    ops.linear_input_grad_into(grad, memory.arena, *weight, dx, True, 5, 33)
    expected = values(6, 65, seed=3) + grad[:, 5:33] @ w[5:33]
    torch.testing.assert_close(dx, expected, rtol=1e-5, atol=1e-4)
    dw = memory.page(values(40, 65, seed=4))
    ops.linear_weight_grad(grad, x, memory.arena, table(dw), *weight[1:], True, 5, 33)
    expected = values(40, 65, seed=4)
    expected[5:33] += grad[:, 5:33].t() @ x
    torch.testing.assert_close(memory.dense(dw).view(40, 65), expected, rtol=1e-5, atol=1e-4)


def test_half_precision_and_other_shapes_of_x() -> None:
    memory = Memory()
    w = values(40, 64, dtype=torch.bfloat16)
    weight = table(memory.page(w)), PAGE, torch.bfloat16
    x = values(64, 5, dtype=torch.bfloat16, seed=1).t()  # rows that are not contiguous
    y = ops.linear(x, memory.arena, *weight, 40, None)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, torch.nn.functional.linear(x, w))
    one = ops.linear(x[0], memory.arena, *weight, 40, None)
    assert one.shape == (40,)
    torch.testing.assert_close(one, y[0])
    with pytest.raises(ValueError, match="x is torch"):
        ops.linear(x.float(), memory.arena, *weight, 40, None)


def test_lookups_and_their_gradients() -> None:
    memory, w = Memory(), values(40, 65)
    indices = torch.tensor([[3, 39], [3, 16]])
    call = PAGE, torch.float32, 40
    frames, gradient = table(memory.page(w)), memory.page(torch.zeros(40, 65))
    rows = ops.gather_rows(memory.arena, frames, *call, 65, indices).requires_grad_()
    assert torch.equal(rows, w[indices])
    rows.square().sum().backward()
    grad, groups = rows.grad.view(-1, 65), ops.group_rows(indices, 16)
    assert groups[0].tolist() == [3, 39]
    ops.add_rows(memory.arena, table(gradient), *call, grad, *groups)
    expected = torch.zeros(40, 65)
    expected[3], expected[39] = 4 * w[3], 2 * w[39]
    assert torch.equal(memory.dense(gradient).view(40, 65), expected)
    mean = ops.sum_rows(grad, *groups, torch.float16, True)
    assert torch.equal(mean, torch.stack([2 * w[3], 2 * w[39]]).half())


def test_softmax_over_slabs() -> None:
    logits, targets = values(4, 20), torch.tensor([3, 19, 10, 12])
    state = new_state(4, torch.float32, torch.device("cpu"))
    for begin, end in ((0, 11), (11, 20)):
        ops.softmax_update(logits[:, begin:end].contiguous(), begin, targets, state)
    torch.testing.assert_close(state[1].log() + state[0], logits.logsumexp(1))
    factors = torch.stack([state[0], 1 / state[1], torch.zeros(4), torch.ones(4)])
    grad = logits.clone()
    ops.softmax_grad(grad, 0, targets, factors)
    expected = logits.softmax(1) - torch.nn.functional.one_hot(targets, 20)
    torch.testing.assert_close(grad, expected)


def test_ops_run_in_inference_mode() -> None:
    with torch.inference_mode():
        for name, make in CASES.items():
            getattr(ops, name)(*make())
