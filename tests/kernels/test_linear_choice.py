"""The choice between view, direct kernel and gather."""

from typing import get_args

import pytest
import torch

from tensorpager.kernels.linear_choice import RULES, Path, Rates, choose, rule

HALF = torch.bfloat16
SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096)]


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scattered_half_precision(n: int, k: int, dtype: torch.dtype) -> None:
    paths = {m: choose(m, n, k, dtype, consecutive=False) for m in (1, 32, 512, 1024, 2048, 8192)}
    assert [m for m, path in paths.items() if path == "direct"] == [1, 32, 512, 1024]
    assert [m for m, path in paths.items() if path == "gather"] == [2048, 8192]


@pytest.mark.parametrize("m", [1, 1024, 65536])
@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_consecutive_frames_need_no_copy(m: int, device_type: str) -> None:
    assert choose(m, 4096, 4096, HALF, True, device_type=device_type, room_bytes=0) == "view"


def test_a_cpu_gathers_unless_there_is_no_room() -> None:
    weight_bytes = 100 * 64 * 2
    for m in (1, 4096):
        assert choose(m, 100, 64, HALF, False, device_type="cpu") == "gather"
        args = {"device_type": "cpu", "room_bytes": weight_bytes}
        assert choose(m, 100, 64, HALF, False, **args) == "gather"
        args["room_bytes"] -= 1
        assert choose(m, 100, 64, HALF, False, **args) == "direct"


def test_narrow_rows_are_gathered() -> None:
    assert choose(16, 4096, 4097, HALF, False) == "gather"
    assert choose(16, 4096, 4096 + 8, HALF, False) == "direct"


def test_measured_rates_replace_the_constants() -> None:
    slow = Rates(direct_half=0.5)
    assert choose(1024, 4096, 4096, HALF, False, rates=slow) == "gather"
    measured = Rates(crossover={HALF: 3000})
    assert choose(3000, 4096, 4096, HALF, False, rates=measured) == "direct"
    assert choose(3001, 4096, 4096, HALF, False, rates=measured) == "gather"
    assert choose(2048, 4096, 4096, torch.float16, False, rates=measured) == "gather"


def test_a_gather_costs_what_the_docstring_says() -> None:
    rates = Rates()
    for m, share in ((512, 0.72), (4096, 0.09)):
        gather = 2 * 4096 * 4096 * 2 / rates.bytes_per_second
        product = 2 * m * 4096 * 4096 / rates.half_flops
        assert gather / product == pytest.approx(share, abs=0.005)
        assert gather / product == pytest.approx(367 / m, rel=0.01)


def test_every_rule_has_a_path_and_decides_somewhere() -> None:
    cases = [
        {"consecutive": True},
        {"room_bytes": 1},
        {"device_type": "cpu"},
        {"k": 33},
        {},
        {"m": 1 << 20},
    ]
    good = {"m": 64, "n": 4096, "k": 4096, "dtype": HALF, "consecutive": False}
    decided = [rule(**good | case) for case in cases]
    assert decided == list(RULES)
    assert {each.path for each in RULES} == set(get_args(Path))
    assert all(each.reason for each in RULES)
