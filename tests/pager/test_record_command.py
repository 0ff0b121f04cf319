"""``tensorpager record``: what it leaves, what it says, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.modules.module as torch_module
import torch.optim.optimizer as torch_optimizer
from click.testing import CliRunner

import tensorpager as tp
from tensorpager.pager.cli import main
from tensorpager.pager.plan.plain_script import Watch
from tensorpager.pager.plan.record import (
    ITERATION_VARIABLE,
    PATH_VARIABLE,
    Report,
    recording_from_environment,
)
from tensorpager.planner.trace import WRITE
from tensorpager.planner.trace_file import read_trace

from .. import programs
from .models import World, make_pager, mlp, train

SCRIPT = """
import sys
import torch
import tensorpager as tp

torch.set_num_threads(1)
pager = tp.Pager(device_budget="64MiB", host_budget="64MiB", page_size="64KiB", device="cpu",
                 policy="lru")
model = pager.page_module(torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Linear(256, 8)))
optimizer = pager.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
for number in range(int(sys.argv[1])):
    with pager.iteration():
        if number == 2:
            torch.zeros(9).cummax(0)  # tells the third iteration from the others
        model(torch.randn(64, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print("done", number + 1)
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run(folder: Path, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """``tensorpager record`` with ``arguments``, in ``folder``."""
    program = "from tensorpager.pager.cli import main; main(prog_name='tensorpager')"
    return subprocess.run(
        [sys.executable, "-c", program, "record", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def until_caught(pid: int, number: int) -> None:
    """Wait until process ``pid`` has a handler for signal ``number``."""
    while True:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
        if caught >> (number - 1) & 1:
            return
        time.sleep(0.01)


def only_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("tensorpager")]
    assert len(lines) == 1, text
    return lines[0]


# -- the command ---------------------------------------------------------------------------------
def test_the_third_iteration_of_an_unchanged_script(tmp_path: Path, script: Path) -> None:
    ended = run(tmp_path, "--", sys.executable, script.name, 4, 0)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "done 4\n"
    trace = read_trace(tmp_path / "trace.parquet")
    assert "aten::cummax" in trace.op_names
    assert "0.weight.momentum_buffer" in trace.tensor_names
    line = only_line(ended.stderr)
    assert f"wrote trace.parquet: iteration 3, {trace.ops} ops, {trace.tensors} tensors" in line
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trace.parquet", "train.py"]


def test_another_iteration_file_and_exit_code(tmp_path: Path, script: Path) -> None:
    options = ("-o", tmp_path / "x.parquet", "--iteration", 2)
    ended = run(tmp_path, *options, sys.executable, script, 2, 7)
    assert ended.returncode == 7
    assert "aten::cummax" not in read_trace(tmp_path / "x.parquet").op_names


@pytest.mark.slow
def test_too_few_iterations(tmp_path: Path, script: Path) -> None:
    ended = run(tmp_path, "--", sys.executable, script, 2, 0)
    assert ended.returncode == 1
    line = only_line(ended.stderr)
    assert "only 2 of 3 iterations were completed" in line
    assert "--iteration" in line
    assert not (tmp_path / "trace.parquet").exists()
    failed = run(tmp_path, "--", sys.executable, script, 2, 9)
    assert failed.returncode == 9
    assert "exit code 9" in only_line(failed.stderr)


def test_a_program_that_does_not_page(tmp_path: Path) -> None:
    ended = run(tmp_path, "--", sys.executable, "-c", "pass")
    assert ended.returncode == 1
    assert "loaded no PyTorch" in only_line(ended.stderr)


PLAIN = """
import sys
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

torch.manual_seed(0)
model = nn.Sequential(Block(), Block())
optimizers = [
    torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[1].parameters(), momentum=0.9)
][: int(sys.argv[2])]
for number in range(int(sys.argv[1])):
    if number == 2:
        torch.zeros(9).cummax(0)  # tells the third iteration from the others
    loss = model(torch.randn(32, 64)).square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
print("loss", loss.item())
"""


@pytest.mark.parametrize("optimizers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_script_that_knows_nothing_of_us(tmp_path: Path, optimizers: int) -> None:
    """Tensors have their modules' names, and an iteration ends with the last optimizer's step."""
    (tmp_path / "plain.py").write_text(PLAIN)
    ended = run(tmp_path, "--", sys.executable, "plain.py", 4, optimizers)
    assert ended.returncode == 0, ended.stderr
    assert "wrote trace.parquet: iteration 3," in only_line(ended.stderr)
    assert ended.stderr.count("\n") == 1
    alone = programs.run(str(tmp_path / "plain.py"), "4", str(optimizers))
    assert ended.stdout == alone.stdout  # the same loss
    trace = read_trace(tmp_path / "trace.parquet")
    assert trace.op_names.count("aten::cummax") == 1
    assert trace.op_names.count("aten::addmm") == 4
    kinds = dict(zip(trace.tensor_names, trace.tensor_kinds, strict=True))
    assert kinds["0.up.weight"] == "parameter"
    assert kinds["0.up.weight.exp_avg"] == "optimizer"
    assert kinds["0.up.weight.grad"] == "gradient"
    assert ("1.up.weight.momentum_buffer" in kinds) == (optimizers == 2)
    weight = trace.tensor_names.index("0.down.weight")
    assert trace.tensor_persistent[weight]
    assert not trace.tensor_persistent[trace.tensor_names.index("0.up.weight.grad")]
    written = (trace.access_tensor == weight) & (trace.access_mode & WRITE != 0)
    first_written = int(trace.access_op[written].min())
    assert first_written > trace.op_names.index("aten::cummax")
    assert 0 < trace.ideal_us < 600e6


def test_only_the_recorded_iteration_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pagers of other tests may still be there.
    monkeypatch.setattr("tensorpager.pager.plan.plain_script._pages", lambda: False)
    modes, hooks, alive = [], [], []
    watched = len(torch_optimizer._global_optimizer_post_hooks)

    class Probe(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            modes.append(torch._C._len_torch_dispatch_stack())
            hooks.append(len(torch_module._global_forward_hooks))
            gone = [weakref.ref((x * 2).untyped_storage()) for _ in range(3)]
            alive.append([one() is not None for one in gone])
            return x

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Probe(), torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    traces = []
    for name in ("first", "again"):  # what one recording leaves on tensors is nothing to the next
        Watch(Report(tmp_path / name, 3, None))
        for _ in range(5):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        traces.append(read_trace(tmp_path / name))
    assert modes == hooks == [0, 0, 1, 0, 0] * 2
    assert not any(map(any, alive))  # what the program gave back
    assert len(torch_optimizer._global_optimizer_post_hooks) == watched
    assert traces[0].op_names == traces[1].op_names
    assert traces[0].tensor_bytes.tolist() == traces[1].tensor_bytes.tolist()


def test_every_says_how_many_steps_make_an_iteration(tmp_path: Path) -> None:
    """Of two optimizers four: two rounds of the loop. The result as JSON, alone on stdout."""
    (tmp_path / "plain.py").write_text(PLAIN)
    options = ("--every", 4, "--iteration", 2, "--json", "-o", "t.parquet")
    ended = run(tmp_path, *options, "--", sys.executable, "plain.py", 4, 2)
    assert ended.returncode == 0, ended.stderr
    assert "loss" in ended.stderr
    trace = read_trace(tmp_path / "t.parquet")
    assert trace.op_names.count("aten::addmm") == 8
    assert json.loads(ended.stdout) == {
        "path": "t.parquet",
        "written": True,
        "reason": None,
        "iteration": 2,
        "ops": trace.ops,
        "tensors": trace.tensors,
        "exit_code": 0,
    }


def test_every_is_not_for_scripts_with_a_pager(tmp_path: Path, script: Path) -> None:
    ended = run(tmp_path, "--every", 2, "--json", "--", sys.executable, script, 3, 0)
    assert ended.returncode == 1
    found = json.loads(ended.stdout)
    assert (found["written"], found["iteration"], found["exit_code"]) == (False, None, 0)
    assert "--every is for scripts without a Pager" in found["reason"]
    assert not (tmp_path / "trace.parquet").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--every", "0", "--", "true"], "--every"),
        (["--", "no-such-program-anywhere"], "no such command"),
        (["--", os.devnull], "cannot be run"),
        (["-o", "/no/such/folder/a.parquet", "--", "true"], "no folder"),
        (["--iteration", "0", "--", "true"], "--iteration"),
        ([], "COMMAND"),
    ],
)
def test_bad_usage(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(main, ["record", *arguments])
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_signals_go_to_the_program(tmp_path: Path) -> None:
    """Which decides itself what becomes of them."""
    waiting = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\n"
        "print('ready', flush=True)\n"
        "time.sleep(100)\n"
    )
    program = "from tensorpager.pager.cli import main; main(prog_name='tensorpager')"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "record", "--", sys.executable, "-c", waiting],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        until_caught(process.pid, signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 42
    assert "exit code 42" in only_line(errors)


def test_a_program_ended_by_a_signal(tmp_path: Path) -> None:
    text = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert run(tmp_path, "--", sys.executable, "-c", text).returncode == 128 + signal.SIGKILL


# -- the environment -----------------------------------------------------------------------------
def recorded_pager(monkeypatch: pytest.MonkeyPatch, **variables: str) -> tp.Pager:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    pager = make_pager(policy="lru")
    if not pager.core.on_iteration:
        recording_from_environment(pager._recorder)
    return pager


def test_without_the_variable_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    with make_pager(policy="lru") as pager:
        recording_from_environment(pager._recorder)
        assert pager.core.on_iteration == []


def test_a_number_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(tp.PagerError, match="TENSORPAGER_RECORD_ITERATION='x'"):
        recorded_pager(monkeypatch, **{PATH_VARIABLE: "a", ITERATION_VARIABLE: "x"})


def test_a_failed_iteration_is_passed_over(
    one_thread: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "a.parquet"
    variables = {PATH_VARIABLE: str(path), ITERATION_VARIABLE: "2"}
    with recorded_pager(monkeypatch, **variables) as pager:
        world = World(pager)
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        train(world, model, optimizer, 1)
        with pytest.raises(KeyError), pager.iteration():
            raise KeyError
        assert not path.exists()
        train(world, model, optimizer, 1)
        written = path.stat()
        train(world, model, optimizer, 1)
        assert path.stat().st_mtime_ns == written.st_mtime_ns
        assert "aten::addmm" in read_trace(path).op_names


def test_trouble_with_the_file_does_not_end_the_training(
    one_thread: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    variables = {PATH_VARIABLE: str(tmp_path / "no" / "a.parquet"), ITERATION_VARIABLE: "1"}
    with recorded_pager(monkeypatch, **variables) as pager:
        for _ in range(2):
            with pager.iteration():
                pager.page(mlp()[0].weight.detach()).sum()
    assert capsys.readouterr().err.count("was not written") == 1
