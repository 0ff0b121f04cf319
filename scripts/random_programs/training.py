"""Trains a program's model, with or without a pager, and writes down all that can be seen."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

import tensorpager as tp

from .model import RandomModel
from .program import Program, Turn

PAGE = 64 << 10


@dataclass
class Seen:
    """What a training showed: ``(turn, name, value)`` in the order of the program. ``whole``: how
    many of these were seen before anything streamed, by what the pager says."""

    values: list[tuple[int, str, Tensor]] = field(default_factory=list)
    whole: int = 0
    pager: tp.Pager | None = None
    peak_bytes: int = 0
    turn: int = 0
    beside: bool = False  # a thread beside the training runs, or ended the program by its error
    part: int = 0  # of the turn: 0 up to the step, 1 behind it, 2 behind the iteration

    @property
    def streams(self) -> bool:
        return self.pager is not None and bool(self.pager.stats()["streamed"])

    def note(self, name: str, value: Tensor) -> None:
        dense = value.to_dense() if isinstance(value, tp.PagedTensor) else value
        # In NumPy's memory: PyTorch's, of an iteration, counts for as long as it lives.
        flat = dense.detach().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
        kept = torch.from_numpy(flat).view(dense.dtype).view(dense.shape)
        if self.whole == len(self.values) and not self.streams:
            self.whole += 1
        self.values.append((self.turn, name, kept))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


def train(
    program: Program, budget: int | None, policy: str = "lru", seen: Seen | None = None
) -> Seen:
    """Run the program: in plain PyTorch, or inside ``budget`` bytes. Writes into ``seen`` as it
    goes, if given."""
    torch.set_num_threads(program.threads)
    seen = Seen() if seen is None else seen
    gc.disable()
    try:
        if budget is None:
            _train(program, seen, None)
            return seen
        with tp.Pager(
            device_budget=budget, host_budget="64MiB", page_size=PAGE, device="cpu", policy=policy
        ) as pager:
            seen.pager = pager
            _train(program, seen, pager)
            seen.pager = None
            seen.peak_bytes = pager.stats()["peak_bytes"]["device"]
    finally:
        gc.enable()
    return seen


def _train(program: Program, seen: Seen, pager: tp.Pager | None) -> None:
    model = RandomModel(program)
    if pager is not None:
        pager.page_module(model)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = OPTIMIZERS[program.optimizer](weights)
    if pager is not None:
        pager.optimizer(optimizer)
    average: dict[str, Tensor] = {}
    for seen.turn, turn in enumerate(program.turns):
        gc.collect(1)  # what is garbage at a turn's peak does not depend on what ran before
        with nullcontext() if pager is None else pager.iteration():
            seen.part = 0
            _turn(program, turn, model, optimizer, seen)
            seen.part = 1
            for event in turn.after:
                _event(event, turn, model, seen, average)
        seen.part = 2
        for event in turn.between:
            _event(event, turn, model, seen, average)
    for name, weight in model.named_parameters():
        seen.note(f"final {name}", weight)
    seen.note("final mean", model.mean)


def _batch(program: Program, rows: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * program.seed + number)
    dtype = getattr(torch, program.dtype)
    return torch.randn(rows, program.width, generator=generator).to(dtype)


def _turn(
    program: Program,
    turn: Turn,
    model: RandomModel,
    optimizer: torch.optim.Optimizer,
    seen: Seen,
) -> None:
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for part in range(turn.parts):
        x = _batch(program, turn.rows, 10 * seen.turn + part)
        x.requires_grad_(turn.penalty == "inputs")
        loss = model(x).float().square().mean()
        if turn.penalty and loss.requires_grad:
            of = [x] if turn.penalty == "inputs" else trained
            slopes = torch.autograd.grad(loss, of, create_graph=True, allow_unused=True)
            loss = loss + sum(slope.float().square().sum() for slope in slopes if slope is not None)
        seen.note("loss", loss)
        if loss.requires_grad:
            loss.backward()
    if turn.clip == "norm":
        seen.note("norm", torch.nn.utils.clip_grad_norm_(trained, 0.5, foreach=False))
    elif turn.clip == "value" and any(weight.grad is not None for weight in trained):
        torch.nn.utils.clip_grad_value_(trained, 0.01, foreach=False)
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            seen.note(f"gradient of {name}", weight.grad)
    optimizer.step()
    optimizer.zero_grad(set_to_none=turn.to_none)


def _event(
    event: str, turn: Turn, model: RandomModel, seen: Seen, average: dict[str, Tensor]
) -> None:
    if event == "snapshot":
        with torch.no_grad():
            for name, weight in model.named_parameters():
                seen.note(f"mean of {name}", weight.float().mean())
    elif event == "average":
        with torch.no_grad():
            for name, weight in model.named_parameters():
                before = average.get(name)
                average[name] = weight.clone() if before is None else before.lerp(weight, 0.1)
                seen.note(f"average of {name}", average[name].sum())
    elif event == "decay":
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(0.999)
    else:
        _evaluate(event, turn, model, seen)


def _evaluate(event: str, turn: Turn, model: RandomModel, seen: Seen) -> None:
    x = _batch(model.program, turn.rows, 7)
    model.eval()
    if event == "thread":
        box: list[Tensor | BaseException] = []
        thread = threading.Thread(target=_run_into, args=(model, x, box))
        seen.beside = True
        thread.start()
        thread.join()
        if isinstance(box[0], BaseException):
            raise box[0]
        seen.beside = False
        seen.note("thread", box[0])
    else:
        with torch.inference_mode() if event == "inference" else torch.no_grad():
            seen.note(event, model(x))
    model.train()


def _run_into(model: RandomModel, x: Tensor, box: list[Tensor | BaseException]) -> None:
    # MKL hears of the number in a new thread with its first large elementwise op, and uses all
    # cores until then: products of one row would depend on what ran before them.
    torch.set_num_threads(model.program.threads)
    try:
        with torch.no_grad():
            box.append(model(x))
    except BaseException as error:
        box.append(error)
