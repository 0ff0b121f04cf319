"""The arena registered with cuFile: when, how much, and what happens where that cannot be had."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorpager as tp
from tensorpager.pager import core
from tensorpager.pager.devices.cpu import Cpu
from tensorpager.pager.devices.cuda_memory import CudaMemory
from tensorpager.pager.devices.registration import Registration
from tensorpager.pager.disk.tier import DiskTier
from tensorpager.pager.errors import PagerError

from . import fake_kvikio
from .disk_suite import PAGE
from .fake_kvikio import PIECE, Cufile
from .fake_streams import Event, FakeAccelerator, FakeKit, Streams, streams  # noqa: F401
from .models import PAGE_BYTES, make_pager

FRAMES = 2 * PIECE // PAGE_BYTES  # of one arena: two mappings


@pytest.fixture
def cufile(monkeypatch: pytest.MonkeyPatch) -> Cufile:
    return fake_kvikio.install(monkeypatch)


# Pieces of one arena


@pytest.fixture
def arena(cufile: Cufile) -> torch.Tensor:
    memory = torch.zeros(8 * PIECE, dtype=torch.uint8)
    cufile.base = memory.data_ptr()
    for piece in range(8):
        cufile.map(piece)
    return memory


def test_the_front_is_registered_and_follows_the_border(
    cufile: Cufile, arena: torch.Tensor
) -> None:
    known = Registration(cufile)
    known.cover(arena, 3 * PIECE, PIECE)
    assert cufile.pieces("register") == [0, 1, 2]
    known.keep(2 * PIECE + 1)  # a piece of which one byte stays in use stays
    assert cufile.pieces("deregister") == []
    known.keep(PIECE)
    assert cufile.pieces("deregister") == [2, 1]
    known.cover(arena, 2 * PIECE - 5, PIECE)
    assert cufile.registered == {0, 1}
    assert known.registered_bytes == 2 * PIECE
    known.keep(0)
    assert (cufile.registered, known.registered_bytes, known.note) == (set(), 0, None)


def test_the_first_failure_is_the_last_try(cufile: Cufile, arena: torch.Tensor) -> None:
    known = Registration(cufile)
    cufile.most = 3
    known.cover(arena, 2 * PIECE, PIECE)
    known.cover(arena, 6 * PIECE, PIECE)
    assert cufile.registered == {0, 1}, "what could be had before stays; of the rest, nothing"
    note = known.note
    assert note is not None
    assert "an arena of 3.00 MiB could not be registered (BAR1 full)" in note
    assert "nvidia-smi -q -d MEMORY" in note
    tries = cufile.tries
    known.keep(PIECE)
    known.cover(arena, 2 * PIECE, PIECE)
    assert (cufile.tries, cufile.registered, known.note) == (tries, {0}, note)


def test_what_cufile_does_not_take_is_not_tried(cufile: Cufile, arena: torch.Tensor) -> None:
    known = Registration(cufile, most_bytes=4 * PIECE)
    known.cover(arena, 5 * PIECE, PIECE)
    assert cufile.tries == 0
    assert "cuFile registers 2.00 MiB at most" in str(known.note)


def test_a_piece_that_is_not_given_back_must_stay(cufile: Cufile, arena: torch.Tensor) -> None:
    known = Registration(cufile)
    known.cover(arena, 4 * PIECE, PIECE)
    cufile.keeps = {1}
    with pytest.raises(PagerError, match=r"does not give back 1048576 .*\(busy\).*'posix'"):
        known.keep(0)
    assert cufile.registered == {0, 1}
    cufile.keeps.clear()
    known.keep(0)
    assert not cufile.registered


# Which engines want it


def test_only_where_bytes_go_straight(
    cufile: Cufile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wanted(name: str = "kvikio", *, on_cuda: bool = True) -> bool:
        tier = DiskTier(tmp_path, 4 * PAGE, PAGE, io_engine=name, on_cuda=on_cuda)
        tier.close()
        assert tier.describe()["registered_bytes"] == 0
        return tier.registration is not None

    assert wanted()
    assert wanted("auto")
    assert not wanted(on_cuda=False)
    assert not wanted("posix")
    cufile.compat = True
    assert not wanted()
    assert not wanted("auto")
    cufile.compat, cufile.properties["is_gds_available"] = False, False
    assert not wanted()
    cufile.properties = {"is_gds_available": True}  # a driver that does not say more
    assert wanted()
    monkeypatch.setitem(fake_kvikio.sys.modules, "kvikio.buffer", None)
    assert not wanted()
    assert cufile.tries == 0


def test_cufiles_own_limit_is_asked_for(cufile: Cufile, tmp_path: Path) -> None:
    cufile.properties["max_pinned_memory_size"] = 1 << 10  # KiB
    tier = DiskTier(tmp_path, 4 * PAGE, PAGE, io_engine="kvikio", on_cuda=True)
    assert tier.registration is not None
    assert tier.registration.most_bytes == 1 << 20
    tier.close()


# Under a pager, with the CUDA kit's own border


class Range:
    """Stands for ``_MappedRange``: mappings of ``PIECE`` bytes, as ``cufile`` is told."""

    granularity = PIECE

    def __init__(self, cpu: Any, cufile: Cufile) -> None:
        self._cpu, self._cufile, self._count = cpu, cufile, 0

    @property
    def committed_bytes(self) -> int:
        return self._count * PIECE

    def commit(self, nbytes: int) -> None:
        wanted = -(-nbytes // PIECE)
        while self._count > wanted:
            self._count -= 1
            self._cufile.unmap(self._count)
        self._cpu.commit(min(wanted * PIECE, self._cpu.arena.numel()))
        while self._count < wanted:
            self._cufile.map(self._count)
            self._count += 1

    def close(self) -> None:
        self.commit(0)
        self._cpu.close()


class MappedKit(FakeKit):
    """The border of CUDA's kit."""

    granularity = PIECE
    takes_drives = True
    commit, close = CudaMemory.commit, CudaMemory.close  # type: ignore[assignment]
    register_frames, _register = CudaMemory.register_frames, CudaMemory._register
    _registration = None

    def __init__(self, streams: Streams, cpu: Cpu, cufile: Cufile, committed: int) -> None:  # noqa: F811
        super().__init__(streams, cpu)
        del self.commit, self.close
        cufile.base = self.address
        self._device = cpu.device
        self._range = Range(cpu, cufile)
        self._range.commit(committed)


