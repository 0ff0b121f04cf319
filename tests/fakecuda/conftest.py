"""These tests need the fake CUDA: ``scripts/fake_gpu.sh`` starts Python with it."""

import ctypes
import json
from collections.abc import Callable
from contextlib import suppress

import pytest

Counts = dict[str, int]


def _asked(name: str) -> str:
    function = getattr(ctypes.CDLL(None), name)
    function.restype = ctypes.c_char_p
    return function().decode()


def pytest_runtest_setup(item: pytest.Item) -> None:
    with suppress(AttributeError):
        _asked("fakecuda_counts")
        return
    pytest.skip("needs the fake CUDA: scripts/fake_gpu.sh")


@pytest.fixture
def counted() -> Callable[[Callable[[], object]], Counts]:
    """What the library counts while a function runs."""

    def during(run: Callable[[], object]) -> Counts:
        before = json.loads(_asked("fakecuda_counts"))
        run()
        after = json.loads(_asked("fakecuda_counts"))
        return {name: after[name] - before[name] for name in after}

    return during
