"""adam_step against torch.optim, and its states in each kind, on every implementation."""

from typing import Any

import numpy as np
import pytest
import torch
from optimizer_suite import Arena, bits, close, dense, only_touching, place_of, run, zeros
from page_suite import Backend

from tensorpager.kernels import update
from tensorpager.kernels.adam import adam_step, adam_step_again
from tensorpager.kernels.pieces import Operand
from tensorpager.kernels.update import KeptTables

BF16, F32, U8 = torch.bfloat16, torch.float32, torch.uint8
DEFAULTS: dict[str, Any] = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "decoupled": True,
}
FLAGS = [
    {"decoupled": True},
    {"decoupled": False, "amsgrad": True, "maximize": True},
    {"decoupled": False, "weight_decay": 0.0},
    {"decoupled": False},
    {"decoupled": True, "amsgrad": True},
    {"decoupled": True, "maximize": True, "weight_decay": 0.0},
    {"decoupled": True, "beta1": 0.3, "beta2": 0.999, "eps": 1e-3},
    {"decoupled": False, "amsgrad": True, "weight_decay": 0.0, "lr": torch.tensor(3e-3)},
]
SLOW_FROM = 1  # flags that the interpreter, at 30 ms a tile, takes only in the full run


class Problem:
    """Parameters, paged and dense, and what an Adam of them needs."""

    def __init__(
        self,
        backend: Backend,
        sizes: list[int],
        kind: torch.dtype = F32,
        dtype: torch.dtype = F32,
        masters: bool = False,
        amsgrad: bool = False,
        paged: bool = True,
        arena: Arena | None = None,
    ) -> None:
        self.backend, self.sizes, self.dtype = backend, sizes, dtype
        self.arena = arena or Arena(backend)
        self.generator = torch.Generator().manual_seed(0)
        places = [place_of(backend, self.arena, paged and i % 2 == 0) for i in range(len(sizes))]
        start = [torch.randn(n, generator=self.generator, dtype=torch.float64) for n in sizes]
        self.start = [x.to(dtype) for x in start]
        self.params = [place(x) for place, x in zip(places, self.start, strict=True)]
        self.masters = None
        if masters:
            self.masters = [place(x.to(F32)) for place, x in zip(places, self.start, strict=True)]
        self.places = places

        def states() -> list[Any]:
            return [zeros(n, kind, place) for n, place in zip(sizes, places, strict=True)]

        self.avgs, self.sqs = states(), states()
        self.max_sqs = states() if amsgrad else None

    def grads(self, step: int) -> list[torch.Tensor]:
        """The same for every implementation; sizes over five decades."""
        generator = torch.Generator().manual_seed(step)
        found = []
        for n in self.sizes:
            x = torch.randn(n, generator=generator, dtype=torch.float64)
            found.append((x * 10.0 ** (-torch.arange(n) % 5)).to(self.dtype))
        return found

    def operands(self) -> list[Any]:
        lists = [self.params, self.avgs, self.sqs, self.masters or [], self.max_sqs or []]
        return [x for one in lists for x in one]

    def step(self, step: Any, grads: list[Operand] | None = None, **flags: Any) -> None:
        if grads is None:
            number = step if isinstance(step, int) else 1
            grads = [x.to(self.backend.device) for x in self.grads(number)]
        steps = step if isinstance(step, list) else [step] * len(self.sizes)
        run(
            self.backend,
            adam_step,
            *(self.params, grads, self.avgs, self.sqs),
            max_exp_avg_sqs=self.max_sqs,
            masters=self.masters,
            steps=steps,
            **{**DEFAULTS, **flags},
        )

    def dense(self) -> torch.Tensor:
        return torch.cat([dense(x) for x in self.params])


def torch_adam(problem: Problem, steps: int, **flags: Any) -> torch.optim.Optimizer:
    """torch's for-loop, on a CPU, after `steps` steps; its parameters are in param_groups."""
    chosen = {**DEFAULTS, **flags}
    kind = torch.optim.AdamW if chosen.pop("decoupled") else torch.optim.Adam
    betas = (chosen.pop("beta1"), chosen.pop("beta2"))
    params = [x.clone().requires_grad_() for x in problem.start]
    optimizer = kind(params, betas=betas, foreach=False, **chosen)
    for step in range(1, steps + 1):
        for param, grad in zip(params, problem.grads(step), strict=True):
            param.grad = grad
        optimizer.step()
    return optimizer


