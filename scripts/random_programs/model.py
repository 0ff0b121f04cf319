"""Builds a program's model and runs its pieces, in plain PyTorch and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .program import Piece, Program


class RandomModel(nn.Module):
    """The model of a program. Weights depend on the program's seed only."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        dtype = getattr(torch, program.dtype)
        generator = torch.Generator().manual_seed(program.seed)
        for name, shape in program.weights:
            scale = 0.5 / shape[-1] ** 0.5 if len(shape) == 2 else 0.5
            value = (torch.randn(shape, generator=generator) * scale).to(dtype)
            self.register_parameter(name, nn.Parameter(value, name not in program.frozen))
        self.register_buffer("mean", torch.zeros(program.width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.program.pieces, x)

    def run(self, pieces: tuple[Piece, ...], x: Tensor) -> Tensor:
        for piece in pieces:
            x = self._run_one(piece, x)
        return x

    def _run_one(self, piece: Piece, x: Tensor) -> Tensor:
        if piece.kind == "checkpoint":
            if not torch.is_grad_enabled():
                return self.run(piece.inner, x)
            y: Tensor = checkpoint(self.run, piece.inner, x, use_reentrant=False)
            return y
        if piece.kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return self.run(piece.inner, x).to(x.dtype)
        if piece.kind == "no_grad_twin":
            with torch.no_grad():
                twin = self.run(piece.inner, x)
            return x + 0.1 * twin
        weight = getattr(self, piece.weight) if piece.weight else None
        if piece.kind == "running_mean":
            return self._running_mean(x)
        return PIECES[piece.kind](x, weight, piece.number).to(x.dtype)

    def _running_mean(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.detach().mean(0).to(self.mean.dtype), alpha=0.1)
        return x - self.mean.clone().to(x.dtype)


def _rows(x: Tensor, number: int, most: int) -> Tensor:
    """Indices below ``most``, one a row, some of them equal."""
    return (torch.arange(len(x)) * (2 * number + 1) + number) % most


def _with_zeros(x: Tensor, w: Tensor, number: int) -> Tensor:
    """A product with part of a weight's rows; the other columns are the input's."""
    cut = 1 + number * (len(w) - 1) // 100
    return torch.cat([F.linear(x, w[:cut]), x[:, cut:]], 1)


def _in_place_column(x: Tensor, w: Tensor, number: int) -> Tensor:
    y = x * 1.0
    y[:, number % x.shape[1]] = w[: len(y)].mean()
    return y


def _in_place_view(x: Tensor, w: Tensor, number: int) -> Tensor:
    y = x.clone()
    y.t()[number % 3 :: 3].mul_(w[number % 3 :: 3, None])
    return y


def _hook(x: Tensor, w: Tensor, number: int) -> Tensor:
    y = x * w
    if y.requires_grad:
        y.register_hook(lambda grad: grad * (1 + number / 100))
    return y


def _index_put(x: Tensor, w: Tensor, number: int) -> Tensor:
    place = _rows(x, number, len(x))
    return x + torch.zeros_like(x).index_put((place,), x * w, accumulate=True)


def _index_put_rows(x: Tensor, w: Tensor, number: int) -> Tensor:
    y = x.clone()
    y.index_put_((torch.tensor([number % len(x)]),), w.to(x.dtype))
    return y


def _dropout(x: Tensor, w: Tensor, number: int) -> Tensor:
    torch.manual_seed(number)
    return F.dropout(x, 0.3) * w


def _bmm(x: Tensor, w: Tensor, number: int) -> Tensor:
    return torch.bmm(x[None], w.to(x.dtype)[None])[0]


def _statistic(x: Tensor, w: Tensor, number: int) -> Tensor:
    with torch.no_grad():
        scale = w.float().square().mean().sqrt() if number % 2 else w.abs().max()
    return x * (1 + scale).to(x.dtype) + w.diagonal()


def _split_and_cat(x: Tensor, w: Tensor, number: int) -> Tensor:
    return torch.cat([y + v for y, v in zip(x.split(40, 1), w.split(40))], 1)


def _add(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x + y.to(x.dtype))


PIECES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "linear": lambda x, w, _: _add(x, F.linear(x, w.to(x.dtype))),
    "product": lambda x, w, _: _add(x, x @ w.to(x.dtype)),
    "product_of_view": lambda x, w, _: _add(x, x @ w.to(x.dtype).t()),
    "sliced_rows": lambda x, w, n: _add(x, _with_zeros(x, w.to(x.dtype), n)),
    "sliced_columns": lambda x, w, n: _add(x, x[:, n % 7 :] @ w.to(x.dtype)[n % 7 :]),
    "half_cast": lambda x, w, _: _add(x, F.linear(x.bfloat16(), w.to(torch.bfloat16))),
    "double_cast": lambda x, w, _: _add(x, F.linear(x.double(), w.double())),
    "flat_view": lambda x, w, _: _add(x, F.linear(x, w.to(x.dtype).flatten().view(w.shape))),
    "chunks": lambda x, w, _: _add(
        x, torch.cat([F.linear(x, part.to(x.dtype)) for part in w.chunk(3)], 1)
    ),
    "column_copy": lambda x, w, _: _add(x, x @ w.to(x.dtype).t().contiguous()),
    "scaled_weight": lambda x, w, n: _add(x, F.linear(x, w.to(x.dtype) * (1 + n / 100))),
    "normed_weight": lambda x, w, _: _add(x, F.linear(x, F.normalize(w.to(x.dtype), dim=1))),
    "addmm": lambda x, w, _: _add(x, torch.addmm(x, x, w.to(x.dtype), beta=0.5)),
    "bmm": lambda x, w, n: _add(x, _bmm(x, w, n)),
    "einsum": lambda x, w, _: _add(x, torch.einsum("ni,oi->no", x, w.to(x.dtype))),
    "stacked_rows": lambda x, w, _: _add(x, F.linear(x, torch.stack(w.to(x.dtype).unbind()[::-1]))),
    "detached_statistic": _statistic,
    "layer_norm": lambda x, w, _: F.layer_norm(x, x.shape[1:], w.to(x.dtype)),
    "in_place": lambda x, w, n: x.clone().mul_(w).add_(n / 100),
    "in_place_view": _in_place_view,
    "in_place_column": _in_place_column,
    "expand": lambda x, w, _: x * w.expand(x.shape),
    "softmax": lambda x, w, _: x + torch.softmax(x * w, 1),
    "gelu": lambda x, w, _: F.gelu(x + w),
    "split_and_cat": _split_and_cat,
    "index_put": _index_put,
    "index_put_rows": _index_put_rows,
    "gather_rows": lambda x, w, n: x[_rows(x, n, len(x))] + w,
    "where": lambda x, w, _: torch.where(x > 0, x * w, x),
    "hook": _hook,
    "masked_fill": lambda x, w, n: x.masked_fill(x.detach() > 1 + n / 100, 0.5) + w,
    "cumulative": lambda x, w, _: torch.tanh((x * w).cumsum(1) / 8),
    "roll": lambda x, w, n: x.roll(n, 1) + w,
    "power": lambda x, w, _: x + w.abs().add(0.1).pow(0.7),
    "dropout": _dropout,
    "embedding": lambda x, w, n: x + F.embedding(_rows(x, n, len(w)), w),
    "index_rows": lambda x, w, n: x * (1 + w[_rows(x, n, len(w))]),
}
