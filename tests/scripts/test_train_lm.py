"""train_lm.py as users start it: a process with arguments, an exit code and a JSON file."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm.options import UsageError, paged_arguments, parse_options, plain_arguments
from lm.scalars import Scalars

from .. import programs

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_lm.py"
TINY = ("--preset=tiny", "--steps=8", "--page-size=64KiB")
SMALL = ("--preset=10m", "--steps=3", "--batch=2", "--seq=64", "--page-size=256KiB")
LONG = ("--preset=10m", "--steps=20")

# Shares of the need: device, host, disk. The last two cannot do without the disk.
BUDGETS = {
    "100%": (100, 200, 0),
    "50%": (50, 200, 0),
    "25%": (25, 50, 200),
    "25%, no host": (25, 0, 250),
}


def run(*arguments: str) -> programs.Ended:
    return programs.run(str(SCRIPT), *arguments)


def train(path: Path, *arguments: str) -> dict[str, Any]:
    """The JSON record of a run that must succeed."""
    result = run(*arguments, f"--json={path}")
    assert result.returncode == 0, result.stderr
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def budget_arguments(shares: tuple[int, int, int], needed: int, folder: Path) -> list[str]:
    device, host, disk = (needed * share // 100 for share in shares)
    lines = [f"--device-budget={device}", f"--host-budget={host}"]
    return lines if disk == 0 else [*lines, f"--disk-budget={disk}", f"--disk-path={folder}"]


def assert_same_training(paged: dict[str, Any], plain: dict[str, Any]) -> None:
    assert paged["losses"] == plain["losses"]
    assert paged["final_parameters_sha256"] == plain["final_parameters_sha256"]
    for tier, peak in paged["peak_bytes"].items():
        assert peak <= paged["budget_bytes"][tier], tier


@pytest.fixture(scope="module")
def plain_tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(tmp_path_factory.mktemp("plain") / "tiny.json", *TINY, "--no-pager")


@pytest.fixture(scope="module")
def plain_small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(tmp_path_factory.mktemp("plain") / "small.json", *SMALL, "--no-pager")


@pytest.fixture(scope="module")
def plain_long(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(tmp_path_factory.mktemp("plain") / "long.json", *LONG, "--no-pager")


def test_plain_record(plain_tiny: dict[str, Any]) -> None:
    assert len(plain_tiny["losses"]) == len(plain_tiny["step_seconds"]) == 8
    assert plain_tiny["losses"][-1] < plain_tiny["losses"][0] - 0.5
    assert re.fullmatch("[0-9a-f]{64}", plain_tiny["final_parameters_sha256"])
    assert plain_tiny["tokens_per_second"] > 0
    # Parameters, gradients and two optimizer states of 462,336 floats, and something beside them.
    standing = 4 * 4 * 462_336
    assert standing < plain_tiny["needed_bytes"] < 2 * standing
    assert plain_tiny["peak_bytes"] == {
        "device": plain_tiny["needed_bytes"],
        "host": 0,
        "disk": 0,
    }
    assert plain_tiny["budget_bytes"] is None
    assert {"command", "date", "machine", "torch", "threads"} <= plain_tiny["facts"].keys()


@pytest.mark.slow
def test_plain_runs_repeat_bit_for_bit(plain_tiny: dict[str, Any], tmp_path: Path) -> None:
    again = train(tmp_path / "again.json", *TINY, "--no-pager")
    assert again["losses"] == plain_tiny["losses"]
    assert again["final_parameters_sha256"] == plain_tiny["final_parameters_sha256"]
    other = train(tmp_path / "other.json", *TINY, "--no-pager", "--seed=1")
    assert other["losses"] != plain_tiny["losses"]


def test_wrong_usage_is_one_line_and_code_2() -> None:
    result = run("--preset=tiny", "--device-budget=40%")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("train_lm: --device-budget='40%'")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "shares",
    [
        pytest.param(shares, marks=pytest.mark.slow) if name != "25%, no host" else shares
        for name, shares in BUDGETS.items()
    ],
    ids=BUDGETS,
)
def test_tiny_model_trains_the_same_in_pages(
    shares: tuple[int, int, int], plain_tiny: dict[str, Any], tmp_path: Path
) -> None:
    budgets = budget_arguments(shares, plain_tiny["needed_bytes"], tmp_path)
    paged = train(tmp_path / "paged.json", *TINY, *budgets)
    assert_same_training(paged, plain_tiny)
    assert paged["peak_bytes"]["host"] > 0 or shares[1] == 0 or shares[0] == 100
    assert paged["peak_bytes"]["disk"] > 0 or shares[2] == 0


@pytest.mark.slow
@pytest.mark.parametrize("shares", BUDGETS.values(), ids=BUDGETS)
def test_small_model_trains_the_same_in_pages(
    shares: tuple[int, int, int], plain_small: dict[str, Any], tmp_path: Path
) -> None:
    budgets = budget_arguments(shares, plain_small["needed_bytes"], tmp_path)
    assert_same_training(train(tmp_path / "paged.json", *SMALL, *budgets), plain_small)


@pytest.mark.slow
@pytest.mark.parametrize("shares", BUDGETS.values(), ids=BUDGETS)
def test_long_run_is_the_same_in_pages(
    shares: tuple[int, int, int], plain_long: dict[str, Any], tmp_path: Path
) -> None:
    budgets = budget_arguments(shares, plain_long["needed_bytes"], tmp_path)
    assert_same_training(train(tmp_path / "paged.json", *LONG, *budgets), plain_long)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "amp"])
def test_lower_precision_trains_the_same_in_pages(dtype: str, tmp_path: Path) -> None:
    plain = train(tmp_path / "plain.json", *TINY, f"--dtype={dtype}", "--no-pager")
    budgets = budget_arguments((60, 200, 0), plain["needed_bytes"], tmp_path)
    paged = train(tmp_path / "paged.json", *TINY, f"--dtype={dtype}", *budgets)
    assert_same_training(paged, plain)


@pytest.mark.parametrize(
    ("first", "second", "shares"),
    [
        pytest.param("plain", "plain", BUDGETS["100%"], marks=pytest.mark.slow),
        pytest.param("plain", "paged", BUDGETS["50%"], marks=pytest.mark.slow),
        pytest.param("paged", "plain", BUDGETS["25%"], marks=pytest.mark.slow),
        pytest.param("paged", "paged", BUDGETS["25%, no host"], marks=pytest.mark.slow),
    ],
)
def test_resumed_runs_continue_exactly(
    first: str,
    second: str,
    shares: tuple[int, int, int],
    plain_tiny: dict[str, Any],
    tmp_path: Path,
) -> None:
    budgets = budget_arguments(shares, plain_tiny["needed_bytes"], tmp_path)
    where = {"plain": ["--no-pager"], "paged": budgets}
    saved = tmp_path / "step3.pt"
    result = run(*TINY, "--steps=3", *where[first], f"--save={saved}")
    assert result.returncode == 0, result.stderr
    record = train(tmp_path / "resumed.json", *TINY, *where[second], f"--resume={saved}")
    assert record["first_step"] == 3
    assert record["losses"] == plain_tiny["losses"][3:]
    assert record["final_parameters_sha256"] == plain_tiny["final_parameters_sha256"]
    if second == "paged":
        assert record["peak_bytes"]["device"] <= record["budget_bytes"]["device"]


@pytest.mark.slow
def test_checkpoints_of_other_trainings_are_refused(tmp_path: Path) -> None:
    saved = tmp_path / "saved.pt"
    assert run(*TINY, "--steps=2", "--no-pager", f"--save={saved}").returncode == 0
    for change, words in (("--seed=4", "--seed 0"), ("--steps=2", "step 2")):
        result = run(*TINY, "--no-pager", f"--resume={saved}", change)
        assert result.returncode == 2
        assert words in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_an_impossible_budget_names_the_smallest_one(
    plain_tiny: dict[str, Any], tmp_path: Path
) -> None:
    tiers = (*TINY, "--host-budget=40MiB")
    result = run(*tiers, "--device-budget=256KiB")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    named = re.search(r"(\d+) bytes \([^)]*\)\. No parameter", result.stderr)
    assert named is not None, result.stderr
    paged = train(tmp_path / "least.json", *tiers, f"--device-budget={named[1]}")
    assert_same_training(paged, plain_tiny)


@pytest.mark.slow
def test_full_tiers_are_one_line_and_code_2() -> None:
    result = run(*TINY, "--device-budget=3MiB", "--host-budget=1MiB")
    assert result.returncode == 2
    assert "host_budget" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_comparison(tmp_path: Path) -> None:
    path = tmp_path / "compare.json"
    budgets = ("--device-budget=40%", "--host-budget=50%", "--disk-budget=200%")
    where = (f"--disk-path={tmp_path}", f"--json={path}")
    result = run(*TINY, "--compare", "--demand", *budgets, *where)
    assert result.returncode == 0, result.stderr
    assert "losses identical: yes" in result.stdout
    assert "final parameters identical: yes" in result.stdout
    record = json.loads(path.read_text())
    assert record["losses_identical"]
    assert record["final_parameters_identical"]
    assert record["device_budget_share_of_need"] <= 0.4
    assert max(map(len, result.stdout.partition("the same training")[2].splitlines())) <= 80
    for name in ("demand", "paged"):
        assert_same_training(record[name], record["plain"])
    assert record["plain"]["max_rss_bytes"] > 100e6
    assert list(tmp_path.iterdir()) == [path]  # the disk tier's file is gone


@pytest.mark.slow
def test_comparison_passes_on_that_the_budget_is_impossible() -> None:
    result = run(*TINY, "--compare", "--device-budget=1%", "--host-budget=40MiB")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1


# -- looking on ----------------------------------------------------------------------------------
class _Writer:
    """Stands in for TensorBoard's, which is not installed everywhere."""

    def __init__(self, folder: Path) -> None:
        self.points: dict[tuple[str, int], float] = {}
        self.closed = False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.points[name, step] = value

    def close(self) -> None:
        self.closed = True


