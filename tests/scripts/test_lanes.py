"""How scripts/test runs its lanes: what counts as failed, and who gets a second chance."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import lanes
from lanes import Lane, Result, Runner

TESTS = """
import os
from pathlib import Path
import pytest

def test_passes():
    assert os.environ["LANE"] == "this one"

def test_needs_what_is_not_here():
    pytest.skip("no such machine")

@pytest.mark.parametrize("name", ["a b", "c::d"])
def test_passes_the_second_time(name):
    marker = Path(__file__).with_name(name)
    there = marker.exists()
    marker.touch()
    assert there

def test_never_passes():
    raise AssertionError

@pytest.fixture
def unclean():
    yield
    raise AssertionError("on the way out")

def test_ends_badly(unclean):
    pass
"""
BARE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
ENVIRONMENT = {"LANE": "this one", **BARE}


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    folder = tmp_path / "reports"
    folder.mkdir()
    return Runner(folder, tmp_path)


def closing_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_a_second_chance_is_for_single_tests(
    runner: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    lane = Lane("some", ("test_some.py",), ENVIRONMENT)
    with (tmp_path / "printed").open("wb") as file:
        result = runner.run(lane, file.fileno())
    assert result.status == 1
    assert result.named("passed") == ["test_some.py::test_passes"]
    assert list(result.reasons.values()) == ["no such machine"]
    lanes.second_chance(runner, [result])
    steady = [f"test_some.py::{name}" for name in ("test_never_passes", "test_ends_badly")]
    assert result.unsteady == [
        f"test_some.py::test_passes_the_second_time[{name}]" for name in ("a b", "c::d")
    ]
    assert result.failed == steady
    assert not lanes.summarise([result], 1.0)
    assert closing_line(capsys) == "3 passed, 2 failed, 1 skipped"
    lanes.write_record(tmp_path / "record.json", [result], 1.0)
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["passed"], record["failed"]) == (3, 2)
    assert record["lanes"][0]["failed"] == steady


def test_a_worker_that_ends_is_a_failure(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "test_end.py").write_text("import os\ndef test_ends():\n    os._exit(3)\n")
    with (tmp_path / "printed").open("wb") as file:
        result = runner.run(
            Lane("end", ("-p", "xdist", "-n", "1", "test_end.py"), BARE), file.fileno()
        )
    assert result.outcomes == {"test_end.py::test_ends": "crashed"}
    lanes.second_chance(runner, [result])
    assert result.failed == ["test_end.py::test_ends"]


@pytest.mark.slow
def test_a_module_that_cannot_be_imported_is_a_failure(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    with (tmp_path / "printed").open("wb") as file:
        result = runner.run(Lane("broken", ("test_broken.py",)), file.fileno())
    assert "test_broken.py" in result.failed


def test_a_lane_whose_environment_cannot_be_made_is_skipped_with_the_reason(
    runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    says = "echo working >&2; echo 'there is no compiler' >&2; exit 75"
    lane = Lane("strange", ("tests",), interpreter=("bash", "-c", says))
    results: list[Result] = []
    runner.run_all([lane], results)
    assert results[0].reasons == {"strange": "there is no compiler"}
    assert lanes.summarise(results, 1.0)
    assert closing_line(capsys) == "0 passed, 0 failed, 1 skipped"


class Never(Runner):
    def run(self, lane: Lane, output: int | None = None) -> Result:
        raise AssertionError("nobody gets a second chance")


@pytest.mark.parametrize(
    ("status", "outcomes"),
    [
        (1, {f"test_{n}": "failed" for n in range(lanes.SECOND_CHANCES + 1)}),
        (2, {"test_a": "failed"}),
        (1, {"test_a": "crashed"}),
    ],
    ids=["too many", "interrupted", "a worker ended"],
)
def test_no_second_chance(
    tmp_path: Path, status: int, outcomes: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    result = Result(Lane("some", ()), status, 1.0, outcomes)
    lanes.second_chance(Never(tmp_path), [result])
    assert not lanes.summarise([result], 1.0)


@pytest.mark.parametrize(
    ("lane", "status", "outcomes", "failed"),
    [
        (Lane("lint", (), tests=False), 0, {}, 0),
        (Lane("lint", (), tests=False), 1, {}, 1),
        (Lane("tests", ()), 0, {"test_a": "passed"}, 0),
        (Lane("tests", ()), 0, {}, 1),
        (Lane("tests", ()), 3, {"test_a": "passed"}, 1),
        (Lane("tests", ()), 5, {}, 1),
        (Lane("tests", ()), -9, {}, 1),
    ],
)
def test_what_counts_as_a_failure(
    lane: Lane,
    status: int,
    outcomes: dict[str, str],
    failed: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert lanes.summarise([Result(lane, status, 1.0, outcomes)], 1.0) == (not failed)
    assert closing_line(capsys) == f"{len(outcomes)} passed, {failed} failed, 0 skipped"
