"""The snapshot that a training publishes, what becomes of it, and what reads it."""

import gc
import json
import math
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorpager as tp
from tensorpager.pager.metrics import publisher
from tensorpager.pager.metrics.publisher import RECENT, Metrics
from tensorpager.pager.metrics.reader import (
    CHANNELS,
    COUNTERS,
    LINK,
    NAME,
    TIERS,
    TIMES,
    VERSION,
    MetricsError,
    NoSuchProcess,
    checked,
    find_trainings,
    open_training,
)

from .models import World, make_pager, mlp, train

ME = str(os.getpid())


def a_snapshot(number: int = 1, **changes: Any) -> dict[str, Any]:
    """Every field has a value of its own."""
    return {
        "version": VERSION,
        "script": f"train-{number}.py",
        "device": "cuda:0",
        "mode": "planned",
        "started": float(number),
        "updated": number + 1.0,
        "clock": number + 2.0,
        "began": number + 3.0,
        "used_bytes": {tier: number + i for i, tier in enumerate(TIERS)},
        "peak_bytes": {tier: number + i + 10 for i, tier in enumerate(TIERS)},
        "budget_bytes": dict.fromkeys(TIERS, 1 << 40),
        "channel_bytes": {name: number * 100 + i for i, name in enumerate(CHANNELS)},
        **{name: number * 1000 + i for i, name in enumerate(COUNTERS)},
        **{name: number + i / 4 for i, name in enumerate(TIMES)},
        "recent_iteration_us": [5e5, number * 1e6],
        "logged": {"loss": number / 2},
        **changes,
    }


