"""Tensors larger than the arena go through it slab by slab; part pins hold what they name."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorpager as tp
from tensorpager.kernels.pieces import Paged, stretches
from tensorpager.pager.debug.chaos import chaos, scattered
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.disk.tier import DiskTier
from tensorpager.pager.memory.space import Part
from tensorpager.pager.plan.compiled_plan import ANYWHERE, Action
from tensorpager.pager.tensor.new_pages import empty_like_geometry
from tensorpager.pager.tensor.operands import operand, slabs
from tensorpager.pager.tensor.slabs import pages_of, reading_ahead, stream

from .models import PAGE_BYTES, World, loss_of, make_pager, mlp
from .parts import page_set, part
from .test_following import named
from .test_planned import compare_planned, planned_pager
from .test_stress import slow_channels  # noqa: F401
from .test_tickets import Gate, gate  # noqa: F401

FRAMES = 8
SEEDS = 20 if os.environ.get("TENSORPAGER_FULL") else 2
FLOATS = PAGE_BYTES // 4  # of a page
TIERS: dict[str, dict[str, Any]] = {
    "host": {"host_budget": "8MiB"},
    "disk": {"host_budget": 0, "disk_budget": "8MiB"},
    "both": {"host_budget": "1MiB", "disk_budget": "8MiB"},
}
LANES: dict[str, Callable[[tp.Pager], Any]] = {
    "plain": lambda pager: nullcontext(),
    "chaos": chaos,
    "scattered": scattered,
}


def slow(value: str) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


@contextmanager
def small_pager(folder: Path, tiers: str = "host", **options: Any) -> Iterator[tp.Pager]:
    """A pager whose arena has ``FRAMES`` frames for good: its first iteration is over."""
    options = {"frames": FRAMES, **TIERS[tiers], **options}
    if options.get("disk_budget"):
        options["disk_path"] = folder
    with make_pager(**options) as pager:
        with pager.iteration():
            pass
        assert pager.core.residency.pool.count == options["frames"]
        yield pager


def blank(pager: tp.Pager, numel: int, dtype: torch.dtype = torch.float32) -> tp.PagedTensor:
    return empty_like_geometry(pager.core, torch.empty(numel, dtype=dtype, device="meta"), "user")


def values(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, (numel,), generator=generator).to(dtype)


def write(pager: tp.Pager, tensor: tp.PagedTensor, dense: torch.Tensor, **options: Any) -> None:
    for slab in slabs(pager.core, [tensor], write=[True], **options):
        for target, source in stretches([slab.operands[0], dense[slab.start : slab.stop]]):
            target.copy_(source)
        check_invariants(pager.core)


def read(pager: tp.Pager, tensor: tp.PagedTensor, **options: Any) -> torch.Tensor:
    out = torch.empty(tensor.numel(), dtype=tensor.dtype)
    for slab in slabs(pager.core, [tensor], **options):
        for source, target in stretches([slab.operands[0], out[slab.start : slab.stop]]):
            target.copy_(source)
        check_invariants(pager.core)
    return out


def frames_of(tensor: tp.PagedTensor) -> list[int]:
    run = tensor._storage.run
    frames: list[int] = tensor.pager.core.table.frame[run.first : run.first + run.count].tolist()
    return frames


def nothing_is_pinned(pager: tp.Pager) -> bool:
    check_invariants(pager.core)
    return pager.core.residency.pinned_pages() == 0


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not true():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.001)


# -- larger than the arena -----------------------------------------------------------------------
@pytest.mark.parametrize("lane", list(LANES))
@pytest.mark.parametrize("policy", ["lru", "lp"])
@pytest.mark.parametrize("tiers", [*map(slow, ("host", "disk")), "both"])
def test_four_times_the_arena(tmp_path, tiers: str, policy: str, lane: str) -> None:
    numel = 4 * FRAMES * FLOATS - 1000
    with small_pager(tmp_path, tiers, policy=policy, verify=True) as pager, LANES[lane](pager.core):
        tensor = blank(pager, numel)
        for seed in range(2):
            expected = values(numel, seed=seed)
            write(pager, tensor, expected)
            assert torch.equal(read(pager, tensor), expected)
        assert torch.equal(read(pager, tensor, pages_per_slab=1), expected)
        assert nothing_is_pinned(pager)
        stats = pager.stats()
    assert stats["gathers"] == 0
    assert pager.core.residency.peak_frames <= FRAMES
    assert pager.core.residency.largest_need <= FRAMES // 3
    assert stats["bytes_in"] >= 3 * (numel * 4 - FRAMES * PAGE_BYTES)


@pytest.mark.parametrize("policy", ["lru", "lp"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_anything_in_any_order(tmp_path, slow_channels, policy: str, seed: int) -> None:  # noqa: F811
    """Parts held for long, streams left midway, ops in between, slow transfers: the same bytes."""
    chance = random.Random(seed)
    counts = (30, 30, 4, 2, 3)  # pages: two tensors are larger than the arena
    with small_pager(tmp_path, "both", policy=policy, frames=14) as pager:
        paged = [blank(pager, count * FLOATS) for count in counts]
        dense = [values(count * FLOATS, seed=i) for i, count in enumerate(counts)]
        for tensor, source in zip(paged, dense):
            write(pager, tensor, source)
        held: list[tuple[Any, list[int]]] = []

        def walk_two() -> None:
            both = [chance.random() < 0.5, chance.random() < 0.5]
            limit = chance.choice((None, 1, 3, 5))
            last = chance.choice((4, 30)) * FLOATS
            for slab in slabs(pager.core, paged[:2], limit, write=both):
                span = slice(slab.start, slab.stop)
                for one, two, first, second in stretches(
                    [*slab.operands, dense[0][span], dense[1][span]]
                ):
                    assert torch.equal(one, first)
                    assert torch.equal(two, second)
                    for view, flag in ((one, both[0]), (two, both[1])):
                        if flag:
                            view += 1
                for source, flag in zip(dense, both):
                    if flag:
                        source[span] += 1
                if chance.random() < 0.3:
                    op()
                check_invariants(pager.core)
                if slab.stop >= last:
                    return

        def op() -> None:
            which = chance.randrange(2, 5)
            paged[which].add_(2)
            dense[which] += 2
            assert torch.equal(paged[which].to_dense(), dense[which])

        def hold() -> None:
            which = chance.randrange(5)
            numbers = sorted(chance.sample(range(counts[which]), chance.randint(1, 2)))
            block = page_set(pager.core, pages_of(paged[which], numbers, write=True))
            frames = block.__enter__()
            held.append((block, frames.tolist()))
            for number, frame in zip(numbers, frames.tolist()):
                span = slice(number * FLOATS, (number + 1) * FLOATS)
                page = pager.core.backend.arena[frame * PAGE_BYTES : (frame + 1) * PAGE_BYTES]
                assert torch.equal(page.view(torch.float32), dense[which][span])
                page.view(torch.float32).add_(3)
                dense[which][span] += 3

        def let_go() -> None:
            if held:
                held.pop(chance.randrange(len(held)))[0].__exit__(None, None, None)

        def compact() -> None:
            with pager.core.quiet():
                pager.core.residency.compact(set())

        for _ in range(25):
            if len(held) > 2:
                let_go()
            chance.choice((walk_two, op, hold, let_go, compact))()
            check_invariants(pager.core)
        while held:
            let_go()
        assert nothing_is_pinned(pager)
        assert pager.core.residency.peak_frames <= 14
        for tensor, source in zip(paged, dense):
            assert torch.equal(read(pager, tensor), source)


def test_other_tensors_stay_where_they_are(tmp_path) -> None:
    """A stream's own pages are the first to leave."""
    with small_pager(tmp_path) as pager:
        kept = pager.page(torch.ones(4 * FLOATS))
        tensor = blank(pager, 20 * FLOATS)
        for _ in range(2):
            write(pager, tensor, values(20 * FLOATS), pages_per_slab=2)
            assert torch.equal(read(pager, tensor, pages_per_slab=2), values(20 * FLOATS))
            assert kept.residency()["device"] == 4 * PAGE_BYTES
        assert pager.core.residency.peak_frames <= FRAMES


