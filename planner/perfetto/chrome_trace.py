"""Events of the Trace Event Format (JSON), which ui.perfetto.dev and chrome://tracing open.

Format: the public document "Trace Event Format" (1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU at
docs.google.com); what Perfetto makes of it: src/trace_processor/importers/json in its repository.
Times are µs with three decimals. Perfetto turns times and durations into whole nanoseconds, each
rounded down, and does not draw slices of one track that overlap: so a slice ends 1 ns before the
next one may begin.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]
CATEGORY = "tensorpager"
NS = 0.001  # µs
PID = 1  # of the only process


def time_us(us: float) -> float:
    """As it is written: not negative, whole nanoseconds."""
    return max(round(us, 3), 0.0)


def plain(text: str) -> str:
    """A name as a viewer can draw it: no control characters, never empty."""
    return "".join(c if c.isprintable() else "?" for c in text) or "(no name)"


class Track:
    """A thread of the process: slices one after another, none of which overlap."""

    def __init__(self, number: int, name: str) -> None:
        self.tid, self.name = PID + number, name
        self.events: list[Event] = []
        self._end = 0.0

    def slice(self, name: str, begin_us: float, end_us: float, args: dict[str, Any]) -> None:
        """Adds one that begins where the last one ended at the earliest."""
        begin = max(time_us(begin_us), self._end)
        end = max(time_us(end_us), begin)
        self._end = end
        duration = max(round(end - begin - NS, 3), 0.0)
        self.events.append(
            {"ph": "X", "cat": CATEGORY, "pid": PID, "tid": self.tid, "name": plain(name)}
            | {"ts": begin, "dur": duration, "args": args}
        )

    def metadata(self, place: int) -> list[Event]:
        """Its name, and where it comes among the threads of its process."""
        return [
            _metadata(self.tid, "thread_name", name=self.name),
            _metadata(self.tid, "thread_sort_index", sort_index=place),
        ]


def process_metadata(name: str, labels: str) -> list[Event]:
    """Name and labels (shown beside it) of the process."""
    return [
        _metadata(PID, "process_name", name=plain(name)),
        _metadata(PID, "process_labels", labels=plain(labels)),
    ]


def _metadata(tid: int, what: str, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": PID, "tid": tid, "args": args}


def counter(name: str, us: float, values: dict[str, float]) -> Event:
    """From ``us`` on the counter ``name`` has these values, drawn on top of each other."""
    return {"ph": "C", "name": name, "pid": PID, "tid": PID, "ts": time_us(us), "args": values}


def in_order(events: Iterable[Event]) -> list[Event]:
    """Metadata, then the others by time; at one time as they were given."""
    return sorted(events, key=lambda event: (event["ph"] != "M", event.get("ts", 0.0)))


def write_events(
    path: Path, events: Iterable[Event], document: dict[str, Any], packed: bool
) -> None:
    """Writes ``events``, one a line, and the other keys of ``document``; ``packed``: as gzip. The
    same content is always the same bytes."""
    lines = (line.encode() for line in _lines(events, document))
    with path.open("wb") as file:
        if not packed:
            file.writelines(lines)
            return
        with gzip.GzipFile("", "wb", 6, file, mtime=0) as sink:
            sink.writelines(lines)


def _lines(events: Iterable[Event], document: dict[str, Any]) -> Iterator[str]:
    mark = '{\n"traceEvents": [\n'
    for event in events:
        yield mark + json.dumps(event)
        mark = ",\n"
    yield "\n]" if mark == ",\n" else '{\n"traceEvents": []'
    for key, value in document.items():
        yield f",\n{json.dumps(key)}: {json.dumps(value)}"
    yield "\n}\n"