def _lanes() -> list[Any]:
    """Every flag in plain torch; in the interpreter, at 30 ms a tile, most in the full run only."""
    lanes = []
    for i, flags in enumerate(FLAGS):
        name = ",".join(f"{k}={v}" for k, v in flags.items())
        slow = [pytest.mark.slow] if i >= SLOW_FROM else []
        for lane, marks in {
            "reference": [],
            "interpreter": [pytest.mark.interpreter, *slow],
            "cuda": [pytest.mark.gpu],
        }.items():
            lanes.append(pytest.param(Backend(lane), flags, id=f"{lane},{name}", marks=marks))
    return lanes


@pytest.mark.parametrize(("lane", "flags"), _lanes())
def test_100_steps_as_torch(lane: Backend, flags: dict[str, Any]) -> None:
    """The reference bit for bit; kernels within 16 ulp (2^-24) after all 100 steps, measured 5."""
    problem = Problem(lane, [40] if lane.name == "interpreter" else [1500, 7], **_amsgrad(flags))
    for step in range(1, 101):
        problem.step(step, **flags)
    optimizer = torch_adam(problem, 100, **flags)
    for i, param in enumerate(optimizer.param_groups[0]["params"]):
        state = optimizer.state[param]
        expected = [param.detach(), state["exp_avg"], state["exp_avg_sq"]]
        found = [dense(problem.params[i]), dense(problem.avgs[i]), dense(problem.sqs[i])]
        if problem.max_sqs:
            expected.append(state["max_exp_avg_sq"])
            found.append(dense(problem.max_sqs[i]))
        for got, want in zip(found, expected, strict=True):
            if lane.name == "reference":
                assert torch.equal(got, want)
            else:
                assert close(got, want, ulps=16)
    problem.arena.assert_rest_untouched()


def _amsgrad(flags: dict[str, Any]) -> dict[str, bool]:
    return {"amsgrad": bool(flags.get("amsgrad"))}


KINDS = [
    {"kind": F32, "flags": {"maximize": True}},
    {"kind": BF16, "flags": {"seeds": [1, 2, 3]}},
    {"kind": BF16, "dtype": BF16, "masters": True, "flags": {"decoupled": False}},
    {"kind": U8, "dtype": torch.float16, "flags": {"seeds": [1, 2, 3]}},
    {"kind": U8, "dtype": BF16, "masters": True, "flags": {"amsgrad": True}},
]


@pytest.mark.parametrize("case", KINDS, ids=lambda case: f"{case['kind']},{case.get('dtype', F32)}")
def test_kernel_as_reference(backend: Backend, case: dict[str, Any]) -> None:
    """Parameters within 8 ulp (or one bf16 or fp16 rounding); 99 % of the states' bytes equal.

    Stray reads and writes are caught. The rest of the bytes are roundings at a border between two
    codes, where the last bit of what is rounded decides.
    """
    case = dict(case)
    flags = case.pop("flags")
    problems = []
    for lane in (backend, Backend("reference")):
        problem = Problem(lane, [1100, 300, 0], **_amsgrad(flags), **case)
        for step in (1, 2):
            grads = [place(x) for place, x in zip(problem.places, problem.grads(step), strict=True)]
            with only_touching(lane, grads, problem.operands()):
                problem.step(step, grads=grads, **flags)
        problem.arena.assert_rest_untouched()
        problems.append(problem)
    found, expected = problems
    for got, want in zip(found.masters or found.params, expected.masters or expected.params):
        exact = case.get("dtype", F32) is F32 or case.get("masters", False)
        if len(dense(want)):
            assert close(dense(got), dense(want), ulps=8 if exact else 2**14)
    if found.masters:
        for param, master in zip(found.params, found.masters, strict=True):
            assert torch.equal(dense(param), dense(master).to(BF16))
    for got, want in zip(found.operands()[3:], expected.operands()[3:], strict=True):
        if case["kind"] is F32:
            assert len(dense(want)) == 0 or close(dense(got), dense(want), ulps=8)
        else:
            same = bits(got) == bits(want)
            assert same.sum() >= 0.99 * same.numel()