# -- read-ahead ----------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["lru", "lp"])
@pytest.mark.parametrize("tiers", ["host", "disk"])
def test_the_next_slab_is_read_ahead(tmp_path, tiers: str, policy: str) -> None:
    with small_pager(tmp_path, tiers, policy=policy) as pager:
        tensor, expected = blank(pager, 20 * FLOATS), values(20 * FLOATS)
        write(pager, tensor, expected)
        evict(pager, tensor)
        table, run = pager.core.table, tensor._storage.run
        before, faults = pager.core.residency.pages_ahead, pager.core.residency.faults
        wanted = [[pages_of(tensor, range(i, i + 2))] for i in range(0, 20, 2)]
        for number, (frames,) in enumerate(stream(pager.core, wanted)):
            first = run.first + 2 * number
            assert table.frame[first : first + 2].tolist() == frames.tolist()
            if number < 9:
                wait_until(lambda: bool((table.frame[first + 2 : first + 4] >= 0).all()))  # noqa: B023
            check_invariants(pager.core)
        assert pager.core.residency.pages_ahead - before == 18
        assert pager.core.residency.faults - faults == 1  # the first slab
        assert torch.equal(read(pager, tensor), expected)


def test_what_was_read_ahead_leaves_last(tmp_path) -> None:
    """An op in between takes the frames of others, though the stream's own pages are oldest."""
    with small_pager(tmp_path) as pager:
        tensor = blank(pager, 8 * FLOATS)
        write(pager, tensor, values(8 * FLOATS))
        evict(pager, tensor)
        kept = [pager.page(torch.full((FLOATS,), float(i))) for i in range(4)]
        walk = stream(pager.core, [[pages_of(tensor, [i, i + 1])] for i in range(0, 8, 2)])
        next(walk)
        wait_until(lambda: min(frames_of(tensor)[:4]) >= 0)
        with pager.page(torch.ones(2 * FLOATS)).pin() as view:
            assert (view == 1).all()
        assert min(frames_of(tensor)[:4]) >= 0
        assert [frames_of(other)[0] >= 0 for other in kept].count(False) == 2
        next(walk)
        assert pager.core.residency.pages_ahead == 2


