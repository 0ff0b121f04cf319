"""What others on the machine can see or change: files, links in shared folders, memory used before.

Values that nobody has written (``page_module`` of a model on the meta device, what a tensor gains
by ``resize_``) read as zeros. They are never those of another tensor: its frames are erased before
others get them unwritten. Nor of another Pager, process or user: memory is mapped afresh and the
paging file is allocated anew, and both read as zeros. What is saved, copied or printed has the
tensor's own bytes alone.
"""

import gc
import importlib
import io
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import tensorpager as tp
from tensorpager.pager.cli import COMMANDS, main
from tensorpager.pager.devices.cpu import Cpu
from tensorpager.pager.disk import file as disk_io
from tensorpager.pager.disk.tier import DiskTier
from tensorpager.pager.machine.calibration import cache as calibration_cache
from tensorpager.pager.memory.host import HostTier
from tensorpager.pager.tensor.new_pages import empty_like_geometry
from tensorpager.planner.files import follow_own_links, whole_file
from tensorpager.planner.trace import make_trace
from tensorpager.planner.trace_file import write_trace

from .models import FRAMES, PAGE_BYTES, make_pager
from .parts import part

PAGE = 64 << 10
SECRET = 0xA5
STRANGER = 4321  # a user who has nothing to do with this


@pytest.fixture
def open_mask() -> Iterator[None]:
    """The most careless umask."""
    before = os.umask(0)
    yield
    os.umask(before)


# The paging file


@pytest.mark.usefixtures("open_mask")
@pytest.mark.parametrize("has_tmpfile", [True, False])
def test_the_paging_file_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_tmpfile: bool
) -> None:
    """Whatever the umask. Without O_TMPFILE it has a name for a moment, which nobody can guess, and
    is made by O_EXCL and O_NOFOLLOW: a link that waits there is not followed."""
    opened: list[tuple[str, int, int]] = []
    real = os.open

    def note(path: Any, flags: int, mode: int = 0o777, **rest: Any) -> int:
        if not has_tmpfile and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        opened.append((os.fspath(path), flags, mode))
        return real(path, flags, mode, **rest)

    monkeypatch.setattr(os, "open", note)
    tiers = [DiskTier(tmp_path, 2 * PAGE, PAGE, io_engine="posix") for _ in range(2)]
    for tier in tiers:
        status = os.fstat(tier.fileno())
        assert (stat.S_IMODE(status.st_mode), status.st_nlink) == (0o600, 0)
        tier.close()
    made = [entry for entry in opened if entry[0].startswith(str(tmp_path))]
    assert len(made) == 2
    for path, flags, mode in made:
        assert mode == 0o600
        if has_tmpfile:
            assert path == str(tmp_path)
            assert flags & os.O_EXCL  # so that nobody can give it a name by /proc
        else:
            assert flags & os.O_CREAT
            assert flags & os.O_EXCL
            assert flags & os.O_NOFOLLOW
    assert has_tmpfile or made[0][0] != made[1][0]
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_waits_for_the_paging_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even one with the right name: the next name is tried."""
    precious = tmp_path / "precious"
    precious.write_text("old")
    names = iter(["guessed", "fresh"])
    monkeypatch.setattr(tempfile, "_get_candidate_names", lambda: names)
    (tmp_path / "tensorpager-guessed").symlink_to(precious)
    real = os.open

    def no_tmpfile(path: Any, flags: int, mode: int = 0o777, **rest: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, mode, **rest)

    monkeypatch.setattr(os, "open", no_tmpfile)
    tier = DiskTier(tmp_path, 2 * PAGE, PAGE, io_engine="posix")
    tier.close()
    assert list(names) == []
    assert precious.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "tensorpager-guessed"]


# What was there before


def test_a_disk_tier_begins_with_zeros(tmp_path: Path) -> None:
    """On room that another's file has just left, and after it has grown."""
    nbytes = 32 * PAGE
    before = tmp_path / "of another user"
    before.write_bytes(bytes([SECRET]) * nbytes)
    with before.open("rb") as file:
        os.fsync(file.fileno())
    before.unlink()
    old = DiskTier(tmp_path, nbytes, PAGE, io_engine="posix")
    pages = disk_io.aligned_bytes(nbytes)
    pages[:] = SECRET
    old.write([(0, pages)])
    old.close()
    new = DiskTier(tmp_path, nbytes, PAGE, io_engine="posix")
    new.grow(2 * nbytes)
    with open(f"/proc/self/fd/{new.fileno()}", "rb") as file:
        content = file.read()
    new.close()
    assert content == bytes(2 * nbytes)


