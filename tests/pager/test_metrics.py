"""The record that a training publishes, the places it goes to, and what reads it."""

import dataclasses
import errno
import fcntl
import gc
import math
import os
import random
import stat
import struct
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorpager as tp
from tensorpager.pager.metrics import outputs as metrics_outputs
from tensorpager.pager.metrics import publisher as metrics_module
from tensorpager.pager.metrics.format import (
    CHANNELS,
    COUNTERS,
    LOGGED,
    RECENT,
    RECORD_BYTES,
    TIERS,
    TIMES,
    VERSION,
    MetricsError,
    Record,
    Tier,
    decode,
    encode,
)
from tensorpager.pager.metrics.outputs import NAME
from tensorpager.pager.metrics.reader import (
    Training,
    find_trainings,
    open_training,
    remove_left_over,
)

from .models import World, make_pager, mlp, train


def a_record(number: int = 1, **changes: Any) -> Record:
    """Every field has a value of its own."""
    record = Record(
        pid=1000 + number,
        script=f"train-{number}.py",
        device="cuda:0",
        mode="planned",
        closed=False,
        started_ns=number,
        updated_ns=number + 1,
        monotonic_ns=number + 2,
        began_ns=number + 3,
        tiers={tier: Tier(number + i, number + i + 10, 1 << 40) for i, tier in enumerate(TIERS)},
        channel_bytes={name: number * 100 + i for i, name in enumerate(CHANNELS)},
        counters={name: number * 1000 + i for i, name in enumerate(COUNTERS)},
        times_us={name: number + i / 4 for i, name in enumerate(TIMES)},
        recent_s=(0.5, float(number)),
        logged={"loss": number / 2},
    )
    return dataclasses.replace(record, **changes)


def own_fds() -> list[str]:
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # of the listing itself
            continue
    return [link for link in links if NAME in link]


# -- the record ----------------------------------------------------------------------------------
def test_every_field_comes_back() -> None:
    data = encode(a_record(), sequence=7)
    assert len(data) == RECORD_BYTES < 4096
    assert decode(data) == a_record()


def test_what_is_not_known_comes_back_as_none() -> None:
    record = a_record(times_us=dict.fromkeys(TIMES), recent_s=(), logged={})
    assert decode(encode(record, 1)) == record


def test_longer_texts_and_lists_are_cut_whole() -> None:
    record = a_record(
        script="ä" * 40,  # 80 bytes, 48 are kept
        recent_s=tuple(float(i) for i in range(RECENT + 5)),
        logged={f"name {i}": math.nan for i in range(LOGGED + 3)},
    )
    found = decode(encode(record, 1))
    assert found is not None
    assert found.script == "ä" * 24
    assert found.recent_s == tuple(float(i) for i in range(5, RECENT + 5))
    assert list(found.logged) == [f"name {i}" for i in range(LOGGED)]
    assert math.isnan(found.logged["name 0"])


def test_control_characters_do_not_reach_the_terminal() -> None:
    found = decode(encode(a_record(script="\x1b]0;x\x07.py", logged={"a\nb": 1.0}), 1))
    assert found is not None
    assert found.script == "?]0;x?.py"
    assert found.logged == {"a?b": 1.0}


def test_a_torn_record_is_never_taken() -> None:
    old, new = encode(a_record(1), 1), encode(a_record(2), 2)
    for cut in range(8, RECORD_BYTES):
        for first, second in ((old, new), (new, old)):
            torn = first[:cut] + second[cut:]
            found = decode(torn)
            assert found is None or torn in (old, new)


def test_no_bytes_break_the_reader() -> None:
    dice = random.Random(0)
    good = encode(a_record(), 1)
    for _ in range(300):
        data = bytearray(good)
        for _ in range(dice.randint(1, 8)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        if dice.random() < 0.3:
            data = data[: dice.randrange(len(data))]
        elif dice.random() < 0.7:  # a body that vouches for itself
            data[24:28] = struct.pack("<I", zlib.crc32(data[32:-8]))
            data[-8:] = data[16:24]
        try:
            found = decode(bytes(data))
        except MetricsError:
            continue
        if found is not None:
            for training in (found, decode(encode(found, 1))):
                assert training is not None
                assert training.script.isprintable()
                assert all(s >= 0 for s in training.recent_s)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: b"", "not a metrics record"),
        (lambda data: b"hello" * 1000, "not a metrics record"),
        (lambda data: data[:-1], "cut off"),
        (lambda data: data + b"\0", "cut off"),
        (lambda data: data[:8] + struct.pack("<I", VERSION + 1) + data[12:], "version 2"),
    ],
    ids=["empty", "text", "truncated", "longer", "newer"],
)
def test_what_is_no_record_says_so(change: Any, words: str) -> None:
    with pytest.raises(MetricsError, match=words):
        decode(change(encode(a_record(), 1)))


