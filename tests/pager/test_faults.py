"""What breaks below the pager, and what is kept: the rows of the table in ``pager/README.md``."""

from __future__ import annotations

import errno
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.disk import watch as io_watch
from tensorpager.pager.errors import HungDisk

from .faulty_engine import FaultyEngine, break_disk
from .models import (
    PAGE_BYTES,
    RESERVE_BYTES,
    SEED,
    World,
    assert_same,
    compare_runs,
    make_pager,
    mlp,
    plain,
    train,
)
from .test_planned import PlannedWorld

DISK_ONLY = {"host_budget": 0, "disk_budget": "32MiB"}
HUNG_SECONDS = 1.0  # before a disk is given up; a busy one must answer sooner
PATIENT_SECONDS = 300.0
STEPS = 4
POLICIES = ["lru", pytest.param("lp", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_watch, "RETRY_PAUSES_SECONDS", (0.001,) * 3)


def disk_pager(folder: Path, policy: str = "lru", **options: Any) -> tp.Pager:
    frames = 24 if policy == "lru" else 40
    given = {"disk_path": folder, "policy": policy, "frames": frames, **DISK_ONLY, **options}
    pager = make_pager(**given)
    if pager.core.follower is not None:
        pager.core.follower.most_plans = 1
        pager.core.follower.only_if_faster = False
    return pager


class Training:
    """A model and its optimizer, in pages, that go on step by step."""

    def __init__(self, pager: tp.Pager | None, depth: int = 4) -> None:
        torch.manual_seed(SEED)
        planned = pager is not None and pager.core.follower is not None
        self.world = PlannedWorld(pager) if planned else World(pager)
        self.model = self.world.module(mlp(depth=depth))
        adamw = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.optimizer = self.world.optimizer(adamw)

    def steps(self, count: int) -> list[float]:
        return train(self.world, self.model, self.optimizer, count)

    def state(self) -> Any:
        return plain([self.model.state_dict(), self.optimizer.state_dict()])


def saved(pager: tp.Pager) -> Any:
    state = pager.state_dict()
    return plain([state["models"][0], state["optimizers"][0]])


def expected_after(steps: int) -> Any:
    training = Training(None)
    losses = training.steps(steps)
    return [losses, training.state()]


def evict_all(pager: tp.Pager) -> None:
    with pager.core.quiet():
        for run in list(pager.core.space.runs.values()):
            pager.core.residency.evict_run(run)


def wait_for_answers(pager: tp.Pager) -> None:
    deadline = time.monotonic() + 300
    while pager.core.io_watch.calls:
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Writes and reads that fail


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_writes_that_fail_lose_nothing(one_thread: None, tmp_path: Path, code: int) -> None:
    """The step stops; all pages are where they were, can be saved, and training goes on later."""
    with disk_pager(tmp_path) as pager:
        training = Training(pager)
        training.steps(2)
        before = saved(pager)
        engine = break_disk(pager)
        engine.fail("write", code)
        with pytest.raises(tp.PagerError, match=rf"{os.strerror(code)}.*stay where they were"):
            training.steps(STEPS)
        check_invariants(pager.core)
        assert pager.core.mover.disk_refuses
        after = saved(pager)  # while it still fails
        check_invariants(pager.core)
        assert engine.happened[os.strerror(code)] >= 1
        engine.heal()
        assert_same(saved(pager), after)
        pager.load_state_dict({"models": before[:1], "optimizers": before[1:]})
        training.optimizer.zero_grad()
        losses = training.steps(2)
        assert all(torch.isfinite(torch.tensor(losses)))
        assert not pager.core.mover.disk_refuses
        check_invariants(pager.core)


def test_other_pages_leave_while_writes_fail(one_thread: None, tmp_path: Path) -> None:
    """Pages that need no write make room, so that what only reads goes on."""
    with disk_pager(tmp_path, frames=12) as pager:
        model = pager.page_module(mlp(depth=8))
        inputs = torch.randn(8, 128)
        evict_all(pager)
        with torch.no_grad():
            expected = model(inputs)
        evict_all(pager)
        with torch.no_grad():
            model[0].weight.mul_(1.0)  # two pages that cannot leave
        engine = break_disk(pager)
        engine.fail("write", errno.ENOSPC)
        with pager.core.quiet(), pytest.raises(tp.PagerError, match="No space left"):
            pager.core.residency.evict_run(model[0].weight._storage.run)
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(plain(model(inputs)), plain(expected))
        assert model[0].weight.residency()["device"] == 2 * PAGE_BYTES
        check_invariants(pager.core)


def test_a_failing_disk_does_not_matter_while_the_host_has_room(
    one_thread: None, tmp_path: Path
) -> None:
    def script(world: World) -> object:
        training = world.module(mlp(depth=4))
        optimizer = world.optimizer(torch.optim.AdamW(training.parameters(), lr=1e-3))
        return train(world, training, optimizer, STEPS), training, optimizer

    with disk_pager(tmp_path, host_budget="16MiB") as pager:
        engine = break_disk(pager)
        engine.fail("write", errno.EIO)
        engine.fail("read", errno.EIO)
        compare_runs(script, World(pager))
        assert not engine.happened


def test_reads_that_fail_can_be_tried_again(one_thread: None, tmp_path: Path) -> None:
    with disk_pager(tmp_path) as pager:
        training = Training(pager)
        losses = training.steps(2)
        evict_all(pager)
        engine = break_disk(pager)
        engine.fail("read", errno.EIO)
        with pytest.raises(tp.PagerError, match=r"Input/output error.*still on the disk"):
            training.steps(1)
        check_invariants(pager.core)
        engine.heal()
        torch.manual_seed(SEED)
        world_losses, state = expected_after(2)
        assert losses == world_losses
        assert_same(saved(pager), state)


@pytest.mark.parametrize("policy", POLICIES)
def test_errors_for_a_moment_are_not_noticed(one_thread: None, tmp_path: Path, policy: str) -> None:
    expected = expected_after(8)
    with disk_pager(tmp_path, policy) as pager:
        engine = break_disk(pager)
        engine.chances = {("write", errno.EIO): 0.05, ("read", errno.EIO): 0.05}
        training = Training(pager)
        losses = training.steps(8)
        engine.chances.clear()
        assert_same([losses, training.state()], expected)
        count = engine.happened["Input/output error"]
        assert 0 < count == pager.stats()["io_retries"]


@pytest.mark.slow
def test_planned_writes_that_fail(one_thread: None, tmp_path: Path) -> None:
    """The plan ends, faults go on: the same losses. While they fail too, the model can be saved."""
    expected = expected_after(10)
    with disk_pager(tmp_path, "lp") as pager:
        training = Training(pager)
        losses = training.steps(5)
        assert pager.stats()["planned_iterations"] > 0, pager.explain()
        engine = break_disk(pager)
        engine.fail("write", errno.ENOSPC, times=1)
        losses += training.steps(5)
        assert engine.happened["No space left on device"] == 1
        assert_same([losses, training.state()], expected)
        engine.fail("write", errno.ENOSPC)
        with pytest.raises(tp.PagerError, match="No space left"):
            training.steps(3)
        state = saved(pager)
        engine.heal()
        assert_same(saved(pager), state)
        check_invariants(pager.core)


def test_transfers_that_end_early_or_are_interrupted(
    one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = expected_after(STEPS)
    chance, seen = random.Random(3), Counter[str]()

    def unreliable(name: str) -> Any:
        real = getattr(os, name)

        def call(fd: int, buffers: Any, offset: int) -> int:
            what = chance.random()
            if what < 0.1:
                seen[f"{name} interrupted"] += 1
                raise InterruptedError(errno.EINTR, "Interrupted system call")
            if what < 0.3:
                seen[f"{name} short"] += 1
                return int(real(fd, [buffers[0][:4096]], offset))
            return int(real(fd, buffers, offset))

        return call

    for name in ("pwritev", "preadv"):
        monkeypatch.setattr(os, name, unreliable(name))
    with disk_pager(tmp_path) as pager:
        training = Training(pager)
        assert_same([training.steps(STEPS), training.state()], expected)
    assert len(seen) == 4, seen


# A disk that is slow, or does not answer


@pytest.mark.parametrize(
    "seconds", [0.005, pytest.param(10.0, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_a_slow_disk_is_waited_for(one_thread: None, tmp_path: Path, seconds: float) -> None:
    """Each call takes longer than a quarter of the time-out, all of them far longer than it."""
    with disk_pager(tmp_path, io_timeout=max(1.0, 3 * seconds)) as pager:
        tensors = [pager.page(torch.randn(4, PAGE_BYTES // 16)) for _ in range(3)]
        values = plain(tensors)
        break_disk(pager).delay_seconds = seconds
        evict_all(pager)
        assert_same(plain(tensors), values)
        assert pager.stats()["disk_bytes_written"] > 0


@pytest.mark.parametrize("verb", ["write", "read"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_disk_that_does_not_answer(
    one_thread: None, tmp_path: Path, policy: str, verb: str
) -> None:
    """After ``io_timeout`` it is said what is under way; when the disk is back all goes on."""
    _, expected = expected_after(6)
    with disk_pager(tmp_path, policy, io_timeout=PATIENT_SECONDS) as pager:
        training = Training(pager)
        training.steps(6)
        engine = break_disk(pager)
        if policy == "lru":
            evict_all(pager)
        before = saved(pager)
        assert_same(before, expected)
        engine.hang(verb)
        pager.core.io_watch.timeout_seconds = HUNG_SECONDS
        began = time.monotonic()
        pattern = rf"does not answer: {verb} of .* for .* s \(io_timeout=1 s\).*nothing is lost"
        with pytest.raises(HungDisk, match=pattern) as caught:
            training.steps(3)
        assert time.monotonic() - began < PATIENT_SECONDS
        assert re.search(
            r"page \d+ of \d+ of '.*(weight|bias|exp_avg|gradient|activation)", str(caught.value)
        )
        began = time.monotonic()
        with pytest.raises(HungDisk, match="still does not answer"):
            training.steps(1)
        assert time.monotonic() - began < PATIENT_SECONDS
        engine.heal()
        pager.core.io_watch.timeout_seconds = PATIENT_SECONDS
        wait_for_answers(pager)
        check_invariants(pager.core)
        pager.load_state_dict({"models": before[:1], "optimizers": before[1:]})
        training.optimizer.zero_grad()
        assert_same(saved(pager), expected)
        training.steps(1)


def test_frames_of_a_read_that_hangs_stay_taken(one_thread: None, tmp_path: Path) -> None:
    """Nobody is given them, so what needs no disk goes on."""
    with disk_pager(
        tmp_path, io_timeout=PATIENT_SECONDS, frames=3, host_budget=PAGE_BYTES
    ) as pager:
        on_host, on_disk = (pager.page(torch.full((PAGE_BYTES // 4,), n)) for n in (1.0, 2.0))
        evict_all(pager)
        columns = pager.core.table.host, pager.core.table.disk
        for tensor, column in zip((on_host, on_disk), columns, strict=True):
            assert column[tensor._storage.run.first] >= 0
        engine = break_disk(pager)
        engine.hang("read")
        pager.core.io_watch.timeout_seconds = HUNG_SECONDS
        with pytest.raises(HungDisk, match="does not answer"):
            on_disk.to_dense()
        free = pager.core.residency.pool.free_count
        assert free == 2
        assert bool((on_host.to_dense() == 1).all())
        assert pager.core.residency.pool.free_count == 1
        with pytest.raises(HungDisk, match="still does not answer"):
            on_disk.to_dense()
        engine.heal()
        pager.core.io_watch.timeout_seconds = PATIENT_SECONDS
        wait_for_answers(pager)
        check_invariants(pager.core)
        assert bool((on_disk.to_dense() == 2).all())


def test_closing_while_the_disk_does_not_answer(one_thread: None, tmp_path: Path) -> None:
    """Memory that the drive may still write to is not given to others."""
    pager = disk_pager(tmp_path, io_timeout=PATIENT_SECONDS)
    tensor = pager.page(torch.randn(4, PAGE_BYTES // 16))
    evict_all(pager)
    engine = break_disk(pager)
    engine.hang("read")
    pager.core.io_watch.timeout_seconds = HUNG_SECONDS
    with pytest.raises(HungDisk):
        tensor.to_dense()
    address = pager.core.backend.address
    with pytest.warns(RuntimeWarning, match="given back when the process ends"):
        pager.close()
    mapped = Path("/proc/self/maps").read_text()
    starts = [int(line.split("-")[0], 16) for line in mapped.splitlines()]
    assert any(start <= address for start in starts)
    assert pager.core.disk is not None
    os.fstat(pager.core.disk._fd)  # still open: its number must not become another file's
    engine.heal()
    wait_for_answers(pager)


EXIT = """
import sys, torch, tensorpager as tp
from tests.pager.faulty_engine import break_disk
from tests.pager.models import make_pager, PAGE_BYTES
pager = make_pager(host_budget=0, disk_budget="4MiB", disk_path=sys.argv[1], io_timeout=0.4)
tensor = pager.page(torch.randn(4, PAGE_BYTES // 16))
with pager.core.quiet():
    pager.core.residency.evict_run(tensor._storage.run)
break_disk(pager).hang("read")
try:
    tensor.to_dense()
except tp.PagerError as error:
    print(error)
"""
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_no_thread_holds_the_interpreter(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "does not answer" in done.stdout


STOPPED = """
import sys, torch
from tests.pager.faulty_engine import break_disk
from tests.pager.test_faults import Training, disk_pager, expected_after
torch.set_num_threads(1)
steps = 6
losses, _ = expected_after(steps)
with disk_pager(sys.argv[1], io_timeout=1.0) as pager:
    break_disk(pager).delay_seconds = 0.01
    training = Training(pager)
    seen = []
    for step in range(steps):
        seen += training.steps(1)
        print("step", flush=True)
    print("same" if seen == losses else "different", bool(pager.core.io_watch._hung))
"""


@pytest.mark.slow
def test_a_process_that_is_stopped_and_continued(tmp_path: Path) -> None:
    """SIGSTOP stops the I/O too. Three times the time-out later nothing has happened."""
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.readline() == "step\n"
            time.sleep(0.05)
            process.send_signal(signal.SIGSTOP)
            time.sleep(1.5)
            process.send_signal(signal.SIGCONT)
        rest = process.stdout.read().splitlines()
    assert rest[-1] == "same False"


@pytest.mark.parametrize("given", [0, -1, float("nan"), "60", True])
def test_a_time_out_that_is_none(given: Any) -> None:
    with pytest.raises(ValueError, match=r"io_timeout=.* is not a time"):
        make_pager(io_timeout=given)


# The place of the file


def test_a_folder_that_disappears(one_thread: None, tmp_path: Path) -> None:
    """The file has no name, so it stays, and can even grow."""
    folder = tmp_path / "pages"
    folder.mkdir()
    expected = expected_after(STEPS)
    with disk_pager(folder) as pager:
        training = Training(pager)
        losses = training.steps(1)
        shutil.rmtree(folder)
        losses += training.steps(STEPS - 1)
        with pytest.raises(tp.PagerError, match="does not fit"):
            pager.grow(disk_budget="100TiB")
        assert pager.stats()["budget_bytes"]["disk"] == 32 << 20
        pager.grow(disk_budget="33MiB")
        check_invariants(pager.core)
        assert_same([losses, training.state()], expected)


@contextmanager
def mounted(*options: str, source: str = "none", kind: str = "tmpfs") -> Iterator[Path]:
    """A file system of its own; the test is skipped where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    place = Path(tempfile.mkdtemp(prefix="tensorpager-test-"))
    try:
        made = subprocess.run(
            ["mount", "-t", kind, "-o", ",".join(options), source, str(place)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if made.returncode:
            pytest.skip(f"cannot mount {kind}: {made.stderr.strip()}")
        try:
            yield place
        finally:
            subprocess.run(["umount", "-l", str(place)], check=True)
    finally:
        place.rmdir()


def test_a_file_system_that_is_full(one_thread: None) -> None:
    """All of the file is reserved at the start: others may fill the rest, and it cannot grow."""
    expected = expected_after(STEPS)
    with mounted("size=40m") as folder:
        with pytest.raises(tp.PagerError, match="does not fit"):
            disk_pager(folder, disk_budget="64MiB")
        with disk_pager(folder) as pager:
            training = Training(pager)
            losses = training.steps(1)
            free = shutil.disk_usage(folder).free
            (folder / "others").write_bytes(bytes(free))
            assert shutil.disk_usage(folder).free == 0
            losses += training.steps(STEPS - 1)
            with pytest.raises(tp.PagerError, match="does not fit"):
                pager.grow(disk_budget="36MiB")
            check_invariants(pager.core)
            assert_same([losses, training.state()], expected)


@pytest.mark.slow
def test_a_file_system_that_turns_read_only(one_thread: None, tmp_path: Path) -> None:
    """As ext4 does on its own errors. Writes fail, reads go on: the model can be saved."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("no mkfs.ext4")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(96 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    with mounted("loop,errors=remount-ro", source=str(image), kind="ext4") as folder:
        device = os.path.basename(
            subprocess.run(
                ["findmnt", "-n", "-o", "SOURCE", str(folder)],
                capture_output=True, text=True, check=True,
            ).stdout.strip()
        )  # fmt: skip
        trigger = Path(f"/sys/fs/ext4/{device}/trigger_fs_error")
        if not trigger.exists():
            pytest.skip(f"no {trigger}")
        with disk_pager(folder) as pager:
            training = Training(pager)
            training.steps(2)
            trigger.write_text("made read-only by a test")
            with pytest.raises(tp.PagerError, match=r"could not be written.*Read-only"):
                training.steps(3)
            check_invariants(pager.core)
            saved(pager)


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_on_the_size_of_files(one_thread: None, tmp_path: Path) -> None:
    """RLIMIT_FSIZE: an error as any other; SIGXFSZ does not end the process."""
    with file_size_limit(8 << 20), pytest.raises(tp.PagerError, match=r"reserved.*File too large"):
        disk_pager(tmp_path)
    with disk_pager(tmp_path) as pager:
        training = Training(pager)
        training.steps(2)
        with file_size_limit(1 << 20):
            with pytest.raises(tp.PagerError, match=r"File too large.*stay where they were"):
                training.steps(3)
            check_invariants(pager.core)
            state = saved(pager)
        assert_same(saved(pager), state)


# Anything at any time


class RandomPages:
    """Tensors in pages beside plain copies of them, and random operations on both."""

    def __init__(self, pager: tp.Pager, seed: int) -> None:
        self.pager = pager
        self.chance = random.Random(seed)
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def step(self) -> None:
        operations = [
            self.make,
            self.make,
            self.write,
            self.read,
            self.read,
            self.evict,
            self.forget,
        ]
        operation = self.chance.choice(operations if self.pairs else operations[:1])
        name = operation.__name__
        try:
            operation()
        except tp.CorruptPage:
            raise
        except tp.PagerError as error:
            if not isinstance(error, tp.TierFull) and "pages could not be" not in str(error):
                raise
            self.refused[name] += 1
        else:
            self.done[name] += 1
        check_invariants(self.pager.core)

    def make(self) -> None:
        if len(self.pairs) >= 24:
            self.forget()
        pages = self.chance.choice((0.01, 0.3, 1, 1, 2, 3.5, 5))
        values = torch.rand(int(pages * PAGE_BYTES / 4))
        self.pairs.append((self.pager.page(values), values))

    def write(self) -> None:
        """A write that is refused has changed nothing."""
        paged, values = self.chance.choice(self.pairs)
        value = self.chance.random()
        paged.fill_(value)
        values.fill_(value)

    def read(self) -> None:
        paged, values = self.chance.choice(self.pairs)
        assert torch.equal(paged.to_dense(), values)  # type: ignore[attr-defined]

    def evict(self) -> None:
        paged, _ = self.chance.choice(self.pairs)
        with self.pager.core.quiet():
            self.pager.core.residency.evict_run(paged._storage.run)  # type: ignore[attr-defined]

    def forget(self) -> None:
        self.pairs.pop(self.chance.randrange(len(self.pairs)))


def weather(engine: FaultyEngine, chance: random.Random) -> None:
    """Errors that pass, spells in which all calls fail, and calls that take a while."""
    engine.heal()
    engine.chances = {("write", errno.EIO): 0.1, ("read", errno.EIO): 0.1}
    kind = chance.random()
    if kind < 0.2:
        engine.fail("write", chance.choice((errno.ENOSPC, errno.EIO, errno.EROFS)))
    elif kind < 0.3:
        engine.fail("read", errno.EIO)
    elif kind < 0.35:
        engine.delay_seconds = 0.002


@pytest.mark.parametrize(
    "operations",
    [300, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_random_operations_under_random_faults(
    one_thread: None, tmp_path: Path, operations: int
) -> None:
    """No page is ever lost or wrong, with the invariants checked after each operation."""
    budget = RESERVE_BYTES + 8 * PAGE_BYTES
    with make_pager(
        device_budget=budget, host_budget=4 * PAGE_BYTES, disk_budget="4MiB", disk_path=tmp_path,
        verify=True,
    ) as pager:  # fmt: skip
        engine = break_disk(pager, seed=1)
        pages = RandomPages(pager, seed=2)
        for index in range(operations):
            if index % 25 == 0:
                weather(engine, pages.chance)
            pages.step()
        engine.heal()
        for paged, values in pages.pairs:
            assert torch.equal(paged.to_dense(), values)  # type: ignore[attr-defined]
        check_invariants(pager.core)
        print(f"{dict(pages.done)} refused {dict(pages.refused)} faults {dict(engine.happened)}")
        assert engine.happened.total() > operations // 30
        assert sum(pages.refused.values()) > 0
        assert set(pages.done) == {"make", "write", "read", "evict", "forget"}
        assert pager.stats()["io_retries"] > 0
