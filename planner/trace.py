"""One recorded iteration in memory: what every part of the planner reads.

Columns, not objects: a trace has up to a million accesses. Tensors are numbered 0 … T−1 here in the
order of their first access; ``tensor_ids`` has the numbers of the file, which plans use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import TraceError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

MAX_PAGES = 1 << 24  # of one trace; what looks at pages keeps some 50 bytes for each
READ, WRITE, READWRITE = 1, 2, 3  # bit 1: reads, bit 2: writes
ACCESS_NAMES = {READ: "read", WRITE: "write", READWRITE: "readwrite"}
KINDS = ("parameter", "gradient", "optimizer", "activation", "input", "workspace")


class Segment(NamedTuple):
    """Ops ``first_op`` to ``last_op`` (inclusive) are a block of the model in its forward pass."""

    first_op: int
    last_op: int
    name: str


@dataclass(frozen=True, eq=False)
class Trace:
    """``ops`` in the order they run; ``accesses`` sorted by op, at most one per op and tensor is
    not guaranteed (two rows may touch two page ranges).

    Page ranges count within the tensor in pages of ``page_size`` bytes. An access that only writes
    sets every byte of its pages.

    ``op_rerun``: the op may run again, with the same result. ``op_host_us``: what the host takes
    for it while transfers run. ``segments``: blocks of the forward pass, disjoint or nested.
    """

    page_size: int
    op_names: list[str]
    op_start_us: Floats  # [ops]
    op_duration_us: Floats  # [ops]
    tensor_ids: Ints  # [tensors], as in the file and in plans
    tensor_names: list[str | None]
    tensor_bytes: Ints  # [tensors], > 0
    tensor_kinds: list[str]
    tensor_persistent: Bools  # [tensors]
    access_op: Ints  # [accesses], not falling
    access_tensor: Ints  # [accesses], index of a tensor
    access_mode: npt.NDArray[np.int8]  # [accesses], READ, WRITE or READWRITE
    access_first_page: Ints  # [accesses]
    access_page_count: Ints  # [accesses]
    source: str = ""
    sha256: str = ""  # of the file that it was read from, or that it was written to
    device: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)  # free keys
    op_rerun: Bools = None  # type: ignore[assignment]  # [ops], False for all if not given
    op_host_us: Floats = None  # type: ignore[assignment]  # [ops], NaN: the host cannot; all if not
    segments: tuple[Segment, ...] = ()

    def __post_init__(self) -> None:
        if self.op_rerun is None:
            object.__setattr__(self, "op_rerun", np.zeros(self.ops, np.bool_))
        if self.op_host_us is None:
            object.__setattr__(self, "op_host_us", np.full(self.ops, np.nan))

    @property
    def has_choices(self) -> bool:
        """Whether some op may run again or on the host; a trace of version 1 has none such."""
        return bool(self.op_rerun.any() or not np.isnan(self.op_host_us).all() or self.segments)

    @property
    def ops(self) -> int:
        return len(self.op_names)

    @property
    def tensors(self) -> int:
        return len(self.tensor_ids)

    @cached_property
    def ideal_us(self) -> float:
        """Iteration time if nothing ever had to wait."""
        return float(self.op_duration_us.sum())

    @cached_property
    def first_op(self) -> Ints:
        """First op that touches each tensor, [tensors]."""
        first = np.full(self.tensors, self.ops, np.int64)
        np.minimum.at(first, self.access_tensor, self.access_op)
        return first

    @cached_property
    def last_op(self) -> Ints:
        """Last op that touches each tensor, [tensors]."""
        last = np.full(self.tensors, -1, np.int64)
        np.maximum.at(last, self.access_tensor, self.access_op)
        return last

    def made_by(self, segment: Segment) -> Ints:
        """Tensors that ``segment`` makes and later ops use."""
        first, last = self.first_op, self.last_op
        inside = (segment.first_op <= first) & (first <= segment.last_op)
        return np.flatnonzero(inside & (last > segment.last_op) & ~self.tensor_persistent)

    def between_segments(self) -> set[int]:
        """Tensors that a segment uses which are not its own: they go from one to the next."""
        around = np.full(self.ops, -1)
        by_length = sorted(
            enumerate(self.segments), key=lambda one: one[1].last_op - one[1].first_op
        )
        for number, (first, last, _) in by_length:  # of the outermost ones, in the end
            around[first : last + 1] = number
        mine, makers = around[self.access_op], around[self.first_op][self.access_tensor]
        return set(self.access_tensor[(mine >= 0) & (mine != makers)].tolist())

    def pages(self, page_size: int) -> Ints:
        """Pages of each tensor when a page has ``page_size`` bytes, [tensors]."""
        return -(-self.tensor_bytes // page_size)

    def countable_pages(self, page_size: int) -> Ints:
        """The same, for those who keep something for each page.

        Raises ``TraceError`` for more than ``MAX_PAGES``: a file of a kilobyte can name sizes that
        no machine's memory has room to count.
        """
        pages = self.pages(page_size)
        if (total := int(pages.sum())) > MAX_PAGES:
            raise TraceError(
                f"the trace has {total} pages of {page_size} bytes, more than {MAX_PAGES}; give "
                "larger pages"
            )
        return pages

    def access_ranges(self, page_size: int) -> tuple[Ints, Ints]:
        """First page and end page (exclusive) of each access in pages of ``page_size`` bytes."""
        first, count = self.access_first_page, self.access_page_count
        if page_size == self.page_size:
            return first, first + count
        nbytes = self.tensor_bytes[self.access_tensor]
        begin = first * self.page_size // page_size
        end = -(-np.minimum((first + count) * self.page_size, nbytes) // page_size)
        return begin, end

    @cached_property
    def access_offsets(self) -> Ints:
        """Where each op's accesses begin, and the end: rows ``offsets[k]:offsets[k + 1]`` are op
        k's, [ops + 1]."""
        return np.searchsorted(self.access_op, np.arange(self.ops + 1)).astype(np.int64)

    @cached_property
    def access_bytes(self) -> Ints:
        """Bytes that each access touches, [accesses]."""
        begin = self.access_first_page * self.page_size
        end = begin + self.access_page_count * self.page_size
        size: Ints = np.minimum(end, self.tensor_bytes[self.access_tensor]) - begin
        return size

    @cached_property
    def index_of(self) -> dict[int, int]:
        """The index of each tensor by its number in the file."""
        return {int(number): index for index, number in enumerate(self.tensor_ids)}

    def name_of(self, tensor: int) -> str:
        """The tensor's name, or its number in the file."""
        return self.tensor_names[tensor] or f"tensor {self.tensor_ids[tensor]}"


