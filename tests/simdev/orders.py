"""Small programs, each of which needs a wait of the runtime, whatever is slow and whatever is not.

Planned moves are begun and, but for those of the tickets, ended where they stand. What is checked:
the bytes, and by who runs one of these, that there is no race.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorpager as tp
from tensorpager.pager.debug.chaos import scramble
from tensorpager.pager.devices import choice
from tensorpager.pager.devices.choice import make_device, resolve
from tensorpager.pager.devices.device import URGENT, Copy, HostMemory
from tensorpager.pager.devices.plain_memory import PlainMemory
from tensorpager.pager.machine.calibration.link import measure_link
from tensorpager.pager.moves.compaction import rearrange
from tensorpager.pager.plan.compiled_plan import ANYWHERE, Action
from tensorpager.pager.plan.planned import Job
from tensorpager.pager.tensor.new_pages import empty_like_geometry

from ..pager.parts import part
from .device import NAME, Machine, on

PAGE = 64 << 10
N = PAGE // 4
RESERVE = 4 << 20
Script = Callable[[Machine, Path], None]
SCRIPTS: dict[str, Script] = {}


def script(function: Script) -> Script:
    SCRIPTS[function.__name__] = function
    return function


def small(frames: int, **limits: Any) -> tp.Pager:
    limits = {"host_budget": "4MiB"} | limits
    return tp.Pager(
        RESERVE + frames * PAGE, dense_reserve=RESERVE, page_size=PAGE, device=NAME, **limits
    )


def page_of(pager: tp.Pager, value: float, pages: int = 1) -> tp.PagedTensor:
    return pager.page(torch.full((pages * N,), float(value), device=NAME))


def new_page(pager: tp.Pager, pages: int = 1) -> tp.PagedTensor:
    """Of zeros, which the runtime writes when it has a frame."""
    return empty_like_geometry(pager.core, torch.empty(pages * N, device="meta"), "user")


def holds(tensor: tp.PagedTensor, value: float) -> bool:
    return bool((tensor.to_dense().cpu() == value).all())


def evict(pager: tp.Pager, tensor: tp.PagedTensor) -> int:
    """By a fault; the first frame that it gives back."""
    with pager.core.quiet():
        return int(pager.core.residency.evict_run(tensor._storage.run)[0])


def frame_of(tensor: tp.PagedTensor) -> int:
    return int(tensor._storage.pager.table.frame[tensor._storage.run.first])


def queue(tensor: tp.PagedTensor, what: str, tier: str = "host", base: int = ANYWHERE) -> None:
    """All pages of ``tensor``, as a plan has it."""
    core, run = tensor._storage.pager, tensor._storage.run
    assert core.follower is not None
    moves = core.follower.planned
    with core.lock:
        queues = moves._outs if what == "out" else moves._ins
        queues[tier].append(Job(Action(what, tier, run.key, 0, run.count, base), run))
        moves.go_on()
        assert not moves.waiting


def planned(tensor: tp.PagedTensor, what: str, tier: str = "host", base: int = ANYWHERE) -> None:
    """The same, and the move has ended."""
    queue(tensor, what, tier, base)
    core = tensor._storage.pager
    with core.lock:
        core.mover.drain()
    if core.mover.error is not None:
        raise core.mover.error


def slow_disk(pager: tp.Pager) -> None:
    """What is queued for the disk begins a while later."""
    lane = pager.core.mover.lanes["disk-out"]
    begin = lane.add
    lane.add = lambda *work: threading.Timer(0.2, begin, work).start()  # type: ignore[method-assign]


# -- faults ----------------------------------------------------------------------------------------
@script
def pages_take_turns_in_one_frame(machine: Machine, folder: Path) -> None:
    with small(1) as pager:
        x, y = page_of(pager, 1), page_of(pager, 2)
        for _ in range(3):
            x.add_(1)
            y.mul_(2)
        assert holds(x, 4)
        assert holds(y, 16)


@script
def a_new_page_takes_the_frame_of_one_that_leaves(machine: Machine, folder: Path) -> None:
    with small(1) as pager:
        x = page_of(pager, 1)
        y = new_page(pager).add_(2)
        assert holds(x, 1)
        assert holds(y, 2)


@script
def a_page_moves_to_the_frame_of_one_that_leaves(machine: Machine, folder: Path) -> None:
    with small(2) as pager:
        x, y = page_of(pager, 1), page_of(pager, 2)
        _clean(pager, x)
        Late(pager, x, y).op()
        free = evict(pager, x)
        pages = np.array([y._storage.run.first])
        with pager.core.quiet():
            pager.core.residency.relocate(pages, np.array([free]))
        assert holds(x, 1)
        assert holds(y, 2)


@script
def pages_change_places_beside_one_that_leaves(machine: Machine, folder: Path) -> None:
    """Through its frame, as they go round in a circle; then one goes there, and the other after
    it."""
    with small(3) as pager:
        x, y = page_of(pager, 1), page_of(pager, 2, pages=2)
        _clean(pager, x)
        Late(pager, x, y).op()
        free = evict(pager, x)
        pages = y._storage.run.pages
        frames = pager.core.table.frame[pages].tolist()
        for targets in ([frames[1], frames[0]], [frames[0], free]):
            with pager.core.quiet():
                rearrange(pager.core.residency, pages, np.array(targets))
            assert pager.core.table.frame[pages].tolist() == targets
        assert holds(y, 2)
        assert holds(x, 1)


@script
def pages_are_exchanged_as_one_comes(machine: Machine, folder: Path) -> None:
    """No frame is free, so each changes places with the other, behind the bytes that come."""
    with small(2) as pager:
        x, y = page_of(pager, 1), page_of(pager, 2)
        _clean(pager, x)
        free = evict(pager, x)
        queue(x, "in", base=free)
        pages = np.array([x._storage.run.first, y._storage.run.first])
        with pager.core.quiet():
            frames = pager.core.table.frame[pages]
            rearrange(pager.core.residency, pages, frames[::-1].copy())
            assert pager.core.table.frame[pages].tolist() == frames[::-1].tolist()
        assert holds(x, 1)
        assert holds(y, 2)


@script
def pages_slide_to_the_frames_of_one_that_leaves(machine: Machine, folder: Path) -> None:
    with small(3) as pager:
        x, y = page_of(pager, 1), page_of(pager, 2, pages=2)
        _clean(pager, x)
        Late(pager, x, y).op()
        assert evict(pager, x) < frame_of(y)
        with pager.core.quiet():
            pager.core.residency.compact(set())
        assert holds(x, 1)
        assert holds(y, 2)


@script
def chaos_writes_to_the_frame_of_one_that_leaves(machine: Machine, folder: Path) -> None:
    with small(2) as pager:
        x, y = page_of(pager, 1), page_of(pager, 2)
        _clean(pager, x)
        Late(pager, x, y).op()
        scramble(pager.core)
        assert holds(x, 1)
        assert holds(y, 2)


@script
def pages_are_verified(machine: Machine, folder: Path) -> None:
    """Their checksums are of the bytes that have arrived."""
    with small(1, verify=True) as pager:
        x, y = page_of(pager, 1), page_of(pager, 2)
        x.add_(1)
        assert holds(x, 2)
        assert holds(y, 2)


@script
def a_page_is_saved_from_where_it_is(machine: Machine, folder: Path) -> None:
    with small(1) as pager:
        x = page_of(pager, 1)
        evict(pager, x)
        out = np.zeros(PAGE, np.uint8)
        pages = np.array([x._storage.run.first])
        with pager.core.quiet():
            pager.core.mover.copy_of(pages, out)
        assert (out.view(np.float32) == 1).all()


@script
def a_page_is_saved_from_the_device(machine: Machine, folder: Path) -> None:
    with small(1) as pager:
        x = page_of(pager, 1).add_(1)
        (memory,) = pager.core.backend.host_memory(PAGE)
        pages = np.array([x._storage.run.first])
        with pager.core.quiet():
            pager.core.mover.copy_of(pages, memory.bytes)
        machine.touch(memory.bytes.ctypes.data, PAGE, write=False)
        assert (memory.bytes.view(np.float32) == 2).all()
        memory.give_back()


@script
def a_part_is_on_its_way(machine: Machine, folder: Path) -> None:
    with small(2, policy="lp") as pager:
        x = page_of(pager, 1)
        queue(x, "out")
        queue(x, "in")
        with part(pager.core, x, 0, 1, write=True) as frames:
            start = int(frames[0]) * PAGE
            pager.core.backend.arena[start : start + PAGE].view(torch.float32).add_(1)
        assert holds(x, 2)


@script
def a_copy_fails_behind_others(machine: Machine, folder: Path) -> None:
    """What had been queued of them is no longer under way when its frames have other pages."""
    with small(3) as pager:
        x = page_of(pager, 1, pages=2)
        pager.core.residency.scattered = True  # a copy for each page
        evict(pager, x)
        machine.fail_copy(1)
        with pytest.raises(RuntimeError, match="told to fail"):
            x.add_(1)
        machine.fail_copy(-1)
        assert holds(new_page(pager, pages=3), 0)


# -- several streams of ops ------------------------------------------------------------------------
class Late:
    """A thread on a stream of its own has ``tensor`` pinned, and its op is not queued yet. Another
    stream has become that of the ops meanwhile."""

    def __init__(self, pager: tp.Pager, tensor: tp.PagedTensor, other: tp.PagedTensor) -> None:
        self._pager, self._run = pager, tensor._storage.run
        self._own, self.theirs = torch.Stream(NAME), torch.Stream(NAME)
        main = torch.accelerator.current_stream()
        self._own.wait_stream(main)
        self.theirs.wait_stream(main)
        with on(self._own):
            pager.core.take([self._run])
        with on(self.theirs):
            pager.core.take([other._storage.run])
            pager.core.release([other._storage.run])

    def op(self, *, write: bool = False) -> None:
        start = self._run.base * PAGE
        view = self._pager.core.backend.arena[start : start + PAGE].view(torch.float32)
        with on(self._own):
            if write:
                self._pager.core.will_write([self._run])
                view.add_(1)
            else:
                view.sum()
            self._pager.core.release([self._run])


@script
def a_late_op_and_a_page_that_leaves(machine: Machine, folder: Path) -> None:
    with small(2) as pager:
        x, y = page_of(pager, 1), page_of(pager, 2)
        Late(pager, x, y).op(write=True)
        evict(pager, x)
        assert holds(x, 2)


def _clean(pager: tp.Pager, tensor: tp.PagedTensor) -> None:
    """It is on the device, and has a copy below."""
    evict(pager, tensor)
    pager.core.take([tensor._storage.run])
    pager.core.release([tensor._storage.run])


@script
def a_late_op_and_a_page_that_comes(machine: Machine, folder: Path) -> None:
    with small(2) as pager:
        z = page_of(pager, 3)
        evict(pager, z)
        x, y = page_of(pager, 1), page_of(pager, 2)
        _clean(pager, x)
        Late(pager, x, y).op()
        evict(pager, x)
        assert holds(z, 3)


@script
def a_late_op_and_a_new_page(machine: Machine, folder: Path) -> None:
    with small(2) as pager:
        x, y = page_of(pager, 1), page_of(pager, 2)
        _clean(pager, x)
        late = Late(pager, x, y)
        late.op()
        evict(pager, x)
        assert holds(new_page(pager), 0)


@script
def a_late_op_and_a_page_that_a_plan_bears(machine: Machine, folder: Path) -> None:
    with small(2) as pager:
        x, y = page_of(pager, 1), page_of(pager, 2)
        _clean(pager, x)
        late = Late(pager, x, y)
        late.op()
        frame, blank = evict(pager, x), new_page(pager)
        with pager.core.lock:
            assert pager.core.residency.place_at(blank._storage.run, frame)
        assert holds(blank, 0)


@script
def a_late_op_and_a_page_that_its_maker_writes(machine: Machine, folder: Path) -> None:
    with small(2) as pager:
        x, y = page_of(pager, 1), page_of(pager, 2)
        _clean(pager, x)
        late = Late(pager, x, y)
        late.op()
        frame, blank = evict(pager, x), new_page(pager)
        blank._storage.run.overwritten = True
        with pager.core.lock:
            assert pager.core.residency.place_at(blank._storage.run, frame)
        with on(late.theirs):
            blank.fill_(3)
        assert holds(blank, 3)


@script
def a_late_op_and_planned_moves(machine: Machine, folder: Path) -> None:
    with small(2) as pager:
        x, y = page_of(pager, 1), page_of(pager, 2)
        Late(pager, x, y).op(write=True)
        planned(x, "out")
        planned(x, "in")
        assert holds(x, 2)


@script
def a_page_comes_to_the_frame_of_one_that_leaves(machine: Machine, folder: Path) -> None:
    with small(1, policy="lp") as pager:
        x = page_of(pager, 1)
        y = page_of(pager, 2).add_(1)
        queue(y, "out")
        queue(x, "in")
        assert holds(x, 1)
        assert holds(y, 3)


@script
def a_page_comes_to_the_frame_of_one_that_leaves_for_the_disk(
    machine: Machine, folder: Path
) -> None:
    """Which a thread carries out, and streams know nothing of."""
    with small(1, policy="lp", disk_budget="4MiB", disk_path=folder) as pager:
        x = page_of(pager, 1)
        y = page_of(pager, 2).add_(1)
        slow_disk(pager)
        queue(y, "out", "disk")
        queue(x, "in")
        assert holds(x, 1)
        assert holds(y, 3)


@script
def a_page_is_in_the_slot_of_one_that_came(machine: Machine, folder: Path) -> None:
    """Before ops have waited for it."""
    with small(2, policy="lp", host_budget=PAGE) as pager:
        x, y = page_of(pager, 1), page_of(pager, 2)
        queue(x, "out")
        queue(x, "in")
        pager.core.mover.slots.drop_copies(x._storage.run.pages, "host")
        queue(y, "out")
        assert holds(x, 1)
        assert holds(y, 2)


@script
def a_new_page_takes_the_frame_of_one_that_is_queued(machine: Machine, folder: Path) -> None:
    with small(1, policy="lp") as pager:
        x = page_of(pager, 1)
        queue(x, "out")
        y = new_page(pager).add_(2)
        assert holds(x, 1)
        assert holds(y, 2)


@script
def a_page_is_used_on_two_streams(machine: Machine, folder: Path) -> None:
    """By a program that orders its own tensors, and knows nothing of pages."""
    with small(1) as pager:
        x = page_of(pager, 1)
        evict(pager, x)
        one, two, main = torch.Stream(NAME), torch.Stream(NAME), torch.accelerator.current_stream()
        one.wait_stream(main)
        two.wait_stream(main)
        with on(one):
            first = x * 2
        with on(two):
            second = x * 3
        main.wait_stream(one)
        main.wait_stream(two)
        assert bool((first.cpu() + second.cpu() == 5).all())


@script
def a_part_is_used_on_another_stream(machine: Machine, folder: Path) -> None:
    with small(1) as pager:
        x = page_of(pager, 1)
        side = torch.Stream(NAME)
        side.wait_stream(torch.accelerator.current_stream())
        with on(side), part(pager.core, x, 0, 1, write=True) as frames:
            start = int(frames[0]) * PAGE
            pager.core.backend.arena[start : start + PAGE].view(torch.float32).add_(1)
        evict(pager, x)
        assert holds(x, 2)


@script
def another_thread_comes_in_while_one_waits_for_its_turn(machine: Machine, folder: Path) -> None:
    with small(2) as pager:
        main, theirs = torch.accelerator.current_stream(), torch.Stream(NAME)
        theirs.wait_stream(main)

        def meanwhile() -> None:
            with on(theirs):
                pager.core.backend.note_compute()

        pager.core.residency.before_pinning = meanwhile
        y = new_page(pager).add_(1)
        pager.core.residency.before_pinning = lambda: None
        assert holds(y, 1)


# -- planned moves ---------------------------------------------------------------------------------
@script
def a_planned_page_leaves_and_comes(machine: Machine, folder: Path) -> None:
    with small(1) as pager:
        x = page_of(pager, 1)
        x.add_(1)
        planned(x, "out")
        y = page_of(pager, 5)  # in the frame of x
        y.add_(1)
        planned(y, "out")
        planned(x, "in")
        x.add_(1)
        assert holds(x, 3)
        assert holds(y, 6)


@script
def a_planned_page_comes_to_a_frame_that_was_in_use(machine: Machine, folder: Path) -> None:
    with small(1) as pager:
        x = page_of(pager, 1)
        evict(pager, x)
        y = page_of(pager, 2)
        y.add_(1)
        del y
        with pager.core.lock:
            pager.core.residency.collect()
        planned(x, "in")
        assert holds(x, 1)


@script
def a_planned_page_comes_to_a_frame_that_chaos_has_written(machine: Machine, folder: Path) -> None:
    with small(1) as pager:
        x = page_of(pager, 1)
        scramble(pager.core)
        planned(x, "in")
        assert holds(x, 1)


@script
def frames_of_a_planned_page_were_given_back_one_by_one(machine: Machine, folder: Path) -> None:
    with small(2) as pager:
        x = page_of(pager, 1, pages=2)
        evict(pager, x)
        others = [page_of(pager, 2), page_of(pager, 3)]
        while others:
            others[-1].add_(1)
            others.pop()
            with pager.core.lock:
                pager.core.residency.collect()
        planned(x, "in")
        assert holds(x, 1)


@script
def a_planned_page_comes_to_a_frame_that_one_has_moved_from(machine: Machine, folder: Path) -> None:
    with small(2) as pager:
        x = page_of(pager, 1)
        evict(pager, x)
        y = page_of(pager, 2)
        before = frame_of(y)
        pages = np.array([y._storage.run.first])
        with pager.core.quiet():
            pager.core.residency.relocate(pages, np.array([1 - before]))
        planned(x, "in", base=before)
        assert frame_of(x) == before
        assert holds(x, 1)
        assert holds(y, 2)


@script
def a_planned_page_comes_to_a_frame_that_one_has_slid_from(machine: Machine, folder: Path) -> None:
    with small(2) as pager:
        x, y = page_of(pager, 1), page_of(pager, 2)
        assert evict(pager, x) < frame_of(y)
        with pager.core.quiet():
            pager.core.residency.compact(set())
        planned(x, "in", base=1)
        assert (frame_of(y), frame_of(x)) == (0, 1)
        assert holds(x, 1)
        assert holds(y, 2)


@script
def a_page_that_left_by_a_fault_comes_as_planned(machine: Machine, folder: Path) -> None:
    """To a frame that was free before it left."""
    with small(2) as pager:
        x, y = page_of(pager, 1), page_of(pager, 2)
        free = evict(pager, y)
        evict(pager, x)
        planned(x, "in", base=free)
        assert frame_of(x) == free
        assert holds(x, 1)


@script
def planned_pages_pass_through_the_disks_buffers(machine: Machine, folder: Path) -> None:
    with small(1, host_budget=0, disk_budget="4MiB", disk_path=folder) as pager:
        x = page_of(pager, 1)
        x.add_(1)
        planned(x, "out", "disk")
        y = page_of(pager, 5)
        y.add_(1)
        del y
        with pager.core.lock:
            pager.core.residency.collect()
        planned(x, "in", "disk")
        assert holds(x, 2)


# -- a disk that moves frames itself ---------------------------------------------------------------
class Straight:
    """An engine that reads and writes device memory, which is no stream's work."""

    takes_device = True

    def __init__(self, machine: Machine, inner: Any) -> None:
        self._machine, self._inner = machine, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _bytes(self, buffers: Any, *, write: bool) -> list[Any]:
        found = []
        for buffer in buffers:
            if isinstance(buffer, torch.Tensor):
                self._machine.touch(buffer.data_ptr(), buffer.nbytes, write=write)
                there = self._machine.bytes_of(buffer.data_ptr())
                buffer = np.ctypeslib.as_array((ctypes.c_uint8 * buffer.nbytes).from_address(there))
            found.append(buffer)
        return found

    def write(self, buffers: Any, offset: int) -> None:
        self._inner.write(self._bytes(buffers, write=False), offset)

    def read(self, buffers: Any, offset: int) -> None:
        self._inner.read(self._bytes(buffers, write=True), offset)


