"""Columns of a trace file to a :class:`Trace`, refusing what no iteration can be.

Every rule is one comparison of whole columns, so that a million rows take a fraction of a second; a
broken rule names the first row that breaks it. Rows count from 0, as data frames show them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from .errors import TraceError
from .shown import shown
from .trace import ACCESS_NAMES, KINDS, WRITE, Bools, Floats, Ints, Segment, Trace

MAX_BYTES = 1 << 60  # of all tensors, so that sums of sizes and pages stay within 64 bits
MAX_US = 1e18  # 30,000 years, so that sums of times stay finite
MODE_OF = {name: mode for mode, name in ACCESS_NAMES.items()}


@dataclass(frozen=True, eq=False)
class Strings:
    """A string column as codes into its distinct values; a null has the code −1."""

    codes: Ints  # [rows]
    values: list[str]  # distinct


@dataclass(frozen=True, eq=False)
class Columns:
    """A trace file's columns, [rows] each. Nulls of integer columns are −1 here, and masked in
    ``touches`` or ``missing``."""

    op: Ints
    op_name: Strings
    start_us: Floats
    duration_us: Floats
    tensor: Ints  # number in the file
    touches: Bools  # False where ``tensor`` is null
    tensor_name: Strings
    nbytes: Ints
    kind: Strings
    access: Strings
    first_page: Ints
    page_count: Ints
    persistent: Bools
    rerun: Bools | None  # of version 2, as is the next
    host_us: Floats | None  # NaN where it is null
    missing: dict[str, Bools]  # where a column is null


class _Checker:
    """Raises for the first row at which a rule is broken."""

    def __init__(self, where: str) -> None:
        self.where = where

    def refuse(self, row: int, reason: str) -> NoReturn:
        raise TraceError(f"{self.where}: row {row}: {reason}")

    def first(self, broken: Bools) -> int | None:
        return int(broken.argmax()) if broken.any() else None


def build_trace(columns: Columns, header: dict[str, Any], where: str, sha256: str) -> Trace:
    """The trace that the columns and the file's checked metadata describe.

    ``where`` names the file in errors. Raises ``TraceError`` naming the row and the reason.
    """
    if not len(columns.op):
        raise TraceError(f"{where}: no rows; a trace has at least one op")
    check = _Checker(where)
    first_row = _check_ops(columns, check)
    rows = np.flatnonzero(columns.touches)
    tensors = _check_tensors(columns, rows, check)
    check_bytes(columns.nbytes[tensors.first_row], where)
    page_size = int(header["page_size"])
    modes = _check_accesses(columns, rows, page_size, check)
    _check_duplicates(columns, rows, tensors.index, modes, check)
    first = tensors.first_row
    named = (
        ("version", "page_size", "segments") if header["version"] > 1 else ("version", "page_size")
    )
    free = {k: v for k, v in header.items() if k not in named}
    _check_choices(columns, modes, rows, check)
    return Trace(
        page_size=page_size,
        op_names=_decode(columns.op_name, first_row),
        op_start_us=columns.start_us[first_row],
        op_duration_us=columns.duration_us[first_row],
        tensor_ids=columns.tensor[first],
        tensor_names=_decode_nullable(columns.tensor_name, first),
        tensor_bytes=columns.nbytes[first],
        tensor_kinds=_decode(columns.kind, first),
        tensor_persistent=columns.persistent[first],
        access_op=columns.op[rows],
        access_tensor=tensors.index,
        access_mode=modes,
        access_first_page=columns.first_page[rows],
        access_page_count=columns.page_count[rows],
        source=str(free.pop("source", "")),
        sha256=sha256,
        device=str(free.pop("device", "")),
        metadata=free,
        op_rerun=None if columns.rerun is None else columns.rerun[first_row],  # type: ignore
        op_host_us=None if columns.host_us is None else columns.host_us[first_row],  # type: ignore
        segments=(
            check_segments(header.get("segments", []), len(first_row), where)
            if header["version"] > 1
            else ()
        ),
    )


def _check_choices(
    columns: Columns, modes: npt.NDArray[np.int8], rows: Ints, check: _Checker
) -> None:
    """What may run again, and what the host takes, is the same in all rows of an op."""
    if columns.rerun is None or columns.host_us is None:
        return
    host = columns.host_us
    row = check.first(~columns.missing["host_us"] & ~((host >= 0) & (host <= MAX_US)))
    if row is not None:
        check.refuse(row, f"host_us = {host[row]:g}; times are finite and ≥ 0, or null")
    same = columns.op[1:] == columns.op[:-1]
    filled = np.nan_to_num(host, nan=-1.0)
    for name, values in (("rerun", columns.rerun), ("host_us", filled)):
        row = check.first(same & (values[1:] != values[:-1]))
        if row is not None:
            check.refuse(
                row + 1, f"{name} differs from the row before, of the same op {columns.op[row]}"
            )
    broken = check.first(columns.rerun[rows] & columns.persistent[rows] & (modes & WRITE != 0))
    if broken is not None:
        row = int(rows[broken])
        check.refuse(
            row,
            f"rerun is true, but op {columns.op[row]} writes tensor {columns.tensor[row]}, which "
            "lives across iterations; it cannot run again with the same result",
        )


def check_segments(entries: Any, ops: int, where: str) -> tuple[Segment, ...]:
    """The metadata's ``segments``, each two of which are disjoint or one within the other. Raises
    ``TraceError`` for others."""
    if not isinstance(entries, list):
        raise TraceError(f"{where}: metadata segments = {shown(entries)} is not a list")
    found = []
    for number, entry in enumerate(entries):
        right = isinstance(entry, list) and [type(v) for v in entry] == [int, int, str]
        if not right or not 0 <= entry[0] <= entry[1] < ops:
            raise TraceError(
                f"{where}: metadata segments[{number}] = {shown(entry)}; it is [first op, last op, "
                f"name] with 0 ≤ first ≤ last < {ops}"
            )
        found.append(Segment(*entry))
    around: list[Segment] = []
    for each in sorted(found, key=lambda s: (s.first_op, -s.last_op)):
        while around and around[-1].last_op < each.first_op:
            around.pop()
        if around and each.last_op > around[-1].last_op:
            raise TraceError(
                f"{where}: metadata segments {shown(list(around[-1]))} and {shown(list(each))} "
                "overlap; two segments are disjoint, or one lies within the other"
            )
        around.append(each)
    return tuple(found)


def check_bytes(tensor_bytes: Ints, where: str) -> None:
    """Raises ``TraceError`` if sizes, [tensors], each from 0 to 2⁶³ − 1, add up to more than
    ``MAX_BYTES``."""
    total = float(tensor_bytes.sum(dtype=np.float64))
    if total > MAX_BYTES:
        raise TraceError(
            f"{where}: tensors of {total:.3g} bytes altogether, more than {MAX_BYTES}; no machine "
            "has so much, so record or copy it again"
        )


def _decode(strings: Strings, rows: Ints) -> list[str]:
    values = strings.values
    return [values[code] for code in strings.codes[rows].tolist()]


def _decode_nullable(strings: Strings, rows: Ints) -> list[str | None]:
    values: list[str | None] = [*strings.values, None]  # a null's −1 is the last
    return [values[code] for code in strings.codes[rows].tolist()]


def _check_ops(columns: Columns, check: _Checker) -> Ints:
    """The first row of each op, [ops]."""
    for name in ("op", "op_name", "start_us", "duration_us"):
        row = check.first(columns.missing[name])
        if row is not None:
            check.refuse(row, f"{name} is null; every row needs one")
    for name, times in (("start_us", columns.start_us), ("duration_us", columns.duration_us)):
        row = check.first(~((times >= 0) & (times <= MAX_US)))
        if row is not None:
            check.refuse(
                row, f"{name} = {times[row]:g}; times are finite and ≥ 0 (at most {MAX_US:g})"
            )
    op = columns.op
    if op[0] != 0:
        check.refuse(0, f"op = {op[0]}; the first op of a trace is 0")
    step = np.diff(op)
    row = check.first(step < 0)
    if row is not None:
        check.refuse(row + 1, f"op {op[row + 1]} after op {op[row]}; rows come in op order")
    row = check.first(step > 1)
    if row is not None:
        check.refuse(
            row + 1,
            f"op {op[row + 1]} after op {op[row]}; an op that touches nothing has a row too, "
            "with a null tensor",
        )
    for name, values in (
        ("op_name", columns.op_name.codes),
        ("start_us", columns.start_us),
        ("duration_us", columns.duration_us),
    ):
        row = check.first((step == 0) & (values[1:] != values[:-1]))
        if row is not None:
            check.refuse(row + 1, f"{name} differs from the row before, of the same op {op[row]}")
    row = check.first(np.diff(columns.start_us) < 0)
    if row is not None:
        check.refuse(
            row + 1,
            f"op {op[row + 1]} starts at {columns.start_us[row + 1]:g} µs, before op {op[row]} at "
            f"{columns.start_us[row]:g} µs; ops come in the order in which they ran",
        )
    begins = np.flatnonzero(np.concatenate([[1], step]))
    alone = np.diff(np.append(begins, len(op))) == 1
    row = check.first(~columns.touches & ~alone[op])
    if row is not None:
        check.refuse(row, f"tensor is null, but op {op[row]} has other rows; leave this one out")
    return begins


@dataclass(frozen=True, eq=False)
class _Tensors:
    index: Ints  # [accesses], numbers by first appearance
    first_row: Ints  # [tensors], row of the first access


def number_by_appearance(values: Ints) -> tuple[Ints, Ints]:
    """Numbers 0, 1, … in the order in which distinct ``values`` (≥ 0) first appear, [values], and
    where each one does, [distinct]."""
    if len(values) and values.max() < 4 * len(values) + 1024:  # a table beats sorting
        where = np.full(int(values.max()) + 1, -1, np.int64)
        where[values[::-1]] = np.arange(len(values))[::-1]  # the first one is written last
        first = np.sort(where[where >= 0])
        rank = np.empty(len(where), np.int64)
        rank[values[first]] = np.arange(len(first))
        return rank[values], first
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank[inverse], first[order].astype(np.int64)


def _check_tensors(columns: Columns, rows: Ints, check: _Checker) -> _Tensors:
    """``rows`` are those that touch a tensor."""
    for name in ("nbytes", "kind", "access", "first_page", "page_count", "persistent"):
        broken = check.first(columns.missing[name][rows])
        if broken is not None:
            row = int(rows[broken])
            check.refuse(row, f"{name} is null, but tensor {columns.tensor[row]} is touched")
    broken = check.first(columns.tensor[rows] < 0)
    if broken is not None:
        row = int(rows[broken])
        check.refuse(row, f"tensor = {columns.tensor[row]}; numbers are ≥ 0")
    row_or_none = check.first(~columns.missing["nbytes"] & (columns.nbytes < columns.touches))
    if row_or_none is not None:
        check.refuse(row_or_none, f"nbytes = {columns.nbytes[row_or_none]}; sizes are at least 1")
    _check_words(columns.kind, KINDS, "kind", rows, check)
    _check_words(columns.access, tuple(MODE_OF), "access", rows, check)
    index, first_access = number_by_appearance(columns.tensor[rows])
    first_row = rows[first_access]
    values: dict[str, npt.NDArray[Any]] = {
        "nbytes": columns.nbytes,
        "kind": columns.kind.codes,
        "persistent": columns.persistent,
        "tensor_name": columns.tensor_name.codes,
    }
    for name, column in values.items():
        broken = check.first(column[rows] != column[first_row][index])
        if broken is not None:
            row, before = int(rows[broken]), int(first_row[index[broken]])
            check.refuse(
                row, f"{name} of tensor {columns.tensor[row]} differs from that in row {before}"
            )
    return _Tensors(index, first_row)


def _check_words(
    strings: Strings, known: tuple[str, ...], name: str, rows: Ints, check: _Checker
) -> None:
    allowed = np.array([value in known for value in strings.values] + [False])
    broken = check.first(~allowed[strings.codes[rows]])
    if broken is not None:
        row = int(rows[broken])
        value = strings.values[strings.codes[row]]
        check.refuse(row, f"{name} = {shown(value)} is unknown (known: {', '.join(known)})")


def _check_accesses(
    columns: Columns, rows: Ints, page_size: int, check: _Checker
) -> npt.NDArray[np.int8]:
    """The mode of each access, [accesses]."""
    first, count = columns.first_page[rows], columns.page_count[rows]
    pages = -(-columns.nbytes[rows] // page_size)
    broken = check.first((first < 0) | (count < 1) | (count > pages - first))
    if broken is not None:
        row = int(rows[broken])
        check.refuse(
            row,
            f"first_page = {first[broken]}, page_count = {count[broken]}, outside tensor "
            f"{columns.tensor[row]} of {pages[broken]} pages ({columns.nbytes[row]} bytes in pages "
            f"of {page_size})",
        )
    mode_of = np.array([MODE_OF.get(value, 0) for value in columns.access.values] + [0], np.int8)
    return mode_of[columns.access.codes[rows]]


def _check_duplicates(
    columns: Columns, rows: Ints, index: Ints, modes: npt.NDArray[np.int8], check: _Checker
) -> None:
    """Several rows of an op may touch one tensor, but not the same pages in the same way."""
    if not len(rows):
        return
    pair = columns.op[rows] * (int(index.max()) + 1) + index
    order = np.argsort(pair, kind="stable")
    equal = pair[order][1:] == pair[order][:-1]
    if not equal.any():
        return
    several = order[np.append(equal, False) | np.insert(equal, 0, False)]
    keys = np.stack(
        [pair, modes, columns.first_page[rows], columns.page_count[rows]], axis=1, dtype=np.int64
    )[several]
    order = np.lexsort(keys.T)
    same = (keys[order][1:] == keys[order][:-1]).all(axis=1)
    if same.any():
        row = int(rows[several[order[1:][same]]].min())
        check.refuse(
            row,
            f"op {columns.op[row]} touches the same pages of tensor {columns.tensor[row]} in the "
            "same way as an earlier row; leave one of them out",
        )