def test_readers_see_whole_records_while_one_writes() -> None:
    records = [encode(a_record(number), number) for number in (1, 2)]
    fd = os.memfd_create("test")
    os.pwrite(fd, records[0], 0)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for record in records:
                os.pwrite(fd, record, 0)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        training = Training(os.dup(fd), Path("nowhere"))
        seen = {training.read().pid for _ in range(300)}
        training.close()
    finally:
        stop.set()
        writer.join()
        os.close(fd)
    assert seen <= {1001, 1002}


# -- publishing ----------------------------------------------------------------------------------
def test_a_record_holds_what_stats_say(one_thread: None) -> None:
    with make_pager(metrics=True) as pager:
        world = World(pager)
        model = world.module(mlp())
        train(world, model, world.optimizer(torch.optim.AdamW(model.parameters())), 3)
        pager.metrics.log("loss", torch.tensor(2.5))
        pager.metrics.publish()
        training = open_training(str(os.getpid()))
        record, stats = training.record, pager.stats()
        training.close()
    assert record.counters["iterations"] == 3 == len(record.recent_s)
    for name in COUNTERS:
        assert record.counters[name] == {**stats, "page_size": pager.page_size}[name], name
    for tier in TIERS:
        expected = tuple(stats[f"{what}_bytes"][tier] for what in ("used", "peak", "budget"))
        assert record.tiers[tier] == expected
    assert record.channel_bytes == stats["channel_bytes"]
    assert record.channel_bytes["host-in"] > 0
    assert record.times_us["stall_us"] == stats["stall_us"] > 0
    assert record.times_us["iterations_us"] == pytest.approx(sum(record.recent_s) * 1e6, rel=1e-5)
    assert record.logged == {"loss": 2.5}
    assert (record.began_ns, record.closed, record.mode) == (0, False, "demand")
    name = os.path.basename(sys.argv[0])  # "-c" in a worker of pytest-xdist
    assert record.script == (os.path.basename(sys.executable) if name == "-c" else name)


def test_a_thread_publishes_inside_an_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "PERIOD_SECONDS", 0.01)
    with make_pager(metrics=True) as pager:
        training = open_training(str(os.getpid()))
        with pager.iteration():
            for _ in range(1000):
                if training.read().began_ns:
                    break
                threading.Event().wait(0.01)
        assert training.record.began_ns > 0
        training.close()


def test_nothing_is_left_after_close_and_without_metrics() -> None:
    before = own_fds()
    with make_pager() as pager:
        pager.metrics.log("loss", 1.0)
        assert own_fds() == before
    with make_pager(metrics=True) as pager:
        assert len(own_fds()) == len(before) + 1
        training = open_training(str(os.getpid()))
        assert not training.ended
    assert own_fds() == [*before, *own_fds()[:1]]  # the reader's
    assert training.read().closed
    assert training.ended
    training.close()
    assert own_fds() == before
    assert not [t for t in threading.enumerate() if t.name == NAME and not t.daemon]


def test_metrics_end_with_a_pager_that_is_never_closed(tmp_path: Path) -> None:
    class Owner:
        pass

    before = own_fds()
    path = tmp_path / "metrics"
    owner: Any = Owner()
    owner.device, owner._inside = "cpu", False
    published = metrics_module.Metrics(owner)
    published._record = lambda closed: a_record(closed=closed)  # type: ignore[method-assign]
    published.open(path)
    assert path.exists()
    del published
    gc.collect()
    assert not path.exists()
    assert own_fds() == before


def test_two_pagers_of_one_process() -> None:
    with make_pager(metrics=True), make_pager(metrics=True, host_budget="128MiB"):
        pid = os.getpid()
        mine = [training for training in find_trainings() if training.pid == pid]
        assert [training.name for training in mine] == [f"{pid}", f"{pid}.2"]
        second = open_training(f"{pid}.2")
        assert second.record.tiers["host"].budget == 128 << 20
        with pytest.raises(MetricsError, match="has 2 Pagers"):
            open_training(f"{pid}.3")
        for training in (*mine, second):
            training.close()