def own_fds() -> list[int]:
    """Descriptors of this process that hold a snapshot."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == LINK:
                found.append(int(name))
        except FileNotFoundError:  # of the listing itself
            continue
    return found


# -- the snapshot --------------------------------------------------------------------------------
def test_every_field_comes_back() -> None:
    data = json.dumps(a_snapshot()).encode()
    assert len(data) < 4096
    assert checked(data) == a_snapshot()
    unknown = a_snapshot(**dict.fromkeys(TIMES), recent_iteration_us=[], logged={"loss": math.inf})
    assert checked(json.dumps(unknown).encode()) == unknown


def test_control_characters_do_not_reach_the_terminal() -> None:
    found = checked(json.dumps(a_snapshot(script="\x1b]0;x\x07.py", logged={"a\nb": 1})).encode())
    assert found["script"] == "?]0;x?.py"
    assert found["logged"] == {"a?b": 1.0}


@pytest.mark.parametrize("wrong", [None, "x", -1, math.nan, math.inf, [], {}, True, 10**400])
def test_no_value_breaks_the_reader(wrong: Any) -> None:
    """Each field with a value of another kind."""
    for name, value in a_snapshot().items():
        if (name in TIMES and wrong is None) or type(wrong) is type(value) is not float:
            continue
        with pytest.raises(ValueError, match=r"is no snapshot|Exceeds"):
            checked(json.dumps(a_snapshot(**{name: wrong})).encode())


@pytest.mark.parametrize("data", [b"", b"hello" * 1000, b"[]", b"{}", b"\xff", b"[" * 10**6])
def test_what_is_no_snapshot_says_so(data: bytes) -> None:
    with pytest.raises(ValueError):
        checked(data)


# -- publishing ----------------------------------------------------------------------------------
def test_a_snapshot_holds_what_stats_say(one_thread: None) -> None:
    with make_pager(metrics=True) as pager:
        world = World(pager)
        model = world.module(mlp())
        train(world, model, world.optimizer(torch.optim.AdamW(model.parameters())), 3)
        pager.metrics.log("loss", torch.tensor(2.5))
        pager.metrics.publish()
        found, stats = open_training(ME).latest, pager.stats()
    assert found["iterations"] == 3 == len(found["recent_iteration_us"])
    for name in COUNTERS:
        assert found[name] == {**stats, "page_size": pager.page_size}[name], name
    for tier in TIERS:
        for key in ("used_bytes", "peak_bytes", "budget_bytes"):
            assert found[key][tier] == stats[key][tier]
    assert found["channel_bytes"] == stats["channel_bytes"]
    assert found["channel_bytes"]["host-in"] > 0
    assert found["stall_us"] == stats["stall_us"] > 0
    assert found["iterations_us"] == pytest.approx(sum(found["recent_iteration_us"]))
    assert found["logged"] == {"loss": 2.5}
    assert (found["began"], found["mode"]) == (0, "demand")
    name = os.path.basename(sys.argv[0])  # "-c" in a worker of pytest-xdist
    assert found["script"] == (os.path.basename(sys.executable) if name == "-c" else name)


def test_the_latest_times_are_kept() -> None:
    with make_pager(metrics=True) as pager:
        for _ in range(RECENT + 5):
            with pager.iteration():
                pass
        pager.metrics.publish()
        assert len(open_training(ME).latest["recent_iteration_us"]) == RECENT


def test_a_thread_publishes_inside_an_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "PERIOD_SECONDS", 0.01)
    with make_pager(metrics=True) as pager:
        training = open_training(ME)
        with pager.iteration():
            for _ in range(1000):
                if training.read()["began"]:
                    break
                threading.Event().wait(0.01)
        assert training.latest["began"] > 0


def test_readers_see_whole_snapshots_while_one_writes() -> None:
    with make_pager(metrics=True) as pager:
        training = open_training(ME)
        stop = threading.Event()

        def write() -> None:
            while not stop.is_set():
                pager.metrics.publish()

        writer = threading.Thread(target=write)
        writer.start()
        try:
            clocks = []
            for _ in range(100):
                clocks.append(training.read()["clock"])
                assert not training.ended
        finally:
            stop.set()
            writer.join()
    assert clocks == sorted(clocks)
    assert clocks[-1] > clocks[0]


def test_nothing_is_left_after_close_and_without_metrics() -> None:
    before = own_fds()
    with make_pager() as pager:
        pager.metrics.log("loss", 1.0)
        assert own_fds() == before
    with make_pager(metrics=True):
        (fd,) = set(own_fds()) - set(before)
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
        assert not os.get_inheritable(fd)
        training = open_training(ME)
        last = training.read()
        assert not training.ended
    assert training.read() == last
    assert training.ended
    assert own_fds() == before
    assert not [t for t in threading.enumerate() if t.name == NAME and not t.daemon]


def test_metrics_end_with_a_pager_that_is_never_closed() -> None:
    class Owner:
        pass

    before = own_fds()
    published = Metrics(Owner())  # type: ignore[arg-type]
    published._snapshot = a_snapshot  # type: ignore[method-assign]
    published.open()
    assert len(own_fds()) == len(before) + 1
    del published
    gc.collect()
    assert own_fds() == before


def test_two_pagers_of_one_process() -> None:
    with make_pager(metrics=True), make_pager(metrics=True, host_budget="128MiB"):
        mine = [training for training in find_trainings() if str(training.pid) == ME]
        assert [training.name for training in mine] == [ME, f"{ME}.2"]
        second = open_training(f"{ME}.2")
        assert second.latest["budget_bytes"]["host"] == 128 << 20
        with pytest.raises(MetricsError, match="has 2 Pagers"):
            open_training(f"{ME}.3")


def test_a_forked_child_publishes_nothing() -> None:
    with make_pager(metrics=True) as pager:
        other = os.memfd_create(NAME)  # as if it was about to be published
        child = os.fork()
        if child == 0:
            pager.metrics.log("loss", 1.0)
            pager.metrics.close()
            os._exit(0 if not own_fds() else 1)
        os.close(other)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        training = open_training(ME)
        training.read()
        assert not training.ended


def test_a_program_that_is_started_inherits_none() -> None:
    code = "import os; print([os.readlink(link) for link in os.scandir('/proc/self/fd')])"
    with make_pager(metrics=True) as pager:
        pager.metrics.publish()
        command = [sys.executable, "-c", code]
        shown = subprocess.run(command, capture_output=True, text=True, close_fds=False)
    assert shown.stdout.startswith("[")
    assert NAME not in shown.stdout


@pytest.mark.parametrize("name", ["", "a\nb"])
def test_names_that_cannot_be_logged(name: str) -> None:
    with make_pager(metrics=True) as pager, pytest.raises(ValueError, match="printable"):
        pager.metrics.log(name, 1.0)


@pytest.mark.parametrize("metrics", ["", "/tmp/metrics", 3, b"x", Path("x")])
def test_another_value_is_refused(metrics: Any) -> None:
    with pytest.raises(ValueError, match="metrics="):
        make_pager(metrics=metrics)


# -- what is not ours ----------------------------------------------------------------------------
def test_no_such_process() -> None:
    for target, words in (("0", "there is no process 0"), ("x", "is no PID"), ("1.x", "is no PID")):
        with pytest.raises(MetricsError, match=words) as caught:
            open_training(target)
        assert isinstance(caught.value, NoSuchProcess) == (target == "0")


def test_what_belongs_to_another_user_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_pager(metrics=True):
        assert ME in [str(training.pid) for training in find_trainings()]
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
        assert find_trainings() == []


def test_a_process_that_cannot_be_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(tp.PagerError, match=r"cannot be looked into .Permission denied.; run"):
        open_training(ME)


def test_foreign_memory_of_that_name_is_left_out() -> None:
    fd = os.memfd_create(NAME)
    try:
        os.write(fd, b'{"version": 1}, or so it says')
        assert not [t for t in find_trainings() if str(t.pid) == ME]
        with pytest.raises(MetricsError, match="publishes no metrics"):
            open_training(ME)
    finally:
        os.close(fd)