def test_a_host_tier_and_an_arena_begin_with_zeros() -> None:
    nbytes = 64 * PAGE
    for _ in range(2):
        arena = Cpu(nbytes, nbytes)
        host = HostTier(nbytes, PAGE, arena)
        assert not host.view(0, 64).any()
        host.view(0, 64)[:] = SECRET
        host.close()
        assert not arena.arena.any()
        arena.arena.fill_(SECRET)
        arena.commit(PAGE)  # the border moves down and up again: what was behind it is gone
        arena.commit(nbytes)
        assert (arena.arena[:PAGE] == SECRET).all()
        assert not arena.arena[PAGE:].any()
        arena.close()


def meta_linear(features: int) -> nn.Linear:
    with torch.device("meta"):
        return nn.Linear(features, features)


def test_undefined_values_are_never_another_pagers() -> None:
    with make_pager() as first:
        held = [first.page(torch.full((4 * PAGE_BYTES,), SECRET, dtype=torch.uint8)) for _ in "123"]
        assert held[0].sum() == SECRET * 4 * PAGE_BYTES
    with make_pager() as second:
        model = second.page_module(meta_linear(256))
        paged = second.page(torch.ones(3 * PAGE_BYTES, dtype=torch.uint8))
        for tensor in (*model.parameters(), empty_like_geometry(second.core, paged, "user")):
            assert not tensor.detach().numpy().any()


def poison(pager: tp.Pager) -> None:
    """Every frame and many slots have held the secret, and are free."""
    held = [pager.page(torch.full((PAGE_BYTES,), SECRET, dtype=torch.uint8)) for _ in range(60)]
    assert pager.stats()["bytes_out"] > 0
    held.clear()
    gc.collect()


def holds_secret(content: bytes) -> bool:
    return bytes([SECRET]) * 8 in content


@pytest.mark.parametrize("features", [10, 150, 256])
def test_unwritten_values_are_not_an_earlier_tensors(features: int) -> None:
    """In part of a page that others share (10, and each bias), in one page, in four."""
    with make_pager() as pager:
        poison(pager)
        neighbour = pager.page(torch.full((1000,), SECRET, dtype=torch.uint8))
        del neighbour
        gc.collect()
        for parameter in pager.page_module(meta_linear(features)).parameters():
            assert not parameter.detach().numpy().any()


def test_unwritten_values_of_a_tensor_larger_than_the_arena() -> None:
    """It comes page by page, into frames that were another's a moment before."""
    pages = 2 * FRAMES
    with make_pager() as pager:
        poison(pager)
        blank = torch.empty(pages * PAGE_BYTES, dtype=torch.uint8, device="meta")
        tensor = empty_like_geometry(pager.core, blank, "user")
        for first in range(0, pages, 4):
            with part(pager.core, tensor, first, 4) as frames:
                for frame in frames.tolist():
                    start = frame * PAGE_BYTES
                    assert not pager.core.backend.arena[start : start + PAGE_BYTES].any()


def test_unwritten_values_where_a_plan_has_their_place() -> None:
    with make_pager() as pager:
        poison(pager)
        tensor = empty_like_geometry(pager.core, torch.empty(4 * PAGE_BYTES, device="meta"), "user")
        run = tensor._storage.run
        with pager.core.lock:
            pager.core.residency.collect()
            assert pager.core.residency.place_at(run, 2)
        assert run.base == 2
        assert not tensor.numpy().any()


def test_what_a_tensor_gains_by_resize() -> None:
    with make_pager() as pager:
        poison(pager)
        tensor = pager.page(torch.ones(100, dtype=torch.uint8))
        tensor.resize_(3 * PAGE_BYTES)
        assert tensor[:100].sum() == 100
        assert not tensor[100:].any()


