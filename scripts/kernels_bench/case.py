"""A case: one kernel on operands of a given size, what it must cost, and what it must compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class ResultError(Exception):
    """A kernel computed something else than it should have. The message says what."""


@dataclass(frozen=True)
class Setting:
    """Where and how large.

    nbytes : of the main operand: a parameter, a table, a weight, a slab of logits.
    """

    device: str
    nbytes: int
    page_bytes: int
    seed: int = 0

    def generator(self, salt: int = 0) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(1000 * self.seed + salt)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
        """Normal numbers; other ones with another `salt`."""
        values = torch.empty(shape, dtype=dtype, device=self.device)
        return values.normal_(generator=self.generator(salt))

    def elements(self, dtype: torch.dtype) -> int:
        """That the main operand has."""
        return self.nbytes // dtype.itemsize


@dataclass(frozen=True)
class Work:
    """The least that any implementation does.

    memory_bytes : read plus written, of device memory. link_bytes : that come from host memory.
    """

    memory_bytes: int = 0
    link_bytes: int = 0


@dataclass(frozen=True)
class Rates:
    """Measured in the same run, per second.

    memory : bytes read plus bytes written by a large dense copy. link : bytes of one large copy
    from page-locked memory.
    """

    memory: float
    link: float

    def floor_seconds(self, work: Work) -> float:
        """Nothing does `work` faster than that."""
        return max(work.memory_bytes / self.memory, work.link_bytes / self.link)


@dataclass(frozen=True)
class Job:
    """Operands in place. `run` once, then `expect` (or `peer`) once, then `compare`; or time them.

    run : the launcher on paged operands. Repeated it stays finite.
    compare : raises `ResultError` unless both sides now hold the same, but for what rounding may
        do.
    peer : torch's own op on dense tensors of the same values, the expectation and the rival.
    expect : the expectation, where torch has no such op or where its own is too coarse.
    """

    run: Callable[[], Any]
    compare: Callable[[], None]
    work: Work
    peer: Callable[[], Any] | None = None
    expect: Callable[[], Any] | None = None

    def check(self) -> None:
        """On fresh operands. Raises `ResultError`, or what the launcher raises."""
        self.run()
        expect = self.expect or self.peer
        if expect is not None:
            expect()
        self.compare()


@dataclass(frozen=True)
class Case:
    """One entry of the list of cases.

    kernels : which it launches, as ``module.launcher`` for a function ``_launcher_kernel``.
    peer : torch's op, for the table; "" if torch has none.
    make : operands in place.
    """

    name: str
    kernels: frozenset[str]
    peer: str
    make: Callable[[Setting], Job]


def same(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise `ResultError` unless all bytes agree."""
    got, expected = got.reshape(-1), expected.reshape(-1)
    if got.dtype != expected.dtype or got.numel() != expected.numel():
        raise ResultError(f"{name}: {got.numel()} x {got.dtype}, not {expected.numel()}")
    differ = got.view(torch.uint8) != expected.view(torch.uint8)
    if differ.any():
        first = int(differ.int().argmax()) // got.element_size()
        raise ResultError(
            f"{name}: element {first} is {got[first].item()}, not {expected[first].item()}"
        )


def close(
    name: str, got: torch.Tensor, expected: torch.Tensor, allowed: float | torch.Tensor
) -> None:
    """Raise `ResultError` unless every |got - expected| is at most `allowed`; NaN is not."""
    got, expected = got.reshape(-1), expected.reshape(-1)
    over = ((got.double() - expected.double()).abs() <= allowed).logical_not_()
    if over.any():
        first = int(over.int().argmax())
        raise ResultError(
            f"{name}: {int(over.sum())} of {got.numel()} elements are off; element {first} is "
            f"{got[first].item()}, not {expected[first].item()}"
        )


def rounding(expected: torch.Tensor, units: float, dtype: torch.dtype) -> torch.Tensor:
    """`units` half units in the last place of `dtype`, of each element; float64."""
    info = torch.finfo(dtype)
    return expected.reshape(-1).double().abs() * (units * info.eps / 2) + units * info.tiny
