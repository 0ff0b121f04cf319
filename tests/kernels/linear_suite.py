"""What the tests of paged matrix products share: weights in scattered pages, cases and bounds.

The oracle is float64 arithmetic on a dense copy of the weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from page_suite import Backend, Guarded

from tensorpager.kernels.paged_matrix import PagedMatrix

PAGE = 4096
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True)
class LinearCase:
    """x [m, k], weight [n, k]; x lies `shift` elements into rows that are that much longer."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    shift: int = 0

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.m}x{self.n}x{self.k},{dtype}" + (f",+{self.shift}" if self.shift else "")


SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
LINEAR_CASES = [
    LinearCase(5, 40, 64, SINGLE),  # rows divide pages
    LinearCase(17, 70, 64, BRAIN),
    LinearCase(18, 45, 96, SINGLE),  # rows straddle pages, no 32 columns do
    LinearCase(5, 45, 96, HALF),
    LinearCase(3, 90, 50, BRAIN),  # 32 columns straddle pages; rows of 100, 132 and 208 bytes
    LinearCase(3, 66, 33, SINGLE),
    LinearCase(3, 45, 104, HALF),
    LinearCase(1, 1, 1, SINGLE),
    LinearCase(4, 40, 64, HALF, shift=1),
]
LONG_ROWS = LinearCase(2, 3, 1100, SINGLE)  # each row is in two pages, or in three
linear_cases = pytest.mark.parametrize(
    "case", [*LINEAR_CASES, pytest.param(LONG_ROWS, marks=pytest.mark.slow)], ids=str
)


class PagedWeight:
    """A matrix in scattered pages of an arena of random bytes, with guards around the arena."""

    def __init__(
        self,
        values: torch.Tensor,
        backend: Backend,
        rows: tuple[int, int] | None = None,
        consecutive: bool = False,
    ) -> None:
        """rows : only their pages have frames; the others' entries are -1."""
        self.nbytes = values.nbytes
        self.values = values
        pages = -(-self.nbytes // PAGE)
        numbers = torch.randperm(pages, generator=torch.Generator().manual_seed(pages)) * 2 + 1
        if consecutive:
            numbers = torch.arange(pages) + 1
        elif pages > 1 and torch.equal(numbers, numbers.sort().values):
            numbers = numbers.flip(0)
        self.frames = numbers.tolist()
        self.arena = Guarded((2 * pages + 1) * PAGE, backend, seed=pages)
        everything = values.contiguous().view(-1).view(torch.uint8)
        for page, place in enumerate(self.places()):
            start = page * PAGE
            self.arena.tensor[place].copy_(everything[start : start + place.stop - place.start])
        table = list(self.frames)
        if rows is not None:
            needed = range(*_pages(rows, values))
            table = [frame if page in needed else -1 for page, frame in enumerate(table)]
        self.matrix = PagedMatrix(
            self.arena.tensor, backend.frames(table), PAGE, values.dtype, *values.shape
        )
        self.before = self.arena.bytes()

    def places(self, rows: tuple[int, int] | None = None) -> list[slice]:
        """Bytes of the arena that hold these rows, half-open, one slice per page."""
        columns, itemsize = self.values.shape[1], self.values.element_size()
        begin, end = rows or (0, self.values.shape[0])
        first, stop = begin * columns * itemsize, end * columns * itemsize
        found = []
        for page, frame in enumerate(self.frames):
            low, high = max(first, page * PAGE), min(stop, (page + 1) * PAGE)
            if low < high:
                move = (frame - page) * PAGE
                found.append(slice(low + move, high + move))
        return found

    def memory(self, rows: tuple[int, int] | None = None) -> list[torch.Tensor]:
        """The same as tensors, and the page table."""
        return [self.matrix.frame_of, *(self.arena.tensor[place] for place in self.places(rows))]

    def pages(self) -> list[torch.Tensor]:
        """All frames whole, and the page table."""
        whole = [slice(frame * PAGE, (frame + 1) * PAGE) for frame in self.frames]
        return [self.matrix.frame_of, *(self.arena.tensor[place] for place in whole)]

    def read(self) -> torch.Tensor:
        """What the pages hold."""
        parts = [self.arena.tensor[place].cpu() for place in self.places()]
        return torch.cat(parts).view(self.values.dtype).view(self.values.shape)

    def assert_nothing_else_changed(self, rows: tuple[int, int] | None = None) -> None:
        """The arena's bytes outside `rows` are as they were."""
        expected, now = bytearray(self.before), self.arena.bytes()
        for place in self.places(rows):
            expected[place] = now[place]
        self.arena.assert_is(bytes(expected))


def _pages(rows: tuple[int, int], values: torch.Tensor) -> tuple[int, int]:
    row_bytes = values.shape[1] * values.element_size()
    return rows[0] * row_bytes // PAGE, -(-rows[1] * row_bytes // PAGE)


class Dense:
    """A matrix between guards, its rows `shift` elements longer than it shows."""

    def __init__(self, values: torch.Tensor, backend: Backend, shift: int = 0) -> None:
        rows, columns = values.shape
        self.memory = Guarded(rows * (columns + shift) * values.element_size(), backend, seed=3)
        whole = self.memory.tensor.view(values.dtype).view(rows, columns + shift)
        self.tensor = whole[:, shift:]
        self.tensor.copy_(values)
        self._before = self.memory.bytes()

    def assert_guarded(self) -> None:
        """Nothing was written outside; what is inside may be anything."""
        self.memory.assert_is(self.memory.bytes())

    def assert_unchanged(self) -> None:
        self.memory.assert_is(self._before)


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_product(
    got: torch.Tensor,
    factors: Sequence[torch.Tensor],
    added: torch.Tensor | float,
    backend: Backend,
) -> None:
    """`got` is factors[0] @ factors[1] + added to within what adding up in float32 may lose.

    A kernel adds up n products in float32 and rounds once: each error is at most (n + 2) * 2**-24
    of the sum of magnitudes, plus half a unit in the last place of the result. torch's own
    products on a CPU may round to the result's dtype once more on the way: twice that of the
    magnitudes.
    """
    a, b = (factor.double() for factor in factors)
    more = added.double() if isinstance(added, torch.Tensor) else torch.tensor(added).double()
    exact, magnitude = a @ b + more, a.abs() @ b.abs() + more.abs()
    unit = UNIT[got.dtype]
    if backend.name in ("interpreter", "cuda"):
        bound = (a.shape[1] + 2) * 2.0**-24 * magnitude * (1 + unit) + unit * exact.abs()
    else:
        bound = ((a.shape[1] + 2) * 2.0**-24 + 2 * unit) * magnitude
    error = (got.cpu().double() - exact).abs()
    # The smallest normal number covers results that are subnormal in float16.
    assert (error <= bound + torch.finfo(got.dtype).tiny).all(), (
        f"off by {error.max():.3g}, allowed {bound.flatten()[error.argmax()]:.3g}"
    )
