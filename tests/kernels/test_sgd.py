"""sgd_step against torch.optim, and its buffers in each kind, on every implementation."""

from typing import Any

import pytest
import torch
from optimizer_suite import Arena, bits, close, dense, only_touching, place_of, run, zeros
from page_suite import Backend

from tensorpager.kernels.pieces import Operand
from tensorpager.kernels.sgd import sgd_step

BF16, F32, U8 = torch.bfloat16, torch.float32, torch.uint8
DEFAULTS: dict[str, Any] = {
    "lr": 1e-2,
    "momentum": 0.9,
    "dampening": 0.0,
    "weight_decay": 0.1,
    "nesterov": False,
    "maximize": False,
}
FLAGS = [
    {"nesterov": True},
    {},
    {"momentum": 0.0},
    {"momentum": 0.0, "weight_decay": 0.0, "maximize": True},
    {"dampening": 0.5, "maximize": True},
    {"weight_decay": 0.0, "lr": torch.tensor(3e-3)},
]
SLOW_FROM = 1  # flags that the interpreter, at 20 ms a tile, takes only in the full run


class Problem:
    """Parameters, paged and dense in turn, and what an SGD of them needs."""

    def __init__(
        self,
        backend: Backend,
        sizes: list[int],
        kind: torch.dtype | None = F32,
        dtype: torch.dtype = F32,
        masters: bool = False,
    ) -> None:
        self.backend, self.sizes, self.dtype = backend, sizes, dtype
        self.arena = Arena(backend)
        generator = torch.Generator().manual_seed(0)
        self.places = [place_of(backend, self.arena, i % 2 == 0) for i in range(len(sizes))]
        start = [torch.randn(n, generator=generator, dtype=torch.float64) for n in sizes]
        self.start = [x.to(dtype) for x in start]
        pairs = list(zip(self.places, self.start, strict=True))
        self.params = [place(x) for place, x in pairs]
        self.masters = [place(x.to(F32)) for place, x in pairs] if masters else None
        self.buffers = None
        if kind is not None:
            self.buffers = [zeros(len(x), kind, place) for place, x in pairs]

    def grads(self, step: int) -> list[torch.Tensor]:
        """The same for every implementation."""
        generator = torch.Generator().manual_seed(step)
        return [
            torch.randn(n, generator=generator, dtype=torch.float64).to(self.dtype)
            for n in self.sizes
        ]

    def operands(self) -> list[Any]:
        return [*self.params, *(self.buffers or []), *(self.masters or [])]

    def step(self, step: int, grads: list[Operand] | None = None, **flags: Any) -> None:
        first = [step == 1] * len(self.sizes)
        named = {**DEFAULTS, "first": first, "step": step, "masters": self.masters, **flags}
        if grads is None:
            grads = [x.to(self.backend.device) for x in self.grads(step)]
        run(self.backend, sgd_step, self.params, grads, self.buffers, **named)


def _lanes() -> list[Any]:
    """Every flag in plain torch; in the interpreter most in the full run only."""
    lanes = []
    for i, flags in enumerate(FLAGS):
        name = ",".join(f"{k}={v}" for k, v in flags.items()) or "momentum"
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
    """The reference bit for bit; kernels within 16 ulp (2^-24) after all 100 steps."""
    chosen = {**DEFAULTS, **flags}
    kind = F32 if chosen["momentum"] else None
    problem = Problem(lane, [40] if lane.name == "interpreter" else [1500, 7], kind)
    params = [x.clone().requires_grad_() for x in problem.start]
    optimizer = torch.optim.SGD(params, foreach=False, **chosen)
    for step in range(1, 101):
        problem.step(step, **flags)
        for param, grad in zip(params, problem.grads(step), strict=True):
            param.grad = grad
        optimizer.step()
    pairs = [(dense(a), b.detach()) for a, b in zip(problem.params, params, strict=True)]
    for buffer, param in zip(problem.buffers or [], params, strict=bool(problem.buffers)):
        pairs.append((dense(buffer), optimizer.state[param]["momentum_buffer"]))
    for got, want in pairs:
        assert torch.equal(got, want) if lane.name == "reference" else close(got, want, ulps=16)
    problem.arena.assert_rest_untouched()