def test_pages_of_every_size_and_dense_at_any_address(backend: Backend) -> None:
    """Whole tiles, last partial ones, and memory that is not 16-byte aligned: the same bits."""
    results = []
    for page_bytes, paged, offset in ((4096, True, 0), (16384, True, 0), (4096, False, 1)):
        arena = Arena(backend, 16, page_bytes)
        problem = Problem(backend, [2500], paged=paged, arena=arena)
        grad = problem.grads(1)[0]
        moved = torch.zeros(2500 + offset, device=backend.device)[offset:]
        moved.copy_(grad)
        problem.step(1, grads=[moved])
        results.append(problem.dense())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.interpreter
def test_again_is_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of the kernel that cuts pages; operands may move between two steps."""
    monkeypatch.setattr(update, "LONGEST", 4096)  # one tensor is cut, in few tiles
    sizes, flags = [40, 5000, 8], {"amsgrad": True}
    problems = [
        Problem(Backend("interpreter"), sizes, BF16, amsgrad=True, paged=False) for _ in range(2)
    ]
    again = problems[1]
    tables = KeptTables([F32, F32, BF16, BF16, BF16], sizes, torch.device("cpu"))
    for step in (1, 2, 3):
        grads = problems[0].grads(step)
        steps = [step, step + 4, step]
        problems[0].step(steps, grads=grads, **flags)
        again.grads(step)
        if step == 3:  # and one that is not aligned
            again.params[1] = torch.cat([torch.zeros(1), again.params[1]])[1:]
        rows = [grads, again.params, again.avgs, again.sqs, again.max_sqs]
        bases = np.array([[x.data_ptr() for x in row] for row in rows])
        counters = torch.tensor(steps, dtype=torch.float32)
        together = [counters] if step == 2 else list(counters)
        adam_step_again(tables, bases, steps=together, **{**DEFAULTS, **flags})
    for found, expected in zip(again.operands(), problems[0].operands(), strict=True):
        assert torch.equal(bits(found), bits(expected))


def test_numbers_on_the_device(backend: Backend) -> None:
    """Steps and learning rate as tensors: kernels give the same bits as for numbers.

    The reference works with them in float32, as torch does.
    """
    problems = [Problem(backend, [300, 20]) for _ in range(2)]
    problems[0].step([3, 7], grads=_on(backend, problems[0].grads(1)), lr=0.5)
    steps = [torch.tensor(float(x), device=backend.device) for x in (3, 7)]
    lr = torch.tensor(0.5, device=backend.device)
    problems[1].step(steps, grads=_on(backend, problems[1].grads(1)), lr=lr)
    ulps = 8 if backend.name in ("reference", "cpu") else 0
    assert close(problems[1].dense(), problems[0].dense(), ulps)
    assert [float(x) for x in steps] == [3, 7], "steps are not written"


def test_scaled_gradients(backend: Backend) -> None:
    """inv_scale undoes a loss scale; with found_inf nothing is written."""
    plain, scaled = Problem(backend, [300]), Problem(backend, [300])
    plain.step(1)
    grads = _on(backend, [x * 1024 for x in scaled.grads(1)])
    device = backend.device
    before = [bits(x) for x in scaled.operands()]
    numbers = {"inv_scale": torch.tensor([1 / 1024], device=device)}
    scaled.step(1, grads=grads, found_inf=torch.ones(1, device=device), **numbers)
    assert all(torch.equal(bits(x), y) for x, y in zip(scaled.operands(), before, strict=True))
    scaled.step(1, grads=grads, found_inf=torch.zeros(1, device=device), **numbers)
    assert torch.equal(plain.dense(), scaled.dense())


def _on(backend: Backend, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.to(backend.device) for x in tensors]


@pytest.mark.parametrize("kind", [BF16, U8])
def test_random_rounding_depends_on_element_numbers_only(
    backend: Backend, kind: torch.dtype
) -> None:
    """Not on pages, nor on how many stretches of the parameter are updated apart."""
    n = 4096 + 300
    whole = Problem(backend, [n], kind, arena=Arena(backend, 32, 16384))
    grads = whole.grads(1)
    whole.step(1, grads=_on(backend, grads), seeds=[5])

    def last_part(seed: int) -> Problem:
        part = Problem(backend, [300], kind, paged=False)
        part.params = [whole.start[0][4096:].to(backend.device)]
        rest = grads[0][4096:].clone().to(backend.device)
        part.step(1, grads=[rest], seeds=[seed], firsts=[4096])
        return part

    same, other = last_part(5), last_part(6)
    for ours, theirs in ((whole.avgs, same.avgs), (whole.sqs, same.sqs)):
        assert torch.equal(_codes(ours)[-300:], _codes(theirs)[-300:])
    assert not torch.equal(_codes(same.avgs), _codes(other.avgs))


def _codes(states: list[Any]) -> torch.Tensor:
    return torch.cat([dense(getattr(x, "codes", x)).view(torch.uint8) for x in states])


def test_steps_below_half_a_bf16_ulp_add_up() -> None:
    """At random they do on average; to nearest a second moment stops far below where it belongs."""
    means = []
    for flags in ({}, {"seeds": [1]}):
        problem = Problem(Backend("cpu"), [256], BF16, paged=False)
        for step in range(1, 1001):
            problem.step(step, grads=[torch.ones(256)], beta2=0.999, **flags)
        means.append(float(dense(problem.sqs[0]).float().mean()))
    expected = 1 - 0.999**1000
    assert means[0] < 0.5 * expected
    assert means[1] == pytest.approx(expected, rel=0.03)


def test_masters_take_the_way_of_float32() -> None:
    """bf16 parameters with masters: torch's float32 run on the same gradients, bit for bit."""
    problem = Problem(Backend("cpu"), [1500], dtype=BF16, masters=True)
    param = problem.start[0].float().requires_grad_()
    optimizer = torch.optim.AdamW([param], 1e-2, (0.9, 0.99), weight_decay=0.1, foreach=False)
    for step in range(1, 101):
        problem.step(step)
        param.grad = problem.grads(step)[0].float()
        optimizer.step()
    assert problem.masters
    assert torch.equal(dense(problem.masters[0]), param.detach())
    assert torch.equal(dense(problem.params[0]), param.detach().to(BF16))


