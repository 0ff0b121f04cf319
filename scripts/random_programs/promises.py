"""What a pager promises of any training, asked of one random program.

- The smallest budget that it names works, as long as nothing happens that no turn had done.
- Nothing fails that works without it, and what it counts stays inside the budget.
- All that is seen before anything streams, by what ``stats()["streamed"]`` says then, has plain's
  bits. (A weight streams in the first iteration from the product on that finds no room for it, so
  what is seen after that in the same iteration may differ.) What follows is close to plain's, and
  has the same bits under another policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import tensorpager as tp

from .program import Piece, Program
from .training import PAGE, Seen, train

TINY = 4 * PAGE
CLOSE = {"float64": 1e-6, "float32": 2e-2, "bfloat16": 0.3}


def broken_promise(program: Program) -> str | None:
    """``None``, or what was promised and not kept."""
    plain = train(program, None)
    try:
        budget, paged = _train_with_enough(program)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if isinstance(paged, Refusal):
        return f"budget {budget} was refused: {paged.message}"
    if paged.peak_bytes > budget:
        return f"peak of {paged.peak_bytes} device bytes over the budget of {budget}"
    difference = _difference(program, plain, paged, paged.whole)
    if difference or paged.whole == len(paged.values):
        return difference and f"budget {budget}: {difference}"
    other = train(program, budget, "lru" if program.policy == "lp" else "lp")
    difference = _difference(program, paged, other, len(other.values))
    return difference and f"budget {budget}, another policy: {difference}"


@dataclass(frozen=True)
class Refusal:
    """A budget that is too small. ``when``: the turn, and how far in it (``Seen.part``). ``new``:
    for what no earlier turn had done; ``beside``: for a thread beside the training."""

    message: str
    minimum: int | None
    when: tuple[int, int]
    new: bool
    beside: bool


def _train_refused(program: Program, budget: int) -> Seen | Refusal:
    seen = Seen()
    try:
        return train(program, budget, program.policy, seen)
    except tp.InfeasibleBudget as error:
        now, before = program.turns[seen.turn], program.turns[: seen.turn]
        new = now.rows not in {turn.rows for turn in before}
        # The first average is a copy of the weights, each later one is made of that before it.
        averages = sum("average" in turn.after for turn in before)
        new = new or ("average" in now.after and averages == 1 and seen.part == 1)
        return Refusal(
            f"turn {seen.turn}: {error}", error.minimum, (seen.turn, seen.part), new, seen.beside
        )


def _train_with_enough(program: Program) -> tuple[int, Seen | Refusal]:
    """Under a budget that the pager said is enough, or one above it. A minimum is for what was
    seen, so other shapes, or what comes after the step that was refused, may name another."""
    budget, when = TINY, (-1, 0)
    while True:
        result = _train_refused(program, budget)
        if isinstance(result, Refusal) and result.beside:
            budget += budget // 2  # a thread beside the training, to which nothing is promised
        elif isinstance(result, Refusal) and result.new and result.when > when:
            assert result.minimum is not None
            most = 6 * sum(_nbytes(program, shape) for _, shape in program.weights) + (4 << 20)
            above = program.budget * max(0, most - result.minimum)
            budget, when = result.minimum + int(above), result.when
        else:
            return budget, result


def _nbytes(program: Program, shape: tuple[int, ...]) -> int:
    size = torch.Size(shape).numel() * getattr(torch, program.dtype).itemsize
    return -(-size // PAGE) * PAGE


def _difference(program: Program, one: Seen, other: Seen, same: int) -> str | None:
    """The first value that differs more than it may, or ``None``. ``same``: how many, from the
    first, have the same bits."""
    if [row[:2] for row in one.values] != [row[:2] for row in other.values]:
        return "other values were seen"
    for number, ((turn, name, a), (_, _, b)) in enumerate(zip(one.values, other.values)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"turn {turn}, {name}: {a.dtype} {a.shape} became {b.dtype} {b.shape}"
        if torch.equal(_bits(a), _bits(b)) or (number >= same and _close(program, a, b)):
            continue
        gap = (a.double() - b.double()).abs().max().item()
        return f"turn {turn}, {name}: differs by up to {gap:.3g}"
    return None


def _close(program: Program, a: torch.Tensor, b: torch.Tensor) -> bool:
    scale = a.double().abs().max().item() + 1e-6
    gap = (a.double() - b.double()).abs().max().item()
    return gap <= CLOSE["bfloat16" if _casts(program.pieces) else program.dtype] * scale


def _casts(pieces: tuple[Piece, ...]) -> bool:
    """Whether products round to half precision: the last bits of a sum may be a bit of that."""
    return any(p.kind in ("autocast", "half_cast") or _casts(p.inner) for p in pieces)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