@pytest.mark.parametrize("numel", [100, 3 * PAGE_BYTES // 4 - 1])
def test_values_after_others_are_the_tensors_own(numel: int) -> None:
    """Tensors that fill no whole page, in frames and slots that held a secret: the rest of their
    pages comes out by no door."""
    values = torch.arange(numel, dtype=torch.float32)
    with make_pager() as pager:
        poison(pager)
        paged = pager.page(values)
        zeros = torch.zeros_like(paged)
        full = torch.full_like(paged, 3.0)
        press = [pager.page(torch.ones(PAGE_BYTES, dtype=torch.uint8)) for _ in range(30)]
        assert torch.equal(paged.cpu(), values)
        assert not zeros.any()
        assert torch.equal(full.cpu(), torch.full_like(values, 3.0))
        saved = io.BytesIO()
        torch.save({name: t.cpu() for name, t in (("p", paged), ("z", zeros), ("f", full))}, saved)
        assert not holds_secret(saved.getvalue())
        for tensor in (paged, zeros, full):
            assert not holds_secret(tensor.numpy().tobytes())
            assert not holds_secret(np.asarray(tensor.tolist(), np.float32).tobytes())
        assert len(press) == 30


def test_a_saved_model_has_its_own_bytes_alone(tmp_path: Path) -> None:
    """A layer of 10 × 10 shares its page with what was there before."""
    with make_pager() as pager:
        poison(pager)
        model = pager.page_module(nn.Sequential(nn.Linear(10, 10), nn.Linear(300, 300)))
        path = tmp_path / "model.pt"
        torch.save(model.state_dict(), path)
        assert not holds_secret(path.read_bytes())
        expected = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    loaded = torch.load(path, weights_only=True)
    assert all(np.array_equal(loaded[name].numpy(), expected[name]) for name in expected)


# Links in folders that others can write to


@pytest.fixture
def strange_link(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Path], None]:
    """Makes a symbolic link that belongs to another user. Who may not give files away becomes
    another user himself, as far as we are told."""

    def make(link: Path, target: Path) -> None:
        link.symlink_to(target)
        if os.geteuid() == 0:
            os.lchown(link, STRANGER, STRANGER)
        else:
            own = os.geteuid()
            monkeypatch.setattr(os, "geteuid", lambda: own + 1)

    return make


def test_own_links_are_followed_and_others_refused(
    tmp_path: Path, strange_link: Callable[[Path, Path], None]
) -> None:
    real, link, far = tmp_path / "real", tmp_path / "link", tmp_path / "far"
    real.write_text("old")
    link.symlink_to("real")
    far.symlink_to(link)
    assert follow_own_links(far) == real
    assert follow_own_links(tmp_path / "none") == tmp_path / "none"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"):
        follow_own_links(tmp_path / "loop")
    far.unlink()
    strange_link(tmp_path / "strange", real)
    far.symlink_to("strange")
    for path in (tmp_path / "strange", far):
        with (
            pytest.raises(PermissionError, match="a link that belongs to user"),
            whole_file(path) as part,
        ):
            part.write_text("new")
    assert real.read_text() == "old"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.usefixtures("open_mask")
def test_a_file_is_private_while_it_is_written(tmp_path: Path) -> None:
    with whole_file(tmp_path / "plan.json") as part:
        assert stat.S_IMODE(part.stat().st_mode) == 0o600
        assert part.parent == tmp_path
        part.write_text("{}")
    assert stat.S_IMODE((tmp_path / "plan.json").stat().st_mode) == 0o600


WRITERS: dict[str, list[str]] = {
    "plan": ["plan", "{trace}", "--hardware", "{machine}", "--policy", "lru", "-o", "{out}"],
    "perfetto": ["perfetto", "{trace}", "-o", "{out}"],
    "html": ["html", "{trace}", "-o", "{out}"],
    "import": ["import", "g10", "{workload}", "-o", "{out}"],
    "--svg": ["--svg", "{out}", "show", "{trace}"],
}  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
def test_no_command_writes_through_another_users_link(
    name: str, tmp_path: Path, strange_link: Callable[[Path, Path], None]
) -> None:
    words = WRITERS[name]
    if name not in COMMANDS and not name.startswith("--"):
        pytest.skip(f"there is no command {name}")
    files = {key: tmp_path / key for key in ("trace", "machine", "workload", "out")}
    trace = make_trace([(0, 2000, True)], [("op", 10.0, [0], [])], page_size=1000)
    write_trace(files["trace"], trace)
    files["machine"].write_text("device_bytes = 4000\npage_size = 1000\n")
    workload = {"schema": "teraio-neutral-1", "tensors": [[1, 50, 1]], "kernels": [[0, 5.5, [1]]]}
    files["workload"].write_text(json.dumps(workload))
    precious = tmp_path / "precious"
    precious.write_text("old")
    strange_link(files["out"], precious)
    arguments = [word.format(**{key: str(path) for key, path in files.items()}) for word in words]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2, result.output
    assert "a link that belongs to user" in result.output
    assert precious.read_text() == "old"
    assert files["out"].is_symlink()
    files["out"].unlink()
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert stat.S_IMODE(files["out"].lstat().st_mode) == 0o600


def test_a_recorded_trace_replaces_a_link(tmp_path: Path) -> None:
    precious, link = tmp_path / "precious", tmp_path / "trace.parquet"
    precious.write_text("old")
    link.symlink_to(precious)
    write_trace(link, make_trace([(0, 1, True)], [("op", 1.0, [0], [])], page_size=1))
    assert precious.read_text() == "old"
    assert not link.is_symlink()


def test_a_checkpoint_replaces_a_link(tmp_path: Path) -> None:
    checkpoint_file = pytest.importorskip("tensorpager.pager.checkpoint.file")
    precious, link = tmp_path / "precious", tmp_path / "model.pt"
    precious.write_text("old")
    link.symlink_to(precious)
    with checkpoint_file.atomic_file(link) as file:
        file.write(b"new")
    assert precious.read_text() == "old"
    assert link.read_bytes() == b"new"
    assert stat.S_IMODE(link.lstat().st_mode) == 0o600


# The cache of measured rates


def test_a_cache_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither read, where its rates could be anything, nor written to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key: calibration_cache.Key = {"machine": "this"}
    calibration_cache.store(key, {"d2h_bytes_per_s": 1.0})
    assert calibration_cache.load(key) == {"d2h_bytes_per_s": 1.0}
    (file,) = (tmp_path / "tensorpager").iterdir()
    before = file.read_bytes()
    if os.geteuid() == 0:
        os.chown(tmp_path / "tensorpager", STRANGER, STRANGER)
    else:
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    assert calibration_cache.load(key) is None
    calibration_cache.store(key, {"d2h_bytes_per_s": 2.0})
    assert file.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"[" * 60_000, b"{}", b"\xff", b"9" * 60_000, b"null"])
