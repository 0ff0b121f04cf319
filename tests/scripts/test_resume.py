"""``--resume`` continues a training exactly: the same losses and parameters, bit for bit, as if it
had never stopped. Whatever its memory was, and is."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lm.checkpoint import load_checkpoint, save_checkpoint
from lm.data import Corpus, load_corpus
from lm.memory import Memory, PagedMemory, PlainMemory
from lm.options import Options, UsageError, parse_options
from lm.random_states import random_states, set_random_states
from lm.trainer import Trainer

import tensorpager as tp

from .. import programs

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_lm.py"
SMALL = ("--preset=tiny", "--batch=2", "--seq=16", "--no-pager", "--warmup=2")
STOP, END = 2, 4


class _OwnStates(PagedMemory):
    """States as ``Pager.optimizer`` can keep them."""

    def __init__(self, pager: tp.Pager, kind: dict[str, Any]) -> None:
        super().__init__(pager)
        self._kind = kind

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return self._pager.optimizer(optimizer, **self._kind)


@contextmanager
def _memory(name: str, folder: Path, kind: dict[str, Any]) -> Iterator[Memory]:
    """``plain``, or a budget."""
    if name == "plain":
        yield PlainMemory("cpu", measure=False)
        return
    device, host = {"tight": ("12MiB", 0), "wide": ("64MiB", "16MiB")}[name]
    with tp.Pager(
        device, host, "64MiB", folder, page_size="64KiB", device="cpu", policy="lru"
    ) as pager:
        yield _OwnStates(pager, kind)


class Result(NamedTuple):
    losses: list[float]
    sha256: str
    draws: list[float]


def _train(
    memory: Memory, options: Options, corpus: Corpus, first: Path | None, last: Path | None
) -> Result:
    """From ``first``, or the start, to the end, or to where ``last`` is saved."""
    trainer = Trainer(options, memory, corpus)
    if first is None:
        random.seed(1)
        np.random.seed(2)  # noqa: NPY002
    else:
        trainer.restore(load_checkpoint(first))
    losses = []
    while trainer.next_step < (END if last is None else STOP):
        losses.append(trainer.step())
        _draw()
    if last is not None:
        save_checkpoint(last, trainer.checkpoint())
    return Result(losses, trainer.parameters_sha256(), _draw())


def _draw() -> list[float]:
    """Of each generator, as data loaders and dropout do."""
    numbers = random.gauss(), np.random.standard_normal(), float(torch.randn(1))  # noqa: NPY002
    return list(numbers)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus(None, 16)


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("wide", "tight", {}),
        pytest.param("tight", "wide", {"states": "8bit"}, marks=pytest.mark.slow),
        pytest.param("plain", "tight", {}, marks=pytest.mark.slow),
        pytest.param("wide", "plain", {}, marks=pytest.mark.slow),
        pytest.param("wide", "tight", {"states": "bf16"}, marks=pytest.mark.slow),
        pytest.param(
            "tight", "wide", {"states": "8bit", "master_weights": True}, marks=pytest.mark.slow
        ),
        pytest.param("wide", "tight", {"master_weights": True}, marks=pytest.mark.slow),
    ],
)
def test_stopped_and_resumed_is_the_same(
    before: str, after: str, kind: dict[str, Any], one_thread: None, corpus: Corpus, tmp_path: Path
) -> None:
    dtype = "bf16" if "master_weights" in kind else "fp32"
    options = parse_options([*SMALL, f"--dtype={dtype}", f"--steps={END}"])
    with _memory(before if kind else "plain", tmp_path, kind) as memory:
        whole = _train(memory, options, corpus, None, None)
    saved = tmp_path / "saved.pt"
    with _memory(before, tmp_path, kind) as memory:
        first = _train(memory, options, corpus, None, saved)
    with _memory(after, tmp_path, kind) as memory:
        second = _train(memory, options, corpus, saved, None)
    assert first.losses + second.losses == whole.losses
    assert second.sha256 == whole.sha256
    assert first.sha256 != whole.sha256
    assert second.draws == whole.draws
    assert os.listdir(tmp_path) == ["saved.pt"]


def test_checkpoints_from_before_all_generators_were_saved() -> None:
    states = random_states("cpu")
    expected = _draw()
    set_random_states(states, "cpu")
    assert _draw() == expected
    del states["python"], states["numpy"]
    set_random_states(states, "cpu")
    assert _draw()[2] == expected[2]


def test_a_checkpoint_of_something_else_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    for content in (b"PK\x03\x04" + b"x" * 100, b"", b"\x80\x02."):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"--resume=.*x\.pt") as caught:
            load_checkpoint(path)
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_in_a_new_process_with_another_budget_and_plan(tmp_path: Path) -> None:
    def run(*arguments: str) -> dict[str, Any]:
        path = tmp_path / "run.json"
        common = ("--preset=tiny", "--page-size=64KiB", f"--json={path}")
        subprocess.run(
            [sys.executable, str(SCRIPT), *common, *arguments], check=True, capture_output=True
        )
        return dict(json.loads(path.read_text()))

    disk = f"--disk-path={tmp_path}"
    saved = tmp_path / "saved.pt"
    tight = ("--device-budget=5MiB", "--disk-budget=64MiB", disk)
    whole = run("--steps=9", *tight)
    losses = []
    for steps, budget in (
        ("3", tight),
        ("6", ("--device-budget=7MiB", "--host-budget=64MiB", "--policy=lru")),
        ("9", ("--device-budget=64MiB",)),
    ):
        resume = [f"--resume={saved}"] if losses else []
        record = run(f"--steps={steps}", *budget, *resume, f"--save={saved}")
        losses += record["losses"]
    assert losses == whole["losses"]
    assert record["final_parameters_sha256"] == whole["final_parameters_sha256"]
    assert sorted(os.listdir(tmp_path)) == ["run.json", "saved.pt"]


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_a_signal_ends_a_run_with_a_checkpoint(tmp_path: Path, number: signal.Signals) -> None:
    """It ends after the step that it meets, and the run that goes on has the losses of one that was
    never stopped."""
    saved, went_on, whole = (tmp_path / name for name in ("run.pt", "on.json", "whole.json"))
    child = subprocess.Popen(
        [sys.executable, str(SCRIPT), *SMALL, "--steps=1000", f"--save={saved}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert "step 50/1000" in child.stdout.readline()
        child.send_signal(number)
        said = child.stderr.read()
    assert child.returncode == 128 + number
    assert f"--resume={saved} goes on" in said
    steps = int(re.findall(r"after step (\d+) of", said)[0])
    for path, *how in ((went_on, f"--resume={saved}"), (whole,)):
        ended = programs.run(str(SCRIPT), *SMALL, f"--steps={steps + 2}", f"--json={path}", *how)
        assert ended.returncode == 0, ended.stderr
    losses = [json.loads(path.read_text())["losses"] for path in (went_on, whole)]
    assert losses[0] == losses[1][-2:]


def test_a_run_that_has_written_enough_saves_and_goes_on_another_day(tmp_path: Path) -> None:
    saved = tmp_path / "run.pt"
    disk = ("--device-budget=6MiB", "--disk-budget=64MiB", f"--disk-path={tmp_path}")
    command = (*SMALL[:3], "--warmup=2", "--page-size=64KiB", *disk, "--policy=lru", "--steps=3")
    ended = programs.run(str(SCRIPT), *command, f"--save={saved}", "--disk-write-limit=64KiB")
    assert ended.returncode == 2, ended.stderr
    assert "stopped after step 1 of 3, as --disk-write-limit is reached, and saved" in ended.stderr
    ended = programs.run(str(SCRIPT), *command, "--disk-write-limit=64KiB")
    assert ended.returncode == 2
    assert "disk_write_limit=65536 (64.00 KiB) a day is reached" in ended.stderr
    ended = programs.run(str(SCRIPT), *command, f"--resume={saved}", "--disk-write-limit=1TB")
    assert ended.returncode == 0, ended.stderr
