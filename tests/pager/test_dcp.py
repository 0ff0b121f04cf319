"""``torch.distributed.checkpoint`` of paged models: a slab at a time, while training goes on."""

from __future__ import annotations

import errno
import io
import os
import pickle
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.api
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tensorpager as tp
from tensorpager.pager.checkpoint import dcp as ours
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.disk.file import BounceBuffers, aligned_bytes
from tensorpager.pager.moves.slots import Slots
from tensorpager.pager.tensor import tensor_bytes

from .models import PAGE_BYTES, SEED, assert_same, loss_of, make_pager, mlp, plain

Failed = dcp.api.CheckpointException  # which holds the error of each rank
Models = tuple[torch.nn.Module, torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        warnings.filterwarnings("ignore", "torch.distributed is unavailable")
        warnings.filterwarnings("ignore", ".*assuming the intent is to (save|load) in a single")
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def models(pager: tp.Pager | None) -> Models:
    torch.manual_seed(SEED)
    model: torch.nn.Module = mlp()
    if pager is not None:
        pager.page_module(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    return model, optimizer if pager is None else pager.optimizer(optimizer)


def train(pager: tp.Pager, some: Models, steps: int = 1) -> None:
    for _ in range(steps):
        with pager.iteration():
            loss_of(some[0]).backward()
            some[1].step()
            some[1].zero_grad()


def state_of(some: Models) -> dict[str, Any]:
    model, optimizer = get_state_dict(*some)
    return {"model": model, "optimizer": optimizer, "note": {"lr": 0.5, "names": ["a", "b"]}}


def values(some: Models) -> list[torch.Tensor]:
    model, optimizer = some
    states = [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
    return [plain(value).clone() for value in [*model.parameters(), *states]]


def load(some: Models, reader: Any) -> dict[str, Any]:
    state = state_of(some)
    dcp.load(state, storage_reader=reader)
    set_state_dict(*some, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state


def test_both_ways_between_ours_and_dcps_own(tmp_path: Path) -> None:
    with make_pager() as pager:
        some = models(pager)
        train(pager, some, 2)
        expected = values(some)
        dcp.save(state_of(some), storage_writer=tp.dcp.Writer(tmp_path / "ours"))
        dcp.save(state_of(some), checkpoint_id=tmp_path / "theirs")
    for path in (tmp_path / "ours").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path
    bare = models(None)
    loss_of(bare[0]).backward()
    bare[1].step()
    load(bare, dcp.FileSystemReader(tmp_path / "ours"))
    assert_same(values(bare), expected)
    for name in ("ours", "theirs"):
        with make_pager() as pager:
            some = models(pager)
            train(pager, some)
            state = load(some, tp.dcp.Reader(tmp_path / name))
            assert state["note"] == {"lr": 0.5, "names": ["a", "b"]}
            assert all(type(p) is tp.PagedTensor for p in some[0].parameters())
            assert_same(values(some), expected)


def test_tensors_are_written_a_slab_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tensor larger than the arena; nobody asks for all of it."""
    monkeypatch.setattr(tensor_bytes, "BUFFER_BYTES", 256 << 10)
    sizes = []
    real = ours.chunks

    def counted(tensor: torch.Tensor, **options: Any) -> Iterator[memoryview]:
        for chunk in real(tensor, **options):
            sizes.append(len(chunk))
            yield chunk

    monkeypatch.setattr(ours, "chunks", counted)
    with make_pager(host_budget="32MiB") as pager:
        large = pager.page(torch.arange(2 << 20, dtype=torch.float32))
        assert large.nbytes > pager.core.residency.pool.count * pager.page_size
        dcp.save({"large": large}, storage_writer=tp.dcp.Writer(tmp_path / "a"))
        assert sum(sizes) == large.nbytes
        assert max(sizes) <= 256 << 10
        with torch.no_grad():
            large.zero_()
        dcp.load({"large": large}, storage_reader=tp.dcp.Reader(tmp_path / "a"))
        assert torch.equal(large.to_dense(), torch.arange(2 << 20, dtype=torch.float32))


class Held(tp.dcp.Writer):
    """A writer that begins when it is allowed to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_begin = threading.Event()
        self.copied = 0

    def write_data(self, *given: Any) -> Any:
        assert self.may_begin.wait(300)
        held = self._frozen
        found = super().write_data(*given)
        assert held is not None
        self.copied = held.copied_bytes
        return found


def begin_save(some: Models, writer: Any) -> Future[Any]:
    """As ``dcp.async_save``, which wants a process group."""
    from torch.distributed.checkpoint._async_thread_executor import (
        _ThreadBasedAsyncCheckpointExecutor,
    )

    staged = writer.stage(state_of(some))
    return _ThreadBasedAsyncCheckpointExecutor().execute_save(  # type: ignore[no-any-return]
        staged, storage_writer=writer, no_dist=True
    )


@pytest.mark.parametrize(("fits", "tier"), [(False, "host"), (False, "disk"), (True, "host")])
def test_training_goes_on_while_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool, tier: str
) -> None:
    """The values are those from when the save began; what is written before it is saved is copied
    into free slots first. Training takes no notice, and budgets hold: no thread of the disk tier
    has a buffer of its own for it, which would stay."""
    bounces: list[int] = []

    def bounce(self: BounceBuffers, nbytes: int) -> Any:
        bounces.append(nbytes)
        return aligned_bytes(nbytes)

    monkeypatch.setattr(BounceBuffers, "get", bounce)
    with make_pager(fits=fits) as pager:
        some = models(pager)
        train(pager, some, 4)
        expected_end = values(some)
    room: Any = {"host_budget": "64MiB"} if tier == "host" else {}
    if tier == "disk":
        room = {"host_budget": 0, "disk_budget": "64MiB", "disk_path": tmp_path}
    with make_pager(fits=fits, **room) as pager:
        some = models(pager)
        train(pager, some, 2)
        expected, slots = values(some), pager.core.mover.slots
        writer = Held(tmp_path / "a")
        future = begin_save(some, writer)
        with pytest.raises(tp.PagerError, match="asynchronous save of this pager goes on"):
            tp.dcp.Writer(tmp_path / "b").stage(state_of(some))
        train(pager, some)
        assert slots.lends_some
        stats = pager.stats()
        assert stats["used_bytes"][tier] >= len(slots.lent[tier]) * pager.page_size
        assert stats["peak_bytes"][tier] <= stats["budget_bytes"][tier]
        assert set(os.listdir(tmp_path)) <= {"a"}, "no file but the tier's, which has no name"
        writer.may_begin.set()
        train(pager, some)
        future.result(300)
        assert writer.copied > 0
        assert bounces == []
        assert not slots.lends_some
        check_invariants(pager.core)
        assert pager.core.before_write is None
        assert_same(values(some), expected_end)
        load(some, tp.dcp.Reader(tmp_path / "a"))
        assert_same(values(some), expected)


def test_without_free_slots_the_step_waits_until_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slots, "lend", lambda *given: None)
    with make_pager() as pager:
        some = models(pager)
        train(pager, some, 2)
        expected, waited = values(some), pager.stats()["stall_us"]
        writer = Held(tmp_path / "a")
        future = begin_save(some, writer)
        allowed = threading.Timer(0.2, writer.may_begin.set)
        allowed.start()
        train(pager, some)
        future.result(300)
        assert writer.copied == 0
        assert pager.stats()["stall_us"] > waited
        load(some, tp.dcp.Reader(tmp_path / "a"))
        assert_same(values(some), expected)


def test_pages_that_want_the_slots_of_copies_wait_for_the_save(tmp_path: Path) -> None:
    with make_pager(host_budget="8MiB") as pager:
        some = models(pager)
        train(pager, some, 2)
        expected, slots = values(some), pager.core.mover.slots
        writer = Held(tmp_path / "a")
        future = begin_save(some, writer)
        train(pager, some)
        lent, free = len(slots.lent["host"]), pager.core.host.slots.free_count
        assert lent > 8
        allowed = threading.Timer(0.2, writer.may_begin.set)
        allowed.start()
        count = free + pager.core.residency.pool.count + lent // 2
        more = [pager.page(torch.full((PAGE_BYTES // 4,), float(n))) for n in range(count)]
        assert not slots.lends_some
        future.result(300)
        assert all(bool((plain(one) == n).all()) for n, one in enumerate(more))
        del more
        load(some, tp.dcp.Reader(tmp_path / "a"))
        assert_same(values(some), expected)


def test_a_save_that_fails_leaves_the_checkpoint_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_pager() as pager:
        some = models(pager)
        train(pager, some)
        expected = values(some)
        dcp.save(state_of(some), storage_writer=tp.dcp.Writer(tmp_path / "a"))
        before = sorted(os.listdir(tmp_path / "a"))
        train(pager, some)
        real, written = ours.write_torch, []

        def full(*given: Any) -> None:
            written.append(1)
            if len(written) == 4:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(*given)

        with monkeypatch.context() as patch:
            patch.setattr(ours, "write_torch", full)
            with pytest.raises(Failed, match="No space left on device"):
                dcp.save(state_of(some), storage_writer=tp.dcp.Writer(tmp_path / "a"))
        assert sorted(os.listdir(tmp_path / "a")) == before
        load(some, tp.dcp.Reader(tmp_path / "a"))
        assert_same(values(some), expected)
        dcp.save(state_of(some), storage_writer=tp.dcp.Writer(tmp_path / "a"))
        after = sorted(os.listdir(tmp_path / "a"))
        assert len(after) == len(before)
        assert after != before, "the older files are gone"


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("echo run > evil",)


def test_nothing_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"a": torch.ones(3)}
    # PyTorch 2.11 keeps our sentence to itself.
    with pytest.raises(Failed, match=r"has no '\.metadata'|metadata is None"):
        dcp.load(state, storage_reader=tp.dcp.Reader(tmp_path))
    dcp.save({**state, "value": Evil()}, checkpoint_id=tmp_path / "value")
    with pytest.raises(Failed, match="not plain data"):
        dcp.load({"value": 1}, storage_reader=tp.dcp.Reader(tmp_path / "value"))
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(Failed, match="no plain data"):
        dcp.load(state, storage_reader=tp.dcp.Reader(tmp_path / "meta"))
    assert not (tmp_path / "evil").exists()


def test_members_of_enumerations_as_python_3_11_2_writes_them() -> None:
    """By ``getattr``, which reads nothing else."""
    module = "torch.distributed.checkpoint.metadata"
    text = "cbuiltins\ngetattr\n(c{}\n{}\nV{}\ntR."
    member = text.format(module, "_MEM_FORMAT_ENCODING", "TORCH_CONTIGUOUS_FORMAT")
    found = ours._Plain(io.BytesIO(member.encode())).load()
    assert found is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    for name, attribute in (("StorageMeta", "__init__"), ("_MEM_FORMAT_ENCODING", "__init__")):
        with pytest.raises((pickle.UnpicklingError, KeyError), match=attribute):
            ours._Plain(io.BytesIO(text.format(module, name, attribute).encode())).load()


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    state = {"a": torch.ones(1000)}
    dcp.save(state, storage_writer=tp.dcp.Writer(tmp_path))
    (name,) = tmp_path.glob("__0_*.distcp")
    with name.open("r+b") as file:
        file.truncate(name.stat().st_size // 2)
    with pytest.raises(Failed, match=r"cannot be read|cut off"):
        dcp.load(state, storage_reader=tp.dcp.Reader(tmp_path))
