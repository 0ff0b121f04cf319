"""What fused optimizers share: parameters as groups, and one launch for all groups alike.

A program updates one tile of one piece; the numbers of its group (learning rate, bias corrections
and so on) are in a table on the device, so that nothing is read back to the host.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .blockwise import (
    BLOCK,
    LONGEST,
    Blockwise,
    check_blocks,
    scale_addresses,
)
from .launch import ARENA_ALIGNMENT_BYTES as ALIGNMENT_BYTES
from .launch import launch, tl, triton, upload, upload_to
from .pieces import Operand, cut, dtype_name, memory_of, numel_of, stretches
from .quantize import decode_reference, encode_reference, load_blocks, store_blocks
from .rounding import (
    load_as,
    random_bits,
    random_bits_reference,
    random_key,
    stochastic_bf16,
    stochastic_bf16_reference,
    store_as,
    store_raw,
    tile_elements,
    tile_rows,
)

__all__ = ["Group", "KeptTables", "Number", "State", "make_groups"]

State = Operand | Blockwise
Number = float | torch.Tensor  # a tensor has one element
TILE = 1024
FIRST_MULTIPLE = 4096
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
CHUNK = 1 << 18  # elements that a reference updates at a time: its temporaries stay in the caches
ROOMS = 2  # temporaries of a chunk that a reference has at once where nothing is converted
# What an update does, beside what all of them do: compile-time constants of the kernel.
RULE = ("ADAM", "DECOUPLED", "AMSGRAD", "MOMENTUM", "NESTEROV")
STATE_FLOATS = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True, eq=False)
class Group:
    """One parameter, or a stretch of one, and all that its update reads and writes.

    number : its place in the caller's lists.
    seed : for stochastic rounding; None rounds to nearest.
    first : number of its first element within the parameter.
    """

    number: int
    grad: Operand
    param: Operand
    states: tuple[State, ...]
    master: Operand | None
    seed: int | None
    first: int

    @property
    def flat(self) -> list[Operand]:
        """Operands of as many elements each: gradient, parameter, states, master."""
        states = [x.codes if isinstance(x, Blockwise) else x for x in self.states]
        return [self.grad, self.param, *states, *([self.master] if self.master is not None else [])]

    @property
    def scales(self) -> list[Operand]:
        return [x.scales for x in self.states if isinstance(x, Blockwise)]

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(x.dtype for x in self.flat)

    @property
    def compute(self) -> torch.dtype:
        """What is computed in."""
        return torch.float64 if torch.float64 in self.dtypes else torch.float32


def make_groups(
    params: Sequence[Operand],
    grads: Sequence[Operand],
    states: Sequence[Sequence[State] | None],
    masters: Sequence[Operand] | None,
    seeds: Sequence[int] | None,
    firsts: Sequence[int] | None,
) -> list[Group]:
    """Groups of parameters that have elements."""
    given = [state for state in states if state is not None]
    lists = [grads, *given, *(x for x in (masters, seeds, firsts) if x is not None)]
    assert {len(one) for one in lists} <= {len(params)}
    groups = [
        Group(
            number,
            grads[number],
            params[number],
            tuple(state[number] for state in given),
            masters[number] if masters is not None else None,
            seeds[number] if seeds is not None else None,
            firsts[number] if firsts is not None else 0,
        )
        for number in range(len(params))
    ]
    for group in groups:
        _check(group)
    return [group for group in groups if numel_of(group.param)]


@dataclass(frozen=True, eq=False)
class Tables:
    """What one launch for groups of the same dtypes reads, on the device.

    addresses, lengths, group, starts : as in `Pieces`; starts count from the parameter's first
        element. scales : of `scale_addresses`. seeds : int32 [groups]. longest : of lengths.
    aligned : whether every piece of every operand begins at a multiple of 16 bytes.
    """

    addresses: torch.Tensor
    lengths: torch.Tensor
    group: torch.Tensor
    starts: torch.Tensor
    scales: torch.Tensor
    seeds: torch.Tensor
    longest: int
    aligned: bool

    def launch(
        self,
        numbers: torch.Tensor,
        *,
        grad: torch.dtype,
        param: torch.dtype,
        state: str,
        maximize: bool,
        master: bool = False,
        stochastic: bool = False,
        **rule: Any,
    ) -> None:
        """Queue the kernel. numbers : float32 or float64 [rows, groups], on the device; state :
        dtype of the states; rule : what of `RULE` is true."""
        tiles = -(-self.longest // TILE)
        launch(
            _step_kernel,
            self.lengths.numel() * tiles,
            *(self.addresses, self.scales, self.lengths, self.group, self.starts, self.seeds),
            *(numbers, self.lengths.numel(), self.seeds.numel(), tiles),
            GRAD=dtype_name(grad),
            PARAM=dtype_name(param),
            MASTER=master,
            STOCHASTIC=stochastic,
            ALIGNED=self.aligned,
            TILE=TILE,
            STATE=state,
            MAXIMIZE=maximize,
            **(dict.fromkeys(RULE, False) | rule),
            num_warps=warps(state),
            # So that the interpreter's bits are the device's, now and with any version of Triton.
            enable_fp_fusion=False,
        )


def launch_groups(
    groups: Sequence[Group], numbers: torch.Tensor, *, maximize: bool, **rule: bool
) -> None:
    """Queue one launch for groups of the same dtypes.

    numbers : float32 or float64 [rows, groups], on the device; column i is for groups[i].
    maximize, rule : as in `Tables.launch`.
    """
    device = memory_of(groups[0].param).device
    pieces = cut([group.flat for group in groups], LONGEST)
    starts = pieces.starts + torch.tensor([group.first for group in groups])[pieces.group.long()]
    scales = scale_addresses(pieces, [group.scales for group in groups])
    seeds = torch.tensor([_int32(group.seed or 0) for group in groups], dtype=torch.int32)
    tables = (pieces.addresses, pieces.lengths, pieces.group, starts, scales, seeds)
    there = [upload(table, device) for table in tables]
    Tables(*there, pieces.longest, pieces.aligned).launch(  # type: ignore[call-arg,arg-type]
        numbers,
        grad=groups[0].grad.dtype,
        param=groups[0].param.dtype,
        state=dtype_name(groups[0].dtypes[2]) if groups[0].states else "float32",
        master=groups[0].master is not None,
        stochastic=groups[0].seed is not None,
        maximize=maximize,
        **rule,
    )


class KeptTables:
    """Tables for launches over the same consecutive memory again and again. They stay on the
    device; only addresses that have changed are copied there.

    dtypes : of gradient, parameter and states, the same for all groups.
    numels : elements of each group, none of them 0.
    """

    def __init__(
        self, dtypes: Sequence[torch.dtype], numels: Sequence[int], device: torch.device
    ) -> None:
        self.dtypes, self.numels, self.device = tuple(dtypes), tuple(numels), device
        self.groups = len(numels)
        self.compute = torch.float64 if torch.float64 in self.dtypes else torch.float32
        counts = [-(-numel // LONGEST) for numel in numels]
        self._group = np.repeat(np.arange(len(numels), dtype=np.int32), counts)
        starts = np.concatenate([np.arange(0, numel, LONGEST, dtype=np.int64) for numel in numels])
        sizes = np.array([dtype.itemsize for dtype in self.dtypes], np.int64)
        lengths = np.minimum(LONGEST, np.array(numels, np.int64)[self._group] - starts)
        self._offsets = starts * sizes[:, None]
        self._bases: npt.NDArray[np.int64] | None = None
        self._tables: Tables  # of these
        self._fixed = [
            upload(torch.from_numpy(table), device)
            for table in (lengths.astype(np.int32), self._group, starts)
        ]
        empty = torch.empty((0, len(starts)), dtype=torch.int64)
        seeds = torch.zeros(len(numels), dtype=torch.int32)
        self._fixed += [upload(table, device) for table in (empty, seeds)]
        self._longest = int(lengths.max())

    def at(self, bases: npt.NDArray[np.int64]) -> Tables:
        """bases : int64 [operands, groups], the address of each one's first element."""
        if self._bases is None:
            addresses = torch.empty(self._offsets.shape, dtype=torch.int64, device=self.device)
            changed = np.arange(len(bases))
        else:
            addresses = self._tables.addresses
            changed = (bases != self._bases).any(1).nonzero()[0]
        if len(changed):
            one = int(changed[0])  # in most steps only gradients are elsewhere
            rows = slice(one, one + 1) if len(changed) == 1 else slice(None)
            theirs = bases[rows, self._group] + self._offsets[rows]
            upload_to(addresses[rows], torch.from_numpy(theirs))
            aligned = not (bases % ALIGNMENT_BYTES).any()  # LONGEST elements are a multiple too
            self._tables = Tables(
                *(addresses, *self._fixed, self._longest, aligned)  # type: ignore[arg-type]
            )
            self._bases = bases.copy()
        return self._tables


