"""The steady iteration of a plan as tracks of a trace viewer: ops, stalls, channels, counters.

A picture of n iterations is a window of the steady state: transfers that go on after its end are
cut there, and those that the iteration before left behind are seen at its begin.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..hardware import describe
from ..simulation import Transfer
from ..timeline import Timeline, telling_points
from ..trace import READ, WRITE, Floats, Trace
from .chrome_trace import Event, Track, counter, in_order, process_metadata, time_us
from .counters import counters
from .transfers import Uses, merged

CHANNELS = ("host-out", "disk-out", "disk-in", "host-in")
PID = 1
NAMED = 6  # tensors that an op's arguments name
MOST_SAMPLES = 20_000  # of one counter


@dataclass
class Picture:
    """The tracks of ``line``, ``iterations`` times."""

    line: Timeline
    iterations: int = 1
    ops: Track = field(init=False)
    stalls: Track = field(init=False)
    host: Track = field(init=False)
    channels: dict[str, Track] = field(init=False)
    flows: int = 0
    _incoming: dict[tuple[int, int], list[tuple[int, str]]] = field(init=False)

    def __post_init__(self) -> None:
        self.ops = Track(PID, PID, "ops")
        self.stalls = Track(PID, PID + 1, "stalls")
        self.channels = {
            name: Track(PID, PID + 2 + number, name) for number, name in enumerate(CHANNELS)
        }
        self.host = Track(PID, PID + 2 + len(CHANNELS), "host steps")
        self._incoming = defaultdict(list)

    @property
    def window_us(self) -> float:
        return self.iterations * self.line.iteration_us

    def events(self) -> list[Event]:
        """All of them, sorted. Flows are numbered from 1 on."""
        tracks = [self.ops]
        if self.line.plan is not None:
            self._draw_transfers()
            self._draw_stalls()
            tracks += [self.stalls, *self.channels.values()]
            if self.line.plan.host_steps:
                self._draw_host_steps()
                tracks.append(self.host)
        self._draw_ops()
        found = self._process()
        for place, track in enumerate(tracks):
            found += track.metadata(place)
        for name, times, series in counters(self.line):
            found += self._samples(name, times, series)
        for track in reversed(tracks):  # a flow comes before the op that it leads to
            found += track.events
        return in_order(found)

    def _process(self) -> list[Event]:
        trace, plan = self.line.trace, self.line.plan
        if plan is None:
            name = "tensorpager: recorded iteration"
            labels = f"{trace.ops} ops, {trace.source or 'source not given'}"
        else:
            assert self.line.hardware is not None
            name = f"tensorpager: plan of {plan.policy}"
            labels = describe(self.line.hardware)
        return process_metadata(PID, name, labels)

    # -- slices ----------------------------------------------------------------------------------
    def _shown(self, begin_us: Floats, end_us: Floats, iteration: int) -> tuple[Any, Any]:
        """Begins and ends, cut to the window."""
        shift = iteration * self.line.iteration_us
        begin = np.clip(begin_us + shift, 0.0, self.window_us)
        end = np.clip(end_us + shift, 0.0, self.window_us)
        return begin.tolist(), end.tolist()

    def _shown_ops(self, iteration: int) -> tuple[Any, Any]:
        return self._shown(self.line.op_start_us, self.line.op_end_us, iteration)

    def _draw_transfers(self) -> None:
        line = self.line
        uses = Uses(line)
        parts = merged(line.transfers)
        begins = np.array([part.begin_us for part in parts])
        ends = np.array([part.end_us for part in parts])
        targets = [uses.op_after(part) for part in parts]
        for iteration in range(-1, self.iterations):
            shift = iteration * line.iteration_us
            shown = self._shown(begins, ends, iteration)
            for part, target, begin, end in zip(parts, targets, *shown):
                # Cut off whole: it is before the window, or after it.
                if part.end_us + shift <= 0 or part.begin_us + shift >= self.window_us:
                    continue
                direction = "out" if part.is_out else "in"
                track = self.channels[f"{part.tier}-{direction}"]
                written = track.slice(
                    line.trace.name_of(part.tensor), begin, end, self._transfer_args(part)
                )
                if target is None or part.end_us + shift > self.window_us:
                    continue
                op, why = target
                at = iteration + op // line.trace.ops
                if 0 <= at < self.iterations and written[1] > 0:
                    self.flows += 1
                    track.flow_out(self.flows, why, *written)
                    self._incoming[at, op % line.trace.ops].append((self.flows, why))

    def _transfer_args(self, part: Transfer) -> dict[str, Any]:
        plan = self.line.plan
        assert plan is not None
        last = part.first_page + part.page_count - 1
        return {
            **_tensor_args(self.line.trace, part.tensor),
            "bytes": part.page_count * self.line.page_size,
            "pages": f"{part.first_page} to {last}" if part.page_count > 1 else str(last),
            "place": f"device → {part.tier}" if part.is_out else f"{part.tier} → device",
            "move": part.move,
            "queued before op": plan.moves[part.move].issue_op,
            **({} if part.arrived else {"ends": "with its tensor, before it arrives"}),
        }

    def _draw_stalls(self) -> None:
        line = self.line
        for iteration in range(self.iterations):
            begins, _ = self._shown_ops(iteration)
            for stall in line.stalls:
                known = stall.tensor >= 0
                what = line.trace.name_of(stall.tensor) if known else "free frames"
                args = {
                    **(_tensor_args(line.trace, stall.tensor) if known else {}),
                    "op": stall.op,
                    "op name": line.trace.op_names[stall.op],
                    "us": round(stall.us, 3),
                    "channel": stall.channel,
                }
                end = begins[stall.op]
                self.stalls.slice(f"waits for {what}", end - stall.us, end, args)

    def _draw_ops(self) -> None:
        line, trace = self.line, self.line.trace
        every_op = list(_op_args(trace))
        for stall in line.stalls:
            every_op[stall.op]["waited us"] = round(stall.us, 3)
        hosted = set(line.plan.host_steps) if line.plan else set()
        for iteration in range(self.iterations):
            self._draw_again(iteration)
            begins, ends = self._shown_ops(iteration)
            for op, (name, begin, end) in enumerate(zip(trace.op_names, begins, ends)):
                if op in hosted:
                    continue  # on the host's track
                args = every_op[op]
                if self.iterations > 1:
                    args = {**args, "iteration": iteration}
                written = self.ops.slice(name or f"op {op}", begin, end, args)
                for number, why in self._incoming.get((iteration, op), ()):
                    self.ops.flow_in(number, why, *written)

    def _draw_again(self, iteration: int) -> None:
        """Ops that run again, among the others and named so."""
        line = self.line
        runs = line.simulation.reruns if line.simulation else []
        begins, ends = (np.array([getattr(r, k) for r in runs]) for k in ("begin_us", "end_us"))
        for run, begin, end in zip(runs, *self._shown(begins, ends, iteration)):
            args = {"op": run.op, "runs again before op": run.before_op}
            self.ops.slice(f"again: {line.trace.op_names[run.op]}", begin, end, args)

    def _draw_host_steps(self) -> None:
        line = self.line
        runs = line.simulation.host_runs if line.simulation else []
        begins, ends = (np.array([getattr(r, k) for r in runs]) for k in ("begin_us", "end_us"))
        for iteration in range(-1, self.iterations):
            for run, begin, end in zip(runs, *self._shown(begins, ends, iteration)):
                if end > begin:
                    self.host.slice(line.trace.op_names[run.op], begin, end, {"op": run.op})

    def _samples(self, name: str, times: Floats, series: dict[str, Any]) -> Iterator[Event]:
        """As events, in every iteration, and once more where the window ends."""
        if not series:
            return
        values = np.array(list(series.values()))
        most = MOST_SAMPLES // self.iterations
        kept = telling_points(times, values.sum(axis=0), self.line.iteration_us, most)
        columns = values[:, kept].T.tolist()
        samples: dict[float, list[float]] = {}  # of those at one time the last
        for iteration in range(self.iterations):
            shown = (times[kept] + iteration * self.line.iteration_us).tolist()
            samples |= zip(map(time_us, shown), columns)
        end = time_us(self.window_us)
        for us, row in {**samples, end: samples.get(end, columns[-1])}.items():
            yield counter(PID, name, us, dict(zip(series, row)))


def _tensor_args(trace: Trace, tensor: int) -> dict[str, Any]:
    return {
        "tensor": trace.name_of(tensor),
        "number": int(trace.tensor_ids[tensor]),
        "kind": trace.tensor_kinds[tensor],
        "tensor bytes": int(trace.tensor_bytes[tensor]),
    }


def _op_args(trace: Trace) -> Iterator[dict[str, Any]]:
    """Of each op: how many bytes of how many tensors it touches, and the first few of them."""
    total = np.bincount(trace.access_op, trace.access_bytes, trace.ops).astype(np.int64).tolist()
    tensors, modes = trace.access_tensor.tolist(), trace.access_mode.tolist()
    offsets = trace.access_offsets.tolist()
    for op in range(trace.ops):
        rows = range(offsets[op], offsets[op + 1])
        args: dict[str, Any] = {"op": op, "tensors": len(rows), "bytes": total[op]}
        for what, bit in (("reads", READ), ("writes", WRITE)):
            names = [trace.name_of(tensors[row]) for row in rows if modes[row] & bit]
            more = [f"and {len(names) - NAMED} more"] if len(names) > NAMED else []
            if names:
                args[what] = ", ".join([*names[:NAMED], *more])
        yield args