@contextmanager
def straight(machine: Machine, frames: int, folder: Path, **limits: Any) -> Iterator[tp.Pager]:
    from tensorpager.pager.disk import tier

    make = tier.make_engine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier, "make_engine", lambda *a, **k: Straight(machine, make(*a, **k)))
        limits = {"host_budget": 0, "disk_budget": "4MiB", "disk_path": folder} | limits
        with small(frames, **limits) as pager:
            yield pager


@script
def the_disk_moves_frames(machine: Machine, folder: Path) -> None:
    with straight(machine, 1, folder) as pager:
        x, y = page_of(pager, 1), page_of(pager, 2)
        for _ in range(3):
            x.add_(1)
            y.mul_(2)
        assert holds(x, 4)
        assert holds(y, 16)


@script
def the_disk_fills_a_frame_that_was_in_use(machine: Machine, folder: Path) -> None:
    with straight(machine, 1, folder) as pager:
        x = page_of(pager, 1)
        evict(pager, x)
        y = page_of(pager, 2)
        y.add_(1)
        del y
        assert holds(x, 1)


@script
def the_disk_fills_a_frame_whose_page_leaves(machine: Machine, folder: Path) -> None:
    with straight(machine, 1, folder, host_budget=PAGE) as pager:
        x, y = page_of(pager, 1), page_of(pager, 2)
        planned(y, "out", "disk")
        pager.core.take([x._storage.run])
        pager.core.release([x._storage.run])
        x.add_(1)
        assert holds(y, 2)  # read into the frame that x has left for the host
        assert holds(x, 2)