def _stats(scale: int) -> dict[str, Any]:
    return {
        "stall_us": 250_000.0 * scale,
        "bytes_out": 100 * scale,
        "bytes_in": 50 * scale,
        "used_bytes": {"device": 1, "host": 2, "disk": 3},
        "peak_bytes": {"device": 4, "host": 5, "disk": 6},
    }


def test_scalars_are_of_each_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = SimpleNamespace(SummaryWriter=_Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    with Scalars(tmp_path) as scalars:
        scalars.step(0, 5.5, 1000.0, 0.5, _stats(1))
        scalars.step(1, 4.5, 2000.0, 0.5, _stats(3))
    writer = scalars._writer
    assert writer.closed
    assert {name: value for (name, step), value in writer.points.items() if step == 1} == {
        "train/loss": 4.5,
        "train/tokens_per_s": 2000.0,
        "memory/device_bytes": 1,
        "memory/host_bytes": 2,
        "memory/disk_bytes": 3,
        "memory/device_peak_bytes": 4,
        "paging/stall_share": 1.0,
        "paging/bytes_moved": 300,
    }
    assert writer.points["paging/stall_share", 0] == 0.5
    assert writer.points["paging/bytes_moved", 0] == 150


def test_tensorboard_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UsageError, match="pip install tensorboard"):
        Scalars(tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


def test_both_runs_of_a_comparison_write_scalars(tmp_path: Path) -> None:
    options = parse_options(
        ["--compare", "--device-budget=1MiB", "--metrics", f"--tensorboard={tmp_path}"]
    )
    plain = parse_options(plain_arguments(options, tmp_path / "plain.json"))
    paged = parse_options(paged_arguments(options, tmp_path / "paged.json", needed=1000))
    assert (plain.tensorboard, paged.tensorboard) == (tmp_path / "plain", tmp_path / "paged")
    assert (plain.metrics, paged.metrics) == (False, True)


def test_options_for_looking_on_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--no-pager and --metrics"):
        parse_options(["--no-pager", "--metrics"])
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match="is a file; name a folder"):
        parse_options(["--no-pager", f"--tensorboard={file}"])


@pytest.mark.slow
def test_tensorboard_reads_what_a_run_writes(tmp_path: Path) -> None:
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    record = train(
        tmp_path / "run.json", *TINY, "--device-budget=64MiB", f"--tensorboard={tmp_path / 'runs'}"
    )
    found = events.EventAccumulator(str(tmp_path / "runs"))
    found.Reload()
    losses = [point.value for point in found.Scalars("train/loss")]
    assert losses == pytest.approx(record["losses"])
    assert {"memory/device_bytes", "paging/stall_share"} <= set(found.Tags()["scalars"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "amp"])
def test_comparison_on_cuda(dtype: str, tmp_path: Path) -> None:
    budgets = ("--device-budget=50%", "--host-budget=200%", f"--dtype={dtype}")
    result = run(*LONG, "--device=cuda", "--compare", *budgets)
    assert result.returncode == 0, result.stdout + result.stderr