def test_written_slabs_leave_beside_the_op(tmp_path) -> None:
    """So that the next ones can come: the op itself writes nothing back."""
    with small_pager(tmp_path) as pager:
        tensor = blank(pager, 20 * FLOATS)
        write(pager, tensor, torch.zeros(20 * FLOATS))
        evict(pager, tensor)
        faults = pager.core.residency.faults
        run = tensor._storage.run
        wanted = [[pages_of(tensor, range(i, i + 4), write=True)] for i in range(0, 20, 4)]
        for number, (frames,) in enumerate(stream(pager.core, wanted)):
            for frame in frames.tolist():
                pager.core.backend.arena[frame * PAGE_BYTES : (frame + 1) * PAGE_BYTES] = number + 1
            ahead = slice(run.first + 4 * number + 4, run.first + 4 * number + 8)
            if number < 4:
                wait_until(lambda: bool((pager.core.table.frame[ahead] >= 0).all()))  # noqa: B023
        assert pager.core.residency.faults - faults == 1
        pages = read(pager, tensor).view(torch.uint8).view(5, -1)
        assert (pages == torch.arange(1, 6)[:, None]).all()


def test_a_disk_that_fails_to_read(tmp_path, monkeypatch) -> None:
    """Nothing stays pinned; when the disk is well again all is there."""
    with small_pager(tmp_path, "disk", policy="lp") as pager:
        tensor, expected = blank(pager, 20 * FLOATS), values(20 * FLOATS)
        write(pager, tensor, expected)
        evict(pager, tensor)
        working = DiskTier._to_read

        def failing(self: DiskTier, *args: Any, **kwargs: Any) -> Any:
            raise tp.PagerError("the disk is ill")

        monkeypatch.setattr(DiskTier, "_to_read", failing)
        with pytest.raises(tp.PagerError, match="ill"), part(pager.core, tensor, 3, 2):
            pass
        assert nothing_is_pinned(pager)
        assert frames_of(tensor) == [-1] * 20
        monkeypatch.setattr(DiskTier, "_to_read", working)
        walk = stream(pager.core, [[pages_of(tensor, [i])] for i in range(20)])
        next(walk)
        monkeypatch.setattr(DiskTier, "_to_read", failing)
        with pytest.raises(tp.PagerError, match="ill"):
            list(walk)
        assert nothing_is_pinned(pager)
        monkeypatch.setattr(DiskTier, "_to_read", working)
        assert torch.equal(read(pager, tensor), expected)


