"""The steady iteration of a plan as tracks of a trace viewer: ops, stalls, channels, counters.

Transfers that go on after the iteration's end are cut there, and those that the iteration before
left behind are seen at its begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..hardware import describe
from ..simulation import Transfer
from ..timeline import Timeline, telling_points
from ..trace import READ, WRITE, Floats, Trace
from .chrome_trace import Event, Track, counter, in_order, process_metadata, time_us
from .counters import counters
from .transfers import merged

CHANNELS = ("host-out", "disk-out", "disk-in", "host-in")
NAMED = 6  # tensors that an op's arguments name
MOST_SAMPLES = 20_000  # of one counter


class Picture:
    """The tracks of ``line``."""

    def __init__(self, line: Timeline) -> None:
        self.line = line
        self.ops = Track(0, "ops")
        self.stalls = Track(1, "stalls")
        self.channels = {name: Track(2 + number, name) for number, name in enumerate(CHANNELS)}
        self.host = Track(2 + len(CHANNELS), "host steps")

    def events(self) -> list[Event]:
        """All of them, sorted."""
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
        for track in tracks:
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
        return process_metadata(name, labels)

    # -- slices ----------------------------------------------------------------------------------
    def _turns(self, things: Sequence[Any]) -> Iterator[tuple[Any, float, float]]:
        """Each of ``things`` that begins or ends in the iteration, and what of it lies in there;
        what goes on after the end is seen at the begin, where the one before left it."""
        length = self.line.iteration_us
        for shift in (-length, 0.0):
            for thing in things:
                begin, end = thing.begin_us + shift, thing.end_us + shift
                if end > 0 and begin < length:
                    yield thing, max(begin, 0.0), min(end, length)

    def _draw_transfers(self) -> None:
        for part, begin, end in self._turns(merged(self.line.transfers)):
            track = self.channels[f"{part.tier}-{'out' if part.is_out else 'in'}"]
            name = self.line.trace.name_of(part.tensor)
            track.slice(name, begin, end, self._transfer_args(part))

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
            end = float(line.op_start_us[stall.op])
            self.stalls.slice(f"waits for {what}", end - stall.us, end, args)

    def _draw_ops(self) -> None:
        """Those that run again among the others, named so."""
        line, trace = self.line, self.line.trace
        every_op = list(_op_args(trace))
        for stall in line.stalls:
            every_op[stall.op]["waited us"] = round(stall.us, 3)
        hosted = set(line.plan.host_steps) if line.plan else set()
        for run in line.simulation.reruns if line.simulation else ():
            args = {"op": run.op, "runs again before op": run.before_op}
            self.ops.slice(f"again: {trace.op_names[run.op]}", run.begin_us, run.end_us, args)
        times = zip(trace.op_names, line.op_start_us.tolist(), line.op_end_us.tolist())
        for op, (name, begin, end) in enumerate(times):
            if op not in hosted:  # those are on the host's track
                self.ops.slice(name or f"op {op}", begin, end, every_op[op])

    def _draw_host_steps(self) -> None:
        runs = self.line.simulation.host_runs if self.line.simulation else []
        for run, begin, end in self._turns(runs):
            self.host.slice(self.line.trace.op_names[run.op], begin, end, {"op": run.op})

    def _samples(self, name: str, times: Floats, series: dict[str, Any]) -> Iterator[Event]:
        """As events, and once more where the iteration ends."""
        if not series:
            return
        values, length = np.array(list(series.values())), self.line.iteration_us
        kept = telling_points(times, values.sum(axis=0), length, MOST_SAMPLES)
        columns = values[:, kept].T.tolist()
        samples = dict(zip(map(time_us, times[kept].tolist()), columns))  # the last at one time
        samples.setdefault(time_us(length), columns[-1])
        for us, row in samples.items():
            yield counter(name, us, dict(zip(series, row)))


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
