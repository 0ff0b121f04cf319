"""Metrics for Prometheus: text exposition format 0.0.4, served by a reader, not by the training.

https://prometheus.io/docs/instrumenting/exposition_formats/ and /docs/practices/naming/: base units
(bytes, seconds), ``_total`` on counters.
"""

from __future__ import annotations

import math
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from .format import MODES, MetricsError, Record
from .reader import Training

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PLAIN = "text/plain; charset=utf-8"
Labels = dict[str, str]
Samples = Iterable[tuple[Labels, float | None]]  # None: not known, left out


class Family(NamedTuple):
    """One metric: what follows ``tensorpager_`` in its name, and its samples of one training."""

    name: str
    kind: str
    text: str
    samples: Callable[[Training], Samples]


def _counter(name: str, key: str, text: str) -> Family:
    return Family(name, "counter", text, lambda t: [({}, t.record.counters[key])])


def _gauge_bytes(name: str, key: str, text: str) -> Family:
    return Family(name, "gauge", text, lambda t: [({}, t.record.counters[key])])


def _seconds(name: str, key: str, text: str, kind: str = "gauge") -> Family:
    def samples(training: Training) -> Samples:
        us = training.record.times_us[key]
        return [({}, None if us is None else us / 1e6)]

    return Family(name, kind, text, samples)


def _per_tier(name: str, field: str, text: str) -> Family:
    def samples(training: Training) -> Samples:
        tiers = training.record.tiers
        return [({"tier": tier}, getattr(value, field)) for tier, value in tiers.items()]

    return Family(name, "gauge", text, samples)


def _channels(training: Training) -> Samples:
    return [({"channel": name}, n) for name, n in training.record.channel_bytes.items()]


def _modes(training: Training) -> Samples:
    return [({"mode": mode}, float(mode == training.record.mode)) for mode in MODES]


def _facts(training: Training) -> Samples:
    record: Record = training.record
    return [({"script": record.script, "device": record.device}, 1.0)]


def _logged(training: Training) -> Samples:
    return [({"name": name}, value) for name, value in training.record.logged.items()]


FAMILIES: Sequence[Family] = (
    Family("training_info", "gauge", "What the process is; always 1.", _facts),
    Family("start_time_seconds", "gauge", "When the Pager was made, since the epoch.",
           lambda t: [({}, t.record.started_ns / 1e9)]),
    Family("updated_time_seconds", "gauge", "When the training last published, since the epoch.",
           lambda t: [({}, t.record.updated_ns / 1e9)]),
    Family("mode", "gauge", "1 for the mode that the latest iteration ran in.", _modes),
    _per_tier("tier_used_bytes", "used", "Bytes that pages take in a tier now."),
    _per_tier("tier_peak_bytes", "peak",
              "Most bytes used in a tier so far; on the device with dense memory."),
    _per_tier("tier_budget_bytes", "budget", "Bytes that a tier may use."),
    _gauge_bytes("arena_bytes", "arena_bytes", "Bytes of the device budget that hold pages."),
    _gauge_bytes("dense_peak_bytes", "dense_peak_bytes",
                 "Most bytes of dense memory beside the arena."),
    _gauge_bytes("live_bytes", "live_bytes", "Bytes of all pages, in any tier."),
    Family("channel_bytes_total", "counter", "Bytes of pages moved by a channel.", _channels),
    _counter("disk_written_bytes_total", "disk_bytes_written", "Bytes written to disk."),
    _counter("iterations_total", "iterations", "Iterations completed."),
    _counter("planned_iterations_total", "planned_iterations",
             "Iterations that followed a plan from end to end."),
    _counter("plan_departures_total", "departures", "Plans that were left early."),
    _counter("faults_total", "faults", "Runs of pages brought in because an op needed them."),
    _counter("prefetches_total", "prefetches", "Planned moves that brought their pages."),
    _counter("prefetch_hits_total", "prefetch_hits", "Those that came in time."),
    _counter("gathers_total", "gathers", "Dense copies made of scattered frames."),
    _counter("compactions_total", "compactions", "Times that runs slid together."),
    _seconds("stall_seconds_total", "stall_us", "Time spent waiting for pages.", "counter"),
    _seconds("iterations_seconds_total", "iterations_us", "Time spent in completed iterations.",
             "counter"),
    _seconds("iteration_seconds", "iteration_us", "Duration of the latest iteration."),
    _seconds("iteration_predicted_seconds", "predicted_us", "Duration by the plan."),
    _seconds("iteration_bound_seconds", "bound_us", "No plan is faster than this."),
    _seconds("iteration_ideal_seconds", "ideal_us", "Duration if nothing ever had to wait."),
    Family("logged", "gauge", "Latest value that the program logged by a name.", _logged),
)  # fmt: skip


def render(trainings: Iterable[Training]) -> str:
    """All metrics of ``trainings``; each sample has the label ``pid``, and ``pager`` for others
    than the first Pager of a process."""
    known = list(trainings)
    lines = [
        "# HELP tensorpager_trainings Trainings of this user that publish metrics.",
        "# TYPE tensorpager_trainings gauge",
        f"tensorpager_trainings {len(known)}",
    ]
    for family in FAMILIES:
        lines += _family(family, known)
    return "\n".join(lines) + "\n"


def _family(family: Family, trainings: Sequence[Training]) -> Iterator[str]:
    name = f"tensorpager_{family.name}"
    yield f"# HELP {name} {family.text}"
    yield f"# TYPE {name} {family.kind}"
    for training in trainings:
        pid, _, number = training.name.partition(".")
        own = {"pid": pid, **({"pager": number} if number else {})}
        for labels, value in family.samples(training):
            if value is not None:
                yield f"{name}{{{_labels({**own, **labels})}}} {_value(value)}"


def _labels(labels: Labels) -> str:
    return ",".join(f'{name}="{_escape(text)}"' for name, text in labels.items())


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if isinstance(value, int) else repr(float(value))


# -- serving -------------------------------------------------------------------------------------
class Server(ThreadingHTTPServer):
    """Serves ``/metrics``; ``content`` is called for each scrape, in any thread."""

    daemon_threads = True

    def __init__(self, host: str, port: int, content: Callable[[], str]) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.content = content
        super().__init__((host, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        name = str(host)
        return f"http://{f'[{name}]' if ':' in name else name}:{port}/metrics"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 10  # a client that says nothing is left

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            try:
                status, kind, text = HTTPStatus.OK, CONTENT_TYPE, self.server.content()
            except MetricsError as error:
                status, kind = HTTPStatus.SERVICE_UNAVAILABLE, _PLAIN
                text = f"tensorpager: {error}\n"
        else:
            status, kind = HTTPStatus.NOT_FOUND, _PLAIN
            text = "tensorpager: metrics are at /metrics\n"
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def version_string(self) -> str:
        return "tensorpager"

    def log_message(self, format: str, *arguments: object) -> None:
        """A line for each scrape is of no use."""