@script
def the_disk_moves_frames_as_planned(machine: Machine, folder: Path) -> None:
    with straight(machine, 1, folder) as pager:
        x = page_of(pager, 1)
        x.add_(1)
        planned(x, "out", "disk")
        y = page_of(pager, 5)
        y.add_(1)
        del y
        with pager.core.lock:
            pager.core.residency.collect()
        planned(x, "in", "disk")
        assert holds(x, 2)


# -- memory that is given back ---------------------------------------------------------------------
class Mapped(PlainMemory):
    """As CUDA's kit: the border moves, and what lies beyond it is given back; host memory is
    registered."""

    name, can_unmap = "mapped", True
    machine: Machine

    def __init__(self, device: torch.device, reserved_bytes: int, committed_bytes: int) -> None:
        super().__init__(device, reserved_bytes, reserved_bytes)
        self._committed = reserved_bytes
        self.commit(committed_bytes)

    def commit(self, nbytes: int) -> None:
        self.machine.touch(self.address + nbytes, max(0, self._committed - nbytes), write=True)
        self._committed = nbytes

    def host_memory(self, nbytes: int) -> list[HostMemory]:
        memory = np.zeros(nbytes, np.uint8)
        address = memory.ctypes.data
        if nbytes:
            self.machine.lock_pages(address, nbytes)
        return [HostMemory(memory, lambda: self.machine.unlock_pages(address))] if nbytes else []


