"""PyTorch profiler traces (``prof.export_chrome_trace``), recorded with ``profile_memory=True`` and
``record_shapes=True``.

- An op is an outermost ``cpu_op`` event. It lasts until it ends or the next one begins; where the
  file has GPU kernels, as long as the kernels that were launched within it, back to back.
- A tensor is a memory block, from the ``[memory]`` event of its allocation to that of its free, of
  the GPU with the most events, or of the CPU if no GPU has any. A profile knows no kinds, so all
  are activations. The op in which a block is allocated writes it, the one in which it is freed (or
  after which) reads it. ``block_lives.py`` says what becomes of blocks that cross the iteration's
  border.
- What else an op reads or writes in place is guessed from shapes: ``shape_match.py``.
- The iteration is the last full ``ProfilerStep``, else the last of those that ``iteration.py``
  finds in the ops and their shapes, else the whole recording.
- Bytes of blocks without access, and of those that the allocator already had out at its first
  event, are ``static_bytes`` in the metadata.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TraceError
from ..iteration import cut_at_least_use, find_balanced
from ..shown import shown
from ..trace import Ints, Trace
from ..trace_check import check_bytes
from .block_lives import Blocks, lives, trace_of
from .json_file import is_number, read_json_object
from .shape_match import Call, input_bytes, match_inputs

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
MOST = 0.9  # a step with fewer of the busiest step's ops was cut off


@dataclass
class _Op:
    name: str
    start_us: float
    end_us: float
    calls: list[Call] = field(default_factory=list)
    external_ids: list[int] = field(default_factory=list)
    duration_us: float = 0.0


@dataclass(frozen=True)
class _MemoryEvent:
    at_us: float
    address: int
    nbytes: int  # < 0: freed
    device: tuple[int, int]  # type (0 is the CPU), index
    total_bytes: int  # that the allocator has out, after the event


def load(path: Path, page_size: int = 2 << 20) -> Trace:
    """The trace of one iteration of the profile at ``path``, ``.json`` or ``.json.gz``.

    Raises ``TraceError`` naming the file, the event and the reason.
    """
    path = Path(path)
    wanted = "what torch.profiler's export_chrome_trace() wrote"
    events = read_json_object(path, wanted).get("traceEvents")
    if not isinstance(events, list):
        raise TraceError(
            f"{path}: no list 'traceEvents', so this is no profiler trace; give {wanted}"
        )
    ops = _ops(events, path)
    memory = _memory(events, path)
    blocks, born_us = _blocks(memory, ops)
    check_bytes(blocks.nbytes, str(path))
    on_gpu = memory[0].device[0] != 0
    match = match_inputs(blocks, born_us, (op.calls for op in ops), rounded=on_gpu)
    part = _step(events, ops) or _repeated(ops, blocks)
    span = part or slice(0, len(ops))
    tensors, unused_bytes = lives(blocks, span, None, match.uses)
    inside = ops[span]
    kernels = _use_kernel_times(events, ops)
    durations = np.array([op.duration_us for op in inside])
    starts = np.array([op.start_us - inside[0].start_us for op in inside])
    if kernels:
        starts = np.concatenate([[0.0], np.cumsum(durations)[:-1]])
    kind, index = memory[0].device
    return trace_of(
        tensors,
        [op.name for op in inside],
        starts,
        durations,
        page_size=page_size,
        source="torch profiler",
        device="cpu" if kind == 0 else f"cuda:{index}",
        metadata={
            "static_bytes": unused_bytes + max(memory[0].total_bytes - memory[0].nbytes, 0),
            "matched_inputs": match.found,
            "unmatched_inputs": match.missed,
            "kernel_times": kernels,
            "iteration_found": part is not None,
            "first_op": span.start,
            "recorded_ops": len(ops),
        },
    )


# --- ops -------------------------------------------------------------------------------------


def _checked(events: list[Any], path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The operator calls with their arguments."""
    for number, event in enumerate(events):
        if not isinstance(event, dict):
            raise TraceError(f"{path}: traceEvents[{number}] is not an object")
        if event.get("ph") != "X" or event.get("cat") != "cpu_op":
            continue
        for key in ("ts", "dur"):
            if not is_number(event.get(key)):
                value = shown(event.get(key))
                raise TraceError(
                    f"{path}: traceEvents[{number}]: {key} = {value} is not a time ≥ 0"
                )
        arguments = event.get("args")
        yield event, arguments if isinstance(arguments, dict) else {}


def _ops(events: list[Any], path: Path) -> list[_Op]:
    """The outermost operator calls of all threads, by start, cut where the next one begins."""
    calls = sorted(_checked(events, path), key=lambda pair: (pair[0]["ts"], -pair[0]["dur"]))
    if not any("Input Dims" in arguments for _, arguments in calls):
        raise TraceError(
            f"{path}: no operator with input shapes; record with profile(record_shapes=True)"
        )
    ops: list[_Op] = []
    current: dict[Any, _Op] = {}  # by thread
    for event, arguments in calls:
        start, name = float(event["ts"]), str(event.get("name"))
        thread = str((event.get("pid"), event.get("tid")))
        op = current.get(thread)
        if op is None or start >= op.end_us:
            op = current[thread] = _Op(name, start, start + float(event["dur"]))
            ops.append(op)
        sizes, written = input_bytes(name, arguments)
        op.calls.append(Call(start, sizes, written))
        if isinstance(identity := arguments.get("External id"), int):
            op.external_ids.append(identity)
    for op, following in pairwise(ops):
        op.end_us = min(op.end_us, following.start_us)
    for op in ops:
        op.duration_us = op.end_us - op.start_us
    return ops


