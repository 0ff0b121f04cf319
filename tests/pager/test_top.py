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
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tensorpager.pager.metrics import rates as metrics_rates
from tensorpager.pager.metrics import top_command
from tensorpager.pager.metrics.format import Tier, encode
from tensorpager.pager.metrics.prometheus import FAMILIES, Server, render
from tensorpager.pager.metrics.rates import History
from tensorpager.pager.metrics.reader import (
    MetricsError,
    NoSuchProcess,
    Training,
    find_trainings,
    open_training,
)
from tensorpager.pager.metrics.view import Screen, bar, format_duration, frame, number, sparkline

from ..planner.command_line import refused, run, run_json
from .models import make_pager
from .test_metrics import a_record

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "scripts" / "train_lm.py"
TINY = ("--preset=tiny", "--batch=1", "--seq=8", "--page-size=64KiB", "--steps=100000", "--metrics")
BUDGETS = ("--device-budget=4MiB", "--host-budget=40MiB")
PATIENCE = 300.0  # seconds; a loaded machine is slow, and a test that hangs must end


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
        done = training.record.counters["iterations"]
        training.close()
        if done >= iterations:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} did not come to {iterations} iterations")


@contextmanager
def published(tmp_path: Path, **changes: Any) -> Iterator[Path]:
    """A metrics file with :func:`a_record`, whose writer lives: this process holds its lock."""
    path = tmp_path / "metrics"
    path.write_bytes(encode(a_record(**changes), 1))
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield path


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
        assert f"(PID {pid}) has ended without closing its Pager, after" in last
        assert child.pid not in [training.pid for training in find_trainings()]
    ended = run("top", pid, "--once")
    assert ended.exit_code == 0
    assert ended.stdout == f"there is no process {pid}: it has ended, or never was\n"
    assert run_json("top", pid) == {"name": pid, "state": "ended"}


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
    assert len(second["recent_iteration_us"]) == min(60, second["iterations"])


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
    with subprocess.Popen(
        [*TOP, pid, "--prometheus", "0"], stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        line = server.stderr.readline()
        address = re.fullmatch(r"serving (http://127\.0\.0\.1:\d+/metrics); .*\n", line)
        assert address is not None, line
        with urllib.request.urlopen(address[1], timeout=PATIENCE) as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            samples = parsed(answer.read().decode())
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=PATIENCE) == 0
    assert samples["tensorpager_trainings", ()] == 1
    labels = (("pid", pid), ("tier", "device"))
    assert samples["tensorpager_tier_budget_bytes", labels] == 4 << 20
    assert samples["tensorpager_channel_bytes_total", (("channel", "host-in"), ("pid", pid))] > 0


def test_torch_is_not_loaded() -> None:
    code = (
        "import sys; from tensorpager.pager.cli import main\n"
        "try: main(['top', '0', '--once'])\n"
        "finally: assert not {'torch', 'numpy', 'pyarrow'} & sys.modules.keys()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert "there is no process 0" in result.stdout


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
        self.resize(80)
        self.text = ""

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        os.kill(self.pid, signal.SIGWINCH)

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


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_the_view_fills_the_terminal_and_a_key_ends_it(key: bytes, tmp_path: Path) -> None:
    with published(tmp_path) as path:
        terminal = Terminal(str(path), "--interval=5")
        terminal.wait_for("\x1b[?1049h")  # the other screen
        terminal.wait_for("q quits")
        assert "\x1b[1mtrain-1.py\x1b[0m" in terminal.text
        terminal.text = ""
        terminal.resize(60)  # drawn anew at once, not after the interval
        terminal.wait_for("q quits")
        terminal.text = ""
        os.write(terminal.fd, key)
        terminal.wait_for("\x1b[?1049l")
        assert terminal.code() == 0


# -- states --------------------------------------------------------------------------------------
def test_no_training_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_command, "find_trainings", list)
    assert "metrics=True" in refused("top")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("/no/such/file",), "No such file"),
        (("nonsense",), "nonsense cannot be opened"),
        ((os.getpid(),), "publishes no metrics; make its Pager with metrics=True"),
        (("--interval", "0"), "--interval"),
        (("--interval", "nan"), "--interval"),
        (("--prometheus", "x"), "'x' is no port"),
        (("--prometheus", "70000"), "is no port"),
        (("--prometheus", "9101", "--json"), "drop --once and --json"),
        (("--prometheus", "256.256.256.256:1"), "cannot be served"),
    ],
)
def test_wrong_usage_is_one_line(arguments: tuple[Any, ...], words: str) -> None:
    assert words in refused("top", *arguments)


