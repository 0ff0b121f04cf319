"""Finds the iteration in a raw stream of memory events.

A training run allocates and frees the same sizes in the same order in every iteration, after some
warm-up. :func:`encode_events` turns each event into a number that is the same in every iteration,
and :func:`repetitions` finds all maximal stretches of a sequence that are periodic with at least
two periods, called runs below. AutoSwap compares all pairs of neighbouring segments, O(n²); here
the runs theorem does it in O(n log² n):

    The period of every run is the length of the longest Lyndon word at some position inside it, for
    the usual order of the codes or for the reverse order.

The longest Lyndon word at ``i`` ends where the next lexicographically smaller suffix begins. So
there are 2n candidates, each of which is stretched to both sides as far as its period holds. The
comparisons are exact: they use the ranks that sorting the suffixes by doubling leaves behind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .trace import Bools, Ints

ALLOCATION = 0  # the kind of an event that begins a block's life; other kinds are the caller's
FLOOR = 16  # events; what repeats in fewer is a loop inside an iteration
LEAST_SHARE = 0.25  # of all events and of the largest fall, in a repetition that explains them


@dataclass(frozen=True)
class Repetition:
    """Events ``[start, stop)`` repeat every ``period`` events, for at least two periods. No shorter
    period would do, and neither neighbour of the stretch continues it."""

    start: int
    stop: int
    period: int

    @property
    def middle(self) -> slice:
        """A period away from both ends, where the first and last one may miss a free."""
        first = self.start + (self.stop - self.start - self.period) // 2
        return slice(first, first + self.period)

    def last_iteration(self, begin: int) -> slice:
        """The last whole period of those that begin at ``begin`` or whole periods after it."""
        periods = (self.stop - begin) // self.period
        first = begin + (periods - 1) * self.period
        return slice(first, first + self.period)


def encode_events(kinds: Ints, blocks: Ints, sizes: Ints) -> Ints:
    """A code for each event, [events]: an allocation's holds its size in bytes, another one's its
    kind and its distance, in events, to the event before it on the same block (0 if it is the
    first).

    ``kinds`` are small numbers ≥ 0, of which ``ALLOCATION`` is one; ``blocks`` are numbers or
    addresses, which a later block may use again.
    """
    kinds = np.asarray(kinds, np.int64)
    if not len(kinds):
        return np.zeros(0, np.int64)
    order = np.argsort(blocks, kind="stable")
    before = np.full(len(kinds), -1, np.int64)
    same = np.asarray(blocks)[order][1:] == np.asarray(blocks)[order][:-1]
    before[order[1:][same]] = order[:-1][same]
    positions = np.arange(len(kinds), dtype=np.int64)
    distance = np.where(before >= 0, positions - before, 0)
    values = np.where(kinds == ALLOCATION, np.asarray(sizes, np.int64), distance)
    return values * (int(kinds.max()) + 1) + kinds


def find_balanced(codes: Ints, change_bytes: Ints, freed_age: Ints) -> Repetition | None:
    """The longest repetition that looks like iterations, not like the layers of one;
    ``change_bytes`` is what each event adds, [events], and ``freed_age`` how many events ago the
    oldest block that it frees was allocated (0: it frees none), [events].

    It covers a good part of the events. Its period adds no bytes in all: forward layers keep
    memory, backward layers give it back. What it frees is at most two periods old: a loop over the
    layers in an optimizer may be balanced, but what it replaces is an iteration old. And within it
    memory use falls by a good part of what it falls by anywhere: such a loop frees little at once.
    """
    in_use = np.concatenate([[0], np.cumsum(change_bytes)])
    least_fall = LEAST_SHARE * _largest_fall(in_use)
    for found in repetitions(codes):
        if found.stop - found.start < LEAST_SHARE * len(codes):
            return None  # the rest are shorter
        middle = found.middle
        if in_use[middle.stop] != in_use[middle.start]:
            continue
        if freed_age[middle].max() > 2 * found.period:
            continue
        if _largest_fall(np.tile(in_use[middle], 2)) >= least_fall:
            return found
    return None


def _largest_fall(values: Ints) -> int:
    """From a value to a later one."""
    return int((np.maximum.accumulate(values) - values).max())


def cut_at_least_use(found: Repetition, change_bytes: Ints, allowed: Bools) -> slice:
    """The last iteration that begins where ``allowed`` ([events]) and the fewest bytes are in use,
    so that as little as possible crosses its border."""
    middle = found.middle
    before = (np.cumsum(change_bytes) - change_bytes)[middle].astype(np.float64)
    before[~allowed[middle]] = np.inf
    phase = (middle.start + int(before.argmin()) - found.start) % found.period
    return found.last_iteration(found.start + phase)


def repetitions(codes: Ints, floor: int = FLOOR) -> list[Repetition]:
    """All runs with a period of at least ``floor`` codes, the one that spans the most codes first,
    the later first of two that span as many."""
    codes = np.asarray(codes)
    if len(codes) < 2 * max(floor, 1):
        return []
    levels = _ranks(codes)
    candidates = [_lyndon_periods(levels[-1]), _lyndon_periods(_ranks(-codes.astype(np.int64))[-1])]
    begin = np.tile(np.arange(len(codes)), 2)
    period = np.concatenate(candidates)
    keep = period >= max(floor, 1)
    begin, period = begin[keep], period[keep]
    start = begin - _common_before(levels, begin, begin + period)
    stop = begin + period + _common_after(levels, begin, begin + period)
    runs = np.stack([start, stop, period], axis=1)[stop - start >= 2 * period]
    runs = np.unique(runs, axis=0)
    order = np.lexsort((-runs[:, 0], runs[:, 0] - runs[:, 1]))
    return [Repetition(*map(int, run)) for run in runs[order]]


def _ranks(codes: Ints) -> list[Ints]:
    """Level k has the rank of the 2^k codes from each position on among all those, [codes + 1]; the
    end ranks below everything, as −1. In the last level all ranks differ."""
    count = len(codes)
    ranks = np.unique(codes, return_inverse=True)[1].astype(np.int64)
    levels = [np.append(ranks, -1)]
    width = 1
    while levels[-1].max() < count - 1:
        ranks = levels[-1]
        following = np.full(count + 1, -1, np.int64)
        following[:-width] = ranks[width:]
        pairs = ranks[:-1] * (count + 1) + following[:-1] + 1
        levels.append(np.append(np.unique(pairs, return_inverse=True)[1].astype(np.int64), -1))
        width *= 2
    return levels


def _lyndon_periods(suffix_ranks: Ints) -> Ints:
    """Length of the longest Lyndon word that begins at each position, [codes]."""
    ranks = suffix_ranks.tolist()
    periods = [0] * (len(ranks) - 1)
    smaller = [len(ranks) - 1]  # positions of ever smaller suffixes, the nearest last
    for position in range(len(ranks) - 2, -1, -1):
        while ranks[smaller[-1]] > ranks[position]:
            smaller.pop()
        periods[position] = smaller[-1] - position
        smaller.append(position)
    return np.array(periods, np.int64)


def _common_after(levels: list[Ints], left: Ints, right: Ints) -> Ints:
    """How many codes from ``left`` and ``right`` (> left) on are the same, [pairs]."""
    end = len(levels[0]) - 1
    length = np.zeros(len(left), np.int64)
    for level in range(len(levels) - 1, -1, -1):
        # A pair that has reached the end compares its −1 with a rank ≥ 0, and stays.
        ranks, at = levels[level], np.minimum(right + length, end)
        length += (ranks[left + length] == ranks[at]).astype(np.int64) << level
    return length


def _common_before(levels: list[Ints], left: Ints, right: Ints) -> Ints:
    """How many codes before ``left`` and ``right`` (> left) are the same, [pairs]."""
    length = np.zeros(len(left), np.int64)
    for level in range(len(levels) - 1, -1, -1):
        ranks, at = levels[level], left - length - (1 << level)
        same = ranks[np.maximum(at, 0)] == ranks[np.maximum(right - left + at, 0)]
        length += ((at >= 0) & same).astype(np.int64) << level
    return length
