"""A trace with fewer ops: neighbours joined, so that thousands of ops can be planned in seconds.

Ops of a bucket are of the same blocks of the model, and all or none of them may run again, or the
host can do all or none. What lives inside of one bucket only is no tensor any more. Its bytes
are in the bucket's workspace, as far as they are above what else is there, so the peak of a bucket
is that of its ops, or a little more. Updates of large parameters are cut into slabs, as the host
takes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .lifetimes import live_pages
from .trace import READ, READWRITE, WRITE, Trace, make_trace

SLAB_BYTES = 256_000_000  # of parameter that one op updates
TOGETHER = SLAB_BYTES / 2  # of parameters whose updates are joined, at most
UPDATES = 32  # buckets of a small model's updates, so that the host can do some of them
SMALL_US = 1e-9  # as good as nothing
HALVINGS = 24  # in the search for how long buckets are


@dataclass
class _Bucket:
    """``ops`` that were joined, what they take together, and how they use tensors."""

    ops: list[int]
    us: float = 0.0
    modes: dict[int, int] = field(default_factory=dict)  # tensor → READ | WRITE


def bucketed(trace: Trace, most_ops: int) -> Trace:
    """The same iteration in about ``most_ops`` ops, or in as many as it has if these are fewer.
    Bounds and plans are for the new trace."""
    kinds = kinds_of(trace, blocks_of(trace))
    fewest = len(groups_of(trace, kinds, trace.ideal_us))
    groups = even_groups(trace, kinds, max(most_ops, 2 * fewest))  # no bucket is half of the model
    names = [_name(trace, ops) for ops in groups]
    return join(trace, groups, names, trace.page_size, SLAB_BYTES)


def shortened(trace: Trace, most_ops: int) -> Trace:
    """In buckets if it has more ops; large updates by slabs in any case."""
    return bucketed(trace, most_ops) if trace.ops > most_ops else updates_in_slabs(trace)


def updates_in_slabs(trace: Trace) -> Trace:
    """The same ops, but those that update a large parameter, each of which is several."""
    groups = [[op] for op in range(trace.ops)]
    return join(trace, groups, trace.op_names, trace.page_size, SLAB_BYTES)


def even_groups(trace: Trace, kinds: list[Any], most_ops: int) -> list[list[int]]:
    """So many groups at most, as even as can be."""
    low, high = 0.0, max(trace.ideal_us, SMALL_US)
    groups = groups_of(trace, kinds, 0.0)
    if len(groups) <= most_ops:
        return groups
    for _ in range(HALVINGS):
        limit = (low + high) / 2
        if len(groups_of(trace, kinds, limit)) > most_ops:
            low = limit
        else:
            high = limit
    return groups_of(trace, kinds, high)


def blocks_of(trace: Trace) -> list[tuple[int, ...]]:
    """The segments that each op is in."""
    blocks: list[tuple[int, ...]] = [() for _ in range(trace.ops)]
    for number, (first, last, _) in enumerate(trace.segments):
        for op in range(first, last + 1):
            blocks[op] = (*blocks[op], number)
    return blocks


def kinds_of(trace: Trace, *more: Sequence[Any]) -> list[Any]:
    """Of each op: only neighbours of one kind are joined."""
    return list(zip((~np.isnan(trace.op_host_us)).tolist(), trace.op_rerun.tolist(), *more))


def groups_of(trace: Trace, kinds: list[Any], limit_us: float) -> list[list[int]]:
    """Ops together as long as they take no longer than ``limit_us``."""
    host = (~np.isnan(trace.op_host_us)).tolist()
    weights = _updated_bytes(trace)
    together = min(TOGETHER, sum(weights) / UPDATES)
    groups: list[list[int]] = []
    size, limit = 0.0, 0.0
    for op, us in enumerate(trace.op_duration_us.tolist()):
        mine, limit = (weights[op], together) if host[op] else (us, max(limit_us, SMALL_US))
        if groups and kinds[op] == kinds[op - 1] and size + mine <= limit:
            groups[-1].append(op)
            size += mine
        else:
            groups.append([op])
            size = mine
    return groups


def _updated_bytes(trace: Trace) -> list[int]:
    """Bytes of parameters that each op writes."""
    weights = np.array(trace.tensor_kinds, np.str_) == "parameter"
    rows = (trace.access_mode & WRITE != 0) & weights[trace.access_tensor]
    found = np.zeros(trace.ops, np.int64)
    np.add.at(found, trace.access_op[rows], trace.tensor_bytes[trace.access_tensor[rows]])
    return found.tolist()


def join(
    trace: Trace, groups: list[list[int]], names: list[str], page_size: int, slab_bytes: float
) -> Trace:
    """``groups`` of neighbours as an op each, called ``names``. A tensor's number is its place in
    ``trace``; behind these come workspaces, in pages of ``page_size``. Updates of parameters with
    more than ``slab_bytes`` are several ops."""
    buckets = [_Bucket(ops, float(trace.op_duration_us[ops].sum())) for ops in groups]
    at = np.repeat(np.arange(len(groups)), [len(ops) for ops in groups])
    first, last = at[trace.first_op], at[trace.last_op]
    inner = (first == last) & ~trace.tensor_persistent
    # What is only written in an op, and was never there before, is read by none of the bucket. Of
    # what was there before, and is written in part, the rest stays.
    part = trace.access_page_count < trace.pages(trace.page_size)[trace.access_tensor]
    bucket_of = at[trace.access_op]
    there = trace.tensor_persistent[trace.access_tensor] | (first[trace.access_tensor] < bucket_of)
    mode_of = np.where(part & there & (trace.access_mode == WRITE), READWRITE, trace.access_mode)
    rows = zip(bucket_of.tolist(), trace.access_tensor.tolist(), mode_of.tolist())
    # A bucket does not run again where it would find anything as it was not before: what it
    # changes, what it reads before it has written that, or writes in part.
    changes = (trace.access_mode & WRITE != 0) & there
    row = np.unique(trace.access_tensor, return_index=True)[1]
    unmade = np.zeros(trace.tensors, np.bool_)
    unmade[trace.access_tensor[row]] = trace.access_mode[row] == READ
    unmade[trace.access_tensor[part & ~there]] = True
    written = np.zeros(trace.tensors, np.bool_)
    written[trace.access_tensor[trace.access_mode & WRITE != 0]] = True
    changes |= (unmade & written)[trace.access_tensor] & ~there
    once = set(bucket_of[changes].tolist())
    for bucket, tensor, mode in rows:
        modes = buckets[bucket].modes
        if tensor not in modes:
            modes[tensor] = mode
        elif modes[tensor] != WRITE:
            modes[tensor] |= mode
    tensors = [
        (i, nbytes, lasting)
        for i, (nbytes, lasting) in enumerate(
            zip(trace.tensor_bytes.tolist(), trace.tensor_persistent.tolist())
        )
    ]
    called = {i: name for i, name in enumerate(trace.tensor_names) if name is not None}
    kinds = dict(enumerate(trace.tensor_kinds))
    alive = np.zeros(len(groups) + 1)  # bytes of what is not inside of one bucket only
    sizes = trace.pages(page_size) * page_size
    for tensor in np.flatnonzero(~inner).tolist():
        lasting = bool(trace.tensor_persistent[tensor])
        alive[0 if lasting else first[tensor]] += sizes[tensor]
        alive[len(groups) if lasting else last[tensor] + 1] -= sizes[tensor]
    alive = np.cumsum(alive)
    peaks = live_pages(trace, page_size) * page_size
    ops: list[tuple[str, float, list[int], list[int]]] = []
    rerun, host, slabs, place = [], [], [], []
    for number, bucket in enumerate(buckets):
        reads = [t for t, mode in bucket.modes.items() if mode & READ and not inner[t]]
        writes = [t for t, mode in bucket.modes.items() if mode & WRITE and not inner[t]]
        beside = int(peaks[bucket.ops].max() - alive[number])
        if beside > 0:
            workspace = len(tensors)
            tensors.append((workspace, beside, False))
            kinds[workspace] = "workspace"
            writes.append(workspace)
        us = float(trace.op_host_us[bucket.ops].sum())
        weights = [trace.tensor_bytes[t] for t in writes if kinds[t] == "parameter"]
        count = 1 if np.isnan(us) else max(1, math.ceil(max(weights, default=0) / slab_bytes))
        place.append(len(ops))
        for slab in range(count):
            ops.append((names[number], bucket.us / count, reads, writes))
            rerun.append(bool(trace.op_rerun[bucket.ops].all()) and number not in once)
            host.append(None if np.isnan(us) else us / count)
            slabs.append((slab, count))
    segments = [(place[at[a]], place[at[b]], name) for a, b, name in trace.segments]
    made = make_trace(
        tensors,
        ops,
        page_size=page_size,
        names=called,
        kinds=kinds,
        source=trace.source,
        device=trace.device,
        metadata=trace.metadata | {"joined_from_ops": trace.ops},
        rerun=rerun,
        host_us=host,
        segments=segments,
    )
    return _in_slabs(made, slabs)


def _name(trace: Trace, ops: list[int]) -> str:
    """The longest op's, after the block that it is in."""
    longest = max(ops, key=lambda op: float(trace.op_duration_us[op]))
    around = [s for s in trace.segments if s.first_op <= longest <= s.last_op]
    inner = min(around, key=lambda s: s.last_op - s.first_op, default=None)
    return trace.op_names[longest] if inner is None else f"{inner.name}.{trace.op_names[longest]}"


def _in_slabs(trace: Trace, slabs: list[tuple[int, int]]) -> Trace:
    """Slab ``k`` of ``n`` accesses the ``k``-th part of the pages of each tensor."""
    if all(count == 1 for _, count in slabs):
        return trace
    slab, count = np.array(slabs, np.int64)[trace.access_op].T
    pages = trace.access_page_count
    first = pages * slab // count
    length = pages * (slab + 1) // count - first
    kept = length > 0
    return replace(
        trace,
        access_op=trace.access_op[kept],
        access_tensor=trace.access_tensor[kept],
        access_mode=trace.access_mode[kept],
        access_first_page=first[kept],
        access_page_count=length[kept],
    )