def alike(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Groups of the same dtypes, which one launch can take."""
    buckets: dict[tuple[torch.dtype, ...], list[Group]] = {}
    for group in groups:
        buckets.setdefault(group.dtypes, []).append(group)
    yield from buckets.values()


def warps(state: str) -> int:
    """How many warps update a tile; 8-bit states take more registers for each element."""
    if state == "uint8":
        return 4 if torch.version.hip else 8  # 256 threads, four elements each
    return 4


def is_on_host(value: Number) -> bool:
    """Whether reading it waits for no device."""
    return not isinstance(value, torch.Tensor) or value.device.type == "cpu"


def doubles(values: Sequence[Number], device: torch.device) -> torch.Tensor:
    """Numbers as float64 [n]: on `device` if one is there already, else on the host; no wait."""
    if all(is_on_host(x) for x in values):
        return torch.tensor([float(x) for x in values], dtype=torch.float64)
    moved = [
        x.reshape(()).to(device, torch.float64, non_blocking=True)
        if isinstance(x, torch.Tensor)
        else torch.full((), x, dtype=torch.float64, device=device)
        for x in values
    ]
    return torch.stack(moved)


def table(
    rows: Sequence[torch.Tensor | float], groups: int, compute: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Rows of float64 numbers, each one for all groups or [groups], as a kernel reads them."""
    tensors = [x for x in rows if isinstance(x, torch.Tensor)]
    where = next((x.device for x in tensors if x.device.type != "cpu"), torch.device("cpu"))
    columns = [
        x.to(where, non_blocking=True).expand(groups)
        if isinstance(x, torch.Tensor)
        else torch.full((groups,), x, dtype=torch.float64, device=where)
        for x in rows
    ]
    return upload(torch.stack(columns).to(compute), device)


@triton.jit
def load_state(
    address,
    scales,
    at,
    rows,
    length,
    DTYPE: tl.constexpr,
    ROOT: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A tile of a state; see `load_blocks`, whose arguments these are."""
    if DTYPE == "uint8":
        return load_blocks(address, scales, at, rows, length, ROOT, ALIGNED, MASKED)
    else:
        return load_as(address, at, length, DTYPE, ALIGNED, MASKED)


@triton.jit
def store_state(
    address,
    scales,
    at,
    rows,
    value,
    random,
    length,
    DTYPE: tl.constexpr,
    ROOT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Store a tile of a state; see `store_blocks`, whose arguments these are."""
    if DTYPE == "uint8":
        store_blocks(
            address, scales, at, rows, value, random, length, ROOT, STOCHASTIC, ALIGNED, MASKED
        )
    elif DTYPE == "bfloat16" and STOCHASTIC:
        store_raw(address, at, stochastic_bf16(value, random), length, DTYPE, ALIGNED, MASKED)
    else:
        store_as(address, at, value, length, DTYPE, ALIGNED, MASKED)


@triton.jit
def state_memory(number: tl.constexpr, row, scales_ptr, pieces, STATE: tl.constexpr):
    """Where a piece of a state is, and its scales if it has any."""
    address = tl.load(row + (2 + number) * pieces)
    scales = address
    if STATE == "uint8":
        scales = tl.load(scales_ptr + number * pieces)
    return address, scales


@triton.jit(
    do_not_specialize=["pieces", "groups", "tiles"],
    do_not_specialize_on_alignment=[
        "addresses_ptr",
        "scales_ptr",
        "lengths_ptr",
        "group_ptr",
        "starts_ptr",
        "seeds_ptr",
        "numbers_ptr",
    ],
)
def _step_kernel(
    addresses_ptr,
    scales_ptr,
    lengths_ptr,
    group_ptr,
    starts_ptr,
    seeds_ptr,
    numbers_ptr,
    pieces,
    groups,
    tiles,
    GRAD: tl.constexpr,
    PARAM: tl.constexpr,
    MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    STATE: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ADAM: tl.constexpr,
    DECOUPLED: tl.constexpr,
    AMSGRAD: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
):
    """Program t updates tile t % tiles of piece t // tiles, if the piece has so many.

    addresses : int64 [operands, pieces]: gradient, parameter, states, and master if there is one.
    scales : int64 [8-bit states, pieces], addresses of the first scale of each piece.
    numbers : [rows, groups], as `_numbers` of `adam.py` and `sgd.py` have them; rows 0 to 4 are
        the step, the gradients' scale, whether to do nothing, weight decay and learning rate.
    """
    piece = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * TILE
    group = tl.load(group_ptr + piece)
    length = tl.load(lengths_ptr + piece)
    numbers_ptr += group
    inv_scale = tl.load(numbers_ptr + groups)
    found_inf = tl.load(numbers_ptr + 2 * groups)
    decay = tl.load(numbers_ptr + 3 * groups)
    rate = tl.load(numbers_ptr + 4 * groups)
    numbers_ptr += 5 * groups
    if (first < length) & (found_inf == 0):
        start = tl.load(starts_ptr + piece)
        key = tl.load(seeds_ptr + group).to(tl.uint32)
        if STOCHASTIC:
            key = random_key(key, tl.load(numbers_ptr - 5 * groups).to(tl.int32), start)
        rows = tile_rows(first, TILE)
        at = tile_elements(rows)
        random = at.to(tl.uint32)
        if STOCHASTIC:
            random = random_bits(key, start.to(tl.uint32) + random)
        row = addresses_ptr + piece
        scales_ptr += piece
        count: tl.constexpr = (2 + AMSGRAD) if ADAM else MOMENTUM  # of states
        for masked in tl.static_range(2):  # a whole tile, or the last one of a piece
            if (first + TILE > length) == (masked == 1):
                param_at = tl.load(row + pieces)
                grad = load_as(tl.load(row), at, length, GRAD, ALIGNED, masked) * inv_scale
                master_at = param_at
                if MASTER:
                    master_at = tl.load(row + (2 + count) * pieces)
                    param = load_as(master_at, at, length, "float32", ALIGNED, masked)
                else:
                    param = load_as(param_at, at, length, PARAM, ALIGNED, masked)
                if MAXIMIZE:
                    grad = -grad
                if DECOUPLED:
                    param = param * decay
                else:
                    grad = tl.where(decay != 0, grad + decay * param, grad)
                if ADAM:
                    root_correction = tl.load(numbers_ptr)
                    weight1 = tl.load(numbers_ptr + groups)
                    beta2 = tl.load(numbers_ptr + 2 * groups)
                    weight2 = tl.load(numbers_ptr + 3 * groups)
                    eps = tl.load(numbers_ptr + 4 * groups)
                    a_at, a_scales = state_memory(0, row, scales_ptr, pieces, STATE)
                    s_at, s_scales = state_memory(1, row, scales_ptr, pieces, STATE)
                    avg = load_state(
                        a_at, a_scales, at, rows, length, STATE, False, ALIGNED, masked
                    )
                    sq = load_state(s_at, s_scales, at, rows, length, STATE, True, ALIGNED, masked)
                    # As torch's lerp, which keeps its precision at both ends.
                    change = grad - avg
                    near = avg + weight1 * change
                    avg = tl.where(weight1 < 0.5, near, grad - change * (1 - weight1))
                    sq = sq * beta2 + weight2 * grad * grad
                    store_state(
                        *(a_at, a_scales, at, rows, avg, random & 0xFFFF, length, STATE, False),
                        *(STOCHASTIC, ALIGNED, masked),
                    )
                    store_state(
                        *(s_at, s_scales, at, rows, sq, random >> 16, length, STATE, True),
                        *(STOCHASTIC, ALIGNED, masked),
                    )
                    if AMSGRAD:
                        m_at, m_scales = state_memory(2, row, scales_ptr, pieces, STATE)
                        largest = load_state(
                            m_at, m_scales, at, rows, length, STATE, True, ALIGNED, masked
                        )
                        # As torch's maximum, which keeps NaN.
                        sq = tl.where((largest > sq) | (largest != largest), largest, sq)
                        store_state(
                            *(m_at, m_scales, at, rows, sq, random >> 16, length, STATE, True),
                            *(STOCHASTIC, ALIGNED, masked),
                        )
                    if PARAM == "float64":
                        denominator = tl.sqrt(sq) / root_correction + eps
                        param = param - rate * avg / denominator
                    else:
                        denominator = tl.div_rn(tl.sqrt_rn(sq), root_correction) + eps
                        param = param - tl.div_rn(rate * avg, denominator)
                else:
                    if MOMENTUM:
                        momentum = tl.load(numbers_ptr)
                        undamped = tl.load(numbers_ptr + groups)
                        fresh = tl.load(numbers_ptr + 2 * groups)
                        b_at, b_scales = state_memory(0, row, scales_ptr, pieces, STATE)
                        old = load_state(
                            b_at, b_scales, at, rows, length, STATE, False, ALIGNED, masked
                        )
                        buffer = tl.where(fresh != 0, grad, old * momentum + undamped * grad)
                        store_state(
                            *(b_at, b_scales, at, rows, buffer, random & 0xFFFF, length, STATE),
                            *(False, STOCHASTIC, ALIGNED, masked),
                        )
                        grad = grad + momentum * buffer if NESTEROV else buffer
                    param = param - rate * grad
                store_as(param_at, at, param, length, PARAM, ALIGNED, masked)
                if MASTER:
                    store_as(master_at, at, param, length, "float32", ALIGNED, masked)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Up to CHUNK elements of a group, for references: views [n], consecutive in every operand.

    rooms : where temporaries go, [n] each, of the dtype that is computed in; None for new memory.
    """

    group: Group
    grad: torch.Tensor
    param: torch.Tensor
    states: list[torch.Tensor]
    master: torch.Tensor | None
    start: int
    rooms: tuple[torch.Tensor | None, ...] = (None,) * ROOMS

    def read_state(self, i: int, *, root: bool = False) -> torch.Tensor:
        """State i in what is computed in: its own memory where that has the dtype."""
        state = self.group.states[i]
        if isinstance(state, Blockwise):
            return decode_reference(self.states[i], state.scales, self.start // BLOCK, root)
        return self.states[i].to(self.group.compute)

    def write_state(
        self, i: int, value: torch.Tensor, step: int, *, root: bool = False, upper: bool = False
    ) -> None:
        """Store what `read_state` gave; upper : round with the upper 16 random bits."""
        state, seed, random = self.group.states[i], self.group.seed, None
        if seed is not None and self.states[i].dtype in (torch.uint8, torch.bfloat16):
            first = self.group.first + self.start
            random = random_bits_reference(seed, step, first, value.numel(), value.device)
            random = random >> 16 if upper else random & 0xFFFF
        if isinstance(state, Blockwise):
            scales, block = state.scales, self.start // BLOCK
            encode_reference(value, self.states[i], scales, block, root, random)
        elif random is not None:
            self.states[i].copy_(stochastic_bf16_reference(value, random))
        elif value.data_ptr() != self.states[i].data_ptr():
            self.states[i].copy_(value)

    def read_param(self) -> torch.Tensor:
        """The parameter, or its master, in what is computed in: its own memory if it can be."""
        return (self.param if self.master is None else self.master).to(self.group.compute)

    def write_param(self, value: torch.Tensor) -> None:
        """Store the updated parameter, and in its master."""
        for kept in (self.param, self.master):
            if kept is not None and kept.data_ptr() != value.data_ptr():
                kept.copy_(value)


def number(value: Number, group: Group) -> torch.Tensor:
    """As an operand of ops on what is computed in; a float would be made one by each of them."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor(value, dtype=group.compute, device=memory_of(group.param).device)


def chunks(group: Group, work: torch.Tensor | None = None) -> Iterator[Chunk]:
    """All of a group, in order; with temporaries in ``work``, uint8, ROOMS pieces of a multiple of
    64 bytes, if it is given. Then nothing is allocated between two chunks, nor by an op that has
    its result there and no float among its operands, but as ``alpha`` or ``value``."""
    start, count, most = 0, len(group.states), CHUNK
    rooms: list[torch.Tensor | None] = [None] * ROOMS
    if work is not None:
        pieces = work.view(group.compute).chunk(ROOMS)
        rooms, most = list(pieces), min(CHUNK, pieces[0].numel())
    for views in stretches(group.flat):
        for parts in zip(*(view.split(most) for view in views), strict=True):
            master = parts[-1] if group.master is not None else None
            numel = parts[0].numel()
            here = tuple(room if room is None else room[:numel] for room in rooms)
            yield Chunk(group, parts[0], parts[1], list(parts[2 : 2 + count]), master, start, here)
            start += numel


def _check(group: Group) -> None:
    """Kernels take such dtypes and blocks, and all operands on one device."""
    check_blocks([group.grad, group.param, *group.states])
    assert {group.grad.dtype, group.param.dtype} <= set(FLOATS)
    states = group.dtypes[2 : 2 + len(group.states)]
    assert len(set(states)) <= 1, f"states of {states}"
    assert set(states) <= {torch.uint8, *STATE_FLOATS}, f"states of {states}"
    assert group.master is None or group.master.dtype == torch.float32
    wide = group.compute == torch.float64
    assert not wide or set(group.dtypes) == {torch.float64}, f"float64 beside {group.dtypes}"
    assert group.first % FIRST_MULTIPLE == 0
    assert len({memory_of(operand).device for operand in [*group.flat, *group.scales]}) == 1


def _int32(seed: int) -> int:
    """The lower 32 bits, signed."""
    return (seed + (1 << 31)) % (1 << 32) - (1 << 31)
