"""Lanes of the kernel tests, and the skips that go with their markers.

| lane | run as | what runs |
|---|---|---|
| reference | `pytest tests/kernels` | plain torch on a CPU |
| interpreter | `TRITON_INTERPRET=1 pytest -m interpreter tests/kernels` | Triton on a CPU |
| aot | `pytest -m aot tests/kernels` | kernels compiled for GPUs that are not there |
| gpu | `pytest -m gpu tests/kernels` | Triton on a CUDA device |

A kernel decorated under the interpreter cannot be compiled, so the interpreter has its own process.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("aot_gate", "page_suite")

from page_suite import Backend  # noqa: E402

from tensorpager.kernels import launch  # noqa: E402


def _reason_to_skip(item: pytest.Item) -> str | None:
    if item.get_closest_marker("interpreter") and not launch.INTERPRETED:
        return "interpreter lane: set TRITON_INTERPRET=1, in a process of its own"
    if item.get_closest_marker("aot") and (launch.INTERPRETED or not launch.HAVE_TRITON):
        return "ahead-of-time lane: needs Triton, and TRITON_INTERPRET unset"
    if item.get_closest_marker("gpu") and (launch.INTERPRETED or not torch.cuda.is_available()):
        return "needs a CUDA device, and TRITON_INTERPRET unset"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    reason = _reason_to_skip(item)
    if reason:
        pytest.skip(reason)


@pytest.fixture(
    scope="session",
    params=[
        "reference",
        "cpu",
        pytest.param("interpreter", marks=pytest.mark.interpreter),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each implementation of the page kernels in turn."""
    if request.param == "cpu" and launch.INTERPRETED:
        pytest.skip("launchers use the interpreter in this process")
    return Backend(request.param)
