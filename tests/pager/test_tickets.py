"""Transfers that are queued: the page table says what comes of them, and whoever needs the bytes,
the frame or the slot waits. One that fails loses nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.devices.device import Mark
from tensorpager.pager.disk import watch as io_watch
from tensorpager.pager.disk.watch import IoWatch
from tensorpager.pager.errors import PagerError
from tensorpager.pager.moves import tickets as tickets_module
from tensorpager.pager.moves.compaction import rearrange
from tensorpager.pager.moves.tickets import Tickets
from tensorpager.pager.moves.transfers import Transfer
from tensorpager.pager.tensor.new_pages import empty_like_geometry
from tensorpager.pager.tensor.paged_tensor import PagedTensor

from .models import make_pager
from .test_compaction import FRAMES, laid_out, layout, unchanged
from .test_following import pages_of

pytestmark = pytest.mark.usefixtures("one_thread")  # a core is left for what is queued


class Gate:
    """Queued transfers wait until it is opened; then those to ``fails`` raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.fails = ""
        self.begun = 0
        run = Transfer.run

        def gated(transfer: Transfer, after: Mark) -> Mark:
            if not transfer.urgent:
                self.begun += 1
                assert self.opened.wait(300)
                if self.fails == ("in" if transfer.to_device else "out"):
                    raise PagerError("not today")
            return run(transfer, after)

        monkeypatch.setattr(Transfer, "run", gated)

    def open_soon(self) -> None:
        threading.Timer(0.1, self.opened.set).start()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


def send(pager: tp.Pager, tensor: PagedTensor) -> None:
    """Queue its way out."""
    pages = pages_of(tensor)
    with pager.core.lock:
        slots = pager.core.mover.slots.take("host", len(pages), leaving=pages)
        pager.core.mover.out("host", pages, slots)


def bring(pager: tp.Pager, tensor: PagedTensor, first: int) -> None:
    """Queue its way in, to the frames from ``first`` on."""
    pages = pages_of(tensor)
    with pager.core.lock:
        pager.core.residency.pool.take(first, len(pages))
        frames = np.arange(first, first + len(pages))
        pager.core.mover.bring("host", pages, frames)


@pytest.fixture
def swapped(gate: Gate) -> Iterator[tuple[tp.Pager, dict[str, PagedTensor]]]:
    """A leaves, B comes to its frames, A comes to others: all queued, and not a byte moved."""
    with make_pager(frames=FRAMES) as pager:
        tensors = laid_out(pager, "BB........")
        with pager.core.lock:
            pager.core.residency.evict_pages(pages_of(tensors["B"]))
        tensors |= laid_out(pager, "AA.....CCC")
        send(pager, tensors["A"])
        bring(pager, tensors["B"], 0)
        bring(pager, tensors["A"], 3)
        yield pager, tensors
        gate.opened.set()


def test_the_page_table_is_in_program_order(swapped, gate: Gate) -> None:
    pager, tensors = swapped
    assert layout(pager, tensors) == "BB.AA..CCC"
    assert gate.begun <= 1, "nothing begins before what it waits for is over"
    for letter in "AB":
        assert tensors[letter]._storage.run.base == -1  # nobody uses it without waiting
    assert unchanged({"C": tensors["C"]})
    gate.open_soon()
    assert unchanged(tensors)
    assert layout(pager, tensors) == "BB.AA..CCC"
    assert pager.core.residency.faults == 0
    check_invariants(pager.core)


def test_a_frame_is_not_written_before_what_was_in_it_has_left(swapped, gate: Gate) -> None:
    """By an op: D is born where A was, and B is sent away again without having arrived."""
    pager, tensors = swapped
    with pager.core.lock:
        pager.core.residency.evict_pages(pages_of(tensors["B"]))
        gate.open_soon()
        assert pager.core.residency.place_at(blank(pager, 2)._storage.run, 0)
    assert unchanged(tensors)
    check_invariants(pager.core)


def blank(pager: tp.Pager, count: int) -> PagedTensor:
    empty = torch.empty(count * pager.core.page_size, dtype=torch.uint8, device="meta")
    return empty_like_geometry(pager.core, empty, "user")


@pytest.mark.parametrize("way", ["out", "in"])
def test_what_fails_is_undone_with_all_that_waited_for_it(swapped, gate: Gate, way: str) -> None:
    """If A could not leave, its only copy is where it was: in the frames that B was to have."""
    pager, tensors = swapped
    gate.fails = way
    gate.opened.set()
    with pager.core.quiet():
        assert str(pager.core.mover.error) == "not today"
    assert layout(pager, tensors) == {"out": "AA.....CCC", "in": ".......CCC"}[way]
    check_invariants(pager.core)
    assert unchanged(tensors)
    check_invariants(pager.core)


def test_an_access_that_waits_for_what_fails_faults(swapped, gate: Gate) -> None:
    pager, tensors = swapped
    gate.fails = "out"
    gate.open_soon()
    assert unchanged({"B": tensors["B"]})
    assert pager.core.residency.faults == 1
    assert unchanged(tensors)
    check_invariants(pager.core)


