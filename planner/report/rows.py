"""The residency map: a row per tensor, and the many small ones that have none in one strip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..timeline import PLACES, Span, Timeline
from ..trace import Floats, Ints
from .reduce import shares_over_time

MOST_ROWS = 3000
MOST_SPANS = 150_000
MOST_ACCESSES = 1_000_000
REST_BINS = 1000


@dataclass(frozen=True, eq=False)
class Map:
    """``tensors``: those with a row, in the trace's order, each with its spans and accesses at
    ``offset[row]`` to ``offset[row + 1]``; ``rest``: mean bytes per place and bin of time of all
    others, [places, bins], empty if there are none."""

    tensors: Ints
    span_offset: Ints
    spans: list[Span]
    access_offset: Ints
    access_op: Ints
    access_mode: npt.NDArray[np.uint8]
    rest: Floats


def residency_map(line: Timeline) -> Map:
    """The largest tensors get a row, as many as a browser draws at once."""
    trace = line.trace
    largest = np.argsort(-trace.tensor_bytes, kind="stable")
    budget, chosen, spans = MOST_SPANS, [], {}
    for tensor in largest[:MOST_ROWS].tolist():
        mine = joined(line.residency(tensor))
        if len(mine) > budget:
            break
        budget -= len(mine)
        chosen.append(tensor)
        spans[tensor] = mine
    rows = np.sort(np.array(chosen, np.int64))
    counts = [len(spans[tensor]) for tensor in rows.tolist()]
    others = np.setdiff1d(np.arange(trace.tensors), rows)
    offset, op, mode = _accesses(line, rows)
    return Map(
        rows,
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        [span for tensor in rows.tolist() for span in spans[tensor]],
        offset,
        op,
        mode,
        _rest(line, others) if len(others) else np.zeros((len(PLACES), 0)),
    )


def joined(spans: list[Span]) -> list[Span]:
    """Neighbouring pages that are at one place over the same time as one span."""
    result: list[Span] = []
    last: dict[tuple[float, float, str], int] = {}
    for span in spans:
        key = span.begin_us, span.end_us, span.place
        at = last.get(key)
        if at is not None and result[at].first_page + result[at].page_count == span.first_page:
            result[at] = result[at]._replace(page_count=result[at].page_count + span.page_count)
        else:
            last[key] = len(result)
            result.append(span)
    return result


def span_columns(found: Map, ticks: Any) -> dict[str, npt.NDArray[Any]]:
    """The map as columns; ``ticks`` turns µs into the report's unit of time."""
    number = {place: i for i, place in enumerate(PLACES)}
    spans = found.spans
    return {
        "row_tensor": found.tensors.astype(np.uint32),
        "span_offset": found.span_offset.astype(np.uint32),
        "span_first": np.array([span.first_page for span in spans], np.uint32),
        "span_pages": np.array([span.page_count for span in spans], np.uint32),
        "span_begin": ticks(np.array([span.begin_us for span in spans], np.float64)),
        "span_end": ticks(np.array([span.end_us for span in spans], np.float64)),
        "span_place": np.array([number[span.place] for span in spans], np.uint8),
        "access_offset": found.access_offset.astype(np.uint32),
        "access_op": found.access_op.astype(np.uint32),
        "access_mode": found.access_mode,
        "rest_bytes": found.rest.ravel(),
    }


def _accesses(line: Timeline, rows: Ints) -> tuple[Ints, Ints, npt.NDArray[np.uint8]]:
    """Uses of the tensors with a row, by row and op; none at all if they are too many to draw."""
    trace = line.trace
    row_of = np.full(trace.tensors, -1, np.int64)
    row_of[rows] = np.arange(len(rows))
    mine = np.flatnonzero(row_of[trace.access_tensor] >= 0)
    if len(mine) > MOST_ACCESSES:
        mine = mine[:0]
    row, op = row_of[trace.access_tensor[mine]], trace.access_op[mine]
    order = np.lexsort((op, row))
    row, op, mode = row[order], op[order], trace.access_mode[mine][order].astype(np.uint8)
    key = row * max(trace.ops, 1) + op
    first = np.flatnonzero(np.diff(key, prepend=-1))
    mode = np.bitwise_or.reduceat(mode, first) if len(first) else mode
    offset = np.searchsorted(row[first], np.arange(len(rows) + 1)).astype(np.int64)
    return offset, op[first], mode


def _rest(line: Timeline, others: Ints) -> Floats:
    """Where the bytes of the tensors without a row are."""
    trace, size = line.trace, line.page_size
    moving = [tensor for tensor in others.tolist() if line.moves_of(tensor)]
    still = np.setdiff1d(others, np.array(moving, np.int64))
    lasting = trace.tensor_persistent[still]
    born = np.where(lasting, 0.0, line.op_start_us[trace.first_op[still]])
    dead = np.where(lasting, line.iteration_us, line.op_end_us[trace.last_op[still]])
    number = {place: i for i, place in enumerate(PLACES)}
    spans = [span for tensor in moving for span in line.residency(tensor)]
    begin = np.concatenate([born, [span.begin_us for span in spans]])
    end = np.concatenate([dead, [span.end_us for span in spans]])
    place = np.array([0] * len(still) + [number[span.place] for span in spans], np.int64)
    pages = np.concatenate(
        [trace.pages(size)[still], np.array([span.page_count for span in spans], np.int64)]
    )
    return (
        shares_over_time(
            np.concatenate([begin, end]),
            np.concatenate([place, place]),
            np.concatenate([pages, -pages]),
            len(PLACES),
            line.iteration_us,
            REST_BINS,
        )
        * size
    )