@pytest.fixture
def on_gds(
    cufile: Cufile,
    streams: Streams,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Cufile:
    """Pagers for the CPU seem to be on a GPU, with GPUDirect Storage."""

    def make(device: torch.device, reserved: int, committed: int) -> FakeAccelerator:
        def kit(streams: Streams, cpu: Cpu) -> MappedKit:
            return MappedKit(streams, cpu, cufile, committed)

        return FakeAccelerator(streams, device, reserved, committed, kit)

    monkeypatch.setattr(core, "make_device", make)
    monkeypatch.setattr(Event, "synchronize", lambda e: streams.run_before(e), raising=False)
    return cufile


@pytest.fixture
def pager(on_gds: Cufile, tmp_path: Path, one_thread: None) -> Iterator[tp.Pager]:
    with make_pager(
        frames=FRAMES, host_budget=0, disk_budget="16MiB", disk_path=tmp_path, io_engine="auto"
    ) as pager:
        yield pager


def use_pages(pager: tp.Pager) -> None:
    """More pages than frames, through the disk and back with the right bytes."""
    twins = [torch.full((PAGE_BYTES // 4,), float(index)) for index in range(FRAMES + 20)]
    paged = [pager.page(twin) for twin in twins]
    assert all(torch.equal(p.to_dense(), twin) for p, twin in zip(paged, twins))
    for tensor in paged:
        tensor.add_(1)
    assert all(torch.equal(p.to_dense(), twin + 1) for p, twin in zip(paged, twins))


def moved_unregistered(cufile: Cufile) -> int:
    """Transfers of memory that was not registered when they began; mapped it must be."""
    count, mapped, registered = 0, set(), set()
    for what, piece in cufile.log:
        if what == "map":
            mapped.add(piece)
        elif what == "unmap":
            mapped.remove(piece)
        elif what == "register":
            registered.add(piece)
        elif what == "deregister":
            registered.remove(piece)
        else:
            assert piece in mapped
            count += piece not in registered
    return count


def test_frames_are_registered_from_before_the_first_transfer_to_the_end(
    on_gds: Cufile, pager: tp.Pager
) -> None:
    assert on_gds.log == [("map", 0), ("map", 1), ("register", 0), ("register", 1)]
    use_pages(pager)
    told = pager.stats()["disk_engine"]
    assert told == json.loads(json.dumps(told))
    assert (told["engine"], told["registered_bytes"], told["note"]) == ("kvikio", 2 * PIECE, None)
    pager.core.residency.resize(FRAMES // 2)
    pager.core.residency.resize(FRAMES + 1)
    assert on_gds.registered == {0, 1, 2}
    use_pages(pager)
    pager.close()
    assert on_gds.pieces("read")
    assert on_gds.pieces("write")
    assert moved_unregistered(on_gds) == 0
    assert not on_gds.registered
    assert not on_gds.mapped


def test_an_arena_that_cannot_be_registered_works_without(
    on_gds: Cufile, tmp_path: Path, one_thread: None
) -> None:
    on_gds.most = 1
    with make_pager(
        frames=FRAMES, host_budget=0, disk_budget="16MiB", disk_path=tmp_path, io_engine="kvikio"
    ) as pager:
        use_pages(pager)
        pager.core.residency.resize(FRAMES // 2)
        pager.core.residency.resize(FRAMES)
        told = pager.stats()["disk_engine"]
        assert told["registered_bytes"] == 0
        assert "could not be registered (BAR1 full)" in told["note"]
        assert on_gds.tries == 2
    assert not on_gds.mapped


def test_memory_that_a_drive_may_still_write_to_is_not_given_back(
    on_gds: Cufile, pager: tp.Pager
) -> None:
    use_pages(pager)
    on_gds.keeps = {0}
    with pytest.warns(RuntimeWarning, match="given back when the process ends"):
        pager.close()
    assert on_gds.mapped == {0, 1}
    on_gds.keeps.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pager.core.backend.close()
    assert not on_gds.mapped
