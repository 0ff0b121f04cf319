"""Following a plan where things are not quite as planned: nothing that it counts on goes away."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.moves.transfers import Transfer
from tensorpager.pager.plan.access_log import (
    FIRST_OPTIONAL,
    FIRST_STREAM,
    AccessLog,
    activation_key,
    is_activation,
    newborn_key,
    ordered,
)
from tensorpager.pager.plan.compiled_plan import ANYWHERE, Action, CompiledPlan, Order
from tensorpager.pager.plan.enter_plan import enter_plan
from tensorpager.pager.plan.planned import _PATIENCE
from tensorpager.pager.plan.signatures import StepSignature
from tensorpager.pager.plan.victims import by_next_use
from tensorpager.pager.tensor.paged_tensor import PagedTensor

from .models import PAGE_BYTES, make_pager
from .test_compaction import FRAMES, laid_out, layout, unchanged

pytestmark = pytest.mark.usefixtures("one_thread")  # a core is left for what is queued

Tensors = dict[str, PagedTensor]


def named(pager: tp.Pager, tensors: Tensors) -> dict[str, int]:
    """The letters' runs get keys 1, 2, 3, … as if an iteration had used them in that order."""
    keys = {}
    for number, letter in enumerate(sorted(tensors), start=1):
        run = tensors[letter]._storage.run
        run.key = keys[letter] = number
        pager.core.follower.recorder.names.runs[number] = run
    return keys


def pages_of(tensor: PagedTensor) -> np.ndarray:
    run = tensor._storage.run
    return np.arange(run.first, run.first + run.count)


