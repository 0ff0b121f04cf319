"""The record that a running training publishes: one fixed layout, little-endian.

::

    offset  bytes  field
    0       8      b"TPMETRIC"
    8       4      version of the layout
    12      4      size of the whole record in bytes
    16      8      sequence number
    24      4      CRC-32 of the body
    28      4      0
    32      n      body, see ``_BODY``
    32 + n  8      the sequence number again

The whole record is written over the last one. A reader takes it only if both sequence numbers are
equal and the checksum is right (``decode``); otherwise it reads again. So a torn record is never
seen, and neither side waits for the other. Nothing here imports torch.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...planner.errors import PagerError

MAGIC, VERSION = b"TPMETRIC", 1
TIERS = ("device", "host", "disk")
CHANNELS = ("host-out", "disk-out", "host-in", "disk-in")
MODES = ("demand", "recording", "planned")
RECENT, LOGGED = 60, 16  # iteration times kept; names that can be logged
SCRIPT_BYTES, DEVICE_BYTES, NAME_BYTES = 48, 16, 32

COUNTERS = (
    "iterations", "faults", "gathers", "compactions", "prefetches", "prefetch_hits",
    "planned_iterations", "departures", "bytes_out", "bytes_in", "disk_bytes_written",
    "overlap_updates", "arena_bytes", "dense_peak_bytes", "live_bytes", "page_size",
)  # fmt: skip
# µs. Since start: waiting for pages; in iterations. Of one iteration: the latest one, and what it
# waited; by the plan; no plan is faster; with no waiting; median of the latest planned ones.
TIMES = (
    "stall_us", "iterations_us", "iteration_us", "iteration_stall_us",
    "predicted_us", "bound_us", "ideal_us", "measured_us",
)  # fmt: skip

_HEADER = struct.Struct("<8sIIQII")
_BODY = struct.Struct(
    "<iBBHHxx"  # pid, mode (index in MODES), closed, recent times, logged values
    "4q"  # wall clock at start and now, monotonic clock now and when the iteration began (ns)
    f"{3 * len(TIERS)}Q{len(CHANNELS)}Q{len(COUNTERS)}Q"
    f"{len(TIMES)}d{RECENT}f"  # NaN: not known
    f"{SCRIPT_BYTES}s{DEVICE_BYTES}s" + f"{NAME_BYTES}sd" * LOGGED
)
_SEQUENCE = struct.Struct("<Q")
RECORD_BYTES = _HEADER.size + _BODY.size + _SEQUENCE.size


class MetricsError(PagerError):
    """What was read is no record of a training, or not a whole one."""


class Tier(NamedTuple):
    """Bytes. ``used``: by pages now; ``peak``: at most so far, on the device with dense memory."""

    used: int
    peak: int
    budget: int


@dataclass(frozen=True)
class Record:
    """What one Pager said of itself at ``monotonic_ns``.

    Clocks are in ns: ``started_ns`` and ``updated_ns`` since the epoch; ``monotonic_ns`` and
    ``began_ns`` (of the iteration that runs, 0 for none) of the machine's monotonic clock.
    ``times_us``: ``None`` for what is not known. ``recent_s``: seconds of the latest iterations,
    oldest first. ``logged``: the latest values that the program logged, by name.
    """

    pid: int
    script: str
    device: str
    mode: str
    closed: bool
    started_ns: int
    updated_ns: int
    monotonic_ns: int
    began_ns: int
    tiers: dict[str, Tier]
    channel_bytes: dict[str, int]
    counters: dict[str, int]
    times_us: dict[str, float | None]
    recent_s: Sequence[float]
    logged: dict[str, float]


def encode(record: Record, sequence: int) -> bytes:
    """``record`` as ``RECORD_BYTES`` bytes. Longer texts are cut."""
    recent = list(record.recent_s)[-RECENT:]
    times = (record.times_us[name] for name in TIMES)
    logged: list[bytes | float] = []
    for name, value in list(record.logged.items())[:LOGGED]:
        logged += (_text(name, NAME_BYTES), value)
    count = len(logged) // 2
    body = _BODY.pack(
        record.pid,
        MODES.index(record.mode),
        record.closed,
        len(recent),
        count,
        record.started_ns,
        record.updated_ns,
        record.monotonic_ns,
        record.began_ns,
        *(value for tier in TIERS for value in record.tiers[tier]),
        *(record.channel_bytes[name] for name in CHANNELS),
        *(record.counters[name] for name in COUNTERS),
        *(math.nan if value is None else value for value in times),
        *recent,
        *[math.nan] * (RECENT - len(recent)),
        _text(record.script, SCRIPT_BYTES),
        _text(record.device, DEVICE_BYTES),
        *logged,
        *[b"", math.nan] * (LOGGED - count),
    )
    header = _HEADER.pack(MAGIC, VERSION, RECORD_BYTES, sequence, zlib.crc32(body), 0)
    return header + body + _SEQUENCE.pack(sequence)


def decode(data: bytes) -> Record | None:
    """The record in ``data``; ``None`` if it is being written right now, so read again.

    Raises ``MetricsError`` for what is no record of this version. Every field is checked: nothing
    that ``data`` may hold makes readers fail later.
    """
    if len(data) < _HEADER.size or data[: len(MAGIC)] != MAGIC:
        raise MetricsError("is not a metrics record of tensorpager")
    _, version, nbytes, sequence, checksum, _ = _HEADER.unpack_from(data)
    if version != VERSION:
        raise MetricsError(
            f"has layout version {version} and this tensorpager reads version {VERSION}; use the "
            "tensorpager that the training runs with"
        )
    if nbytes != RECORD_BYTES or len(data) != RECORD_BYTES:
        raise MetricsError(f"has {len(data)} bytes; a record has {RECORD_BYTES}. It is cut off")
    body = data[_HEADER.size : -_SEQUENCE.size]
    if _SEQUENCE.unpack_from(data, len(data) - _SEQUENCE.size)[0] != sequence:
        return None
    if zlib.crc32(body) != checksum:
        return None
    return _record(body)


def _record(body: bytes) -> Record:
    values = iter(_BODY.unpack(body))
    pid, mode, closed, recent, logged = (next(values) for _ in range(5))
    if mode >= len(MODES) or recent > RECENT or logged > LOGGED:
        raise MetricsError(f"holds impossible values (mode {mode}, {recent} times, {logged} names)")
    started, updated, now, began = (next(values) for _ in range(4))
    tiers = {name: Tier(next(values), next(values), next(values)) for name in TIERS}
    channels = {name: next(values) for name in CHANNELS}
    counters = {name: next(values) for name in COUNTERS}
    times = {name: _known(next(values)) for name in TIMES}
    seconds = [next(values) for _ in range(RECENT)][:recent]
    script, device = (_string(next(values)) for _ in range(2))
    pairs = [(_string(next(values)), next(values)) for _ in range(LOGGED)][:logged]
    return Record(
        pid, script, device, MODES[mode], bool(closed), started, updated, now, began, tiers,
        channels, counters, times, tuple(s for s in seconds if 0 <= s < math.inf), dict(pairs),
    )  # fmt: skip


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _text(text: str, most: int) -> bytes:
    """UTF-8 in ``most`` bytes; a letter that does not fit whole is left out."""
    data = text.encode(errors="replace")
    if len(data) > most:
        data = data[:most].decode(errors="ignore").encode()
    return data


def _string(data: bytes) -> str:
    """Text from elsewhere: no control characters, whatever the bytes were."""
    text = data.rstrip(b"\0").decode(errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)
