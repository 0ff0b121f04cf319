"""What ``show`` says of a trace, as numbers: peaks, kinds, idle time, the tensors that matter.

Bytes are the tensors' own; where whole pages are meant, the name says ``page_bytes``, or that it is
a device's size. Peaks, idle periods and lists are of the ``chosen`` tensors, all or those
of some kinds.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np

from ..hardware import PRESETS, Hardware
from ..joint.layers import decided
from ..lifetimes import (
    gap_bytes,
    gaps,
    hideable_bytes,
    idle_us,
    live_bytes_by_kind,
    working_set_pages,
)
from ..plan import Plan
from ..sweep import Task, evaluate
from ..trace import KINDS, WRITE, Bools, Floats, Ints, Trace
from .show_groups import group_names, grouped

# Idle periods are sorted by how long they are, in µs, half-open: [0, 100 µs), [100 µs, 1 ms), …
EDGES_US = (0.0, 1e2, 1e3, 1e4, 1e5, 1e6)
MOST_PLANNED_OPS = 5000  # in some seconds


class View:
    """A trace and how it is looked at: tensors of ``kinds`` (none: all), in pages of ``page_size``
    bytes, with the link of ``hardware`` if there is one, and a ``plan`` for that."""

    def __init__(
        self,
        trace: Trace,
        page_size: int,
        kinds: tuple[str, ...] = (),
        hardware: Hardware | None = None,
        plan: Plan | None = None,
    ) -> None:
        self.trace, self.page_size, self.kinds = trace, page_size, kinds
        self.hardware, self.plan = hardware, plan
        self.chosen: Bools = np.isin(np.array(trace.tensor_kinds, np.str_), kinds or KINDS)
        self.live_by_kind = live_bytes_by_kind(trace, 1, kinds or KINDS)
        self.page_bytes_by_kind = live_bytes_by_kind(trace, page_size, kinds or KINDS)
        self.live: Ints = sum(self.live_by_kind.values(), np.zeros(trace.ops, np.int64))
        self.peak_op = int(self.live.argmax())
        self.ends: Floats = np.cumsum(trace.op_duration_us)
        self.starts: Floats = self.ends - trace.op_duration_us

    @property
    def axis(self) -> tuple[Floats, float, str]:
        """Where ops begin and the last one ends, in µs; in ops if no op takes any time."""
        if self.trace.ideal_us:
            return self.starts, self.trace.ideal_us, "time"
        return np.arange(self.trace.ops, dtype=np.float64), float(self.trace.ops), "ops"

    @property
    def live_at_peak(self) -> Bools:
        """Which of the chosen tensors exist at the peak, [tensors]."""
        trace, op = self.trace, self.peak_op
        passing = (trace.first_op <= op) & (op <= trace.last_op)
        alive: Bools = self.chosen & (trace.tensor_persistent | passing)
        return alive


def summary(view: View, top: int, by: str = "tensor") -> dict[str, Any]:
    """Everything ``show --json`` prints; ``top`` tensors or groups in each list."""
    trace, page_size, op = view.trace, view.page_size, view.peak_op
    need = working_set_pages(trace, page_size) * page_size
    needy = int(need.argmax())
    whole_pages = sum(view.page_bytes_by_kind.values(), np.zeros(trace.ops, np.int64))
    found: dict[str, Any] = {
        "verdict": verdict(view, int(need[needy]), int(whole_pages.max())),
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
        "kinds": list(view.kinds) or None,
        "peak": {
            "live_bytes": int(view.live[op]),
            "live_page_bytes": int(whole_pages.max()),
            "op": op,
            "op_name": trace.op_names[op],
            "bytes_by_kind": {k: int(v[op]) for k, v in view.live_by_kind.items() if v[op]},
        },
        "peak_tensors": _peak_tensors(view, top),
        "peak_tensors_count": int(view.live_at_peak.sum()),
        "working_set": {
            "page_bytes": int(need[needy]),
            "op": needy,
            "op_name": trace.op_names[needy],
        },
        "choices": _choices(trace),
        "idle": _idle(view),
        "read_only": _read_only(view),
        "hottest": _hottest(view, top),
    }
    if by != "tensor":
        names, live = group_names(trace, by), np.flatnonzero(view.live_at_peak)
        rows = np.flatnonzero(view.chosen[trace.access_tensor])
        by_op = (trace.op_names[op] for op in trace.access_op[rows].tolist())
        hot = by_op if by == "op" else (names[t] for t in trace.access_tensor[rows].tolist())
        found["groups"] = {
            "by": by,
            "at_peak": grouped(
                (names[t] for t in live.tolist()), trace.tensor_bytes[live].tolist(), "tensors"
            ),
            "hottest": grouped(hot, trace.access_bytes[rows].tolist(), "accesses"),
        }
    return found


def verdict(view: View, least: int, most: int) -> dict[str, Any]:
    """What the iteration takes: ``most`` bytes of whole pages, ``least`` for its largest op. On a
    machine also how fast it would run there, by the view's plan and what that decided for which
    layers, or by one that is made quickly, or on demand where there are too many ops for that.
    Where no machine was named, what was recorded on a CPU runs on one, in half of what it needs."""
    found: dict[str, Any] = {"needs_bytes": most, "smallest_device_bytes": least, "machine": None}
    machine, assumed = view.hardware, None
    if machine is None:
        if view.trace.device != "cpu" or view.trace.ops > MOST_PLANNED_OPS or view.kinds:
            return found
        assumed, pages = "cpu", max(least, most // 2) // view.page_size
        size = pages * view.page_size
        machine = PRESETS[assumed].with_(device_bytes=size, page_size=view.page_size)
    policy = "lp" if view.trace.ops <= MOST_PLANNED_OPS else "lru"
    if view.plan is not None:
        policy = view.plan.policy
    outcome = evaluate(view.trace, Task(policy, machine, quick=True, plan=view.plan))
    predicted = outcome.predicted
    found["machine"] = {
        "device_bytes": None if math.isinf(machine.device_bytes) else int(machine.device_bytes),
        "assumed": assumed,
        "policy": policy,
        "percent_of_ideal": None if predicted is None else predicted.percent_of_ideal,
        "reason": outcome.reason,
    }
    if view.plan is not None:
        found["machine"]["layers"] = [asdict(layer) for layer in decided(view.trace, view.plan)]
    return found


def _choices(trace: Trace) -> dict[str, Any] | None:
    """What may run again or on the host, if the trace says so."""
    if not trace.has_choices:
        return None
    hosted = ~np.isnan(trace.op_host_us)
    return {
        "rerun_ops": int(trace.op_rerun.sum()),
        "rerun_us": float(trace.op_duration_us[trace.op_rerun].sum()),
        "host_ops": int(hosted.sum()),
        "host_us": float(trace.op_host_us[hosted].sum()),
    }


def _peak_tensors(view: View, top: int) -> list[dict[str, Any]]:
    """The largest of those that make the peak, and for how long each lies idle around it."""
    trace, op = view.trace, view.peak_op
    live = np.flatnonzero(view.live_at_peak)
    order = np.argsort(-trace.tensor_bytes[live], kind="stable")[:top]
    before, after = _uses_around(trace, op)
    found = []
    for tensor in live[order].tolist():
        last, following = int(before[tensor]), int(after[tensor])
        idle = 0.0
        if last != op:
            wrapped = (following >= trace.ops) + (last < 0)
            idle = view.starts[following % trace.ops] - view.ends[last] + wrapped * trace.ideal_us
        found.append(
            {
                **_facts(trace, tensor),
                "share": int(trace.tensor_bytes[tensor]) / int(view.live[op]),
                "in_use": last == op,
                "idle_us": max(0.0, float(idle)),
            }
        )
    return found


def _facts(trace: Trace, tensor: int) -> dict[str, Any]:
    return {
        "tensor": int(trace.tensor_ids[tensor]),
        "name": trace.tensor_names[tensor],
        "kind": trace.tensor_kinds[tensor],
        "first_op_name": trace.op_names[trace.first_op[tensor]],
        "nbytes": int(trace.tensor_bytes[tensor]),
    }


def _uses_around(trace: Trace, op: int) -> tuple[Ints, Ints]:
    """Ops of the last use up to ``op``, negative if it is in the iteration before, and of the
    first one after, [tensors]."""
    before = trace.last_op - trace.ops
    after = trace.first_op + trace.ops
    past = trace.access_op <= op
    np.maximum.at(before, trace.access_tensor[past], trace.access_op[past])
    np.minimum.at(after, trace.access_tensor[~past], trace.access_op[~past])
    return before, after


def _read_only(view: View) -> dict[str, Any]:
    """Tensors that no op writes: sent away once, they can be dropped and fetched again for good."""
    trace = view.trace
    only_read = view.chosen.copy()
    only_read[trace.access_tensor[(trace.access_mode & WRITE) != 0]] = False
    size, total = (int(trace.tensor_bytes[which].sum()) for which in (only_read, view.chosen))
    share = size / total if total else 0.0
    return {"tensors": int(only_read.sum()), "bytes": size, "share_of_bytes": share}


def _idle(view: View) -> dict[str, Any]:
    """Periods of at least one op between two uses of a tensor (or of a range of its pages), those
    of persistent tensors around the iteration's end included.

    ``mean_bytes``: bytes idle at a time, over the (ideal) iteration; ``mean_live_bytes``: live;
    ``hideable_bytes``: those that the link could move out and back in time, null without a machine.
    """
    trace, machine, ideal = view.trace, view.hardware, view.trace.ideal_us
    found = gaps(trace, view.page_size)
    found = found.pick(view.chosen[found.tensor])
    size = gap_bytes(trace, found, view.page_size)
    length = idle_us(trace, found, view.starts, view.ends, ideal)
    hidden = None if machine is None else hideable_bytes(size, found.pages, length, machine)
    place = np.searchsorted(EDGES_US, length, side="right") - 1
    live = float(view.live @ trace.op_duration_us)
    lines = []
    for number, (lower, upper) in enumerate(zip(EDGES_US, (*EDGES_US[1:], None))):
        mine = place == number
        lines.append(
            {
                "from_us": lower,
                "to_us": upper,
                "periods": int(mine.sum()),
                "bytes": int(size[mine].sum()),
                "mean_bytes": float(size[mine] @ length[mine]) / ideal if ideal else 0.0,
                "hideable_bytes": None if hidden is None else int(hidden[mine].sum()),
            }
        )
    rate = None if machine is None else min(machine.d2h_bytes_per_s, machine.h2d_bytes_per_s)
    return {
        "periods": len(found),
        "mean_bytes": float(size @ length) / ideal if ideal else 0.0,
        "mean_live_bytes": live / ideal if ideal else 0.0,
        "hideable_bytes": None if hidden is None else int(hidden.sum()),
        "link_bytes": None if rate is None or rate == np.inf else int(rate * ideal / 1e6),
        "by_length": lines,
    }


def _hottest(view: View, top: int) -> list[dict[str, Any]]:
    """The ``top`` tensors of which ops access most bytes, the earlier one where equal."""
    trace = view.trace
    touched = np.zeros(trace.tensors, np.int64)
    np.add.at(touched, trace.access_tensor, trace.access_bytes)
    uses = np.bincount(trace.access_tensor, minlength=trace.tensors)
    order = np.argsort(-touched, kind="stable")
    return [
        {
            **_facts(trace, tensor),
            "persistent": bool(trace.tensor_persistent[tensor]),
            "accesses": int(uses[tensor]),
            "touched_bytes": int(touched[tensor]),
        }
        for tensor in order[view.chosen[order]][:top].tolist()
    ]