def test_a_stream_that_is_left(tmp_path) -> None:
    for policy in ("lru", "lp"):
        with small_pager(tmp_path, policy=policy) as pager:
            tensor, expected = blank(pager, 20 * FLOATS), values(20 * FLOATS)
            write(pager, tensor, expected)
            for number, _ in enumerate(slabs(pager.core, [tensor], 2)):
                if number == 3:
                    break
            assert nothing_is_pinned(pager)
            with pytest.raises(ZeroDivisionError):
                [1 / 0 for _ in slabs(pager.core, [tensor], 2)]
            assert nothing_is_pinned(pager)
            assert not pager.core.residency.awaited
            outer = slabs(pager.core, [tensor], 2)  # several at once, ended in any order
            inner = slabs(pager.core, [tensor], 1)
            for walk in (outer, inner, inner, outer):
                assert next(walk).start >= 0
                check_invariants(pager.core)
            outer.close()  # type: ignore[attr-defined]
            assert torch.equal(read(pager, tensor), expected)
            inner.close()  # type: ignore[attr-defined]
            assert nothing_is_pinned(pager)


@pytest.mark.parametrize("policy", ["lru", "lp"])
def test_a_pager_closed_amid_a_stream(tmp_path, slow_channels, policy: str) -> None:  # noqa: F811
    with small_pager(tmp_path, policy=policy) as pager:
        tensor = blank(pager, 20 * FLOATS)
        write(pager, tensor, values(20 * FLOATS))
        walk = slabs(pager.core, [tensor], 2)
        next(walk)
        pager.close()  # while the next slab is on its way
        with pytest.raises(tp.PagerError, match="closed"):
            next(walk)
        with pytest.raises(tp.PagerError, match="closed"), part(pager.core, tensor, 0, 1):
            pass


def test_a_metered_iteration_takes_no_more_than_it_must(tmp_path) -> None:
    """The first iteration finds out the smallest budget: slabs of one page, nothing ahead."""
    with make_pager(host_budget="8MiB", frames=FRAMES) as pager:
        tensor = blank(pager, 40 * FLOATS)
        for _ in range(2):
            with pager.iteration():
                write(pager, tensor, values(40 * FLOATS))
                assert torch.equal(read(pager, tensor), values(40 * FLOATS))
            if pager.core.iterations == 1:
                assert pager.core.residency.largest_need == 1
                assert pager.core.residency.pages_ahead == 0
        assert pager.core.residency.pool.count == FRAMES
        assert pager.core.residency.peak_frames <= FRAMES
        stats = pager.stats()
        assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]


def virtual(tensor: tp.PagedTensor, *numbers: int) -> Any:
    return np.array(numbers) + tensor._storage.run.first