def test_a_silent_training_is_told_from_one_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic_ns()
    with published(tmp_path, monotonic_ns=now) as path:
        training = open_training(str(path))
        assert metrics_rates.state(training) == "training"
        monkeypatch.setattr(metrics_rates, "SILENT_SECONDS", 0.0)
        assert metrics_rates.state(training) == "silent"
        history = History()
        history.add(training.record)
        assert "silent for " in frame(training, history, Screen(80)).plain.splitlines()[0]
        training.close()


def test_a_file_that_a_kill_left_is_told_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    path.write_bytes(encode(a_record(), 1))
    result = run("top", path, "--once")
    assert result.exit_code == 0
    assert "train-1.py (PID 1001) has ended without closing its Pager" in result.stdout
    assert "which it left" in result.stdout
    assert not path.exists()


def test_a_training_that_was_closed_is_over(tmp_path: Path) -> None:
    with published(tmp_path, closed=True) as path:
        assert run_json("top", path)["state"] == "ended"
        result = run("top", path)
        assert result.exit_code == 0
        assert "has ended, after 1,000 iterations" in result.stdout


# -- drawing -------------------------------------------------------------------------------------
def test_rates_are_of_what_changed(tmp_path: Path) -> None:
    first, second = a_record(), a_record()
    history = History()
    history.add(first)
    rates = history.rates()
    assert rates.stall_share is None
    assert rates.faults_per_s is None
    second = a_record(
        monotonic_ns=first.monotonic_ns + 2_000_000_000,
        channel_bytes={name: value + 300 for name, value in first.channel_bytes.items()},
        counters={**first.counters, "faults": first.counters["faults"] + 8},
        times_us={**first.times_us, "stall_us": (first.times_us["stall_us"] or 0) + 500_000},
    )
    history.add(second)
    history.add(second)  # read twice: no time has gone by
    rates = history.rates()
    assert rates.bytes_per_s == dict.fromkeys(first.channel_bytes, 150.0)
    assert (rates.faults_per_s, rates.stall_share) == (4.0, 0.25)
    assert rates.iterations_per_s == pytest.approx(2 / 1.5)  # by durations: none was seen to end


def test_a_history_keeps_some_seconds() -> None:
    history = History()
    for second in range(100):
        history.add(a_record(monotonic_ns=second * 1_000_000_000))
    assert history.span_seconds == 5.0


def test_a_bar_is_as_wide_as_it_should_be() -> None:
    assert bar(Tier(50, 80, 100), 20, 10, plain=True).plain == "#####==|.."
    assert bar(Tier(50, 80, 100), 20, 10, plain=False).plain == "█████▓▓|░░"
    for used, peak, dense in ((0, 0, 0), (0, 1, 0), (100, 100, 50), (300, 900, 0), (1, 99, 1)):
        assert len(bar(Tier(used, peak, 100), dense, 20, plain=True).plain) == 20


@pytest.mark.parametrize("width", [1, 40, 80, 300])
@pytest.mark.parametrize("plain", [False, True])
def test_a_frame_of_extreme_values_fits(width: int, plain: bool, tmp_path: Path) -> None:
    most = (1 << 64) - 1
    record = a_record()
    changes: dict[str, Any] = {
        "script": "モデル" * 20,
        "tiers": dict.fromkeys(record.tiers, Tier(most, most, most)),
        "channel_bytes": dict.fromkeys(record.channel_bytes, most),
        "counters": dict.fromkeys(record.counters, most),
        "times_us": dict.fromkeys(record.times_us, 1e300),
        "recent_s": (0.0, 1e30) * 30,
        "logged": {"loss": float("nan"), "lr": 1e-5, "x": float("inf"), "[red]": 1e15},
        "started_ns": -(1 << 63),
        "updated_ns": (1 << 63) - 1,
        "began_ns": 1,
        "monotonic_ns": (1 << 63) - 1,
    }
    with published(tmp_path, **changes) as path:
        training = open_training(str(path))
        history = History()
        history.add(training.record)
        text = frame(training, history, Screen(width, plain=plain))
        for line in text.split():
            assert line.cell_len <= max(40, min(width, 120))
        assert "[red]" in text.plain or width < 80
        short = frame(training, history, Screen(width, 10, plain=plain), keys=True).plain
        assert len(short.splitlines()) == 10
        assert short.endswith("\nq quits")
        json.dumps(metrics_rates.description(training, history), allow_nan=False)
        parsed(render([training]))
        training.close()


