"""What a training asks of the planner process, as bytes.

One line of JSON (``hardware``: the fields of :class:`Hardware`; ``quick``; ``policy``;
``parent_pid``; and of the trace what is no array: ``page_size``, ``op_names``, ``tensor_names``,
``tensor_kinds``, ``segments``, ``trace_sha256`` and the number of ``accesses``), then the trace's
arrays one after another, in the order and of the types of ``ARRAYS``. Not a trace file: what
writes those (Arrow) would take memory of the training that its budget knows nothing of.
"""

from __future__ import annotations

import json
from typing import Any, BinaryIO

import numpy as np

from .errors import PagerError
from .hardware import Hardware, to_mapping
from .trace import Segment, Trace

MAX_LINE_BYTES = 1 << 28
ARRAYS = (  # field of the trace, type, and what it has one entry for; longer types first: aligned
    ("op_start_us", "<f8", "ops"),
    ("op_duration_us", "<f8", "ops"),
    ("op_host_us", "<f8", "ops"),
    ("tensor_ids", "<i8", "tensors"),
    ("tensor_bytes", "<i8", "tensors"),
    ("access_op", "<i8", "accesses"),
    ("access_tensor", "<i8", "accesses"),
    ("access_first_page", "<i8", "accesses"),
    ("access_page_count", "<i8", "accesses"),
    ("access_mode", "|i1", "accesses"),
    ("tensor_persistent", "|b1", "tensors"),
    ("op_rerun", "|b1", "ops"),
)


class BadRequest(PagerError):  # noqa: N818 (the answer to what is no request)
    """What is wrong with the request."""


def write_request(
    trace: Trace, hardware: Hardware, *, quick: bool, policy: str, parent_pid: int
) -> bytes:
    """The bytes for the planner's stdin. The trace's free keys and source stay behind: no plan
    depends on them."""
    counts = {"ops": trace.ops, "tensors": trace.tensors, "accesses": len(trace.access_op)}
    header = {
        "hardware": to_mapping(hardware),
        "quick": quick,
        "policy": policy,
        "parent_pid": parent_pid,
        "page_size": int(trace.page_size),
        "device": trace.device,
        "op_names": trace.op_names,
        "tensor_names": trace.tensor_names,
        "tensor_kinds": trace.tensor_kinds,
        "segments": [list(each) for each in trace.segments],
        "accesses": counts["accesses"],
        "trace_sha256": trace.sha256,
    }
    parts: list[Any] = [json.dumps(header).encode(), b"\n"]
    for name, kind, entry in ARRAYS:
        array = np.ascontiguousarray(getattr(trace, name), kind)
        assert array.shape == (counts[entry],), name
        parts.append(array.data)
    return b"".join(parts)


def read_header(stream: BinaryIO) -> dict[str, Any]:
    """What the line says. Raises ``BadRequest`` if nobody wrote one, as in a terminal."""
    line = stream.readline(MAX_LINE_BYTES)
    try:
        header = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the first line is not JSON ({error})") from error
    if not isinstance(header, dict) or "hardware" not in header:
        raise BadRequest("the first line is not a JSON object with 'hardware'")
    return header


def read_trace(stream: BinaryIO, header: dict[str, Any]) -> Trace:
    """The trace that follows ``header``. Raises ``BadRequest`` if it ends early."""
    names = {name: header[name] for name in ("op_names", "tensor_names", "tensor_kinds")}
    counts = {
        "ops": len(names["op_names"]),
        "tensors": len(names["tensor_kinds"]),
        "accesses": header["accesses"],
    }
    sizes = [counts[entry] * np.dtype(kind).itemsize for _, kind, entry in ARRAYS]
    content = stream.read(sum(sizes))
    if len(content) < sum(sizes):
        raise BadRequest(f"the trace ends after {len(content)} of {sum(sizes)} bytes")
    arrays: dict[str, Any] = {}
    offset = 0
    for (name, kind, entry), size in zip(ARRAYS, sizes):
        arrays[name] = np.frombuffer(content, kind, counts[entry], offset)
        offset += size
    return Trace(
        page_size=header["page_size"],
        **names,
        **arrays,
        segments=tuple(Segment(*each) for each in header["segments"]),
        device=header.get("device", ""),
        sha256=header["trace_sha256"],
    )