def test_pages_on_their_way_out(tmp_path, gate: Gate) -> None:  # noqa: F811
    """They are not there for parts, nor their run for ops, even if the rest of it arrives."""
    with small_pager(tmp_path) as pager:
        tensor, run = (paged := pager.page(values(4 * FLOATS))), paged._storage.run
        with pager.core.quiet():
            pager.core.residency.evict_pages(virtual(tensor, 3))
        with reading_ahead(pager.core) as ahead:
            with pager.core.lock:
                ahead._send_away(virtual(tensor, 0))
            assert frames_of(tensor) == [-1, 1, 2, -1]
            ahead.ask([Part(run, virtual(tensor, 2, 3))])
            assert run.base == -1
            residency = pager.core.residency
            assert [residency.has([Part(run, virtual(tensor, i))]) for i in range(4)] == [
                False, True, True, False,
            ]  # fmt: skip
            gate.open_soon()
            with part(pager.core, tensor, 0, 2, write=True) as frames:
                check_invariants(pager.core)
                pager.core.backend.arena[frames[0] * PAGE_BYTES : (frames[0] + 1) * PAGE_BYTES] = 0
            assert pager.core.mover.error is None
        expected = values(4 * FLOATS)
        expected[:FLOATS] = 0
        assert torch.equal(tensor.to_dense(), expected)


def test_pages_on_their_way_in(tmp_path, gate: Gate) -> None:  # noqa: F811
    """Nobody brings them a second time."""
    with small_pager(tmp_path) as pager:
        tensor, run = (paged := pager.page(values(4 * FLOATS))), paged._storage.run
        evict(pager, tensor)
        before = pager.core.mover.bytes_in
        with reading_ahead(pager.core) as ahead, reading_ahead(pager.core) as other:
            ahead.ask([Part(run, virtual(tensor, 1, 2))])
            other.ask([Part(run, virtual(tensor, 1, 2, 3))])
            gate.open_soon()
            assert torch.equal(tensor.to_dense(), values(4 * FLOATS))
            assert pager.core.mover.bytes_in - before == 4 * PAGE_BYTES
            assert pager.core.mover.error is None
            check_invariants(pager.core)


def test_moves_of_pages_that_a_part_holds(tmp_path) -> None:
    """An out leaves them where they are; an in that would make them move is not done."""
    with small_pager(tmp_path, policy="lp") as pager:
        assert pager.core.follower is not None
        tensor, planned = pager.page(values(4 * FLOATS)), pager.core.follower.planned
        evict(pager, tensor)
        with page_set(pager.core, pages_of(tensor, [1, 3], write=True)) as frames:
            assert frames.tolist() == [0, 1]
            key = named(pager, {"A": tensor})["A"]
            with pager.core.lock:
                for what in ("out", "in"):
                    planned.issue([Action(what, "host", key, 0, 4, ANYWHERE)], {})
                assert not planned.waiting
            assert frames_of(tensor) == [-1, 0, -1, 1]
            check_invariants(pager.core)


# -- part pins -----------------------------------------------------------------------------------
def evict(pager: tp.Pager, tensor: tp.PagedTensor) -> None:
    with pager.core.quiet():
        pager.core.residency.evict_run(tensor._storage.run)


@pytest.mark.parametrize("lane", list(LANES))
def test_a_part_holds_while_others_come_and_go(tmp_path, lane: str) -> None:
    with small_pager(tmp_path, frames=12) as pager:
        tensor, expected = blank(pager, 20 * FLOATS), values(20 * FLOATS)
        write(pager, tensor, expected)
        others = [pager.page(torch.full((4 * FLOATS,), float(i))) for i in range(5)]
        with LANES[lane](pager.core), part(pager.core, tensor, 7, 3) as frames:
            for _ in range(2):
                for number, other in enumerate(others):
                    assert (other + other == 2 * number).all()
                    check_invariants(pager.core)
                    assert frames_of(tensor)[7:10] == frames.tolist()
            pager.core.residency.compact(set())
            check_invariants(pager.core)
            held = operand(tensor[7 * FLOATS : 10 * FLOATS])
            assert isinstance(held, Paged)
            for view, dense in stretches([held, expected[7 * FLOATS : 10 * FLOATS]]):
                assert torch.equal(view, dense)
            if lane == "chaos":
                assert sum(frame >= 0 for frame in frames_of(tensor)) == 3
        assert nothing_is_pinned(pager)
        assert torch.equal(read(pager, tensor), expected)