def _kernels(events: list[Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """What ran on a GPU, each with the number of the operator call that launched it."""
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in GPU_CATEGORIES:
            arguments = event.get("args")
            identity = arguments.get("External id") if isinstance(arguments, dict) else None
            if isinstance(identity, int) and all(is_number(event.get(k)) for k in ("ts", "dur")):
                yield identity, event


def _use_kernel_times(events: list[Any], ops: list[_Op]) -> bool:
    """Whether there were any: a call to a GPU operator ends long before its kernels do."""
    busy: defaultdict[int, float] = defaultdict(float)
    for identity, kernel in _kernels(events):
        busy[identity] += float(kernel["dur"])
    for op in ops if busy else []:
        op.duration_us = sum(busy.get(identity, 0.0) for identity in op.external_ids)
    return bool(busy)


def _step(events: list[Any], ops: list[_Op]) -> slice | None:
    """The last ``ProfilerStep`` that is not cut off."""
    starts = [op.start_us for op in ops]
    found = []
    for event in events:
        name = event.get("name")
        if event.get("ph") != "X" or not isinstance(name, str):
            continue
        if name.startswith("ProfilerStep#") and is_number(event.get("ts")):
            stop = event["ts"] + (event["dur"] if is_number(event.get("dur")) else 0.0)
            first, last = np.searchsorted(starts, [event["ts"], stop]).tolist()
            found.append(slice(first, last))
    most = max((part.stop - part.start for part in found), default=0)
    full = [part for part in found if part.stop - part.start >= max(MOST * most, 1)]
    return max(full, key=lambda part: part.start, default=None)


def _repeated(ops: list[_Op], blocks: Blocks) -> slice | None:
    """The last iteration that repeats the one before, op by op and shape by shape."""
    codes: dict[tuple[Any, ...], int] = {}
    for op in ops:
        codes.setdefault(_signature(op), len(codes))
    change = np.zeros(len(ops) + 1, np.int64)  # blocks that were there first go to the end's slot
    np.add.at(change, blocks.born, blocks.nbytes)
    np.subtract.at(change, blocks.freed, blocks.nbytes)
    sequence = np.array([codes[_signature(op)] for op in ops])
    found = find_balanced(sequence, change[:-1], blocks.freed_age(len(ops)))
    if found is None:
        return None
    return cut_at_least_use(found, change[:-1], np.ones(len(ops), np.bool_))


def _signature(op: _Op) -> tuple[Any, ...]:
    return op.name, tuple(call.sizes for call in op.calls)


# --- memory ----------------------------------------------------------------------------------


def _memory(events: list[Any], path: Path) -> list[_MemoryEvent]:
    """The allocations and frees of one device, in order."""
    found = []
    for number, event in enumerate(events):
        if event.get("name") != "[memory]" or not isinstance(event.get("args"), dict):
            continue
        arguments = event["args"]
        at, address, nbytes = event.get("ts"), arguments.get("Addr"), arguments.get("Bytes")
        whole = all(isinstance(value, int) and abs(value) < 1 << 63 for value in (address, nbytes))
        if not is_number(at) or not whole:
            raise TraceError(
                f"{path}: traceEvents[{number}]: a [memory] event needs numbers ts, Addr and Bytes "
                f"(has {shown(at)}, {shown(address)}, {shown(nbytes)})"
            )
        kind, index, total = (
            value if isinstance(value := arguments.get(key), int) else 0
            for key in ("Device Type", "Device Id", "Total Allocated")
        )
        if nbytes:
            found.append(_MemoryEvent(float(event["ts"]), address, nbytes, (kind, index), total))
    if not found:
        raise TraceError(
            f"{path}: no [memory] events; record with profile(profile_memory=True) and "
            "export_chrome_trace"
        )
    count = Counter(event.device for event in found)
    chosen = max(count, key=lambda device: (device[0] != 0, count[device]))
    return sorted((e for e in found if e.device == chosen), key=lambda event: event.at_us)


def _blocks(memory: list[_MemoryEvent], ops: list[_Op]) -> tuple[Blocks, list[float]]:
    """Lives in ops, and the times of birth."""
    op_of = _op_of(memory, ops)
    open_: dict[int, int] = {}  # address → allocation
    rows: list[tuple[int, int, int, float]] = []

    def close(event: int, freed: int) -> None:
        start = memory[event]
        rows.append((int(op_of[event]), freed, start.nbytes, start.at_us))

    for number, event in enumerate(memory):
        allocation = open_.pop(event.address, None)
        if event.nbytes > 0:
            if allocation is not None:  # its free was not recorded; the address is in use again
                close(allocation, int(op_of[number]))
            open_[event.address] = number
        elif allocation is not None:
            close(allocation, int(op_of[number]))
        else:
            rows.append((-1, int(op_of[number]), -event.nbytes, -1.0))
    for allocation in open_.values():
        close(allocation, len(ops))
    born, freed, nbytes, born_us = zip(*rows)
    return Blocks(np.array(born), np.array(freed), np.array(nbytes)), list(born_us)


def _op_of(memory: list[_MemoryEvent], ops: list[_Op]) -> Ints:
    """The op in which each event falls; between two ops an allocation belongs to the next one and
    a free to the one before, [events]."""
    at = np.array([event.at_us for event in memory])
    begun = np.searchsorted([op.start_us for op in ops], at, side="right") - 1
    ended = np.array([op.end_us for op in ops])[np.maximum(begun, 0)] <= at
    allocates = np.array([event.nbytes > 0 for event in memory])
    later = allocates & ((begun < 0) | ended)
    return np.clip(begun + later, 0, len(ops) - 1).astype(np.int64)
