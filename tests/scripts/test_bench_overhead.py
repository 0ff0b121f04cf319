"""bench_overhead.py: who takes a step when, and what a training that fails leads to."""

from typing import Any

import bench_overhead
import pytest
from bench_overhead import Training, measure
from lm.options import UsageError, parse_options

TINY = parse_options(["--no-pager", "--preset=tiny", "--batch=1", "--seq=8", "--steps=4"])


class Told:
    """A training that writes down when it was asked for a step."""

    asked: list[str]

    def __init__(self, _options: Any, budget: int | None) -> None:
        self.name = "plain" if budget is None else "paged"
        self.first_losses, self.peak_bytes = [3.0], 100
        if budget is not None:
            assert budget == 200

    def step(self) -> tuple[float, float]:
        self.asked.append(self.name)
        return len(self.asked), 0.5

    def end(self) -> dict[str, Any]:
        return {"sha256": "a", "stats": {}, "moved": 0}

    def __enter__(self) -> "Told":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_steps_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_overhead, "Training", Told)
    monkeypatch.setattr(Told, "asked", [], raising=False)
    record = measure(TINY, None)
    assert Told.asked == ["plain", "paged", "paged", "plain"] * 2
    assert (record["plain_seconds"], record["paged_seconds"]) == ([1, 4, 5, 8], [2, 3, 6, 7])
    assert record["losses_and_parameters_identical"]


@pytest.mark.slow
def test_two_processes_train_alike() -> None:
    record = measure(TINY, None)
    assert record["losses_and_parameters_identical"]
    assert len(record["paged_seconds"]) == len(record["plain_seconds"]) == 4
    assert record["pager"]["fits"]


@pytest.mark.slow
def test_a_training_that_ends_is_an_error() -> None:
    with pytest.raises(UsageError, match="ended with 1"):
        Training(TINY, 1)