def test_a_cache_file_that_is_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calibration_cache.store({"machine": "this"}, {})
    (file,) = (tmp_path / "tensorpager").iterdir()
    file.write_bytes(content)
    assert calibration_cache.load({"machine": "this"}) is None


# Checkpoints that are nearly right


@pytest.fixture(scope="module")
def fuzz() -> Iterator[Any]:
    folder = str(Path(__file__).parents[2] / "scripts")
    sys.path.insert(0, folder)
    yield importlib.import_module("fuzz_targets"), importlib.import_module("fuzz_checkpoints")
    sys.path.remove(folder)


@pytest.mark.parametrize("count", [40, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["safetensors", "torch-checkpoint"])
def test_checkpoints_are_read_or_refused(fuzz: Any, name: str, count: int) -> None:
    targets, checkpoints = fuzz
    target = checkpoints.TARGETS[name]
    assert targets.verdict(target, target.seed) == "read"
    answers = [targets.verdict(target, target.mutate(Random(seed))) for seed in range(count)]
    assert answers.count("refused") > count // 4


def test_a_checkpoint_runs_nothing(fuzz: Any, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made by a pickle"),)

    file = io.BytesIO()
    torch.save({"model": Evil()}, file)
    targets, checkpoints = fuzz
    target = checkpoints.TARGETS["torch-checkpoint"]
    assert targets.verdict(target, file.getvalue()) == "refused"
    assert list(tmp_path.iterdir()) == []