def test_chaos_poisons_the_rest_of_the_run(tmp_path) -> None:
    with small_pager(tmp_path) as pager:
        tensor = blank(pager, 6 * FLOATS)
        write(pager, tensor, torch.ones(6 * FLOATS))
        with part(pager.core, tensor, 0, 6) as frames:
            where = frames.tolist()
        small = pager.page(torch.ones(4))
        with chaos(pager.core), part(pager.core, tensor, 2, 1):
            small + 1
            arena = pager.core.backend.arena.view(torch.float32).view(-1, FLOATS)
            for page, frame in enumerate(where):
                kept = page == 2
                assert frames_of(tensor)[page] == (frame if kept else -1)
                assert torch.isnan(arena[frame]).all() != kept


@pytest.mark.parametrize("lane", list(LANES))
def test_an_op_on_the_whole_while_a_part_is_pinned(tmp_path, lane: str) -> None:
    with small_pager(tmp_path) as pager, LANES[lane](pager.core):
        tensor, expected = pager.page(values(5 * FLOATS)), values(5 * FLOATS)
        evict(pager, tensor)
        with part(pager.core, tensor, 1, 1), part(pager.core, tensor, 3, 1) as outer:
            with part(pager.core, tensor, 2, 2, write=True) as frames:
                assert frames[1] == outer[0]
                with tensor.pin() as view:
                    view.mul_(2)
                assert frames_of(tensor)[2:4] == frames.tolist()
                check_invariants(pager.core)
                for view, dense in stretches(
                    [
                        operand(tensor[2 * FLOATS : 4 * FLOATS]),
                        2 * expected[2 * FLOATS :][: 2 * FLOATS],
                    ]
                ):
                    assert torch.equal(view, dense)
            assert frames_of(tensor)[3] == outer[0]
        assert torch.equal(tensor.to_dense(), 2 * expected)
        assert nothing_is_pinned(pager)


@pytest.mark.parametrize("lane", list(LANES))
def test_sets_of_pages(tmp_path, lane: str) -> None:
    """What an embedding looks up: only the pages that hold the rows come in."""
    with small_pager(tmp_path, "disk") as pager:
        tensor, expected = blank(pager, 80 * FLOATS), values(80 * FLOATS)
        write(pager, tensor, expected)
        evict(pager, tensor)
        with LANES[lane](pager.core):
            moved = pager.stats()["bytes_in"]
            numbers = np.array([0, 17, 18, 40, 79])
            with page_set(pager.core, pages_of(tensor, numbers)) as frames:
                check_invariants(pager.core)
                assert pager.stats()["bytes_in"] - moved == 5 * PAGE_BYTES
                assert np.flatnonzero(np.array(frames_of(tensor)) >= 0).tolist() == numbers.tolist()
                for number, frame in zip(numbers.tolist(), frames.tolist()):
                    page = pager.core.backend.arena[frame * PAGE_BYTES : (frame + 1) * PAGE_BYTES]
                    wanted = expected[number * FLOATS : (number + 1) * FLOATS]
                    assert torch.equal(page.view(torch.float32), wanted)
            with page_set(pager.core, pages_of(tensor, [])) as frames:
                assert len(frames) == 0
        assert nothing_is_pinned(pager)


def test_a_write_to_a_part_voids_its_copies(tmp_path) -> None:
    """Those of its pages and no others; what comes back is what was written."""
    with small_pager(tmp_path, "both") as pager:
        tensor, expected = pager.page(values(6 * FLOATS)), values(6 * FLOATS)
        run, table = tensor._storage.run, pager.core.table
        evict(pager, tensor)
        with part(pager.core, tensor, 0, 6):
            pass
        with part(pager.core, tensor, 2, 2, write=True) as frames:
            copies = (table.host >= 0) | (table.disk >= 0)
            assert copies[run.first : run.first + 6].tolist() == [
                True,
                True,
                False,
                False,
                True,
                True,
            ]
            assert not run.settled
            for frame in frames.tolist():
                pager.core.backend.arena[frame * PAGE_BYTES : (frame + 1) * PAGE_BYTES] = 7
            check_invariants(pager.core)
        expected.view(torch.uint8)[2 * PAGE_BYTES : 4 * PAGE_BYTES] = 7
        out = pager.stats()["bytes_out"]
        evict(pager, tensor)
        assert pager.stats()["bytes_out"] - out == 2 * PAGE_BYTES
        assert torch.equal(tensor.to_dense(), expected)


