"""Pieces: every element of every operand is in one piece, at the address where it lies."""

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorpager.kernels.pieces import Operand, Paged, cut, stretches

PAGE = 4096
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64]


def _paged(numel: int, dtype: torch.dtype, page_bytes: int = PAGE, seed: int = 0) -> Paged:
    """Zeros, in frames of random order of which some are consecutive."""
    pages = -(-numel * dtype.itemsize // page_bytes)
    order = np.random.default_rng(seed).permutation(pages + 2)[:pages]
    arena = torch.zeros((pages + 2) * page_bytes, dtype=torch.uint8)
    return Paged(arena, order.astype(np.int64), page_bytes, dtype, numel)


def _dense(numel: int, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    memory = torch.zeros(offset + numel * dtype.itemsize, dtype=torch.uint8)
    return memory[offset:].view(dtype)


def _address(operand: Operand, element: int) -> int:
    """Of one element, from the definition of a page table."""
    if isinstance(operand, torch.Tensor):
        return operand.view(-1)[element].data_ptr()
    page, inside = divmod(element * operand.dtype.itemsize, operand.page_bytes)
    return operand.arena.data_ptr() + int(operand.frames[page]) * operand.page_bytes + inside


@st.composite
def _operands(draw: st.DrawFn, numel: int) -> Operand:
    dtype = draw(st.sampled_from(DTYPES))
    if draw(st.booleans()):
        page_bytes = draw(st.sampled_from([PAGE, 2 * PAGE]))
        return _paged(numel, dtype, page_bytes, draw(st.integers(0, 9)))
    return _dense(numel, dtype)


@st.composite
def _groups(draw: st.DrawFn) -> list[list[Operand]]:
    width = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.sampled_from([0, 1, 511, 1024, 1025, 5000]), max_size=4))
    return [[draw(_operands(numel)) for _ in range(width)] for numel in lengths]


def _numel(operand: Operand) -> int:
    return operand.numel if isinstance(operand, Paged) else operand.numel()


@given(_groups(), st.sampled_from([256, 1 << 19]))
def test_pieces_cover_each_group_in_order(groups: list[list[Operand]], longest: int) -> None:
    pieces = cut(groups, longest)
    lengths, owners, starts = (
        column.tolist() for column in (pieces.lengths, pieces.group, pieces.starts)
    )
    assert pieces.count == len(lengths)
    assert pieces.longest == max(lengths, default=0) <= longest
    following = dict.fromkeys(range(len(groups)), 0)
    for piece, (length, owner, start) in enumerate(zip(lengths, owners, starts, strict=True)):
        assert length > 0
        assert start == following[owner], "neither a gap nor an overlap"
        following[owner] += length
        for row, operand in enumerate(groups[owner]):
            first = int(pieces.addresses[row, piece])
            assert first == _address(operand, start)
            last = first + (length - 1) * operand.dtype.itemsize
            assert last == _address(operand, start + length - 1), "a page border inside"
    assert owners == sorted(owners)
    assert following == {number: _numel(group[0]) for number, group in enumerate(groups)}
    assert pieces.aligned == bool((pieces.addresses % 16 == 0).all())


@given(_groups())
def test_stretches_are_the_operands_memory_in_order(groups: list[list[Operand]]) -> None:
    for group in groups:
        at = 0
        for views in stretches(group):
            length = views[0].numel()
            assert length > 0
            for operand, view in zip(group, views, strict=True):
                assert view.dtype is operand.dtype
                assert view.shape == (length,)
                assert view.data_ptr() == _address(operand, at)
                assert view[-1].data_ptr() == _address(operand, at + length - 1)
            at += length
        assert at == _numel(group[0])


def test_hand_made() -> None:
    """float32 pages of 1024 elements beside bfloat16 pages of 2048."""
    wide, narrow = _paged(2500, torch.float32), _paged(2500, torch.bfloat16)
    pieces = cut([[wide, narrow]])
    assert pieces.lengths.tolist() == [1024, 1024, 452]
    assert pieces.starts.tolist() == [0, 1024, 2048]
    offset = pieces.addresses - torch.tensor([[x.arena.data_ptr()] for x in (wide, narrow)])
    assert (offset // PAGE).tolist() == [wide.frames.tolist(), narrow.frames[[0, 0, 1]].tolist()]
    assert (offset % PAGE).tolist() == [[0, 0, 0], [0, 2048, 0]]


def test_addresses_are_of_the_memory_itself() -> None:
    operand = _paged(1500, torch.float32)
    pieces = cut([[operand]])
    for piece, address in enumerate(pieces.addresses[0].tolist()):
        (ctypes.c_float * int(pieces.lengths[piece])).from_address(address)[:] = [
            float(piece + 1)
        ] * int(pieces.lengths[piece])
    values = torch.cat([part.clone() for (part,) in stretches([operand])])
    assert values.tolist() == [1.0] * 1024 + [2.0] * 476


def test_consecutive_frames_are_one_stretch() -> None:
    arena = torch.zeros(6 * PAGE, dtype=torch.uint8)
    frames = np.array([2, 3, 4, 0], np.int64)
    operand = Paged(arena, frames, PAGE, torch.float32, 3500)
    assert [part.numel() for (part,) in stretches([operand])] == [3072, 428]


@pytest.mark.parametrize(("offset", "aligned"), [(0, True), (4, False), (8, False), (16, True)])
def test_alignment_is_that_of_the_worst_operand(offset: int, aligned: bool) -> None:
    group = [_paged(1500, torch.float32), _dense(1500, torch.float32, offset)]
    assert cut([[*group, _dense(1500, torch.float32)]]).aligned is aligned


def test_nothing() -> None:
    for groups in ([], [[]], [[_paged(0, torch.float32), _dense(0, torch.float32)]]):
        pieces = cut(groups)
        assert pieces.count == pieces.longest == 0
        assert pieces.aligned
    assert list(stretches([])) == []
    assert pieces.to(torch.device("cpu")) is pieces


def _bad(numel: int = 1500, frames: Sequence[int] = (0, 1)) -> Paged:
    arena = torch.zeros(2 * PAGE, dtype=torch.uint8)
    return Paged(arena, np.array(frames, np.int64), PAGE, torch.float32, numel)


@pytest.mark.parametrize(
    "groups",
    [
        [[_bad()], [_bad(), _bad()]],
        [[_bad()], [_bad(1400)], []],
        [[_bad(), torch.zeros(9)]],
        [[torch.zeros(3000)[::2]]],
        [[_bad(2500)]],
        [[_bad(frames=(0, 2))]],
        [[_bad(frames=(-1, 0))]],
    ],
)
def test_bad_operands_are_noticed(groups: list[list[Operand]]) -> None:
    with pytest.raises(AssertionError):
        cut(groups)
