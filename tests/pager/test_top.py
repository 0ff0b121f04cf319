"""``tensorpager top``: what it shows of a training in another process, and of one that ends."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tensorpager.pager.metrics import rates as metrics_rates
from tensorpager.pager.metrics import top_command
from tensorpager.pager.metrics.prometheus import families
from tensorpager.pager.metrics.rates import History
from tensorpager.pager.metrics.reader import (
    COUNTERS,
    NAME,
    TIMES,
    MetricsError,
    Training,
    find_trainings,
    open_training,
)
from tensorpager.pager.metrics.view import Screen, bar, format_duration, frame, number, sparkline

from ..planner.command_line import refused, run, run_json
from .models import make_pager
from .test_metrics import ME, a_snapshot

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "scripts" / "train_lm.py"
TINY = ("--preset=tiny", "--batch=1", "--seq=8", "--page-size=64KiB", "--steps=100000", "--metrics")
BUDGETS = ("--device-budget=4MiB", "--host-budget=40MiB")
PATIENCE = 300.0  # seconds; a loaded machine is slow, and a test that hangs must end


NEEDS_CLIENT = pytest.mark.skipif(
    find_spec("prometheus_client") is None, reason="prometheus_client is not installed"
)


@contextmanager
def training_process() -> Iterator[subprocess.Popen[bytes]]:
    """train_lm.py with metrics, killed at the end."""
    child = subprocess.Popen(
        [sys.executable, str(TRAIN), *TINY, *BUDGETS],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def wait_for(pid: int, iterations: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            training = open_training(str(pid))
        except MetricsError:
            time.sleep(0.1)
            continue
        done = training.latest["iterations"]
        if done >= iterations:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} did not come to {iterations} iterations")


@contextmanager
def published(**changes: Any) -> Iterator[str]:
    """This process publishes :func:`a_snapshot`; its PID."""
    fd = os.memfd_create(NAME)
    os.write(fd, json.dumps(a_snapshot(**changes)).encode())
    try:
        yield ME
    finally:
        os.close(fd)


# -- a training in another process ---------------------------------------------------------------
def test_a_training_is_seen_until_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with training_process() as child, make_pager(metrics=True):
        pid = str(child.pid)
        wait_for(child.pid, 2)
        monkeypatch.setattr(
            top_command,
            "find_trainings",
            lambda: [t for t in find_trainings() if t.pid in (child.pid, os.getpid())],
        )
        _figures_are_live(pid)
        _a_frame_fits_80_columns(pid)
        child.send_signal(signal.SIGSTOP)  # a reader needs nothing of the training
        _two_are_listed(child.pid)
        _prometheus_is_served(pid)
        child.send_signal(signal.SIGCONT)
        with subprocess.Popen(
            [*TOP, pid, "--interval=0.1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as viewer:
            assert viewer.stdout is not None
            viewer.stdout.readline()  # the first frame
            child.kill()
            child.wait()
            output, errors = viewer.communicate(timeout=PATIENCE)
        assert (viewer.returncode, errors) == (0, "")
        last = output.splitlines()[-1]
        assert f"train_lm.py (PID {pid}) has ended, after" in last
        assert child.pid not in [training.pid for training in find_trainings()]
    ended = run("top", pid, "--once")
    assert ended.exit_code == 2
    assert f"there is no process {pid}: it has ended, or never was" in ended.stderr


TOP = [
    sys.executable,
    "-c",
    "import sys; from tensorpager.pager.cli import main; main(['top', *sys.argv[1:]])",
]


def _two_are_listed(pid: int) -> None:
    result = run("top")
    assert result.exit_code == 0
    assert "train_lm.py" in result.stdout
    for each in (pid, os.getpid()):
        assert re.search(rf"^ *{each} ", result.stdout, re.MULTILINE), result.stdout
    listed = run_json("top")["trainings"]
    assert {each["pid"] for each in listed} == {pid, os.getpid()}


def _figures_are_live(pid: str) -> None:
    first = run_json("top", pid, "--interval", 0.2)
    wait_for(int(pid), first["iterations"] + 1)
    second = run_json("top", pid, "--interval", 0.2)
    assert second["iterations"] > first["iterations"]
    for found in (first, second):
        assert (found["script"], found["device"]) == ("train_lm.py", "cpu")
        assert found["state"] in ("training", "idle", "silent")
        for tier in ("device", "host"):
            facts = found["tiers"][tier]
            assert 0 < facts["used_bytes"] <= facts["peak_bytes"] <= facts["budget_bytes"], tier
        assert found["tiers"]["disk"] == {"used_bytes": 0, "peak_bytes": 0, "budget_bytes": 0}
        assert found["channels"]["host-in"]["bytes"] > 0
        assert 0 <= found["stall_share"] <= 1
        assert found["iterations_per_s"] > 0
        assert found["logged"].keys() == {"loss", "tokens/s"}
    assert second["tiers"]["device"]["budget_bytes"] == 4 << 20
    assert second["logged"]["loss"] < 7
    # One that ends just then is in one of the two.
    assert 0 <= min(60, second["iterations"]) - len(second["recent_iteration_us"]) <= 1


def _a_frame_fits_80_columns(pid: str) -> None:
    result = run("top", pid, "--once", "--interval", 0.2)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"train_lm.py  pid {pid}  cpu  ")
    assert max(map(len, lines)) <= 80
    for words in ("device ", "of    4.00 MiB, peak", "from host", "stalled", "faults", "loss "):
        assert words in result.stdout, words
    assert "disk" not in result.stdout


def _prometheus_is_served(pid: str) -> None:
    pytest.importorskip("prometheus_client")
    with subprocess.Popen(
        [*TOP, pid, "--prometheus", "0"], stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        line = server.stderr.readline()
        address = re.fullmatch(r"serving (http://127\.0\.0\.1:\d+/metrics); .*\n", line)
        assert address is not None, line
        with urllib.request.urlopen(address[1], timeout=PATIENCE) as answer:
            samples = answer.read().decode().splitlines()
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=PATIENCE) == 0
    assert "tensorpager_trainings 1.0" in samples
    budget = f'tensorpager_tier_budget_bytes{{name="{pid}",tier="device"}} 4.194304e+06'
    assert budget in samples


def test_torch_is_not_loaded() -> None:
    code = (
        "import sys; from tensorpager.pager.cli import main\n"
        "try: main(['top', '0', '--once'])\n"
        "finally: assert not {'torch', 'numpy', 'pyarrow'} & sys.modules.keys()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 2
    assert "there is no process 0" in result.stderr


# -- a terminal ----------------------------------------------------------------------------------
class Terminal:
    """A command in a terminal of 80 × 24."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            # The whole environment: readline puts COLUMNS where os.environ does not see it.
            kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
            settings = {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
            os.execve(TOP[0], [*TOP, *arguments], {**kept, **settings})
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.text = ""

    def wait_for(self, words: str) -> None:
        """Until the command has printed them."""
        deadline = time.monotonic() + PATIENCE
        while words not in self.text:
            assert time.monotonic() < deadline, f"{words!r} did not come: {self.text!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                self.text += os.read(self.fd, 1 << 16).decode(errors="replace")

    def code(self) -> int:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.fd)
        return code


