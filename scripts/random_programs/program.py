"""A random training program as data: what its model is made of and what each turn does.

Every body maps a matrix of shape (rows, width) to one of the same shape, so that any sequence of
pieces is a valid model. What a piece needs (weights, indices) it gets by name from the model.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

WIDTHS = (96, 128, 160, 200, 256)
# Pieces that hold others.
BLOCKS = ("checkpoint", "autocast", "no_grad_twin")
# Pieces with a weight of shape (width, width).
MATRICES = (
    "linear", "product", "product_of_view", "sliced_rows", "sliced_columns", "half_cast",
    "double_cast", "flat_view", "chunks", "column_copy", "scaled_weight", "normed_weight",
    "addmm", "bmm", "einsum", "stacked_rows", "detached_statistic",
)  # fmt: skip
# Pieces with a weight of shape (width,), or none.
VECTORS = (
    "layer_norm", "in_place", "in_place_view", "in_place_column", "expand", "softmax", "gelu",
    "split_and_cat", "index_put", "index_put_rows", "gather_rows", "where", "hook", "running_mean",
    "masked_fill", "cumulative", "roll", "power", "dropout",
)  # fmt: skip
TABLES = ("embedding", "index_rows")


@dataclass(frozen=True)
class Piece:
    """One step of a model's forward pass. ``weight`` names the parameter that it uses, if any;
    ``number`` is a detail that the piece reads as it likes, 0 to 99."""

    kind: str
    weight: str = ""
    number: int = 0
    inner: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Turn:
    """One iteration."""

    rows: int
    parts: int = 1  # backward passes before the step
    penalty: str = ""  # "inputs" or "weights": what a gradient penalty is taken of
    clip: str = ""  # "norm" or "value"
    to_none: bool = True
    after: tuple[str, ...] = ()  # what happens after the step, inside the iteration
    between: tuple[str, ...] = ()  # what happens outside of iterations


@dataclass(frozen=True)
class Program:
    """Weights by name and shape, the pieces that use them, and the turns."""

    seed: int
    width: int
    dtype: str
    weights: tuple[tuple[str, tuple[int, ...]], ...]
    frozen: frozenset[str]
    pieces: tuple[Piece, ...]
    turns: tuple[Turn, ...]
    optimizer: str
    threads: int
    budget: float  # 0: the smallest that works; 1: well above what is needed
    policy: str


def draw(seed: int) -> Program:
    """The program of ``seed``, always the same."""
    rng = random.Random(seed)
    width = rng.choice(WIDTHS)
    weights: dict[str, tuple[int, ...]] = {}
    pieces = _pieces(rng, width, weights, rng.randint(3, 8), depth=0)
    if not weights:
        pieces = (*pieces, _matrix(rng, width, weights))
    frozen = frozenset(name for name in weights if rng.random() < 0.1)
    if len(frozen) == len(weights):
        frozen = frozenset()
    return Program(
        seed=seed,
        width=width,
        dtype=rng.choice(("float32",) * 6 + ("float64", "bfloat16")),
        weights=tuple(weights.items()),
        frozen=frozen,
        pieces=pieces,
        turns=_turns(rng),
        optimizer=rng.choice(("sgd", "momentum", "adam", "adamw", "adagrad", "rmsprop")),
        threads=2 if rng.random() < 0.05 else 1,
        budget=rng.choice((0.0, 0.0, rng.random(), rng.random(), 1.0)),
        policy=rng.choice(("lru", "lp")),
    )


def _turns(rng: random.Random) -> tuple[Turn, ...]:
    sizes = [rng.choice((1, 3, 8, 33, 64)) for _ in range(rng.choice((1, 1, 2)))]
    penalty = rng.choice(("", "", "", "", "inputs", "weights"))
    parts, clip = rng.choice((1, 1, 1, 2)), rng.choice(("", "", "", "norm", "value"))
    to_none = rng.random() < 0.8
    events = ("snapshot", "average", "evaluate", "inference", "thread", "decay")
    after = tuple(rng.sample(events, rng.choice((0, 0, 1, 2))))
    between = tuple(rng.sample(events, rng.choice((0, 0, 0, 1))))
    return tuple(
        Turn(rng.choice(sizes), parts, penalty, clip, to_none, after, between)
        for _ in range(rng.randint(3, 7))
    )


def _pieces(
    rng: random.Random, width: int, weights: dict[str, tuple[int, ...]], count: int, depth: int
) -> tuple[Piece, ...]:
    made = []
    for _ in range(count):
        fate = rng.random()
        if fate < 0.15 and depth < 2:
            inner = _pieces(rng, width, weights, rng.randint(1, 3), depth + 1)
            made.append(Piece(rng.choice(BLOCKS), number=rng.randrange(100), inner=inner))
        elif fate < 0.55:
            made.append(_matrix(rng, width, weights))
        elif fate < 0.62:
            shape = rng.choice((50, 700)), width
            made.append(_with_weight(rng, rng.choice(TABLES), shape, weights))
        else:
            made.append(_with_weight(rng, rng.choice(VECTORS), (width,), weights))
    return tuple(made)


def _matrix(rng: random.Random, width: int, weights: dict[str, tuple[int, ...]]) -> Piece:
    return _with_weight(rng, rng.choice(MATRICES), (width, width), weights)


def _with_weight(
    rng: random.Random, kind: str, shape: tuple[int, ...], weights: dict[str, tuple[int, ...]]
) -> Piece:
    """A piece with a new weight, or with one that another piece uses too."""
    alike = [name for name, other in weights.items() if other == shape]
    if alike and rng.random() < 0.3:
        name = rng.choice(alike)
    else:
        name = f"w{len(weights)}"
        weights[name] = shape
    return Piece(kind, name, rng.randrange(100))