def test_what_does_not_fit_is_refused(tmp_path) -> None:
    with small_pager(tmp_path) as pager:
        tensor = blank(pager, 40 * FLOATS)
        for page in range(40):
            with part(pager.core, tensor, page, 1):
                pass
        with (
            pytest.raises(tp.InfeasibleBudget, match="9 pages") as refusal,
            part(pager.core, tensor, 0, FRAMES + 1),
        ):
            pass
        assert refusal.value.minimum >= (FRAMES + 1) * PAGE_BYTES
        assert nothing_is_pinned(pager)
        with part(pager.core, tensor, 0, FRAMES - 2):
            other = blank(pager, 3 * FLOATS)
            with pytest.raises(tp.InfeasibleBudget, match="9 pages"):
                pager.core.take([other._storage.run])
            with (
                pytest.raises(tp.InfeasibleBudget, match="9 pages"),
                part(pager.core, tensor, 20, 3),
            ):
                pass
            assert pager.core.residency.pinned_pages() == FRAMES - 2
            with part(pager.core, tensor, 2, FRAMES - 2):  # pages held twice count once
                check_invariants(pager.core)
        assert nothing_is_pinned(pager)
        for first, count in ((-1, 2), (39, 2)):
            with pytest.raises(ValueError, match="page"), part(pager.core, tensor, first, count):
                pass
        with pytest.raises(ValueError, match="in order"):
            pages_of(tensor, [3, 3])


def test_full_tiers_leave_everything_where_it_was(tmp_path) -> None:
    with small_pager(tmp_path, host_budget=4 * PAGE_BYTES) as pager:
        tensor = blank(pager, 20 * FLOATS)
        walk = stream(pager.core, [[pages_of(tensor, [i], write=True)] for i in range(20)])
        filled = []

        def fill() -> None:
            for number, (frames,) in enumerate(walk):
                start = int(frames[0]) * PAGE_BYTES
                pager.core.backend.arena[start : start + PAGE_BYTES] = number
                filled.append(number)

        with pytest.raises(tp.TierFull):
            fill()
        assert nothing_is_pinned(pager)
        assert len(filled) == FRAMES + 4
        pager.grow(host_budget=8 * PAGE_BYTES)
        for page in filled:
            with part(pager.core, tensor, page, 1) as frames:
                start = int(frames[0]) * PAGE_BYTES
                assert (pager.core.backend.arena[start : start + PAGE_BYTES] == page).all()


def test_compaction_goes_around_a_part(tmp_path) -> None:
    with small_pager(tmp_path) as pager:
        first, tensor = pager.page(torch.zeros(2 * FLOATS)), pager.page(values(6 * FLOATS))
        assert frames_of(tensor) == [2, 3, 4, 5, 6, 7]
        evict(pager, first)
        with part(pager.core, tensor, 2, 1):
            pager.core.residency.compact(set())
            assert frames_of(tensor) == [0, 1, 4, 5, 6, 7]
            check_invariants(pager.core)
        assert torch.equal(tensor.to_dense(), values(6 * FLOATS))


def test_the_border_stops_at_a_part(tmp_path) -> None:
    with small_pager(tmp_path) as pager:
        tensor = pager.page(values(6 * FLOATS))
        with part(pager.core, tensor, 5, 1) as frames:
            last = int(frames[0])
            pager.core.residency.resize(2)
            assert pager.core.residency.pool.count == last + 1
            assert frames_of(tensor)[5] == last
            check_invariants(pager.core)
        pager.core.residency.resize(FRAMES)
        assert torch.equal(tensor.to_dense(), values(6 * FLOATS))


