"""The address checker notices kernels that touch what is not theirs."""

import pytest
import torch
from address_checker import AddressError, checked_addresses
from page_suite import Backend, Guarded, distant_frame

from tensorpager.kernels.copies import gather_pages, scatter_pages
from tensorpager.kernels.launch import tl, triton

pytestmark = pytest.mark.interpreter
PAGE = 4096
INTERPRETER = Backend("interpreter")


@triton.jit
def _copy_without_mask(src_ptr, out_ptr, nbytes, PAGE: tl.constexpr):
    each = tl.arange(0, PAGE)
    tl.store(out_ptr + each, tl.load(src_ptr + each, mask=each < nbytes))


@triton.jit
def _read_without_mask(src_ptr, out_ptr, nbytes, PAGE: tl.constexpr):
    each = tl.arange(0, PAGE)
    tl.store(out_ptr + each, tl.load(src_ptr + each), mask=each < nbytes)


@triton.jit
def _address_in_32_bits(arena_ptr, frames_ptr, PAGE: tl.constexpr):
    frame = tl.load(frames_ptr)
    tl.store(arena_ptr + frame * PAGE + tl.arange(0, 16), tl.full((16,), 1, tl.uint8))


@triton.jit
def _count(counter_ptr):
    tl.atomic_add(counter_ptr, 1)


@pytest.mark.parametrize(
    ("kernel", "verb"), [(_copy_without_mask, "wrote"), (_read_without_mask, "read")]
)
def test_a_missing_mask_is_caught(kernel, verb: str) -> None:
    src, out = Guarded(100, INTERPRETER).tensor, Guarded(100, INTERPRETER).tensor
    with (
        pytest.raises(AddressError, match=f"{verb} 3996 of 4096"),
        checked_addresses([src], [out]),
    ):
        kernel[(1,)](src, out, 100, PAGE=PAGE)


def test_a_32_bit_address_is_caught() -> None:
    arena, frame = distant_frame(INTERPRETER, PAGE * 256)
    frames = INTERPRETER.frames([frame])
    page = arena[frame * PAGE * 256 :]
    with pytest.raises(AddressError, match="wrote 16"), checked_addresses([frames], [page]):
        _address_in_32_bits[(1,)](arena, frames, PAGE=PAGE * 256)


def test_a_read_of_the_output_is_caught() -> None:
    src, out = Guarded(PAGE, INTERPRETER).tensor, Guarded(PAGE, INTERPRETER).tensor
    with pytest.raises(AddressError, match="read 4096"), checked_addresses([src], [out]):
        _copy_without_mask[(1,)](out, out, PAGE, PAGE=PAGE)


def test_an_atomic_is_refused() -> None:
    counter = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(AddressError, match="atomic"), checked_addresses([counter], [counter]):
        _count[(1,)](counter)


def test_a_frame_of_another_tensor_is_caught() -> None:
    arena = Guarded(4 * PAGE, INTERPRETER)
    frames = INTERPRETER.frames([1, 3])
    before = arena.bytes()
    mine = arena.tensor[PAGE : 2 * PAGE]
    dense = torch.zeros(2 * PAGE, dtype=torch.uint8)
    with (
        pytest.raises(AddressError, match="wrote 1024"),
        checked_addresses([frames, dense], [mine]),
    ):
        scatter_pages(dense, frames, arena.tensor, PAGE)
    expected = before[:PAGE] + bytes(PAGE) + before[2 * PAGE :]
    arena.assert_is(expected)


@pytest.mark.parametrize("frame", [-1, 4])
def test_a_frame_outside_the_arena_is_caught(frame: int) -> None:
    arena = Guarded(4 * PAGE, INTERPRETER).tensor
    out = Guarded(PAGE, INTERPRETER).tensor
    frames = INTERPRETER.frames([frame])
    with (
        pytest.raises(AddressError, match="read 1024 of 1024"),
        checked_addresses([frames, arena], [out]),
    ):
        gather_pages(arena, frames, out, PAGE)


def test_checking_ends_with_the_block() -> None:
    out = Guarded(16, INTERPRETER).tensor
    src = Guarded(16, INTERPRETER, seed=1).tensor
    with checked_addresses([], []):
        pass
    _read_without_mask[(1,)](torch.cat([src] * 256), out, 16, PAGE=PAGE)
    assert torch.equal(src, out)