def held_back(pager: tp.Pager, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What leaves for the host does not go before the result is called."""
    late: list[Any] = []
    mover = pager.core.mover
    monkeypatch.setattr(mover.lanes["host-out"], "add", lambda *work: late.append(work))

    def goes() -> None:
        for transfer, ticket in late:
            ticket.carry(transfer.run)
        with pager.core.lock:
            mover.drain()

    return goes


# -- entering a plan -------------------------------------------------------------------------------
def test_what_the_plan_found_no_place_for_stays() -> None:
    """A has a place; B is where nobody else goes; C is where A goes, and makes way; D is not used
    in the iteration; E is below, and is brought."""
    with make_pager(frames=FRAMES, policy="lp") as pager:
        tensors = laid_out(pager, "........EE")
        with pager.core.lock:
            pager.core.residency.evict_pages(pages_of(tensors["E"]))
        tensors |= laid_out(pager, "CCBBAAD...")
        keys = named(pager, tensors)
        compiled = SimpleNamespace(
            uses={keys[letter]: [] for letter in "ABCE"}, start={keys["A"]: 0}, away=[], last_in={}
        )
        with pager.core.lock:
            missing = enter_plan(pager.core.residency, pager.core.follower.recorder.names, compiled)
        after = layout(pager, {name: tensors[name] for name in "ABC"})
        assert after[:4] == "AABB"
        assert "CC" in after
        assert (pager.core.table.frame[pages_of(tensors["D"])] < 0).all()
        assert missing == [Action("in", "host", keys["E"], 0, 2, ANYWHERE)]
        check_invariants(pager.core)
        assert unchanged(tensors)


# -- batches of another length ---------------------------------------------------------------------
def test_keys_say_where_activations_are_born_and_how_large_others_are() -> None:
    keys = {newborn_key(0, index, pages) for index in range(3) for pages in range(1, 4)}
    activations = {activation_key(place, index) for index in range(3) for place in range(4)}
    assert len(keys | activations) == 9 + 12
    assert max(keys | activations) < 0
    assert all(map(is_activation, activations))
    assert not any(map(is_activation, keys | {1, FIRST_STREAM}))
    one, two = activation_key(0, 0), activation_key(0, 1)
    assert ordered((one,)) == ordered((one, two)) == ()
    assert ordered((1, one)) == (1,)
    assert ordered((-7,)) == ordered((1, FIRST_OPTIONAL)) == ()


def test_accesses_are_found_by_their_order() -> None:
    """Small activations are not there in short batches, and have no place in the plan if it is of
    one."""
    a, b, c = (activation_key(1, index) for index in range(3))
    keys = [(1,), (a,), (b,), (2, a), (2,)]
    plan = SimpleNamespace(
        keys=keys, order=[(1,), (2,), (2,)], places=[0, 3, 4], uses={a: [1, 3], b: [2]}
    )

    def found(keys: tuple[int, ...], after: int, place: int) -> int | None:
        return CompiledPlan.find(cast(CompiledPlan, plan), keys, ordered(keys), after, place)

    assert [found(access, where - 1, 0) for where, access in enumerate(keys)] == [0, 1, 2, 3, 4]
    assert found((b,), 0, 1) == 2
    assert found((2,), 0, 1) == 3  # without what was saved
    assert found((c,), 1, 1) == 1  # unknown
    assert found((b,), 3, 2) == 3  # here it is not used again
    assert found((3,), 2, 1) is None
    assert found((1,), 4, 3) is None


def test_moves_of_as_large_a_part() -> None:
    """Parts that follow each other do so in runs of any size."""
    first = Action("out", "host", 1, 0, 3, 7, 10)
    second = first._replace(first=3, pages=7)
    assert first.on(10) == first
    assert first.on(20)[3:5] == (0, 6)
    assert second.on(20)[3:5] == (6, 14)
    assert first.on(3)[3:5] == (0, 0)
    assert second.on(3)[3:5] == (0, 3)
    assert first._replace(of=0).on(4) == first._replace(of=0)


# -- a fault while a plan is followed --------------------------------------------------------------
def test_what_the_plan_uses_last_is_evicted() -> None:
    """LRU would take A, which comes next."""
    with make_pager(frames=FRAMES, policy="lp") as pager:
        tensors = laid_out(pager, "AAABBBCCC.")
        keys = named(pager, tensors)
        known = Order([(keys[letter],) for letter in "ABCA"])
        residency = pager.core.residency
        with pager.core.lock:
            for letter in "ABC":
                residency.touch(tensors[letter]._storage.run)
            ages = residency.ages
            tensors["C"]._storage.run.pins += 1
            with by_next_use(residency, known, 2, {}):  # C is under way, then A, A, B
                residency._free_up(4)
            tensors["C"]._storage.run.pins -= 1
            assert residency.ages is ages
        assert layout(pager, tensors) == "AAA...CCC."
        assert unchanged(tensors)


# -- moves of one point of the program -------------------------------------------------------------
def test_what_begins_at_one_point_moves_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also parts of one run; the out-moves go first, so that the others have their frames."""
    with make_pager(frames=FRAMES, policy="lp") as pager:
        tensors = laid_out(pager, "DDDDEEEE..")
        with pager.core.lock:
            for letter in "DE":
                pager.core.residency.evict_pages(pages_of(tensors[letter]))
        tensors |= laid_out(pager, "AABBCC....")
        keys = named(pager, tensors)
        for letter in "ABC":
            tensors[letter].add_(0)  # no copy of it is valid any more
        mover, begun = pager.core.mover, []
        queue = mover._queue

        def noted(transfer: Transfer, *rest: Any) -> None:
            begun.append(transfer)
            queue(transfer, *rest)

        monkeypatch.setattr(mover, "_queue", noted)
        outs = [Action("out", "host", keys[letter], 0, 2, ANYWHERE) for letter in "ABC"]
        ins = [Action("in", "host", keys["D"], 0, 2, 0), Action("in", "host", keys["E"], 0, 4, 4)]
        rest = [Action("in", "host", keys["D"], 2, 2, 0)]
        planned = pager.core.follower.planned
        with pager.core.lock:
            planned.issue([*ins, *outs, *rest], {})
            assert not planned.waiting
        moved = [(transfer.to_device, len(transfer.pages)) for transfer in begun]
        assert moved == [(False, 6), (True, 8)]
        with pager.core.lock:
            mover.drain()
            pager.core.residency.settle(tensors["D"]._storage.run)
            pager.core.residency.settle(tensors["E"]._storage.run)
        assert layout(pager, {name: tensors[name] for name in "DE"}) == "DDDDEEEE.."
        check_invariants(pager.core)
        assert unchanged(tensors)


def test_what_finds_its_place_taken_comes_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """D goes where there is room, and E to its place; nothing is moved aside for them."""
    with make_pager(frames=FRAMES, policy="lp") as pager:
        tensors = laid_out(pager, "DDEE......")
        residency, mover = pager.core.residency, pager.core.mover
        with pager.core.lock:
            for letter in "DE":
                residency.evict_pages(pages_of(tensors[letter]))
        tensors |= laid_out(pager, "BBB.......")
        keys = named(pager, tensors)
        coming = []
        bring = mover.bring

        def noted(tier: str, pages: np.ndarray, *rest: Any) -> None:
            coming.append(len(pages))
            bring(tier, pages, *rest)

        monkeypatch.setattr(mover, "bring", noted)
        monkeypatch.setattr(residency, "relocate", None)
        ins = [Action("in", "host", keys["D"], 0, 2, 1), Action("in", "host", keys["E"], 0, 2, 8)]
        with pager.core.lock:
            pager.core.follower.planned.issue(ins, {})
            mover.drain()
            for letter in "DE":
                residency.settle(tensors[letter]._storage.run)
        assert coming == [4]
        after = layout(pager, tensors)
        assert after[:3] == "BBB"
        assert "DD" in after
        assert after[8:] == "EE"
        check_invariants(pager.core)
        assert unchanged(tensors)


# -- more frames than the plan counts on -----------------------------------------------------------
def test_what_has_room_beside_the_plan_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan counts on six frames: of A, B and C, which it has leave, two find room in the other
    four, and C is used last. What comes to their places goes behind the plan's frames. When there
    are fewer frames, B has to leave too, and A when E finds no room behind."""
    monkeypatch.setattr("tensorpager.pager.plan.planned._LATE", 100)  # however long A takes
    with make_pager(frames=FRAMES, policy="lp") as pager:
        tensors = laid_out(pager, "DDEE......")
        with pager.core.lock:
            for letter in "DE":
                pager.core.residency.evict_pages(pages_of(tensors[letter]))
        tensors |= laid_out(pager, "AABBCC....")
        keys = named(pager, tensors)
        plan: Any = Order([(keys[letter],) for letter in "ABCDABC"])
        plan.frames, plan.left, plan.parted, plan.births, plan.start = 6, 0, set(), {}, {}
        planned, mover = pager.core.follower.planned, pager.core.mover
        outs = [Action("out", "host", keys[letter], 0, 2, ANYWHERE) for letter in "ABC"]
        with pager.core.lock:
            planned.follow(plan)
            planned.issue(outs, {}, 3)
            assert layout(pager, tensors) == "AABB......"
            planned.issue([Action("in", "host", keys["D"], 0, 2, 0)], {}, 4)
            mover.drain()
            assert layout(pager, tensors) == "AABB..DD.."
            planned.shrink(8, 4)
            pager.core.residency.resize(8)
            assert layout(pager, tensors) == "AA....DD.."
            planned.issue([Action("in", "host", keys["E"], 0, 2, 0)], {}, 4)
            mover.drain()
            assert layout(pager, tensors) == "EE....DD.."
            planned.shrink(6, 4)
            pager.core.residency.resize(6)
        assert layout(pager, tensors) == "EEDD......"
        assert mover.bytes_out == 2 * 5 * pager.core.page_size  # each of them once
        check_invariants(pager.core)
        assert unchanged(tensors)


def test_steps_go_on_as_before_with_about_as_many_frames() -> None:
    """Or each batch that is longer than all before would be another kind, to be planned anew."""
    with make_pager(frames=100, policy="lp") as pager:
        pager.core.budget.settled, found = True, []
        for frames in (100, 92, 70, 76, 90):
            pager.core.residency.resize(frames)
            found.append(pager.core.budget.frames_for_steps)
        assert found == [100, 100, 70, 70, 90]


# -- places of the plan ----------------------------------------------------------------------------
@pytest.fixture
def a_place_that_is_taken() -> Iterator[tuple[tp.Pager, Tensors, dict[str, int]]]:
    """A, 4 pages, is below; B is where A is to come. What has gone astray finds back, as it does on
    a GPU."""
    with make_pager(frames=FRAMES, policy="lp") as pager:
        tensors = laid_out(pager, "AAAA......")
        with pager.core.lock:
            pager.core.residency.evict_pages(pages_of(tensors["A"]))
        tensors |= laid_out(pager, "..BBB.....")
        keys = named(pager, tensors)
        pager.core.follower.planned._tidies = True
        yield pager, tensors, keys
        check_invariants(pager.core)
        assert unchanged(tensors)


def come(pager: tp.Pager, key: int) -> None:
    with pager.core.lock:
        pager.core.follower.planned.issue([Action("in", "host", key, 0, 4, 0)], {})


def test_what_has_gone_astray_makes_way(a_place_that_is_taken) -> None:
    pager, tensors, keys = a_place_that_is_taken
    pager.core.follower.planned.homes[keys["B"]] = 6
    come(pager, keys["A"])
    assert layout(pager, tensors) == "AAAA..BBB."


def test_a_move_waits_for_what_is_in_its_place_by_the_plan(a_place_that_is_taken) -> None:
    pager, tensors, keys = a_place_that_is_taken
    planned = pager.core.follower.planned
    planned.homes[keys["B"]] = 2
    come(pager, keys["A"])
    assert planned.waiting
    with pager.core.lock:
        pager.core.residency.evict_pages(pages_of(tensors["B"]))
        planned.go_on()
    assert not planned.waiting
    assert layout(pager, tensors) == "AAAA......"


@pytest.mark.parametrize("wanted", [True, False])
def test_nor_longer_than_it_should(a_place_that_is_taken, wanted: bool) -> None:
    """An access wants it, or it has waited for long: then it takes another place."""
    pager, tensors, keys = a_place_that_is_taken
    planned, run = pager.core.follower.planned, tensors["A"]._storage.run
    planned.homes[keys["B"]] = 2
    come(pager, keys["A"])
    with pager.core.lock:
        if wanted:
            assert planned.serve([run])
            pager.core.residency.release([run])
        else:
            for _ in range(_PATIENCE):
                assert planned.waiting
                planned.go_on()
    assert not planned.waiting
    assert layout(pager, tensors) == "..BBBAAAA."


def test_an_iteration_begins_with_everything_in_its_place(a_place_that_is_taken) -> None:
    pager, tensors, keys = a_place_that_is_taken
    planned = pager.core.follower.planned
    planned.homes = {keys["A"]: 0, keys["B"]: 1}
    with pager.core.lock:
        planned.go_home()
    assert layout(pager, tensors) == ".BBB......"


def test_what_is_shifted_goes_to_another_place(a_place_that_is_taken) -> None:
    """B, which has found a place where A is to come; not while it is in use."""
    pager, tensors, keys = a_place_that_is_taken
    planned, run = pager.core.follower.planned, tensors["B"]._storage.run
    planned.homes[keys["B"]] = 2
    shift = Action("shift", "device", keys["B"], 0, 3, 7, 3)
    pager.core.take([run])
    with pager.core.lock:
        planned.issue([shift], {})
    assert layout(pager, tensors) == "..BBB....."
    pager.core.release([run])
    with pager.core.lock:
        planned.issue([shift, Action("in", "host", keys["A"], 0, 4, 0)], {})
    assert layout(pager, tensors) == "AAAA...BBB"


def test_nothing_is_shifted_to_what_others_are_still_leaving(monkeypatch) -> None:
    """An op that uses A would wait for B's transfer. What comes instead of A goes elsewhere."""
    with make_pager(frames=FRAMES, policy="lp") as pager:
        tensors = laid_out(pager, "CC........")
        with pager.core.lock:
            pager.core.residency.evict_pages(pages_of(tensors["C"]))
        tensors |= laid_out(pager, "AABB......")
        keys = named(pager, tensors)
        planned, goes = pager.core.follower.planned, held_back(pager, monkeypatch)
        planned._tidies = True
        with pager.core.lock:
            planned.issue([Action("out", "host", keys["B"], 0, 2, ANYWHERE)], {})
            planned.issue([Action("shift", "device", keys["A"], 0, 2, 2, 2)], {})
            assert layout(pager, tensors) == "AA........"
            planned.issue([Action("in", "host", keys["C"], 0, 2, 0)], {})
        assert layout(pager, tensors) == "AA..CC...."
        goes()
        check_invariants(pager.core)
        assert unchanged(tensors)


# -- tiers that are not as planned -----------------------------------------------------------------
def test_what_is_in_another_tier_comes_from_there(tmp_path: Path) -> None:
    """The plan has all of A in the host; two of its pages went to disk before the plan began."""
    disk = {"disk_budget": "4MiB", "disk_path": tmp_path}
    with make_pager(frames=FRAMES, policy="lp", **disk) as pager:
        tensors = laid_out(pager, "AAAA......")
        keys, mover = named(pager, tensors), pager.core.mover
        pages = pages_of(tensors["A"])
        with pager.core.lock:
            for tier, part in (("host", pages[:2]), ("disk", pages[2:])):
                mover.out(tier, part, mover.slots.take(tier, 2, leaving=part))
            mover.drain()
        come(pager, keys["A"])
        with pager.core.lock:
            mover.drain()
        assert layout(pager, tensors) == "AAAA......"
        assert mover.moved["host-in"] == mover.moved["disk-in"] == 2 * pager.core.page_size
        check_invariants(pager.core)
        assert unchanged(tensors)


def test_what_finds_its_tier_full_goes_to_the_other_one(tmp_path: Path) -> None:
    """Nor does what comes behind it wait: B has all of the host, where the plan has A."""
    disk = {"disk_budget": "4MiB", "disk_path": tmp_path}
    with make_pager(frames=FRAMES, policy="lp", host_budget=3 * PAGE_BYTES, **disk) as pager:
        tensors = laid_out(pager, "BBB.......")
        with pager.core.lock:
            pager.core.residency.evict_pages(pages_of(tensors["B"]))
        tensors |= laid_out(pager, "AAAA......")
        keys, mover = named(pager, tensors), pager.core.mover
        out = Action("out", "host", keys["A"], 0, 4, ANYWHERE)
        planned = pager.core.follower.planned
        with pager.core.lock:
            planned.issue([out], {})
            assert not planned.waiting
            mover.drain()
        assert mover.moved["disk-out"] == 4 * pager.core.page_size
        come(pager, keys["A"])
        with pager.core.lock:
            mover.drain()
        assert layout(pager, tensors) == "AAAA......"
        check_invariants(pager.core)
        assert unchanged(tensors)


# -- moves without a window ------------------------------------------------------------------------
def test_what_has_no_window_comes_all_the_same() -> None:
    """It is put together when an access wants it: others change places with it, but for E."""
    with make_pager(frames=FRAMES, policy="lp") as pager:
        tensors = laid_out(pager, "AAA.......")
        with pager.core.lock:
            pager.core.residency.evict_pages(pages_of(tensors["A"]))
        tensors |= laid_out(pager, ".BB.EE.CC.")
        keys = named(pager, tensors)
        runs = {letter: tensors[letter]._storage.run for letter in "ABCE"}
        others = [runs[letter] for letter in "BCE"]
        pager.core.take(others)
        planned = pager.core.follower.planned
        with pager.core.lock:
            planned.issue([Action("in", "host", keys["A"], 0, 3, ANYWHERE)], {})
        assert layout(pager, tensors) == "ABBAEEACC."
        pager.core.release(others[:2])
        with pager.core.lock:
            assert planned.serve([runs["A"]])
        assert layout(pager, tensors) == "CBBCEE.AAA"
        pager.core.release([runs["A"], runs["E"]])
        check_invariants(pager.core)
        assert unchanged(tensors)


def test_what_is_free_sooner_is_filled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """B's frames are planned for A, but B is to leave last of all; and what leaves at one point
    leaves in the order in which the plan needs its frames."""
    monkeypatch.setattr("tensorpager.pager.plan.planned._LATE", 0)
    with make_pager(frames=FRAMES, policy="lp") as pager:
        tensors = laid_out(pager, "AA........")
        with pager.core.lock:
            pager.core.residency.evict_pages(pages_of(tensors["A"]))
        tensors |= laid_out(pager, "BBCCDDEEFF")
        keys = named(pager, tensors)
        planned, goes = pager.core.follower.planned, held_back(pager, monkeypatch)
        pager.core.mover.batch_pages["host-out"] = 2
        outs = [Action("out", "host", keys[letter], 0, 2, ANYWHERE) for letter in "CDB"]
        with pager.core.lock:
            planned.issue([*outs, Action("in", "host", keys["A"], 0, 2, 0)], {})
        assert layout(pager, tensors) == "..AA..EEFF"
        goes()
        check_invariants(pager.core)
        assert unchanged(tensors)


# -- durations -------------------------------------------------------------------------------------
def test_accesses_add_up_to_the_fastest_iteration() -> None:
    """Each iteration is slow somewhere else: the fastest of each access would say 4."""
    log = AccessLog()
    log.keys.append((1,))
    log.times.append(time.perf_counter())
    signature = StepSignature(1, log)
    signature.samples.clear()
    for slow in range(4):
        signature.samples.append([5.0 if position == slow else 1.0 for position in range(4)])
    assert sum(signature.seconds()) == pytest.approx(8.0)
    assert signature.seconds() == pytest.approx([2.0] * 4)


# -- an op and a channel at once -------------------------------------------------------------------
def test_what_moves_just_before_an_op_pins_it_is_one_access(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread makes room and moves it aside. A second access would be none of the plan's."""
    with make_pager(frames=FRAMES) as pager:
        tensors = laid_out(pager, "AABB......")
        tensor = tensors["A"]
        assert (tensor + 1 == ord("A") + 1).all()  # its view is at hand
        run = tensor._storage.run
        accesses = []
        take = pager.core.take

        def moves_first(runs: list) -> None:
            accesses.append(runs)
            if len(accesses) == 1:
                with pager.core.lock:
                    pager.core.residency.relocate(pages_of(tensor), np.array([6, 7]))
            take(runs)

        monkeypatch.setattr(pager.core, "take", moves_first)
        out = tensor + 1
        assert run.base == 6
        assert (out == ord("A") + 1).all()
        assert accesses == [[run]]