def test_numbers_for_people() -> None:
    numbers = [number(x) for x in (4.53123, 12345.6, 0.0, 1.2e-5)]
    assert numbers == ["4.531", "12,346", "0", "1.2e-05"]
    durations = [format_duration(s) for s in (4.9, 200, 7500, 273_600)]
    assert durations == ["4 s", "3 min 20 s", "2 h 05 min", "3 d 4 h"]
    assert sparkline([0, 1, 2, 4]) == "▁▃▅█"
    assert sparkline([0, 0]) == "▁▁"


# -- Prometheus ----------------------------------------------------------------------------------
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (\S+)")
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Samples:
    """Text format 0.0.4, every line of it: HELP, TYPE and samples of one metric together, each
    metric and each sample once, names and units as they should be."""
    assert text.endswith("\n")
    samples: Samples = {}
    types: dict[str, str] = {}
    helped: str | None = None
    current: str | None = None
    for line in text.splitlines():
        if match := re.fullmatch(rf"# HELP ({NAME}) (\S.*)", line):
            assert match[1] not in types
            helped = match[1]
        elif match := re.fullmatch(rf"# TYPE ({NAME}) (counter|gauge)", line):
            assert match[1] == helped
            types[match[1]] = match[2]
            current = match[1]
            assert match[2] != "counter" or match[1].endswith("_total")
            assert not re.search("us$|_ms|_kib|percent", match[1])
        else:
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert match[1] == current, line
            labels = re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', match[2] or "")
            key = match[1], tuple(sorted(labels))
            assert key not in samples, line
            samples[key] = float(match[3].replace("Inf", "inf").replace("NaN", "nan"))
    return samples


def test_every_metric_has_its_sample(tmp_path: Path) -> None:
    with published(tmp_path, logged={'a "b" \\': float("nan"), "c": 1.5}) as path:
        training = open_training(str(path))
        samples = parsed(render([training]))
        training.close()
    pid = ("pid", "1001")
    found = {name for name, _ in samples}
    assert found == {f"tensorpager_{name}" for name in (*(f.name for f in FAMILIES), "trainings")}
    assert samples["tensorpager_iterations_total", (pid,)] == 1000
    assert samples["tensorpager_stall_seconds_total", (pid,)] == pytest.approx(1e-6)
    assert samples["tensorpager_tier_used_bytes", (pid, ("tier", "host"))] == 2
    assert samples["tensorpager_mode", (("mode", "planned"), pid)] == 1
    assert samples["tensorpager_mode", (("mode", "demand"), pid)] == 0
    assert samples["tensorpager_logged", (("name", r"a \"b\" \\"), pid)] != 0  # NaN


def test_without_a_training_there_is_a_zero() -> None:
    assert parsed(render([])) == {("tensorpager_trainings", ()): 0}


def test_only_metrics_are_served() -> None:
    def content() -> str:
        raise NoSuchProcess("it is gone")

    with Server("127.0.0.1", 0, content) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        for path, status in (("/etc/passwd", 404), ("/", 404), ("/metrics?x=1", 503)):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(server.url.replace("/metrics", path), timeout=PATIENCE)
            assert caught.value.code == status
        server.shutdown()
        thread.join()


def test_trainings_are_told_apart_by_their_labels(tmp_path: Path) -> None:
    with published(tmp_path) as path:
        first, second = (open_training(str(path)) for _ in range(2))
        second.name = "1001.2"
        samples = parsed(render([first, second]))
        for training in (first, second):
            assert isinstance(training, Training)
            training.close()
    assert samples["tensorpager_trainings", ()] == 2
    assert samples["tensorpager_iterations_total", (("pager", "2"), ("pid", "1001"))] == 1000


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
