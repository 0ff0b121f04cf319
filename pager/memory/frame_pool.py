"""Which frames of an arena, or slots of a file, are free.

Free frames are kept as maximal runs: two free runs never touch, because ``free`` merges
neighbours. Two views of the same runs, always in step:

- ``_starts`` and ``_ends``: in order, to find the run around or beside a frame
- ``_by_size``: (length, start) in order, to find the best fit

A run is ``(start, length)`` and means the frames ``start <= frame < start + length``. Every
operation costs O(log runs) for each run that it touches, and a shift in a list of all. Not
thread-safe: the owner of the tier is the only caller.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Run = tuple[int, int]
# Of pages, frames or slots. numpy indexes with int64: with other integers it takes several times as
# long, and lets other threads go first.
Numbers = npt.NDArray[np.int64]
_ZERO = np.zeros(1, np.int64)
_FEW = 128  # numbers: NumPy is no faster with them than Python
_MOST_COUNTED = 1 << 20  # numbers, 8 MiB of them
_Whole = TypeVar("_Whole", bound=np.integer[Any])


class FramePool:
    """The free ones of ``count`` frames. All are free at first."""

    def __init__(self, count: int) -> None:
        assert count >= 0, f"a pool of {count} frames"
        self.count = 0  # all frames, free or not
        self.free_count = 0
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._by_size: list[Run] = []
        self.resize(count)

    @property
    def largest_run(self) -> int:
        """Length of the longest run of free frames: what ``allocate_run`` can serve at most."""
        return self._by_size[-1][0] if self._by_size else 0

    def runs(self) -> list[Run]:
        """The free runs by address."""
        return [(start, end - start) for start, end in zip(self._starts, self._ends)]

    def is_free(self, start: int, n: int) -> bool:
        """Whether all of the ``n`` frames from ``start`` on are free."""
        assert n > 0, f"{n} frames"
        place = bisect_right(self._starts, start) - 1
        return place >= 0 and self._ends[place] >= start + n

    def allocate(self, n: int) -> list[Run] | None:
        """Claims ``n`` frames in as few runs as possible; None, and no change, if fewer are free.

        One run where possible: the shortest that holds ``n``, the lowest of equal ones. Otherwise
        the longest runs are used up one after another, and the rest is placed by best fit.
        """
        assert n >= 0, f"{n} frames"
        if n > self.free_count:
            return None
        allocated: list[Run] = []
        while n:
            start = self.allocate_run(n)
            length = n
            if start is None:
                length = self.largest_run
                start = self.allocate_run(length)
                assert start is not None
            allocated.append((start, length))
            n -= length
        return allocated

    def find_run(self, n: int) -> int | None:
        """Where ``allocate_run`` would claim ``n`` frames; claims nothing."""
        assert n > 0, f"{n} frames"
        fit = bisect_left(self._by_size, (n, 0))
        return self._by_size[fit][1] if fit < len(self._by_size) else None

    def allocate_run(self, n: int) -> int | None:
        """Claims ``n`` consecutive frames by best fit; None, and no change, if no run is so long.

        Returns the first one.
        """
        fit = bisect_left(self._by_size, (n, 0))
        if fit == len(self._by_size):
            return None
        start = self._by_size[fit][1]
        self.take_if_free(start, n)
        return start

    def take(self, start: int, n: int) -> None:
        """Claims exactly the ``n`` frames from ``start`` on, which must all be free."""
        taken = self.take_if_free(start, n)
        assert taken, f"frames {start} to {start + n} are not all free"

    def take_if_free(self, start: int, n: int) -> bool:
        """The same where all of them are; False, and no change, otherwise."""
        assert n > 0, f"{n} frames"
        starts, ends, sizes, stop = self._starts, self._ends, self._by_size, start + n
        place = bisect_right(starts, start) - 1
        if place < 0 or ends[place] < stop:
            return False
        first, end = starts[place], ends[place]
        del sizes[bisect_left(sizes, (end - first, first))]
        if first == start:
            if end == stop:
                del starts[place], ends[place]
            else:
                starts[place] = stop
        else:
            ends[place] = start
            insort(sizes, (start - first, first))
            if end > stop:
                starts.insert(place + 1, stop)
                ends.insert(place + 1, end)
        if end > stop:
            insort(sizes, (end - stop, stop))
        self.free_count -= n
        return True

    def free(self, start: int, n: int) -> None:
        """Gives back the ``n`` frames from ``start`` on, none of which may be free."""
        assert n > 0, f"{n} frames"
        starts, ends, sizes, end = self._starts, self._ends, self._by_size, start + n
        assert start >= 0, f"frame {start}"
        assert end <= self.count, f"frames {start} to {end} of {self.count}"
        after = bisect_left(starts, end)
        before = after - 1
        assert not after or ends[before] <= start, f"frames {start} to {end} freed twice"
        first, last = start, end
        if after < len(starts) and starts[after] == end:
            last = ends.pop(after)
            del starts[after], sizes[bisect_left(sizes, (last - end, end))]
        if after and ends[before] == start:
            first = starts[before]
            del sizes[bisect_left(sizes, (start - first, first))]
            ends[before] = last
        else:
            starts.insert(after, start)
            ends.insert(after, last)
        insort(sizes, (last - first, first))
        self.free_count += n

    def take_all(self, frames: Numbers) -> None:
        """Claims ``frames``, in any order, which must all be free."""
        for start, n in _runs_of(frames):
            self.take(start, n)

    def free_all(self, frames: Numbers) -> None:
        """Gives them back."""
        for start, n in _runs_of(frames):
            self.free(start, n)

    def all_free(self, frames: Numbers) -> bool:
        """Whether they are."""
        return all(self.is_free(start, n) for start, n in _runs_of(frames))

    def resize(self, count: int) -> None:
        """Adds free frames at the end, or removes frames there, which must all be free."""
        old = self.count
        if count > old:
            self.count = count
            self.free(old, count - old)
        elif count < old:
            assert count >= 0, f"a pool of {count} frames"
            self.take(count, old - count)
            self.count = count


class _Counting:
    """0, 1, 2 …, as far as they were asked for."""

    numbers: Numbers = np.empty(0, np.int64)


def consecutive(first: int, count: int) -> Numbers:
    """``first``, ``first + 1`` …, so many. Read only: they may be a part of a longer table, which
    takes a third of the time that making them does."""
    end, table = first + count, _Counting.numbers  # which other threads may replace
    if end > len(table):
        if end > _MOST_COUNTED:
            return np.arange(first, end)
        _Counting.numbers = table = np.arange(2 * end)
        table.flags.writeable = False
    return table[first:end]


def are_consecutive(numbers: Numbers) -> bool:
    """Whether they are, and at least one. (NumPy compares a few of them in ten times the time.)"""
    return numbers.tobytes() == consecutive(int(numbers[0]), len(numbers)).tobytes()


def _runs_of(numbers: Numbers) -> Iterable[Run]:
    if not len(numbers):
        return []
    if are_consecutive(numbers):
        return [(int(numbers[0]), len(numbers))]
    if not (numbers[1:] > numbers[:-1]).all():
        numbers = np.array(sorted(numbers.tolist()))  # np.sort lets other threads go first
    return [(start, count) for start, _, count in merge(numbers, numbers)]


def expand(runs: list[tuple[int, int]]) -> Numbers:
    """Numbers covered by half-open ``(start, length)`` runs, in order."""
    if len(runs) == 1:
        return consecutive(*runs[0])
    return np.concatenate([consecutive(0, 0), *(consecutive(a, n) for a, n in runs)])


def distinct(numbers: npt.NDArray[_Whole]) -> npt.NDArray[_Whole]:
    """In order, none twice. As ``np.unique``, which keeps a MiB of code for masked arrays in memory
    once it has been called."""
    if len(numbers) < 2:
        return numbers
    numbers = np.sort(numbers)
    first = np.ones(len(numbers), np.bool_)
    np.not_equal(numbers[1:], numbers[:-1], out=first[1:])
    return numbers[first]


def values_of(numbers: Numbers) -> set[int]:
    """Those that there are, where neighbours are often alike: what pages that came together have in
    common."""
    if len(numbers) < _FEW:
        return set(numbers.tolist())
    ends = (numbers[1:] != numbers[:-1]).nonzero()[0]
    return {int(numbers[-1]), *numbers[ends].tolist()}


def merge(left: Numbers, right: Numbers) -> list[tuple[int, int, int]]:
    """``(left, right, count)`` for stretches in which both sides are consecutive."""
    if not len(left):
        return []
    cut = left[1:] - left[:-1] != 1
    if right is not left:
        cut |= right[1:] - right[:-1] != 1
    ends = cut.nonzero()[0]
    if not len(ends):
        return [(int(left[0]), int(right[0]), len(left))]
    heads = np.concatenate([_ZERO, ends + 1])
    starts = heads.tolist()
    counts = [stop - start for start, stop in zip(starts, [*starts[1:], len(left)])]
    return list(zip(left[heads].tolist(), right[heads].tolist(), counts))


def sliding_max(values: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]:
    """``max(values[i:i+width])`` for every i, in O(len(values)) (van Herk's two sweeps)."""
    count = len(values) - width + 1
    if width == 1:
        return values
    padded = np.full(-(-len(values) // width) * width, np.iinfo(np.int64).min)
    padded[: len(values)] = values
    blocks = padded.reshape(-1, width)
    ahead = np.maximum.accumulate(blocks, axis=1).ravel()
    behind = np.maximum.accumulate(blocks[:, ::-1], axis=1)[:, ::-1].ravel()
    return np.maximum(behind[:count], ahead[width - 1 : width - 1 + count])
