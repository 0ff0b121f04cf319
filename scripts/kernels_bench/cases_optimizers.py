"""Cases of the fused optimizers, each one step of one parameter."""

from __future__ import annotations

from typing import Any

import torch

from tensorpager.kernels.adam import adam_step, adam_step_reference
from tensorpager.kernels.sgd import sgd_step

from .case import Case, Job, Setting, Work, close, rounding
from .pages import BlockwisePages, Pages

LR = 1e-3
STEP = 10
SEEDS = [1234]
UPDATE_ERROR = LR * 2.0**-18  # an update is about lr, and its terms are rounded some 10 times
ADAM: dict[str, Any] = {
    "lr": LR,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "amsgrad": False,
    "maximize": False,
}
SGD: dict[str, Any] = {
    "lr": LR,
    "momentum": 0.9,
    "dampening": 0.0,
    "weight_decay": 0.01,
    "nesterov": True,
    "maximize": False,
}


def _operands(setting: Setting) -> list[torch.Tensor]:
    """Parameter, gradient, both moments: float32, such that updates are about lr."""
    param = setting.randn(setting.elements(torch.float32))
    grad = param.flip(0)
    return [param, grad, param.roll(1).mul_(0.1), param.abs().add_(1.0).mul_(0.01)]


def _torch_adam(dense: list[torch.Tensor]) -> None:
    """torch.optim.AdamW(fused=True)'s own op."""
    step = torch.full((), float(STEP), device=dense[0].device)

    torch._fused_adamw_(*([tensor] for tensor in dense), [], [step], **ADAM)


def _adam(setting: Setting) -> Job:
    dense = _operands(setting)
    pages = [Pages(values, setting.page_bytes, seed) for seed, values in enumerate(dense)]
    operands = [[one.paged] for one in pages]

    def compare() -> None:
        close("parameter", pages[0].read(), dense[0], _parameter_bound(dense[0]))
        for name, page, expected in zip(("exp_avg", "exp_avg_sq"), pages[2:], dense[2:]):
            largest = float(expected.abs().max()) + 1.0
            close(name, page.read(), expected, 4 * 2.0**-24 * largest)

    return Job(
        run=lambda: adam_step(*operands, steps=[float(STEP)], decoupled=True, **ADAM),
        peer=lambda: _torch_adam(dense),
        compare=compare,
        work=Work(7 * dense[0].nbytes),
    )


def _adam_bf16(setting: Setting) -> Job:
    """bfloat16 states, rounded at random; the same random numbers on both sides."""
    dense = _operands(setting)
    rival = [tensor.clone() for tensor in dense]
    dense[2:] = [state.bfloat16() for state in dense[2:]]
    pages = [Pages(values, setting.page_bytes, seed) for seed, values in enumerate(dense)]
    operands = [[one.paged] for one in pages]
    settings: dict[str, Any] = {"steps": [float(STEP)], "decoupled": True, "seeds": SEEDS, **ADAM}

    def compare() -> None:
        close("parameter", pages[0].read(), dense[0], _parameter_bound(dense[0]))
        for name, page, expected in zip(("exp_avg", "exp_avg_sq"), pages[2:], dense[2:]):
            # What differs by a bit in float32 may be rounded to the next number.
            close(name, page.read(), expected, rounding(expected, 2.02, torch.bfloat16) + 2.0**-20)

    state_bytes = sum(state.nbytes for state in dense[2:])
    return Job(
        run=lambda: adam_step(*operands, **settings),
        peer=lambda: _torch_adam(rival),
        expect=lambda: adam_step_reference(*([tensor] for tensor in dense), **settings),
        compare=compare,
        work=Work(3 * dense[0].nbytes + 2 * state_bytes),
    )


def _adam_8bit(setting: Setting) -> Job:
    dense = _operands(setting)
    rival = [tensor.clone() for tensor in dense]
    states = [
        BlockwisePages(values, setting, root=bool(i), seed=4 + 2 * i)
        for i, values in enumerate(dense[2:])
    ]
    del dense[2:]
    pages = [Pages(values, setting.page_bytes, seed) for seed, values in enumerate(dense)]
    settings: dict[str, Any] = {"steps": [float(STEP)], "decoupled": True, "seeds": SEEDS, **ADAM}

    def run() -> None:
        operands = [[one.paged] for one in pages]
        adam_step(*operands, *([one.state] for one in states), **settings)

    def expect() -> None:
        operands = [[one] for one in dense]
        adam_step_reference(*operands, *([one.dense] for one in states), **settings)

    def compare() -> None:
        close("parameter", pages[0].read(), dense[0], _parameter_bound(dense[0]))
        for name, state in zip(("exp_avg", "exp_avg_sq"), states):
            state.compare(name)

    param_bytes = dense[0].nbytes
    return Job(
        run=run,
        peer=lambda: _torch_adam(rival),
        expect=expect,
        compare=compare,
        work=Work(3 * param_bytes + 2 * sum(state.nbytes for state in states)),
    )


def _sgd(setting: Setting) -> Job:
    dense = _operands(setting)[:3]
    pages = [Pages(values, setting.page_bytes, seed) for seed, values in enumerate(dense)]
    operands = [[one.paged] for one in pages]

    def compare() -> None:
        for name, page, expected in zip(("parameter", "gradient", "buffer"), pages, dense):
            allowed = rounding(expected, 4, torch.float32) + 4 * 2.0**-24
            close(name, page.read(), expected, allowed)

    return Job(
        run=lambda: sgd_step(*operands, first=[False], **SGD),
        peer=lambda: torch._fused_sgd_(*([tensor] for tensor in dense), is_first_step=False, **SGD),
        compare=compare,
        work=Work(5 * dense[0].nbytes),
    )


def _parameter_bound(expected: torch.Tensor) -> torch.Tensor:
    return rounding(expected, 4, torch.float32) + UPDATE_ERROR


FUSED = "fused AdamW, float32"
OPTIMIZERS = (
    Case("adamw", frozenset({"update.step"}), "fused AdamW", _adam),
    Case("adamw_bf16_states", frozenset({"update.step"}), FUSED, _adam_bf16),
    Case("adamw_8bit_states", frozenset({"update.step"}), FUSED, _adam_8bit),
    Case("sgd", frozenset({"update.step"}), "fused SGD", _sgd),
)
