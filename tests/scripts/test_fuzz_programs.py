"""Random training programs keep every promise (``scripts/random_programs/promises.py``)."""

import pytest
from random_programs.program import draw
from random_programs.promises import broken_promise

QUICK, ALL, BATCH = 100, 2000, 10


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.slow] if first >= QUICK else [])
        for first in range(0, ALL, BATCH)
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_random_programs_keep_every_promise(first: int) -> None:
    broken = {seed: broken_promise(draw(seed)) for seed in range(first, first + BATCH)}
    assert not {seed: reason for seed, reason in broken.items() if reason}, (
        "run scripts/fuzz_programs.py --seed N for each"
    )


def test_a_program_is_the_same_for_its_seed() -> None:
    assert draw(3) == draw(3)
    assert draw(3) != draw(4)
