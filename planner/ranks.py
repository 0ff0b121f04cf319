"""Several devices: what one rank of FSDP2 does of a trace's iteration, and what that takes.

Each rank trains on as much as the trace does, so N ranks do N times the work in an iteration. Of
every parameter, its gradient and its states a rank holds an N-th, rounded up. The parameters of a
block (``layers.7.…``: the first number in their names) are gathered together, those of no block as
the root's group::

    network   gather 1 | gather 2 |          reduce 2 | gather 1 | reduce 1
    compute            | block 1  | block 2 | backward 2          | backward 1 | update (1/N)

The gather of the next block is begun when a block begins, so two are on the device at a time; after
its forward pass a block is given up, and gathered anew for the backward pass; the root stays until
the end of that. A whole gradient is there until the backward pass of its block has ended, and is
reduced then, from a copy that stays until the next one is reduced. What the network takes beyond
what is computed meanwhile is an op of its own, "wait for …"; a CPU computes nothing meanwhile.

*Dense memory*: what is gathered, or yet to be reduced, is in no pages. The border between the two
stands still through an iteration, so the most that is dense at any time is a workspace that all ops
use. (On a CPU gloo takes another copy of what it gathers or reduces, and an update two copies of
what it updates.) Activations are dense too, but for large ones that the backward pass uses again.

*Pages*: small weights, gradients and states share pages with others of their kind, as in training.

*The network*: rings. A collective of S bytes takes N − 1 steps of ``latency_us`` and moves
S (N − 1) / N through the slowest of its links: the device's own within a node, the node's where
there are several. *A node*: ranks share its host memory and its disk; each has a link of its own,
and all links together move at most what host memory does. *Stragglers*: ranks meet in every
collective, so where they take different times for the same ops, the slowest of them decides.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from .hardware import Hardware
from .trace import READ, WRITE, Bools, Trace, make_trace

_BLOCK = re.compile(r"^(.*?\.?\d+)\.")
ROOT = "root"
DENSE = "dense"


@dataclass(frozen=True)
class Cluster:
    """``ranks`` on ``nodes`` nodes, equally many on each. Rates in bytes a second: ``fabric`` of a
    device to others of its node, ``network`` of a node to others, ``host`` of a node's memory,
    which all its links share (``inf``: enough for all). ``spread``: standard deviation of the times
    that ranks take for the same ops, by their mean. Raises ``ValueError`` otherwise."""

    ranks: int
    nodes: int = 1
    fabric: float = 300e9
    network: float = 50e9
    latency_us: float = 10.0
    host: float = float("inf")
    spread: float = 0.0

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.nodes < 1 or self.ranks % self.nodes:
            raise ValueError(
                f"{self.ranks} ranks cannot be spread evenly over {self.nodes} nodes; give a "
                "number of ranks that the nodes divide"
            )

    @property
    def per_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def slowest(self) -> float:
        """What the slowest of the ranks takes, by what they take on average: if that is normally
        distributed (Blom's approximation of its largest value, off by 5 % for two)."""
        place = (self.ranks - 0.375) / (self.ranks + 0.25)
        return 1 + self.spread * max(0.0, NormalDist().inv_cdf(place))

    def collective_us(self, nbytes: float) -> float:
        """An all-gather or a reduce-scatter of ``nbytes`` in all."""
        if self.ranks == 1:
            return 0.0
        rate = self.fabric if self.nodes == 1 else min(self.fabric, self.network)
        share = (self.ranks - 1) / self.ranks
        return (self.ranks - 1) * self.latency_us + nbytes * share / rate * 1e6

    def part_of(self, node: Hardware) -> Hardware:
        """What one rank has of ``node``, whose device and link are each rank's own, while all ranks
        of the node move as much as it does."""
        count = self.per_node
        link = self.host / (2 * count)  # both directions at a time
        return node.with_(
            host_bytes=node.host_bytes / count,
            disk_bytes=node.disk_bytes / count,
            d2h_bytes_per_s=min(node.d2h_bytes_per_s, link),
            h2d_bytes_per_s=min(node.h2d_bytes_per_s, link),
            disk_read_bytes_per_s=node.disk_read_bytes_per_s / count,
            disk_write_bytes_per_s=node.disk_write_bytes_per_s / count,
            host_adam_bytes_per_s=node.host_adam_bytes_per_s / count,
        )


@dataclass
class _Stay:
    """The parameters of a group are gathered, for ops ``first`` to ``last``."""

    group: str
    first: int
    last: int
    nbytes: int = 0
    shards: list[int] = field(default_factory=list)


def rank_trace(trace: Trace, cluster: Cluster, page_size: int | None = None) -> Trace:
    """The iteration of one of the ranks, with pages of ``page_size`` bytes (the trace's)."""
    return _Rank(trace, cluster, page_size or trace.page_size).made()


def margin(rank: Trace) -> int:
    """Bytes that training with pages keeps free beside what is dense."""
    dense = [size for size, name in zip(rank.tensor_bytes, rank.tensor_names) if name == DENSE]
    return sum(map(int, dense)) // 16


def group_of(name: str | None) -> str:
    """The block that a parameter, gradient or state of this name belongs to."""
    found = _BLOCK.match(name or "")
    return found.group(1) if found and " +" not in (name or "") else ROOT


class _Rank:
    def __init__(self, trace: Trace, cluster: Cluster, page_size: int) -> None:
        self.trace, self.cluster, self.page_size = trace, cluster, page_size
        kinds = trace.tensor_kinds
        self.on_cpu = trace.device.startswith("cpu")
        self.groups = {
            tensor: group_of(trace.tensor_names[tensor])
            for tensor in range(trace.tensors)
            if kinds[tensor] in ("parameter", "gradient", "optimizer")
        }
        self.uses: list[dict[int, int]] = [{} for _ in range(trace.ops)]
        for op, tensor, mode in zip(
            trace.access_op.tolist(), trace.access_tensor.tolist(), trace.access_mode.tolist()
        ):
            self.uses[op][tensor] = self.uses[op].get(tensor, 0) | mode
        # Ops that work on shards: updates, and what is done with gradients once they are reduced.
        self.on_shards = [self._updates(uses) for uses in self.uses]
        grads = [op for op in range(trace.ops) if self._of_kind(op, "gradient")]
        self.backward = next((op for op in grads if not self.on_shards[op]), trace.ops)
        self.stays = self._stays() if cluster.ranks > 1 else []
        self.reduced = self._reduced() if cluster.ranks > 1 else {}
        self.in_pages = self._in_pages()
        for op, uses in enumerate(self.uses):
            mine = {kinds[tensor] for tensor in uses if kinds[tensor] != "workspace"}
            if mine == {"gradient"} and all(
                op > self.reduced.get(t, op) for t in uses if kinds[t] == "gradient"
            ):
                self.on_shards[op] = True

    def _updates(self, uses: dict[int, int]) -> bool:
        kinds = self.trace.tensor_kinds
        return any(
            kinds[t] == "optimizer" or (kinds[t] == "parameter" and mode & WRITE)
            for t, mode in uses.items()
        )

    def _of_kind(self, op: int, kind: str) -> list[int]:
        kinds = self.trace.tensor_kinds
        return [tensor for tensor in self.uses[op] if kinds[tensor] == kind]

    def _stays(self) -> list[_Stay]:
        """In the order of their begin. The backward pass begins with the first gradient."""
        trace, backward = self.trace, self.backward
        begins = {segment.name: segment.first_op for segment in trace.segments}  # in forward
        open_: _Stay | None = None
        root: _Stay | None = None
        found: list[_Stay] = []
        for op in range(trace.ops):
            if self.on_shards[op]:
                continue
            for tensor in self._of_kind(op, "parameter"):
                group = self.groups[tensor]
                if group == ROOT:
                    if root is None:
                        root = _Stay(ROOT, op, op)
                        found.append(root)
                    root.last = op
                    continue
                turns = open_ is not None and open_.first < backward <= op
                if open_ is None or open_.group != group or turns:
                    begin = min(op, begins.get(group, op)) if op < backward else op
                    open_ = _Stay(group, begin, op)
                    found.append(open_)
                open_.last = op
        if root is not None:  # it is gathered as the forward pass begins
            root.first = found[0].first
            root.last = max(op for op in range(trace.ops) if not self.on_shards[op])
            found.remove(root)
            found.insert(0, root)
        sizes: dict[str, list[int]] = defaultdict(list)
        for tensor, group in self.groups.items():
            if trace.tensor_kinds[tensor] == "parameter":
                sizes[group].append(tensor)
        for stay in found:
            stay.shards = sizes[stay.group]
            stay.nbytes = int(trace.tensor_bytes[stay.shards].sum())
        return found

    def _reduced(self) -> dict[int, int]:
        """Gradient → the op after which it is reduced: the end of its block's backward pass, or
        what comes before its first use by an update."""
        trace = self.trace
        updated: dict[int, int] = {}
        for op, uses in enumerate(self.uses):
            for tensor in uses if self.on_shards[op] else ():
                updated.setdefault(tensor, op)
        ends = {stay.group: stay.last for stay in self.stays}
        grads = [t for t in self.groups if trace.tensor_kinds[t] == "gradient"]
        for tensor in grads:
            group = self.groups[tensor]
            ends[group] = max(ends.get(group, 0), int(trace.first_op[tensor]))
        return {
            tensor: min(ends[self.groups[tensor]], updated.get(tensor, trace.ops) - 1)
            for tensor in grads
        }

    def _in_pages(self) -> Bools:
        """By tensor. Activations are if the backward pass uses them again, or a block that may run
        again, and they are not small; all are if nothing is known of gradients."""
        trace = self.trace
        kinds = np.array(trace.tensor_kinds)
        passing = ~trace.tensor_persistent & ~np.isin(kinds, ("gradient", "workspace"))
        saved = (trace.first_op < self.backward) & (trace.last_op >= self.backward)
        saved[list(trace.between_segments())] = True
        kept: Bools = ~passing | saved & (trace.tensor_bytes > self.page_size // 2)
        return kept if self.backward < trace.ops else np.ones(trace.tensors, np.bool_)

    def _dense_levels(self) -> list[int]:
        """Bytes of what is in no pages while each op runs."""
        trace, dense = self.trace, np.flatnonzero(~self.in_pages)
        change = np.zeros(trace.ops + 1, np.int64)
        np.add.at(change, trace.first_op[dense], trace.tensor_bytes[dense])
        np.add.at(change, trace.last_op[dense] + 1, -trace.tensor_bytes[dense])
        return np.cumsum(change).tolist()  # type: ignore[no-any-return]

    def _sharing(self, sizes: list[int]) -> dict[int, int]:
        """Small tensor → the first one of those whose page it shares."""
        align = 64 if self.on_cpu else 512
        room: dict[str, tuple[int, int]] = {}  # kind → its open page's first tensor, bytes left
        found = {}
        for tensor in self.groups:
            nbytes = -(-sizes[tensor] // align) * align
            if nbytes <= self.page_size // 2:
                first, left = room.get(kind := self.trace.tensor_kinds[tensor], (tensor, 0))
                if nbytes > left:
                    first, left = tensor, self.page_size
                found[tensor] = first
                room[kind] = first, left - nbytes
        return found

    # -- the rank's iteration --------------------------------------------------------------------
    def made(self) -> Trace:
        trace, count = self.trace, self.cluster.ranks
        self.ops: list[tuple[str, float, list[int], list[int]]] = []
        self.rerun: list[bool] = []
        self.host_us: list[float | None] = []
        self.now = self.network = 0.0  # µs: compute, and until when the network is busy
        self.arrives: dict[int, float] = {}  # stay → when it has been gathered
        self.whole: dict[int, int] = {}  # gradients that are yet to be reduced → their bytes
        self.reducing = self.most_dense = 0  # bytes: of the latest copy that is reduced; in all
        self.passing, levels = 0, self._dense_levels()  # bytes: of what the next op has in no pages
        reduced_at: dict[int, float] = {}
        leaving: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for tensor, op in self.reduced.items():
            leaving[op][self.groups[tensor]].append(tensor)
        begins: dict[int, list[int]] = defaultdict(list)
        for number, stay in enumerate(self.stays):
            begins[stay.first].append(number)
        place: list[int] = []  # of each op of the trace
        for op in range(trace.ops):
            for number in begins[op]:
                self._begin_stay(number)
            late = max((reduced_at.get(t, 0.0) for t in self.uses[op] if self.on_shards[op]),
                       default=0.0)  # fmt: skip
            if late > self.now:
                waited = [t for t in self.uses[op] if reduced_at.get(t, 0.0) > self.now]
                self._add("wait for reduced gradients", late - self.now, waited, [])
            place.append(len(self.ops))
            self.passing = levels[op]
            self._add_op(op)
            for number, stay in enumerate(self.stays):
                if stay.last == op:
                    self.arrives.pop(number, None)
            for group in sorted(leaving[op], key=ROOT.__eq__):
                grads = leaving[op][group]
                reduced_at |= dict.fromkeys(grads, self._reduce(group, grads))
        sizes = [
            -(-size // count) if t in self.groups else size
            for t, size in enumerate(trace.tensor_bytes.tolist())
        ]
        shared = self._sharing(sizes)
        members = Counter(shared.values())
        names = {t: name for t, name in enumerate(trace.tensor_names) if name}
        for tensor, first in shared.items():
            sizes[first] += sizes[tensor] * (tensor != first)
        for tensor, number in members.items():
            if number > 1 and tensor in names:
                names[tensor] += f" +{number - 1} more"
        tensors = [(t, size, bool(trace.tensor_persistent[t])) for t, size in enumerate(sizes)]
        dense = trace.tensors
        tensors.append((dense, self.most_dense, False))

        def used(numbers: list[int]) -> list[int]:
            return [shared.get(t, t) for t in numbers if self.in_pages[t]]

        ops = []
        met: set[int] = set()
        for name, us, reads, writes in self.ops:
            reads, writes = used(reads), used(writes)
            reads += [
                t for t in writes if members[t] > 1 and t in met
            ]  # of which others have parts
            met.update(writes)
            ops.append((name, us, reads, [*writes, dense] if self.most_dense else writes))
        kinds = dict(enumerate(trace.tensor_kinds)) | {dense: "workspace"}
        return make_trace(
            tensors,
            ops,
            page_size=self.page_size,
            names=names | {dense: DENSE},
            kinds=kinds,
            source=trace.source,
            device=trace.device,
            metadata={**trace.metadata, "ranks": count, "nodes": self.cluster.nodes},
            rerun=self.rerun,
            host_us=self.host_us,
            segments=[(place[first], place[last], name) for first, last, name in trace.segments],
        )

    def _add(
        self, name: str, us: float, reads: list[int], writes: list[int], *, beside: int = 0
    ) -> None:
        """``beside``: bytes that are dense for this op alone."""
        gathered = sum(self.stays[number].nbytes for number in self.arrives)
        dense = gathered + sum(self.whole.values()) + self.reducing + self.passing + beside
        self.most_dense = max(self.most_dense, dense)
        self.ops.append((name, us, reads, writes))
        self.rerun.append(name.startswith(("gather", "wait for weights")))
        self.host_us.append(None)
        self.now += us

    def _meet(self, nbytes: int) -> float:
        """A collective of ``nbytes`` begins; what ops wait for it at once."""
        us = self.cluster.collective_us(nbytes)
        self.network = max(self.network, self.now) + us
        return us if self.on_cpu else 0.0

    def _gather(self, number: int) -> None:
        if number in self.arrives:
            return
        stay = self.stays[number]
        us = self._meet(stay.nbytes)
        self.arrives[number] = self.network
        copy = stay.nbytes if self.on_cpu else 0
        self._add(f"gather {stay.group}", us, stay.shards, [], beside=copy)

    def _begin_stay(self, number: int) -> None:
        """Its weights are waited for, and the next block's gather begins."""
        self._gather(number)
        late = self.arrives[number] - self.now
        if late > 0:
            self._add(f"wait for weights of {self.stays[number].group}", late, [], [])
        following = range(number + 1, len(self.stays))
        coming = next((n for n in following if self.stays[n].group != ROOT), None)
        if coming is not None and self.stays[coming].group != self.stays[number].group:
            self._gather(coming)

    def _add_op(self, op: int) -> None:
        trace, shards = self.trace, self.on_shards[op]
        reads, writes = [], []
        for tensor, mode in self.uses[op].items():
            kind = trace.tensor_kinds[tensor]
            if kind == "parameter" and not shards and self.stays:
                continue  # what was gathered is used
            if kind == "gradient" and not shards and op <= self.reduced.get(tensor, -1):
                self.whole[tensor] = int(trace.tensor_bytes[tensor])
                continue
            reads += [tensor] if mode & READ else []
            writes += [tensor] if mode & WRITE else []
        share = (self.cluster.ranks if shards else 1) / self.cluster.slowest
        updated = [t for t in writes if shards and trace.tensor_kinds[t] == "parameter"]
        beside = 2 * max((int(trace.tensor_bytes[t]) for t in updated), default=0)
        beside = beside // self.cluster.ranks if self.on_cpu else 0
        us = float(trace.op_duration_us[op]) / share
        self._add(trace.op_names[op], us, reads, writes, beside=beside)
        self.rerun[-1] = bool(trace.op_rerun[op])
        host_us = float(trace.op_host_us[op])
        self.host_us[-1] = None if np.isnan(host_us) else host_us / share

    def _reduce(self, group: str, grads: list[int]) -> float:
        """Whole gradients of ``group`` become shards; when that is done."""
        nbytes = sum(int(self.trace.tensor_bytes[tensor]) for tensor in grads)
        self.reducing = nbytes
        us = self._meet(nbytes)
        self._add(f"copy gradients of {group}", 0.0, [], [])
        for tensor in grads:
            self.whole.pop(tensor, None)
        shard = -(-nbytes // self.cluster.ranks)
        copy = nbytes if self.on_cpu else 0
        self._add(f"reduce {group}", us, [], grads, beside=shard + copy)
        return self.network