def make_trace(
    tensors: list[tuple[int, int, bool]],
    ops: list[tuple[str, float, list[int], list[int]]],
    *,
    page_size: int,
    names: dict[int, str] | None = None,
    kinds: dict[int, str] | None = None,
    source: str = "",
    device: str = "",
    metadata: dict[str, Any] | None = None,
    rerun: list[bool] | None = None,
    host_us: list[float | None] | None = None,
    segments: Sequence[tuple[int, int, str]] = (),
) -> Trace:
    """A trace from ``tensors`` (id, bytes, persistent) and ``ops`` (name, duration in µs, ids read,
    ids written), run back to back, each access to a whole tensor. Tensors that no op touches are
    left out. ``rerun``, ``host_us``: per op, if any has it."""
    size = {identity: nbytes for identity, nbytes, _ in tensors}
    persistent = {identity: lasting for identity, _, lasting in tensors}
    index: dict[int, int] = {}
    rows: list[tuple[int, int, int]] = []
    for number, (_, _, reads, writes) in enumerate(ops):
        modes: dict[int, int] = {}
        for identity in reads:
            modes[identity] = modes.get(identity, 0) | READ
        for identity in writes:
            modes[identity] = modes.get(identity, 0) | WRITE
        for identity, mode in modes.items():
            rows.append((number, index.setdefault(identity, len(index)), mode))
    table = np.array(rows, np.int64).reshape(-1, 3)
    ids = list(index)
    nbytes = np.array([size[i] for i in ids], np.int64)
    durations = np.array([op[1] for op in ops], np.float64)
    starts = np.concatenate([[0.0], np.cumsum(durations)[:-1]]) if ops else durations
    pages = -(-nbytes // page_size)
    return Trace(
        page_size=page_size,
        op_names=[op[0] for op in ops],
        op_start_us=starts,
        op_duration_us=durations,
        tensor_ids=np.array(ids, np.int64),
        tensor_names=[(names or {}).get(i) for i in ids],
        tensor_bytes=nbytes,
        tensor_kinds=[
            (kinds or {}).get(i, "parameter" if persistent[i] else "activation") for i in ids
        ],
        tensor_persistent=np.array([persistent[i] for i in ids], np.bool_),
        access_op=table[:, 0].copy(),
        access_tensor=table[:, 1].copy(),
        access_mode=table[:, 2].astype(np.int8),
        access_first_page=np.zeros(len(table), np.int64),
        access_page_count=pages[table[:, 1]] if len(table) else np.zeros(0, np.int64),
        source=source,
        device=device,
        metadata=metadata or {},
        op_rerun=np.array(rerun or [False] * len(ops), np.bool_),
        op_host_us=np.array(host_us or [None] * len(ops), np.float64),
        segments=tuple(Segment(*each) for each in segments),
    )