def test_the_view_fills_the_terminal_until_ctrl_c() -> None:
    with published() as pid:
        terminal = Terminal(pid, "--interval=0.2")
        terminal.wait_for("\x1b[?1049h")  # the other screen
        terminal.wait_for("\x1b[1mtrain-1.py\x1b[0m")
        os.write(terminal.fd, b"\x03")
        terminal.wait_for("\x1b[?1049l")
        assert terminal.code() == 0


# -- states --------------------------------------------------------------------------------------
def test_no_training_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_command, "find_trainings", list)
    assert "metrics=True" in refused("top")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nonsense",), "'nonsense' is no PID"),
        ((ME,), "publishes no metrics; make its Pager with metrics=True"),
        (("--interval", "0"), "--interval"),
        (("--interval", "nan"), "--interval"),
        (("--prometheus", "x"), "'x' is no port"),
        (("--prometheus", "70000"), "is no port"),
        (("--prometheus", "9101", "--json"), "drop --once and --json"),
        pytest.param(("--prometheus", "256.256.256.256:1"), "cannot be served", marks=NEEDS_CLIENT),
    ],
)
def test_wrong_usage_is_one_line(arguments: tuple[Any, ...], words: str) -> None:
    assert words in refused("top", *arguments)


def test_a_silent_training_is_told_from_one_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(1, "1", a_snapshot(clock=time.monotonic()))
    assert metrics_rates.state(training) == "training"
    monkeypatch.setattr(metrics_rates, "SILENT_SECONDS", 0.0)
    assert metrics_rates.state(training) == "silent"
    view = frame(training, History(training.latest), Screen(80))
    assert "silent for " in view.plain.splitlines()[0]


# -- drawing -------------------------------------------------------------------------------------
def test_rates_are_of_what_changed() -> None:
    first = a_snapshot()
    history = History(first)
    rates = history.rates()
    assert rates.stall_share is None
    assert rates.faults_per_s is None
    second = a_snapshot(
        clock=first["clock"] + 2,
        channel_bytes={name: value + 300 for name, value in first["channel_bytes"].items()},
        faults=first["faults"] + 8,
        stall_us=first["stall_us"] + 500_000,
    )
    history.add(second)
    history.add(second)  # read twice: no time has gone by
    rates = history.rates()
    assert rates.bytes_per_s == dict.fromkeys(first["channel_bytes"], 150.0)
    assert (rates.faults_per_s, rates.stall_share) == (4.0, 0.25)
    assert rates.iterations_per_s == pytest.approx(2 / 1.5)  # by durations: none was seen to end


