"""Lifetimes with sizes, and what packing them into one address range gives. Data, CSV, lower bound.

A buffer lives in the half-open interval [lower, upper) and needs ``size`` adjacent bytes all that
time. Times are whole numbers of any unit; only their order matters.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ..errors import PagerError
from ..trace import Ints, Trace

COLUMNS = ("id", "lower", "upper", "size")
TENSOR_ALIGNMENT = 512  # bytes; what CUDA's allocators round every tensor up to
_LARGEST = 2**62


class BuffersError(PagerError):
    """A file that cannot be read as buffers. The message names the place and the reason."""


@dataclass(frozen=True, eq=False)
class Buffers:
    ids: list[str]
    lower: Ints  # [buffers], first time of the lifetime
    upper: Ints  # [buffers], > lower, first time after the lifetime
    size: Ints  # [buffers], bytes, > 0

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def live_bytes(self) -> Ints:
        """Bytes alive from each distinct time to the next, [distinct times]."""
        times, place = np.unique(np.concatenate([self.lower, self.upper]), return_inverse=True)
        change = np.zeros(len(times), np.int64)
        np.add.at(change, place, np.concatenate([self.size, -self.size]))
        return np.cumsum(change)

    @property
    def peak_live_bytes(self) -> int:
        """The most bytes alive at one time: no packing can be smaller."""
        return int(self.live_bytes.max(initial=0))


@dataclass(frozen=True, eq=False)
class Packing:
    """An address for every buffer, as an allocator called ``name`` gave them.

    ``offsets`` is None for an allocator that needs no adjacent addresses (pages). ``optimal`` says
    that no packing of these buffers has a smaller footprint.
    """

    name: str
    offsets: Ints | None  # [buffers], bytes from the start of the arena, >= 0
    footprint_bytes: int
    optimal: bool
    seconds: float


def footprint(buffers: Buffers, offsets: Ints) -> int:
    """End of the highest buffer in bytes."""
    return int((offsets + buffers.size).max(initial=0))


def buffers_of(trace: Trace) -> Buffers:
    """One buffer per tensor, time counted in ops, sizes rounded up to ``TENSOR_ALIGNMENT`` bytes.

    A persistent tensor lives the whole iteration [0, ops), any other from the first op that touches
    it until its last one has ended.
    """
    lasting = trace.tensor_persistent
    return Buffers(
        ids=[str(number) for number in trace.tensor_ids],
        lower=np.where(lasting, 0, trace.first_op).astype(np.int64),
        upper=np.where(lasting, trace.ops, trace.last_op + 1).astype(np.int64),
        size=-(-trace.tensor_bytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT,
    )


def read_csv(path: str | Path) -> Buffers:
    """Buffers of a CSV file with the columns id, lower, upper and size, in any order.

    Other columns are left unread. Raises ``BuffersError`` naming the file, the line and the reason.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file)
            places = _places(next(lines, []), path)
            rows = [
                _row(cells, places, f"{path}, line {lines.line_num}") for cells in lines if cells
            ]
    except OSError as error:
        reason = error.strerror or error
        raise BuffersError(f"{path} cannot be read: {reason}; name a CSV file") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise BuffersError(f"{path} is not a CSV file in UTF-8: {error}") from error
    if len({row[0] for row in rows}) < len(rows):
        raise BuffersError(f"{path}: {_repeated(rows)}; give every buffer an id of its own")
    table = np.array([row[1:] for row in rows], np.int64).reshape(-1, 3)
    columns = [table[:, column].copy() for column in range(3)]
    return Buffers([row[0] for row in rows], *columns)


def write_csv(path: str | Path, buffers: Buffers, offsets: Ints) -> None:
    """The buffers and their offsets in bytes, with the columns of ``read_csv`` and ``offset``."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow([*COLUMNS, "offset"])
        numbers = np.stack([buffers.lower, buffers.upper, buffers.size, offsets], axis=1).tolist()
        lines.writerows([name, *row] for name, row in zip(buffers.ids, numbers, strict=True))


def _places(header: list[str], path: str | Path) -> list[int]:
    names = [cell.strip().lower() for cell in header]
    missing = [column for column in COLUMNS if column not in names]
    if missing:
        raise BuffersError(
            f"{path}, line 1: no column {', '.join(missing)} in {','.join(header)!r}; "
            f"the header must name {', '.join(COLUMNS)}"
        )
    return [names.index(column) for column in COLUMNS]


def _row(cells: list[str], places: list[int], where: str) -> tuple[str, int, int, int]:
    if max(places) >= len(cells):
        raise BuffersError(f"{where}: {len(cells)} values where the header names more")
    name, *texts = (cells[place].strip() for place in places)
    try:
        lower, upper, size = (int(text) for text in texts)
    except ValueError:
        raise BuffersError(
            f"{where}: lower, upper, size = {', '.join(texts)} are not all whole numbers"
        ) from None
    if upper <= lower:
        raise BuffersError(
            f"{where}: buffer {name} has upper={upper}, which must be > lower={lower}"
        )
    if not 0 < size < _LARGEST or max(abs(lower), abs(upper)) >= _LARGEST:
        raise BuffersError(
            f"{where}: buffer {name} has lower={lower}, upper={upper}, size={size}; "
            "size must be > 0 and all below 2⁶²"
        )
    return name, lower, upper, size


def _repeated(rows: list[tuple[str, int, int, int]]) -> str:
    seen: set[str] = set()
    for name, *_ in rows:
        if name in seen:
            return f"two buffers have the id {name!r}"
        seen.add(name)
    raise AssertionError("called without a repeated id")