def test_a_compaction_amid_a_failure_is_begun_anew(swapped, gate: Gate) -> None:
    """E needs a window that there is only when what is queued has moved aside."""
    pager, tensors = swapped
    gate.fails = "out"
    gate.open_soon()
    wide = blank(pager, FRAMES - 3)
    pager.core.take([run := wide._storage.run])
    assert run.base >= 0
    pager.core.release([run])
    assert unchanged(tensors)
    check_invariants(pager.core)


@pytest.mark.parametrize("fails", ["", "out"])
@pytest.mark.parametrize("way", ["relocate", "slide"])
def test_what_makes_way_waits_for_a_frame_and_nobody_for_it(
    gate: Gate, way: str, fails: str
) -> None:
    """C goes to frames that A is still leaving, and is used once it is there; B comes to C's. Where
    A cannot leave, C has stayed where it was."""
    with make_pager(frames=FRAMES) as pager:
        residency = pager.core.residency
        tensors = laid_out(pager, "......BBB.")
        with pager.core.lock:
            residency.evict_pages(pages_of(tensors["B"]))
        tensors |= laid_out(pager, "AAA...CCC.")
        send(pager, tensors["A"])
        pages, frames = pages_of(tensors["C"]), np.arange(3)
        with pager.core.lock:
            if way == "relocate":
                residency.relocate(pages, frames)
            else:
                residency.slide(residency.table.frame[pages], frames)
        bring(pager, tensors["B"], 6)
        assert layout(pager, tensors) == "CCC...BBB."
        assert tensors["C"]._storage.run.base == -1
        gate.fails = fails
        gate.open_soon()
        assert unchanged({"C": tensors["C"]})
        assert layout(pager, tensors) == ("AAA...CCC." if fails else "CCC...BBB.")
        check_invariants(pager.core)
        assert unchanged(tensors)
        check_invariants(pager.core)


@pytest.mark.parametrize("fails", ["", "out"])
def test_what_changes_places_waits_for_the_first_one(gate: Gate, fails: str) -> None:
    """A page goes to a frame that A is still leaving, each other one to that of the one before."""
    with make_pager(frames=FRAMES) as pager:
        residency = pager.core.residency
        tensors = laid_out(pager, "A..CCCC.BB")
        send(pager, tensors["A"])
        pages, targets = pages_of(tensors["C"]), np.array([0, 3, 4, 5])
        with pager.core.lock:
            rearrange(residency, pages, targets)
        assert layout(pager, tensors) == "C..CCC..BB"
        assert (residency.table.frame[pages] == targets).all()
        gate.fails = fails
        gate.open_soon()
        assert unchanged({"C": tensors["C"]})
        assert layout(pager, tensors).count("A") == (1 if fails else 0)
        check_invariants(pager.core)
        assert unchanged(tensors)
        check_invariants(pager.core)


def test_what_dies_on_its_way_is_given_back_when_it_has_ended(swapped, gate: Gate) -> None:
    pager, tensors = swapped
    del tensors["A"]
    with pager.core.lock:
        pager.core.residency.collect()
        assert (pager.core.table.owner[pager.core.table.frame_page[[3, 4]]] >= 0).all()
        gate.open_soon()
    check_invariants(pager.core)
    assert layout(pager, tensors) == "BB.....CCC"
    assert pager.core.residency.pool.free_count == FRAMES - 5
    assert unchanged(tensors)


def test_the_lock_is_not_held_while_bytes_are_waited_for(swapped, gate: Gate) -> None:
    _, tensors = swapped
    waiting = threading.Thread(target=unchanged, args=({"B": tensors["B"]},))
    waiting.start()
    while not tensors["B"]._storage.run.pins:
        assert waiting.is_alive()
    assert unchanged({"C": tensors["C"]})
    assert waiting.is_alive()
    gate.opened.set()
    waiting.join(300)
    assert unchanged(tensors)


def test_the_watchdog_says_what_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets_module, "_WATCHDOG_SECONDS", 0.01)
    monkeypatch.setattr(io_watch, "_TICK_SECONDS", 0.01)
    tickets = Tickets(IoWatch(60.0), lambda mark: None)
    stuck = tickets.take("3 pages to disk", ("device", np.arange(3)))
    with pytest.raises(PagerError, match=r"no page moved for .*; queued: 3 pages to disk"):
        tickets.wait([stuck])


def test_what_is_copied_in_memory_takes_no_core_from_ops(monkeypatch) -> None:
    """Where all cores compute, ops' own thread copies, and nobody waits."""
    with make_pager(frames=FRAMES) as pager:
        mover = pager.core.mover
        monkeypatch.setattr(mover, "_cores", torch.get_num_threads())
        tensors = laid_out(pager, "AA.....CCC")
        send(pager, tensors["A"])
        bring(pager, tensors["A"], 3)
        assert layout(pager, tensors) == "...AA..CCC"
        assert tensors["A"]._storage.run.base == 3, "it is there"
        assert not mover.tickets.any
        assert not any(lane.threads for lane in mover.lanes.values())
        monkeypatch.setattr(mover.backend, "copies_by_core", False, raising=False)
        send(pager, tensors["C"])
        assert mover.lanes["host-out"].threads, "a link is waited for by others"
        pager.core.mover.drain()
        assert unchanged(tensors)
        with pager.core.lock:
            check_invariants(pager.core)