KINDS = [
    {"kind": F32, "flags": {"nesterov": True, "maximize": True}},
    {"kind": BF16, "dtype": BF16, "masters": True, "flags": {"seeds": [1, 2, 3]}},
    {"kind": U8, "flags": {"seeds": [1, 2, 3], "dampening": 0.5}},
    {"kind": None, "dtype": torch.float16, "flags": {"momentum": 0.0}},
]


@pytest.mark.parametrize("case", KINDS, ids=lambda case: f"{case['kind']},{case.get('dtype', F32)}")
def test_kernel_as_reference(backend: Backend, case: dict[str, Any]) -> None:
    """Parameters within 8 ulp (2^14: one rounding to fp16); 99 % of the buffers' bytes equal.

    Stray reads and writes are caught. The rest of the bytes are roundings at a border between two
    codes, where the last bit of what is rounded decides.
    """
    case = dict(case)
    flags = case.pop("flags")
    problems = []
    for lane in (backend, Backend("reference")):
        problem = Problem(lane, [1100, 300, 0], **case)
        for step in (1, 2):
            grads = [place(x) for place, x in zip(problem.places, problem.grads(step), strict=True)]
            with only_touching(lane, grads, problem.operands()):
                problem.step(step, grads=grads, **flags)
        problem.arena.assert_rest_untouched()
        problems.append(problem)
    found, expected = problems
    ulps = 2**14 if case.get("dtype") is torch.float16 else 8
    for got, want in zip(
        found.masters or found.params, expected.masters or expected.params, strict=True
    ):
        assert close(dense(got), dense(want), ulps)
    if found.masters:
        for param, master in zip(found.params, found.masters, strict=True):
            assert torch.equal(dense(param), dense(master).to(BF16))
    for got, want in zip(found.buffers or [], expected.buffers or [], strict=True):
        if case["kind"] is F32:
            assert close(dense(got), dense(want), ulps=8)
        else:
            assert (bits(got) == bits(want)).sum() >= 0.99 * len(bits(want))


def test_fresh_buffers_are_not_read(backend: Backend) -> None:
    """Group by group: one is fresh and full of NaN, the other is not."""
    problem = Problem(backend, [0, 40, 0, 40])
    assert problem.buffers
    problem.buffers[1].fill_(torch.nan)
    problem.buffers[3].fill_(1.0)
    grads = [torch.ones(n, device=backend.device) for n in problem.sizes]
    problem.step(2, grads=grads, first=[True, True, True, False], weight_decay=0.0)
    assert dense(problem.buffers[1]).eq(1).all()
    assert dense(problem.buffers[3]).sub(1.9).abs().max() < 1e-6


def test_found_inf(backend: Backend) -> None:
    problem = Problem(backend, [40])
    before = [bits(x) for x in problem.operands()]
    problem.step(1, found_inf=torch.ones((), device=backend.device))
    assert all(torch.equal(bits(x), y) for x, y in zip(problem.operands(), before, strict=True))
    scaled = [x.to(backend.device) * 8 for x in problem.grads(1)]
    problem.step(1, grads=scaled, inv_scale=0.125, found_inf=torch.zeros((), device=backend.device))
    plain = Problem(backend, [40])
    plain.step(1)
    assert torch.equal(dense(plain.params[0]), dense(problem.params[0]))


def test_float64(backend: Backend) -> None:
    problem = Problem(backend, [600], torch.float64, torch.float64)
    param = problem.start[0].clone().requires_grad_()
    optimizer = torch.optim.SGD([param], foreach=False, **DEFAULTS)
    for step in (1, 2, 3):
        problem.step(step)
        param.grad = problem.grads(step)[0]
        optimizer.step()
    found = dense(problem.params[0])
    torch.testing.assert_close(found, param.detach(), rtol=1e-14, atol=1e-15)


def test_empty(backend: Backend) -> None:
    Problem(backend, []).step(1)
    Problem(backend, [0, 0]).step(1)