# -- tensors in step -----------------------------------------------------------------------------
@pytest.mark.parametrize("pages_per_slab", [1, 3, 6, None])
@pytest.mark.parametrize("lane", list(LANES))
def test_dtypes_walk_in_step(tmp_path, lane: str, pages_per_slab: int | None) -> None:
    numel = 11 * FLOATS + 77
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.int8)
    with small_pager(tmp_path, frames=20) as pager, LANES[lane](pager.core):
        expected = [values(numel, dtype, seed) for seed, dtype in enumerate(dtypes)]
        paged = [blank(pager, numel, dtype) for dtype in dtypes]
        for tensor, dense in zip(paged, expected):
            write(pager, tensor, dense)
        beside = torch.zeros(numel)
        position = 0
        walked = [*paged, beside]
        flags = [True, False, False, False, False]
        for slab in slabs(pager.core, walked, pages_per_slab, write=flags):
            assert slab.start == position
            position = slab.stop
            for one, two, three, four, out in stretches(slab.operands):
                one += two
                out.copy_(three + four)
            check_invariants(pager.core)
        assert position == numel
        assert torch.equal(beside, expected[2] + expected[3])
        assert torch.equal(read(pager, paged[0]), expected[0] + expected[1])
        assert nothing_is_pinned(pager)


def test_small_tensors_and_views(tmp_path) -> None:
    with small_pager(tmp_path) as pager:
        whole, shared = pager.page(values(4 * FLOATS)), pager.page(values(100, torch.float64, 1))
        half = pager.page(values(100, torch.bfloat16, 2))
        for walked in ([shared, half], [half, shared]):
            (slab,) = slabs(pager.core, walked)
            assert (slab.start, slab.stop) == (0, 100)
        for slab in slabs(pager.core, [shared, half]):
            ((one, two),) = stretches(slab.operands)
            assert torch.equal(one, values(100, torch.float64, 1))
            assert torch.equal(two, values(100, torch.bfloat16, 2))
        assert list(slabs(pager.core, [whole[:0]])) == []
        with pytest.raises(ValueError, match="page border"):
            slabs(pager.core, [whole[1 : FLOATS + 2]])
        with pytest.raises(ValueError, match="without gaps"):
            slabs(pager.core, [whole[::2]])
        with pytest.raises(ValueError, match="elements"):
            slabs(pager.core, [whole, shared])
        last = whole[3 * FLOATS :]
        for slab in slabs(pager.core, [last]):
            for view, dense in stretches([slab.operands[0], values(4 * FLOATS)[3 * FLOATS :]]):
                assert torch.equal(view, dense)


# -- beside plans --------------------------------------------------------------------------------
def streamed_training(world: World) -> object:
    """A model trains; in each iteration a tensor of twice the arena is updated by its loss."""
    pager = world.pager
    model = world.module(mlp(depth=6))
    optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    numel = 80 * FLOATS
    table: Any = torch.zeros(numel) if pager is None else blank(pager, numel)
    if pager is not None:
        write(pager, table, torch.zeros(numel))

    def iteration() -> float:
        with world.iteration():
            loss = loss_of(model)
            factor = float(loss.detach())
            if pager is None:
                table.add_(factor)
            else:
                for slab in slabs(pager.core, [table], write=[True]):
                    for (view,) in stretches(slab.operands):
                        view += factor
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return factor

    losses = [iteration() for _ in range(5)]
    with nullcontext() if pager is None else part(pager.core, table, 3, 4):
        losses.append(iteration())  # the arena cannot be brought into the state of its plan
    losses.append(iteration())
    return losses, model, optimizer, table if pager is None else read(pager, table)


@pytest.mark.parametrize("lane", ["plain", slow("chaos")])
def test_planned_training_around_a_stream(one_thread, tmp_path, lane: str) -> None:
    tiers = {"host_budget": "2MiB", "disk_budget": "32MiB", "disk_path": tmp_path}
    with planned_pager(verify=True, **tiers) as pager, ExitStack() as stack:
        stack.enter_context(LANES[lane](pager.core))
        stats = compare_planned(streamed_training, pager)
        assert nothing_is_pinned(pager)
    assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]
    for tier in ("host", "disk"):
        assert stats["peak_bytes"][tier] <= stats["budget_bytes"][tier]
