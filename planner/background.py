"""Planning beside the training: ``python -m tensorpager.planner.background``.

One request on stdin, one line of JSON on stdout; nothing is written to disk. The request is a line
of JSON (``hardware``: the fields of :class:`Hardware`; ``quick``; ``policy``; ``trace_bytes``;
``trace_sha256`` and ``parent_pid`` if they are known) and then the trace's ``trace_bytes`` bytes as
Parquet. The answer is ``{"plan": …, "layout": …}``, or ``{"refused": reason, "minimum": bytes or
null}`` if no plan can work, or ``{"error": reason}`` with exit code 1. What is no request ends with
exit code 2 and one line on stderr.

It gives way to the training (nice 10), runs on one thread (its parent sets OMP_NUM_THREADS), never
loads torch, and dies with its parent.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, BinaryIO

from .errors import InfeasibleBudget, PagerError, PolicyRefusal
from .hardware import Hardware, from_mapping
from .layout import Layout, frames_of, layout_to_json, place
from .plan import Plan, plan_to_json
from .policies.registry import find
from .simulator import simulate
from .trace import Trace
from .trace_file import decode_trace, encode_trace

NICE = 10
BAD_INPUT = 2
PR_SET_PDEATHSIG = 1
MAX_HEADER_BYTES = 1 << 16


def plan_with_layout(
    trace: Trace, hardware: Hardware, *, quick: bool, policy: str = "lp"
) -> tuple[Plan, Layout]:
    """A plan, and base frames for as many of its stays as there is a place for.

    Prefetches fill the device to the last frame, so some stays find none. The executor places those
    when they come, and moves others aside for it: a copy inside the arena, where a plan for less
    of the device would wait for transfers.

    Raises what the policy raises: ``InfeasibleBudget``, ``PolicyRefusal``.
    """
    plan = _make_plan(trace, hardware, quick, policy)
    simulation = simulate(trace, hardware, plan, log_transfers=True)
    if simulation.predicted is None:
        raise PolicyRefusal(f"policy '{policy}' made a plan that cannot run: {simulation.reason}")
    return plan, place(trace, plan, simulation, frames_of(trace, hardware))


def _make_plan(trace: Trace, hardware: Hardware, quick: bool, policy: str) -> Plan:
    if policy != "lp":
        return find(policy)(trace, hardware)
    from .lp.policy import plan  # loads scipy

    try:
        return plan(trace, hardware, quick=quick)
    except InfeasibleBudget as refusal:
        # A quick program of merged steps can refuse a device that it then calls enough.
        if not quick or refusal.minimum > hardware.device_bytes:
            raise
        return plan(trace, hardware, quick=False)


# --- requests ------------------------------------------------------------------------------------


def write_request(
    trace: Trace, hardware: Hardware, *, quick: bool, policy: str, parent_pid: int
) -> bytes:
    """The bytes for stdin. Raises ``TraceError`` for a trace that could not be read back."""
    content = encode_trace(trace, "the recorded trace")
    values = {k: "inf" if v == math.inf else v for k, v in asdict(hardware).items()}
    header = {
        "hardware": values,
        "quick": quick,
        "policy": policy,
        "trace_bytes": len(content),
        "trace_sha256": trace.sha256,
        "parent_pid": parent_pid,
    }
    return json.dumps(header).encode() + b"\n" + content


class _BadRequest(Exception):  # noqa: N818 (the answer to what is no request)
    """What is wrong with the request."""


def _read_header(stream: BinaryIO) -> dict[str, Any]:
    line = stream.readline(MAX_HEADER_BYTES)
    try:
        header = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadRequest(f"the first line is not JSON ({error})") from error
    if not isinstance(header, dict) or not isinstance(header.get("hardware"), dict):
        raise _BadRequest("the first line is not a JSON object with 'hardware'")
    size = header.get("trace_bytes")
    if type(size) is not int or size < 0:
        raise _BadRequest(f"trace_bytes = {size!r} is not a number of bytes")
    for name, kind in (("quick", bool), ("policy", str), ("trace_sha256", str)):
        if name in header and not isinstance(header[name], kind):
            raise _BadRequest(f"{name} = {header[name]!r} is not a {kind.__name__}")
    return header


def _read_trace(stream: BinaryIO, header: dict[str, Any]) -> Trace:
    content = stream.read(header["trace_bytes"])
    if len(content) < header["trace_bytes"]:
        raise _BadRequest(f"the trace ends after {len(content)} of {header['trace_bytes']} bytes")
    trace = decode_trace(content, "the trace on stdin")
    return replace(trace, sha256=header.get("trace_sha256", trace.sha256))


def _answer(trace: Trace, hardware: Hardware, quick: bool, policy: str) -> dict[str, Any]:
    try:
        plan, layout = plan_with_layout(trace, hardware, quick=quick, policy=policy)
    except InfeasibleBudget as error:
        return {"refused": str(error), "minimum": error.minimum}
    except PolicyRefusal as error:
        return {"refused": str(error), "minimum": None}
    except Exception as error:  # the parent goes on without a plan, and says why
        import traceback

        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    return {"plan": plan_to_json(plan), "layout": layout_to_json(layout)}


# --- the process ---------------------------------------------------------------------------------


def _die_with_parent() -> None:
    """The kernel kills this process when the thread that started it is gone."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Answers the one request; the exit code."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training; it ends this
    os.nice(NICE)
    answer_to = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a solver prints is no answer
    try:
        header = _read_header(sys.stdin.buffer)
        if header.get("parent_pid", os.getppid()) != os.getppid():
            return 0  # it died before it could take this process with it
        hardware = from_mapping(header["hardware"], "hardware")
        trace = _read_trace(sys.stdin.buffer, header)
        policy = header.get("policy", "lp")
        find(policy)
    except (_BadRequest, PagerError) as error:
        line = " ".join(str(error).split())
        print(f"tensorpager.planner.background: no request on stdin: {line}", file=sys.stderr)
        return BAD_INPUT
    answer = _answer(trace, hardware, header.get("quick", False), policy)
    try:
        with answer_to:
            answer_to.write(json.dumps(answer).encode() + b"\n")
    except BrokenPipeError:
        return 1  # nobody waits for it any more
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main())