def test_float64(backend: Backend) -> None:
    problem = Problem(backend, [600], torch.float64, torch.float64)
    for step in (1, 2, 3):
        problem.step(step)
    expected = torch_adam(problem, 3).param_groups[0]["params"][0].detach()
    torch.testing.assert_close(problem.dense(), expected, rtol=1e-14, atol=1e-15)


def _loss_after_training(kind: torch.dtype, **flags: Any) -> float:
    """Least squares in 300 unknowns of scales from 0.1 to 10: 200 steps, falling rate."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(600, 300, generator=generator) * torch.logspace(-1, 1, 300)
    target = rows @ torch.randn(300, generator=generator)
    target += torch.randn(600, generator=generator)
    problem = Problem(Backend("cpu"), [300], kind, paged=False)
    param = problem.params[0]
    assert isinstance(param, torch.Tensor)
    param.zero_()
    for step in range(1, 201):
        grad = rows.T @ (rows @ param - target) / 600
        problem.step(step, grads=[grad], lr=0.1 * (1 - step / 201), weight_decay=0.0, **flags)
    return float((rows @ param - target).square().mean())


def test_8_bit_states_train_as_float32() -> None:
    """The loss falls from thousands to at most 1.2 times float32's, measured 0.94 and 1.01."""
    exact = _loss_after_training(F32)
    nearest, random = _loss_after_training(U8), _loss_after_training(U8, seeds=[1])
    assert exact < 1
    assert nearest <= 1.2 * exact
    assert random <= 1.2 * exact


def test_not_finite_gradients_show(backend: Backend) -> None:
    """Without found_inf: in float32 where they are, in 8 bits in the whole block."""
    for kind, expected in ((F32, 1), (U8, 256)):
        problem = Problem(backend, [600], kind, paged=False)
        grads = problem.grads(1)
        grads[0][300] = torch.inf
        for step in (1, 2):
            problem.step(step, grads=_on(backend, grads))
        assert int(problem.dense().isnan().sum()) == expected


def test_empty(backend: Backend) -> None:
    Problem(backend, []).step([])
    Problem(backend, [0, 0]).step(1)