@contextmanager
def mapped(machine: Machine) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(choice.KITS, NAME, type("Mapped", (Mapped,), {"machine": machine}))
        yield


@script
def the_border_moves_under_what_is_queued(machine: Machine, folder: Path) -> None:
    kept = torch.empty(1, device=NAME)  # so that the cache has nothing to wait for
    with mapped(machine), small(2) as pager:
        x, y = page_of(pager, 1), page_of(pager, 2)
        x.add_(1)
        y.add_(1)
        pager.core.residency.resize(1)
        assert holds(x, 2)
        assert holds(y, 3)
    del kept


@script
def host_memory_is_given_back_under_what_is_queued(machine: Machine, folder: Path) -> None:
    with mapped(machine), small(1) as pager:
        x = page_of(pager, 1)
        evict(pager, x)


@script
def the_arena_is_given_back_under_what_is_queued(machine: Machine, folder: Path) -> None:
    with small(1) as pager:
        x = page_of(pager, 1)
        side = torch.Stream(NAME)
        side.wait_stream(torch.accelerator.current_stream())
        with on(side):
            x.add_(1)


@script
def the_arena_is_made_anew_under_what_is_queued(machine: Machine, folder: Path) -> None:
    with small(2) as pager:
        x = page_of(pager, 1)
        side = torch.Stream(NAME)
        side.wait_stream(torch.accelerator.current_stream())
        with on(side):
            x.add_(1)
        pager.core.residency.resize(1)
        pager.core.residency.fit()
        assert pager.core.backend.arena.numel() == PAGE
        assert holds(x, 2)