def test_a_history_keeps_some_seconds() -> None:
    history = History(a_snapshot(clock=0))
    for second in range(100):
        history.add(a_snapshot(clock=second))
    assert history.span_seconds == 5.0


def test_a_bar_is_as_wide_as_it_should_be() -> None:
    assert bar((50, 80, 100), 20, 10).plain == "█████▓▓|░░"
    for used, peak, dense in ((0, 0, 0), (0, 1, 0), (100, 100, 50), (300, 900, 0), (1, 99, 1)):
        assert len(bar((used, peak, 100), dense, 20).plain) == 20


def test_a_narrow_frame_leaves_out_what_has_no_room() -> None:
    training = Training(1, "1", a_snapshot())
    wide, narrow = (frame(training, History(training.latest), Screen(n)).plain for n in (80, 50))
    assert ", peak " in wide
    assert ", peak " not in narrow
    assert "…" not in "".join(narrow.splitlines()[2:7])


@pytest.mark.parametrize("width", [1, 40, 80, 300])
def test_a_frame_of_extreme_values_fits(width: int) -> None:
    most = (1 << 64) - 1
    found = a_snapshot()
    tiers = dict.fromkeys(found["budget_bytes"], most)
    snapshot = a_snapshot(
        script="モデル" * 20,
        **dict.fromkeys(("used_bytes", "peak_bytes", "budget_bytes"), tiers),
        channel_bytes=dict.fromkeys(found["channel_bytes"], most),
        **dict.fromkeys(COUNTERS, most),
        **dict.fromkeys(TIMES, 1e299),
        recent_iteration_us=[0.0, 1e30] * 30,
        logged={"loss": float("nan"), "lr": 1e-5, "x": float("inf"), "[red]": 1e15},
        updated=1e15,
        clock=1e15,
    )
    training = Training(1, "1", snapshot)
    history = History(snapshot)
    text = frame(training, history, Screen(width))
    for line in text.split():
        assert line.cell_len <= max(40, min(width, 120))
    assert "[red]" in text.plain or width < 80
    assert len(frame(training, history, Screen(width, 10)).plain.splitlines()) == 10
    json.dumps(metrics_rates.description(training, history), allow_nan=False)


def test_numbers_for_people() -> None:
    numbers = [number(x) for x in (4.53123, 12345.6, 0.0, 1.2e-5)]
    assert numbers == ["4.531", "12,346", "0", "1.2e-05"]
    durations = [format_duration(s) for s in (4.9, 200, 7500, 273_600)]
    assert durations == ["4 s", "3 min 20 s", "2 h 05 min", "3 d 4 h"]
    assert sparkline([0, 1, 2, 4]) == "▁▃▅█"
    assert sparkline([0, 0]) == "▁▁"


# -- Prometheus ----------------------------------------------------------------------------------
def test_every_figure_is_a_metric() -> None:
    pytest.importorskip("prometheus_client")
    second = a_snapshot(2, bound_us=None, logged={"loss": float("nan")})
    trainings = [Training(1, "1", a_snapshot()), Training(1, "1.2", second)]
    samples = {}
    for family in families(trainings):
        assert not family.name.endswith("_us")
        for sample in family.samples:
            samples[sample.name, *sample.labels.values()] = sample.value
    assert samples["tensorpager_trainings",] == 2
    assert samples["tensorpager_iterations_total", "1.2"] == 2000
    assert samples["tensorpager_stall_seconds_total", "1"] == pytest.approx(1e-6)
    assert samples["tensorpager_tier_used_bytes", "1", "host"] == 2
    assert samples["tensorpager_channel_bytes_total", "1", "host-in"] == 102
    assert samples["tensorpager_page_size", "1"] == 1015
    assert samples["tensorpager_logged", "1", "loss"] == 0.5
    assert ("tensorpager_bound_seconds", "1") in samples
    assert ("tensorpager_bound_seconds", "1.2") not in samples
    names = {name for name, *_ in samples}
    assert len(names) == 1 + len(COUNTERS) + len(TIMES) + 2 + 3


def test_without_its_library_prometheus_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert "pip install 'tensorpager[prometheus]'" in refused("top", "--prometheus", "0")


@pytest.mark.slow
def test_two_processes_are_watched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with training_process() as first, training_process() as second:
        for child in (first, second):
            wait_for(child.pid, 2)
        found = {training.pid for training in find_trainings()}
        assert {first.pid, second.pid} <= found
        first.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(metrics_rates, "SILENT_SECONDS", 1.0)
        time.sleep(1.5)
        assert run_json("top", first.pid, "--interval", 0.1)["state"] == "silent"
        assert run_json("top", second.pid, "--interval", 0.1)["state"] != "ended"