def test_a_forked_child_publishes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    with make_pager(metrics=path) as pager:
        child = os.fork()
        if child == 0:
            pager.metrics.log("loss", 1.0)
            pager.metrics.close()
            os._exit(0 if not own_fds() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        training = open_training(str(path))
        assert not training.ended
        assert not training.read().closed
        training.close()
    assert not path.exists()


@pytest.mark.parametrize("name", ["", "x" * 33, "ä" * 17, "a\nb"])
def test_names_that_cannot_be_logged(name: str) -> None:
    with make_pager(metrics=True) as pager, pytest.raises(ValueError, match="printable"):
        pager.metrics.log(name, 1.0)


def test_too_many_names() -> None:
    with make_pager(metrics=True) as pager:
        for number in range(LOGGED):
            pager.metrics.log(f"name {number}", number)
        pager.metrics.log("name 0", math.inf)
        with pytest.raises(ValueError, match="one too many"):
            pager.metrics.log("another", 1.0)


# -- a file --------------------------------------------------------------------------------------
def test_a_file_is_private_and_removed_at_close(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    with make_pager(metrics=str(path)):
        facts = path.stat()
        assert stat.S_IMODE(facts.st_mode) == 0o600
        assert facts.st_size == RECORD_BYTES
        training = open_training(str(path))
        assert (training.ended, training.pid) == (False, os.getpid())
        assert not remove_left_over(training)
        training.close()
        with pytest.raises(tp.PagerError, match="is being written by another training"):
            make_pager(metrics=path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_a_killed_training_left_is_replaced_or_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    path.write_bytes(encode(a_record(), 1))  # and nobody holds its lock
    training = open_training(str(path))
    assert training.ended
    with make_pager(metrics=path):
        fresh = open_training(str(path))
        assert not fresh.ended
        fresh.close()
        assert not remove_left_over(training) or path.exists()  # it is another file now
    path.write_bytes(encode(a_record(), 1))
    other = open_training(str(path))
    assert remove_left_over(other)
    assert not path.exists()
    training.close()
    other.close()


def test_other_files_are_not_touched(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("a thesis")
    before = own_fds()
    link = tmp_path / "link"
    link.symlink_to(precious)
    for path, words in ((precious, "not a metrics file"), (link, "symbolic link")):
        with pytest.raises(tp.PagerError, match=words):
            make_pager(metrics=path)
    assert precious.read_text() == "a thesis"
    assert own_fds() == before


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ("/no/such/file", "no folder /no/such"),
        ("/", "is a folder"),
        ("", "must be True"),
        (3, "metrics=3"),
        (b"x", "must be True"),
    ],
)
def test_a_path_that_cannot_work_is_refused(metrics: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_pager(metrics=metrics)


def _make(kind: str, path: Path) -> None:
    if kind == "link":
        (path.parent / "real").write_bytes(encode(a_record(), 1))
        path.symlink_to("real")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "truncated":
        path.write_bytes(encode(a_record(), 1)[:100])
    elif kind == "damaged":
        data = bytearray(encode(a_record(), 1))
        data[200] ^= 1
        path.write_bytes(data)
    elif kind == "text":
        path.write_text("x" * RECORD_BYTES)


@pytest.mark.parametrize(
    ("kind", "words"),
    {
        "missing": "No such file",
        "link": "symbolic link",
        "fifo": "not a regular file",
        "folder": "not a regular file",
        "truncated": "cut off",
        "damaged": "no whole record",
        "text": "not a metrics record",
    }.items(),
)
def test_files_that_are_none_are_refused_and_stay(kind: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    _make(kind, path)
    with pytest.raises(MetricsError, match=words):
        open_training(str(path))
    assert kind == "missing" or os.path.lexists(path)


def test_what_belongs_to_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics"
    path.write_bytes(encode(a_record(), 1))
    with make_pager(metrics=True):
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
        with pytest.raises(MetricsError, match=f"belongs to user {me}"):
            open_training(str(path))
        with pytest.raises(MetricsError, match=f"belongs to user {me}"):
            open_training(str(os.getpid()))
        assert find_trainings() == []


def test_foreign_memory_of_that_name_is_left_out() -> None:
    fd = os.memfd_create(NAME)
    try:
        os.write(fd, b"TPMETRIC, or so it says")
        assert not [t for t in find_trainings() if t.pid == os.getpid()]
        with pytest.raises(MetricsError, match=f"process {os.getpid()}"):
            open_training(str(os.getpid()))
    finally:
        os.close(fd)


# -- trouble -------------------------------------------------------------------------------------
def test_a_full_disk_ends_the_file_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics"
    real = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}") == str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    with make_pager(metrics=path) as pager:
        monkeypatch.setattr(metrics_outputs.os, "pwrite", full)
        with pytest.warns(UserWarning, match=f"no longer written to {path}: No space"):
            pager.metrics.publish()
        assert not path.exists()
        pager.metrics.log("loss", 4.0)
        pager.metrics.publish()  # in memory it goes on
        training = open_training(str(os.getpid()))
        assert training.record.logged == {"loss": 4.0}
        training.close()


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    before = own_fds()
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(tp.PagerError, match="has no locks"):
        make_pager(metrics=tmp_path / "metrics")
    assert list(tmp_path.iterdir()) == []
    assert own_fds() == before
