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
from .shown import shown
from .trace import ACCESS_NAMES, WRITE, Trace
from .trace_check import check_bytes, check_segments, number_by_appearance

MAX_LINE_BYTES, MAX_ENTRIES = 1 << 28, 1 << 26
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
    """The bytes for the planner's stdin. The trace's free keys, device and source stay behind: no
    plan depends on them."""
    counts = {"ops": trace.ops, "tensors": trace.tensors, "accesses": len(trace.access_op)}
    header = {
        "hardware": to_mapping(hardware),
        "quick": quick,
        "policy": policy,
        "parent_pid": parent_pid,
        "page_size": int(trace.page_size),
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
    """What the line says, of the right types where it says so. Raises ``BadRequest``."""
    line = stream.readline(MAX_LINE_BYTES)
    try:
        header = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the first line is not JSON ({error})") from error
    if not isinstance(header, dict) or not isinstance(header.get("hardware"), dict):
        raise BadRequest("the first line is not a JSON object with 'hardware'")
    options = (("quick", bool), ("policy", str), ("trace_sha256", str), ("parent_pid", int))
    for name, kind in options:
        if name in header and type(header[name]) is not kind:
            raise BadRequest(f"{name} = {shown(header[name])} is not of type {kind.__name__}")
    for name, least, most in (("page_size", 1, 1 << 62), ("accesses", 0, MAX_ENTRIES)):
        value = header.get(name)
        if type(value) is not int or not least <= value <= most:
            raise BadRequest(f"{name} = {shown(value)} is not a number from {least} to {most}")
    for name, kinds in (
        ("op_names", {str}),
        ("tensor_names", {str, type(None)}),
        ("tensor_kinds", {str}),
    ):
        words = header.get(name)
        if not isinstance(words, list) or not set(map(type, words)) <= kinds:
            raise BadRequest(f"{name} = {shown(words)} is not a list of names")
    return header


def read_trace(stream: BinaryIO, header: dict[str, Any]) -> Trace:
    """The trace that follows ``header``. Raises ``BadRequest``, and ``TraceError`` for more bytes
    than any machine has."""
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
    trace = Trace(
        page_size=header["page_size"],
        **names,
        **arrays,
        segments=check_segments(header.get("segments", []), counts["ops"], "the trace"),
        sha256=header.get("trace_sha256", ""),
    )
    wrong = _wrong(trace)
    if wrong is not None:
        raise BadRequest(f"the trace's {wrong}")
    check_bytes(trace.tensor_bytes, "the trace")
    return trace


def _wrong(trace: Trace) -> str | None:
    """What no trace in memory can be; a planner would come to grief over it later on."""
    op, tensor = trace.access_op, trace.access_tensor
    writes = (trace.access_mode & WRITE) != 0
    if (trace.op_host_us < 0).any() or np.isinf(trace.op_host_us).any():
        return "op_host_us are not all finite and ≥ 0, or NaN"
    if not trace.ops or len(trace.tensor_names) != trace.tensors:
        return "op_names are empty, or its tensor_names not as many as its tensors"
    times = np.concatenate([trace.op_start_us, trace.op_duration_us])
    if not np.isfinite(times).all() or times.min() < 0:
        return "times are not all finite and ≥ 0"
    if len(op) and (op[0] < 0 or op[-1] >= trace.ops or (np.diff(op) < 0).any()):
        return "access_op is not in op order"
    if (tensor < 0).any() or not np.array_equal(number_by_appearance(tensor)[0], tensor):
        return "tensors are not numbered in the order of their first access"
    if len(np.unique(tensor)) != trace.tensors:
        return "tensors do not all have an access"
    if (trace.tensor_bytes < 1).any():
        return "tensor_bytes are not all at least 1"
    if not np.isin(trace.access_mode, list(ACCESS_NAMES)).all():
        return "access_mode is none that there is"
    if (trace.op_rerun[op] & trace.tensor_persistent[tensor] & writes).any():
        return "op_rerun has an op that writes what lives across iterations"
    first, count = trace.access_first_page, trace.access_page_count
    pages = trace.pages(trace.page_size)[tensor]
    if (first < 0).any() or (count < 1).any() or (count > pages - first).any():
        return "accesses touch pages that their tensors do not have"
    return None
