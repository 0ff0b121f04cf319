"""``fused=True`` on the CPU: torch's own fused kernels, on what is on the device.

They are not the for-loop's bits. Each works through a tensor in units of a cache line, whole
vectors first, and what is left at its end one element at a time; threads get whole units. So a
tensor may be cut wherever a cache line ends, and each element keeps the bits that it has in one
call for all. Pages are many cache lines, and a part ends with a page or with the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...kernels.pieces import Operand, stretches
from ..budget.fits import fits
from ..tensor.module import known_parameter
from ..tensor.operands import has_no_gaps
from ..tensor.paged_tensor import PagedTensor

if TYPE_CHECKING:
    from ..core import Core

KINDS: tuple[type, ...] = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.SGD,
    torch.optim.Adagrad,
)
_HALVES = (torch.bfloat16, torch.float16)
_OF_ADAM = ("eps", "amsgrad")
_SETTINGS: dict[type, tuple[str, ...]] = {
    torch.optim.SGD: ("momentum", "dampening", "nesterov"),
    torch.optim.Adagrad: ("lr_decay", "eps"),
}
_LEAST_TENSORS = 2  # of an update: a parameter and its gradient; most optimizers have states too


def settings(kind: type, group: dict[str, Any]) -> dict[str, Any]:
    """Of an update, by the names that kernels have for them, ours too."""
    found = {key: group[key] for key in ("lr", "maximize", *_SETTINGS.get(kind, _OF_ADAM))}
    found["weight_decay"] = float(group["weight_decay"])
    if kind not in _SETTINGS:
        found["beta1"], found["beta2"] = (float(beta) for beta in group["betas"])
    return found


@torch.no_grad()
def update(
    kind: type,
    group: dict[str, Any],
    operands: Sequence[Operand],
    *,
    step: torch.Tensor | None,
    fresh: bool,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    """Update one parameter, or a part of one that ends with a page.

    operands : gradient, parameter and states in torch.optim's order, of one dtype on the CPU. The
        gradient is written too where there is a ``grad_scale``, by which it is divided.
    step : counts this step already; ``None`` for SGD.
    fresh : the states hold nothing yet.
    """
    parts = list(stretches(operands))
    if not parts:
        return
    grads, params, *states = ([part[i] for part in parts] for i in range(len(operands)))
    common = {**settings(kind, group), "grad_scale": grad_scale, "found_inf": found_inf}
    if kind is torch.optim.SGD:
        buffers = states[0] if states else []
        torch._fused_sgd_(params, grads, buffers, is_first_step=fresh, **common)
        return
    assert step is not None
    steps = [step] * len(parts)
    if kind is torch.optim.Adagrad:
        torch._fused_adagrad_(params, grads, states[0], steps, **common)
        return
    largest = states[2] if group["amsgrad"] else []
    call = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    call(params, grads, states[0], states[1], largest, steps, **common)


def refuse(pager: Core, kind: type, groups: Iterable[dict[str, Any]]) -> None:
    """Raise ``ValueError`` for what torch's fused kernels do wrong, or only with all of a parameter
    on the device where that cannot be. Nothing is changed then."""
    if pager.device.type != "cpu":
        return
    for index, group in enumerate(groups):
        if not group.get("fused"):
            continue
        for position, parameter in enumerate(group["params"]):
            paged = known_parameter(pager, parameter)
            reason = _reason(pager, kind, group, parameter if paged is None else paged)
            if reason is not None:
                raise ValueError(
                    f"fused=True of {kind.__name__} cannot update parameter {position} of group "
                    f"{index}, shape {tuple(parameter.shape)}, {parameter.dtype}: {reason}. Make "
                    "the optimizer with fused=False"
                )


def _reason(pager: Core, kind: type, group: dict[str, Any], parameter: torch.Tensor) -> str | None:
    if issubclass(kind, torch.optim.SGD) and group["momentum"] and parameter.dtype in _HALVES:
        return (
            "PyTorch's fused SGD on a CPU keeps wrong momentum for 16-bit parameters, which "
            "differs from call to call"
        )
    if type(parameter) is not PagedTensor or (kind in KINDS and has_no_gaps(parameter)):
        return None
    pages = parameter._storage.run.count * _LEAST_TENSORS
    if fits(pager.budget, pages):
        return None
    what = "it has gaps in memory" if kind in KINDS else f"{kind.__name__} is not known in parts"
    return (
        f"{what}, so it has to be on the device with its gradient, {pages} pages, which is more "
        "than the budget"
    )
