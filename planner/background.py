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
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, BinaryIO

from .errors import InfeasibleBudget, PagerError, PolicyRefusal
from .hardware import Hardware, from_mapping
from .layout import Layout, frames_of, layout_to_json, place
from .lifetimes import working_set_pages
from .plan import Bound, Plan, plan_to_json
from .policies.registry import find
from .simulator import simulate
from .trace import Trace
from .trace_file import decode_trace, encode_trace

SHARES = (0.98, 0.96, 0.93, 0.90, 0.86, 0.80)  # of the device, to plan for where room is needed
SAME_PLAN_SHARES = (0.99, 0.98, 0.97, 0.95)  # to run the whole device's plan on
SLOWER = 1.005  # times as long is worth another plan
QUICK_SECONDS, FULL_SECONDS = 15.0, 90.0
NICE = 10
BAD_INPUT = 2
PR_SET_PDEATHSIG = 1
MAX_HEADER_BYTES = 1 << 16


def plan_with_layout(
    trace: Trace, hardware: Hardware, *, quick: bool, policy: str = "lp"
) -> tuple[Plan, Layout]:
    """A plan, and base frames for it, if possible for all of its stays.

    Prefetches fill the device to the last frame, which leaves no room to place anything. So where
    stays find no base, the same plan is run on a little less of the device, where prefetches begin
    later. If that does not do, or costs time (and not ``quick``), plans are made for less of it:
    one at least, others while time is left. The one that leaves the fewest pages unplaced, and of
    those the fastest, is returned, as a plan for the whole device: so are ``predicted`` and
    ``bound``; ``extra`` has ``device_share`` and, as ``layout_us``, the iteration time there.

    Raises what the policy raises: ``InfeasibleBudget``, ``PolicyRefusal``.
    """
    return _Search(trace, hardware, quick, policy).run()


@dataclass(frozen=True, eq=False)
class _Candidate:
    """``plan`` laid out as it runs on ``share`` of the device, in ``layout_us``."""

    plan: Plan
    share: float
    layout_us: float
    layout: Layout

    @property
    def rank(self) -> tuple[int, float]:
        return self.layout.unplaced_pages, self.layout_us


class _Search:
    def __init__(self, trace: Trace, hardware: Hardware, quick: bool, policy: str) -> None:
        self.trace, self.hardware = trace, hardware
        self.quick, self.policy = quick, policy
        self.frames = frames_of(trace, hardware)
        self.until = time.monotonic() + (QUICK_SECONDS if quick else FULL_SECONDS)

    def run(self) -> tuple[Plan, Layout]:
        plan = self._make_plan(1.0, self.quick)
        first = self._candidate(plan, 1.0)
        if first is None:
            raise PolicyRefusal(f"policy '{self.policy}' made a plan that cannot run")
        best = first
        for share in SAME_PLAN_SHARES:
            if not best.layout.unplaced_pages:
                break
            candidate = self._candidate(plan, share)
            if candidate is None:
                break
            best = min(best, candidate, key=lambda c: c.rank)
        most_us = math.inf if self.quick else SLOWER * first.layout_us
        took = 0.0
        for share in self._shares(first):
            good = not best.layout.unplaced_pages and best.layout_us <= most_us
            if good or (took and time.monotonic() + took > self.until):
                break
            began = time.monotonic()
            try:
                candidate = self._candidate(self._make_plan(share, True), share)
            except (InfeasibleBudget, PolicyRefusal):
                break  # still less would not do either
            best = min(best, candidate or best, key=lambda c: c.rank)
            took = time.monotonic() - began
        return self._on_all(best, plan.bound), best.layout

    def _shares(self, first: _Candidate) -> list[float]:
        """Those that leave more free than found no room at first, and enough for each op."""
        need = int(working_set_pages(self.trace, self.hardware.page_size).max(initial=0))
        most = self.frames - min(first.layout.unplaced_pages, self.frames // 10)
        return [share for share in SHARES if need <= int(share * self.frames) <= most]

    def _device(self, share: float) -> Hardware:
        if share == 1.0:
            return self.hardware
        pages = int(share * self.frames)
        return self.hardware.with_(device_bytes=pages * self.hardware.page_size)

    def _make_plan(self, share: float, quick: bool) -> Plan:
        if self.policy == "lp":
            from .lp.policy import plan  # loads scipy

            device = self._device(share)
            try:
                return plan(self.trace, device, quick=quick)
            except InfeasibleBudget as refusal:
                # A quick program of merged steps can refuse a device that it then calls enough.
                if not quick or refusal.minimum > device.device_bytes:
                    raise
                return plan(self.trace, device, quick=False)
        return find(self.policy)(self.trace, self._device(share))

    def _candidate(self, plan: Plan, share: float) -> _Candidate | None:
        """``None`` if ``plan`` cannot run on that much of the device."""
        simulation = simulate(self.trace, self._device(share), plan, log_transfers=True)
        if simulation.predicted is None:
            return None
        layout = place(self.trace, plan, simulation, self.frames)
        return _Candidate(plan, share, simulation.predicted.iteration_us, layout)

    def _on_all(self, best: _Candidate, bound: Bound | None) -> Plan:
        """The plan of ``best`` as one for the whole device, with that one's ``bound``."""
        whole = replace(best.plan, device_bytes=self.hardware.device_bytes)
        predicted = simulate(self.trace, self.hardware, whole).predicted
        if predicted is None:  # more frames let transfers begin earlier, and fill a tier below
            whole, predicted = best.plan, best.plan.predicted
        if bound is not None and predicted is not None and predicted.iteration_us:
            percent = 100.0 * bound.iteration_us / predicted.iteration_us
            bound = Bound(bound.iteration_us, min(100.0, percent))
        extra = {**whole.extra, "device_share": best.share, "layout_us": best.layout_us}
        return replace(whole, predicted=predicted, bound=bound, extra=extra)


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