@script
def the_arena_is_made_anew_on_another_stream(machine: Machine, folder: Path) -> None:
    """Its memory goes back to the stream that it was allocated on. There is room for both."""
    device = make_device(resolve(NAME), 64 * PAGE, 4 * PAGE)
    side = torch.Stream(NAME)
    with on(side):
        device.arena.zero_()
        device.remake(2 * PAGE, empty=False)
        assert bool((device.arena.cpu() == 0).all())
    device.close()


# -- others ----------------------------------------------------------------------------------------
@script
def the_clock_is_read_when_the_work_is_done(machine: Machine, folder: Path) -> None:
    device: Any = make_device(resolve(NAME), PAGE, PAGE)
    before = device.stamp()
    device.arena.zero_()
    after = device.stamp()
    for _ in range(8):
        device.arena.add_(1)
    assert device.elapsed(before, after) >= 0
    torch.accelerator.synchronize()
    device.close()


@script
def the_link_is_measured(machine: Machine, folder: Path) -> None:
    device = make_device(resolve(NAME), PAGE, PAGE)
    (memory,) = device.host_memory(PAGE)
    machine.touch(memory.bytes.ctypes.data, PAGE, write=True)
    assert measure_link(device, np.zeros(PAGE, np.uint8), [memory.bytes]).out > 0
    machine.touch(memory.bytes.ctypes.data, PAGE, write=True)
    device.close()


@script
def a_buffer_of_the_disk_is_filled_again(machine: Machine, folder: Path) -> None:
    """Its copies to and from the device are over."""
    device = make_device(resolve(NAME), PAGE, PAGE)
    (memory,) = device.host_memory(PAGE)
    for to_device in (True, False):
        device.wait(device.copy([Copy(0, memory.bytes)], URGENT, (), to_device=to_device))
        machine.touch(memory.bytes.ctypes.data, PAGE, write=True)
    device.close()
