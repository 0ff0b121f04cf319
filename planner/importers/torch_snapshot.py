"""PyTorch's CUDA memory snapshots (``torch.cuda.memory._dump_snapshot``).

A snapshot tells when each block was allocated and freed, with the stack that did it, but neither
what the block holds nor when it is read or written. So this trace is coarser than a recorded one:

- Each allocation and each free is an op, named by the innermost Python frame, that lasts until the
  next event. A free counts when it completes, since the memory is in use until then.
- Each block is a tensor of kind ``activation`` (a snapshot knows no kinds), written by its
  allocation and read by its free, so that all its life looks like one long gap. What becomes of
  blocks that cross the iteration's border, ``block_lives.py`` says.
- The trace is the last whole iteration of those that ``iteration.py`` finds, cut at the allocation
  with the least memory in use. If it finds none, the whole recording counts as one iteration.
- A block that lives through it all without an event has no access, so it is no tensor; all their
  bytes are ``static_bytes`` in the metadata.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TraceError
from ..iteration import ALLOCATION, cut_at_least_use, encode_events, find_balanced
from ..shown import shown
from ..trace import Floats, Ints, Trace
from ..trace_check import check_bytes
from .block_lives import Blocks, lives, trace_of
from .json_file import is_whole
from .plain_pickle import load_plain

FREE = 1
ACTIONS = {"alloc": ALLOCATION, "free_completed": FREE}


@dataclass(frozen=True, eq=False)
class _Events:
    """Allocations and completed frees of one device, in order."""

    kind: Ints  # [events], ALLOCATION or FREE
    address: Ints
    nbytes: Ints
    time_us: Floats  # from the first event on, not falling
    names: list[str]


def load(path: Path, page_size: int = 2 << 20) -> Trace:
    """The trace of the snapshot at ``path``, of the device with the most events.

    Raises ``TraceError`` naming the file, the event and the reason. Nothing in the pickle is run.
    """
    path = Path(path)
    snapshot = load_plain(path, "what torch.cuda.memory._dump_snapshot() wrote")
    device, raw = _busiest_device(snapshot, path)
    events = _events(raw, f"{path}: device_traces[{device}]")
    blocks = _blocks(events, _live_at_end(snapshot, device))
    check_bytes(blocks.nbytes, str(path))
    allocates = events.kind == ALLOCATION
    change = np.where(allocates, events.nbytes, -events.nbytes)
    codes = encode_events(events.kind, events.address, events.nbytes)
    found = find_balanced(codes, change, blocks.freed_age(len(codes)))
    part = slice(0, len(change)) if found is None else cut_at_least_use(found, change, allocates)
    tensors, static_bytes = lives(blocks, part, None if found is None else found.period)
    start = events.time_us[part]
    following = np.append(events.time_us, events.time_us[-1])[part.start + 1 : part.stop + 1]
    return trace_of(
        tensors,
        events.names[part],
        start - start[0],
        following - start,
        page_size=page_size,
        source="torch snapshot",
        device=f"cuda:{device}",
        metadata={
            "static_bytes": static_bytes,
            "iteration_found": found is not None,
            "first_event": part.start,
            "recorded_events": len(events.kind),
        },
    )


# --- reading ---------------------------------------------------------------------------------


def _busiest_device(snapshot: Any, path: Path) -> tuple[int, list[Any]]:
    traces = snapshot.get("device_traces") if isinstance(snapshot, dict) else None
    if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
        raise TraceError(f"{path}: no list 'device_traces', so this pickle is no memory snapshot")
    device = max(range(len(traces)), key=lambda index: len(traces[index]), default=0)
    if not traces or not traces[device]:
        raise TraceError(
            f"{path}: no events; call torch.cuda.memory._record_memory_history before training"
        )
    return device, traces[device]


def _events(raw: list[Any], where: str) -> _Events:
    rows: list[tuple[int, int, int, int]] = []
    names = []
    for number, event in enumerate(raw):
        if not isinstance(event, dict) or not isinstance(event.get("action"), str):
            raise TraceError(f"{where}[{number}]: not an event with an 'action'")
        kind = ACTIONS.get(event["action"])
        if kind is None:  # a segment of the allocator, a snapshot, the first half of a free
            continue
        values = [event.get(key) for key in ("addr", "size", "time_us")]
        for key, value in zip(("addr", "size", "time_us"), values):
            if not is_whole(value):
                raise TraceError(
                    f"{where}[{number}]: {key} = {shown(value)} is not a whole number ≥ 0"
                    + ("; record with PyTorch 2.2 or newer" if key == "time_us" else "")
                )
        address, nbytes, time = values
        if nbytes:
            rows.append((kind, address, nbytes, time))  # type: ignore[arg-type]
            names.append(_name(event, nbytes))
    if not rows:
        raise TraceError(f"{where}: no allocation and no free among {len(raw)} events")
    table = np.array(rows, np.int64)
    times = np.maximum.accumulate(table[:, 3])  # threads may note theirs a little late
    return _Events(
        table[:, 0], table[:, 1], table[:, 2], (times - times[0]).astype(np.float64), names
    )


def _name(event: dict[str, Any], nbytes: Any) -> str:
    verb = "alloc" if event["action"] == "alloc" else "free"
    frames = event.get("frames")
    for frame in frames if isinstance(frames, list) else []:
        file = str(frame.get("filename", "")) if isinstance(frame, dict) else ""
        if file.endswith(".py"):
            place = file.replace("\\", "/").rsplit("/", 1)[-1]
            return f"{verb} {frame.get('name')} ({place}:{frame.get('line')})"
    return f"{verb} {nbytes} bytes"


def _live_at_end(snapshot: dict[str, Any], device: int) -> dict[int, int]:
    """Bytes of the blocks in use when the snapshot was taken, by address."""
    live: dict[int, int] = {}
    for segment in _dicts(snapshot.get("segments")):
        if segment.get("device", device) != device:
            continue
        address: Any = segment.get("address")
        for block in _dicts(segment.get("blocks")):
            address = block.get("address", address)  # older snapshots tell the segment's only
            size: Any = block.get("size")
            wanted = block.get("requested_size", size)
            if not (is_whole(address) and is_whole(size) and is_whole(wanted)):
                break
            if wanted and str(block.get("state")).startswith("active"):
                live[address] = wanted
            address += size
    return live


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _blocks(events: _Events, live_at_end: dict[int, int]) -> Blocks:
    count = len(events.kind)
    open_: dict[int, int] = {}
    rows: list[tuple[int, int, int]] = []
    triples = zip(events.kind.tolist(), events.address.tolist(), events.nbytes.tolist())
    for number, (kind, address, nbytes) in enumerate(triples):
        born = open_.pop(address, -1)
        if kind == FREE:
            rows.append((born, number, int(events.nbytes[born]) if born >= 0 else nbytes))
            continue
        if born >= 0:  # its free was not recorded; the address is in use again
            rows.append((born, number - 1, int(events.nbytes[born])))
        open_[address] = number
    rows += [(born, count, int(events.nbytes[born])) for born in open_.values()]
    rows += [(-1, count, nbytes) for address, nbytes in live_at_end.items() if address not in open_]
    table = np.array(rows, np.int64)
    return Blocks(table[:, 0], table[:, 1], table[:, 2])
