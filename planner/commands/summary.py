"""What ``show`` says of a trace, as numbers: peaks, kinds, idle time, the tensors that matter.

Bytes are the tensors' own; where whole pages are meant, the name says ``page_bytes``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..lifetimes import Gaps, gaps, live_pages, working_set_pages
from ..trace import KINDS, WRITE, Bools, Floats, Ints, Trace

# Idle periods are sorted by how long they are, in µs, half-open: [0, 100 µs), [100 µs, 1 ms), …
EDGES_US = (0.0, 1e2, 1e3, 1e4, 1e5, 1e6)


def summary(trace: Trace, page_size: int, top: int) -> dict[str, Any]:
    """Everything ``show --json`` prints; ``top`` tensors in each list."""
    need = working_set_pages(trace, page_size)
    needy = int(need.argmax())
    return {
        "source": trace.source,
        "device": trace.device,
        "sha256": trace.sha256,
        "ops": trace.ops,
        "accesses": len(trace.access_op),
        "tensors": trace.tensors,
        "persistent_tensors": int(trace.tensor_persistent.sum()),
        "ideal_us": trace.ideal_us,
        "iteration_us": trace.metadata.get("iteration_us"),
        "page_size": page_size,
        "peak": _peak(trace, page_size),
        "working_set": {
            "page_bytes": int(need[needy]) * page_size,
            "op": needy,
            "op_name": trace.op_names[needy],
        },
        "read_only": _read_only(trace),
        "idle": _idle(trace, page_size),
        "largest": _tensors(trace, trace.tensor_bytes, top),
        "hottest": _tensors(trace, touched_bytes(trace), top),
    }


def live_bytes(trace: Trace, chosen: Bools | None = None) -> Ints:
    """Bytes of the (chosen) tensors that exist while each op runs, [ops]."""
    chosen = np.ones(trace.tensors, np.bool_) if chosen is None else chosen
    passing = chosen & ~trace.tensor_persistent
    change = np.zeros(trace.ops + 1, np.int64)
    np.add.at(change, trace.first_op[passing], trace.tensor_bytes[passing])
    np.add.at(change, trace.last_op[passing] + 1, -trace.tensor_bytes[passing])
    lasting = int(trace.tensor_bytes[chosen & trace.tensor_persistent].sum())
    return np.cumsum(change[:-1]) + lasting


def touched_bytes(trace: Trace) -> Ints:
    """Bytes that the ops of an iteration access, [tensors]; a tensor counts at every access."""
    begin = trace.access_first_page * trace.page_size
    end = begin + trace.access_page_count * trace.page_size
    size = np.minimum(end, trace.tensor_bytes[trace.access_tensor]) - begin
    total = np.zeros(trace.tensors, np.int64)
    np.add.at(total, trace.access_tensor, size)
    return total


def _peak(trace: Trace, page_size: int) -> dict[str, Any]:
    live = live_bytes(trace)
    op = int(live.argmax())
    kinds = np.array(trace.tensor_kinds)
    by_kind = {kind: int(live_bytes(trace, kinds == kind)[op]) for kind in KINDS}
    return {
        "live_bytes": int(live[op]),
        "live_page_bytes": int(live_pages(trace, page_size).max()) * page_size,
        "op": op,
        "op_name": trace.op_names[op],
        "bytes_by_kind": {kind: size for kind, size in by_kind.items() if size},
    }


def _read_only(trace: Trace) -> dict[str, Any]:
    """Tensors that no op writes: sent away once, they can be dropped and fetched again for good."""
    written = np.zeros(trace.tensors, np.bool_)
    written[trace.access_tensor[(trace.access_mode & WRITE) != 0]] = True
    size, total = int(trace.tensor_bytes[~written].sum()), int(trace.tensor_bytes.sum())
    return {
        "tensors": int((~written).sum()),
        "bytes": size,
        "share_of_bytes": size / total if total else 0.0,
    }


def _idle(trace: Trace, page_size: int) -> dict[str, Any]:
    """Periods of at least one op between two uses of a tensor (or of a range of its pages), those
    of persistent tensors around the iteration's end included.

    ``mean_bytes``: bytes idle at a time, over the (ideal) iteration; ``mean_live_bytes``: live.
    """
    found = gaps(trace, page_size)
    size, idle_us = _gap_bytes(trace, found, page_size), _gap_us(trace, found)
    place = np.searchsorted(EDGES_US, idle_us, side="right") - 1
    ideal = trace.ideal_us
    live = float(live_bytes(trace) @ trace.op_duration_us)
    uppers = (*EDGES_US[1:], None)
    return {
        "periods": len(found),
        "mean_bytes": float(size @ idle_us) / ideal if ideal else 0.0,
        "mean_live_bytes": live / ideal if ideal else 0.0,
        "by_length": [
            {
                "from_us": lower,
                "to_us": upper,
                "periods": int((place == number).sum()),
                "bytes": int(size[place == number].sum()),
                "mean_bytes": float((size * idle_us)[place == number].sum()) / ideal
                if ideal
                else 0.0,
            }
            for number, (lower, upper) in enumerate(zip(EDGES_US, uppers))
        ],
    }


def _gap_bytes(trace: Trace, found: Gaps, page_size: int) -> Ints:
    begin = found.first_page * page_size
    end = (found.first_page + found.pages) * page_size
    clipped: Ints = np.minimum(end, trace.tensor_bytes[found.tensor]) - begin
    return clipped


def _gap_us(trace: Trace, found: Gaps) -> Floats:
    """From the end of the use before to the start of the one after, if no op had to wait."""
    starts = np.concatenate([[0.0], np.cumsum(trace.op_duration_us)])
    around = found.end >= trace.ops
    next_start = starts[found.end % trace.ops] + around * trace.ideal_us
    idle: Floats = next_start - starts[found.begin + 1]
    return idle


def _tensors(trace: Trace, weight: Ints, top: int) -> list[dict[str, Any]]:
    """The ``top`` tensors of most ``weight``, heaviest first, the earlier one where equal."""
    touched = touched_bytes(trace)
    uses = np.bincount(trace.access_tensor, minlength=trace.tensors)
    return [
        {
            "tensor": int(trace.tensor_ids[tensor]),
            "name": trace.tensor_names[tensor],
            "kind": trace.tensor_kinds[tensor],
            "persistent": bool(trace.tensor_persistent[tensor]),
            "nbytes": int(trace.tensor_bytes[tensor]),
            "accesses": int(uses[tensor]),
            "touched_bytes": int(touched[tensor]),
        }
        for tensor in np.argsort(-weight, kind="stable")[:top].tolist()
    ]
