"""Trainings for Prometheus, by its own client library: served by a reader, not by the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .reader import COUNTERS, TIER_KEYS, TIMES, Training

_TOTALS = {*COUNTERS, "stall_us", "iterations_us"} - {
    "arena_bytes", "dense_peak_bytes", "live_bytes", "page_size",
}  # fmt: skip


def serve(host: str, port: int, find: Callable[[], list[Training]]) -> Any:
    """``(server, thread)``. ``find`` is called for each scrape, in any thread. Raises ``OSError``
    for an address that cannot be had."""
    from prometheus_client import CollectorRegistry, start_http_server

    class Collector:
        def collect(self) -> Iterator[Any]:
            return families(find())

    registry: Any = CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    return start_http_server(port, host, registry)


def families(trainings: list[Training]) -> Iterator[Any]:
    """``tensorpager_*``, each with the label ``name`` of its training; bytes and seconds."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    def family(key: str, label: str | None = None, total: bool = False) -> Any:
        kind = CounterMetricFamily if total else GaugeMetricFamily
        kept = f"tier_{key}" if label == "tier" else key.removesuffix("_us")
        name = f"tensorpager_{kept}" + "_seconds" * key.endswith("_us")
        found = kind(name, f"{key} of Pager.stats()", labels=["name", *([label] if label else [])])
        for training in trainings:
            value = training.latest[key]
            for of, number in value.items() if label else [("", value)]:
                if number is not None:
                    each = number / 1e6 if key.endswith("_us") else number
                    found.add_metric([training.name, of] if label else [training.name], each)
        return found

    yield GaugeMetricFamily("tensorpager_trainings", "Trainings of this user.", len(trainings))
    yield from (family(key, total=key in _TOTALS) for key in (*COUNTERS, *TIMES))
    yield family("channel_bytes", "channel", total=True)
    yield family("logged", "value")
    yield from (family(key, "tier") for key in TIER_KEYS)
