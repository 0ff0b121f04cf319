"""What launchers share: argument checks, dispatch, runs of frames, and life without Triton."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from page_suite import kernels_in_folder

from tensorpager.kernels import launch
from tensorpager.kernels.copies import gather_pages, scatter_pages
from tensorpager.kernels.launch import frame_runs

PAGE = 4096
FRAMES = 4


def _arena(nbytes: int = FRAMES * PAGE) -> torch.Tensor:
    return torch.full((nbytes,), 9, dtype=torch.uint8)


def _table(*frames: int) -> torch.Tensor:
    return torch.tensor(frames, dtype=torch.int32)


LAUNCHERS: dict[str, Callable[..., None]] = {
    "gather": lambda arena, table, dense, page: gather_pages(arena, table, dense, page),
    "scatter": lambda arena, table, dense, page: scatter_pages(dense, table, arena, page),
}


@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page": 4095}, "page_bytes is 4095; use a power of two"),
        ({"page": 2048}, "page_bytes is 2048; use a power of two from 4096 to 16777216"),
        ({"page": 32 << 20}, "page_bytes is 33554432"),
        ({"arena": _arena(PAGE + 1)}, "arena has 4097 bytes; use a multiple of page_bytes = 4096"),
        ({"arena": _arena().view(torch.int8)}, "arena is torch.int8, not torch.uint8"),
        ({"arena": _arena().view(FRAMES, PAGE)}, r"arena has shape \(4, 4096\)"),
        ({"arena": _arena(FRAMES * PAGE + 4)[4:]}, "align it to 16 bytes"),
        ({"arena": _arena().to("meta")}, "is on cpu, the arena on meta"),
        ({"table": _table(1).long()}, "is torch.int64, not torch.int32; pass frames.to"),
        ({"table": _table(1, 2, 3)[::2]}, r"stride \(2,\); pass .*contiguous"),
        ({"table": _table(1).to("meta")}, "is on meta, the arena on cpu"),
    ],
)
def test_bad_arguments_are_named(launcher: Callable[..., None], change: dict, message: str) -> None:
    good = {"arena": _arena(), "table": _table(1), "dense": _arena(PAGE), "page": PAGE}
    launcher(**good)
    with pytest.raises(ValueError, match=message):
        launcher(**good | change)


@pytest.mark.parametrize("name", ["gather", "scatter"])
@pytest.mark.parametrize(
    ("dense", "message"),
    [
        (_arena(PAGE + 1), "has 4097 bytes, 2 pages of 4096, but frame_of has 1 entries"),
        (_arena(0), "has 0 bytes, 0 pages of 4096, but frame_of has 1 entries"),
        (_arena(PAGE).view(torch.float32), "is torch.float32, not torch.uint8; pass tensor.view"),
        (_arena(2 * PAGE)[::2], r"stride \(2,\)"),
        (_arena(PAGE).to("meta"), "is on meta"),
    ],
)
def test_bad_dense_tensors_are_named(name: str, dense: torch.Tensor, message: str) -> None:
    arena = _arena()
    with pytest.raises(ValueError, match=message):
        LAUNCHERS[name](arena, _table(1), dense, PAGE)
    assert arena.eq(9).all()


@pytest.mark.skipif(
    launch.INTERPRETED, reason="the interpreter runs kernels, which trust the table"
)
@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS)
@pytest.mark.parametrize("frame", [-1, FRAMES])
def test_a_frame_outside_the_arena_is_named_on_a_cpu(
    launcher: Callable[..., None], frame: int
) -> None:
    arena, dense = _arena(), torch.zeros(PAGE, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"page 0 is in frame {frame}, but the arena has 4 frames"):
        launcher(arena, _table(frame), dense, PAGE)
    assert arena.eq(9).all()
    assert dense.eq(0).all()


@given(st.lists(st.integers(0, FRAMES - 1)), st.lists(st.integers(0, FRAMES - 1)))
def test_runs_are_the_longest_consecutive_pieces(first: list[int], second: list[int]) -> None:
    pairs = list(zip(first, second, strict=False))
    tables = [_table(*(pair[i] for pair in pairs)) for i in (0, 1)]
    runs = frame_runs(*tables, arena=_arena(), page_bytes=PAGE)
    assert [
        (a.frame + i, b.frame + i) for a, b in runs for i in range(a.pages)
    ] == pairs  # in order, nothing missing
    assert [a.page for a, _ in runs] == [
        sum(a.pages for a, _ in runs[:i]) for i in range(len(runs))
    ]
    for (a, b), (next_a, next_b) in pairwise(runs):
        ends = (a.frame + a.pages, b.frame + b.pages)
        assert ends != (next_a.frame, next_b.frame), "two runs that could be one"


SHARED = {  # launchers of kernels that have two
    "copies.copy_pages": ("copies.gather_pages", "copies.scatter_pages"),
    "quantize.convert": ("quantize.quantize", "quantize.dequantize"),
    "update.step": ("adam.adam_step", "sgd.sgd_step"),
}


def test_every_kernel_has_launcher_reference_and_test() -> None:
    for name in (one for kernel in kernels_in_folder() for one in SHARED.get(kernel, (kernel,))):
        module_name, launcher = name.split(".")
        module = importlib.import_module(f"tensorpager.kernels.{module_name}")
        public = {name.rstrip("_") for name in module.__all__}  # `softmax_grad_` works in place
        assert launcher in public
        assert any(
            callable(getattr(module, f"{launcher}{end}_reference", None)) for end in ("", "_")
        )
        assert Path(__file__).with_name(f"test_{module_name}.py").exists()


_WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from tensorpager.kernels import copies, launch
assert not launch.HAVE_TRITON and not launch.INTERPRETED
arena = torch.arange(4, dtype=torch.uint8).repeat_interleave(4096)
one = torch.tensor([1], dtype=torch.int32)
out = torch.empty(10, dtype=torch.uint8)
copies.gather_pages(arena, one, out, 4096)
copies.scatter_pages(out + 4, one, arena, 4096)
assert arena[4090:4110].tolist() == [0] * 6 + [5] * 10 + [1] * 4
try:
    launch.launch(None, 1, arena)
except RuntimeError as error:
    print(error)
"""


def test_references_work_without_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TRITON], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "pages on cpu need Triton; install triton>=3.6\n"
