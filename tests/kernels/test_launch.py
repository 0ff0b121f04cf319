"""What launchers share: dispatch, runs of frames, and life without Triton."""

import importlib
import subprocess
import sys
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


@pytest.mark.skipif(
    launch.INTERPRETED, reason="the interpreter runs kernels, which trust the table"
)
@pytest.mark.parametrize("frame", [-1, FRAMES])
def test_a_frame_outside_the_arena_is_noticed_on_a_cpu(frame: int) -> None:
    arena, dense = _arena(), torch.zeros(PAGE, dtype=torch.uint8)
    for call in (
        lambda: gather_pages(arena, _table(frame), dense, PAGE),
        lambda: scatter_pages(dense, _table(frame), arena, PAGE),
    ):
        with pytest.raises(AssertionError, match="bring the page in first"):
            call()
    assert arena.eq(9).all()
    assert dense.eq(0).all()


@given(st.lists(st.integers(0, FRAMES - 1)))
def test_runs_are_the_longest_consecutive_pieces(frames: list[int]) -> None:
    runs = frame_runs(_table(*frames), _arena(), PAGE)
    assert [run.frame + i for run in runs for i in range(run.pages)] == frames
    assert [run.page for run in runs] == [
        sum(run.pages for run in runs[:i]) for i in range(len(runs))
    ]
    for run, following in pairwise(runs):
        assert run.frame + run.pages != following.frame, "two runs that could be one"


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
