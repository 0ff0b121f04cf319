"""Rounding to whole pages may leave a few pages more on the device than there are frames: some that
come back early are put off, some that go late go sooner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..lifetimes import DYING
from ..trace import Ints
from .problem import Problem
from .schedule import Chunk, Schedule


def resident_pages(problem: Problem, schedule: Schedule) -> Ints:
    """Pages with a frame by the schedule at each step, if every move were instantaneous."""
    steps = problem.steps
    change = np.zeros(steps + 1, np.int64)
    base = 0
    for outs, ins in zip(schedule.outs, schedule.ins):
        ends = [  # what dies below needs no frame from then on
            replace(chunk, step=int(problem.gaps.end[chunk.gap]))
            for chunk in outs
            if problem.gaps.kind[chunk.gap] in DYING
        ]
        for chunks, sign in ((outs, -1), (ins, 1), (ends, 1)):
            for chunk in chunks:
                change[chunk.step % steps] += sign * chunk.count
        base -= sum(chunk.count for chunk in (*ins, *ends) if chunk.step >= steps)
        base += sum(chunk.count for chunk in outs if chunk.step >= steps)
    total: Ints = problem.live + base + np.cumsum(change[:-1])
    return total


def fit(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule made to fit, as far as that goes: where a step has too many pages, ins that are
    not due are put off, the last due first, and then outs of gaps that have begun come sooner.
    Gaps, and what is off in them, stay."""
    resident = resident_pages(problem, schedule)
    limit = int(min(problem.device_pages, np.iinfo(np.int64).max))
    crowded = np.flatnonzero(resident > limit)
    if not len(crowded):
        return schedule
    ins = [list(chunks) for chunks in schedule.ins]
    outs = [list(chunks) for chunks in schedule.outs]
    for step in crowded.tolist():
        excess = int(resident[step]) - limit
        while excess > 0:
            later = _last_due(problem, ins, step)
            sooner = None if later else _next_out(problem, outs, step)
            if later:
                part, index, at = later
                count = min(excess, ins[part][index].count)
                span = range(ins[part][index].step, at + 1)
                _move_end(ins[part], index, count, at + 1)
            elif sooner:
                part, index, at = sooner
                count = min(excess, outs[part][index].count)
                span = range(at, outs[part][index].step)
                _move_begin(outs[part], index, count, at)
            else:
                break
            resident[np.array(span) % problem.steps] -= count
            excess -= count
    for chunks in outs:
        chunks.sort(key=lambda chunk: chunk.step)
    return replace(schedule, ins=ins, outs=outs)


def _last_due(problem: Problem, ins: list[list[Chunk]], step: int) -> tuple[int, int, int] | None:
    """Tier, index and absolute step of the chunk that is back at ``step`` and due last."""
    best: tuple[int, int, int] | None = None
    longest = 0
    for part, chunks in enumerate(ins):
        for index, chunk in enumerate(chunks):
            due = int(problem.gaps.end[chunk.gap])
            for at in (step, step + problem.steps):
                if chunk.step <= at < due and due - at > longest:
                    longest, best = due - at, (part, index, at)
    return best


def _next_out(problem: Problem, outs: list[list[Chunk]], step: int) -> tuple[int, int, int] | None:
    """The same of the chunk that could be out at ``step`` and goes soonest after it."""
    best: tuple[int, int, int] | None = None
    shortest = problem.steps
    for part, chunks in enumerate(outs):
        for index, chunk in enumerate(chunks):
            begin = int(problem.gaps.begin[chunk.gap]) + 1
            for at in (step, step + problem.steps):
                if begin <= at < chunk.step and chunk.step - at < shortest:
                    shortest, best = chunk.step - at, (part, index, at)
    return best


def _move_end(chunks: list[Chunk], index: int, count: int, step: int) -> None:
    """The last ``count`` pages of a chunk go at ``step``."""
    chunk = chunks[index]
    kept = chunk.count - count
    moved = replace(chunk, first=chunk.first + kept, count=count, step=step)
    chunks[index : index + 1] = [replace(chunk, count=kept), moved] if kept else [moved]


def _move_begin(chunks: list[Chunk], index: int, count: int, step: int) -> None:
    """The first ``count`` pages of a chunk go at ``step``."""
    chunk = chunks[index]
    kept = chunk.count - count
    moved = replace(chunk, count=count, step=step)
    rest = replace(chunk, first=chunk.first + count, count=kept)
    chunks[index : index + 1] = [moved, rest] if kept else [moved]
