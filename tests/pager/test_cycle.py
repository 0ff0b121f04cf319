"""``pager.inference()``: what stays on the device in passes that only read, and what moves."""

from __future__ import annotations

import gc
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensorpager as tp
from tensorpager.pager.debug.chaos import chaos
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.memory.space import Extent
from tensorpager.pager.plan.cycle import _choose

from .models import PAGE_BYTES, assert_same, loss_of, mlp, plain

WIDTH, DEPTH = 256, 12  # each matrix takes 4 pages


def model_of() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(
        *(m for _ in range(DEPTH) for m in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()))
    )


def half(**more: Any) -> dict[str, Any]:
    """Half of the weights, and 1 MiB of dense memory."""
    return {
        "device_budget": DEPTH * 4 * PAGE_BYTES // 2 + (1 << 20),
        "host_budget": "16MiB",
        "page_size": PAGE_BYTES,
        "device": "cpu",
    } | more


def passes(model: nn.Module, count: int, rows: int = 5) -> list[torch.Tensor]:
    """Of inputs of another size each."""
    torch.manual_seed(8)
    with torch.no_grad():
        return [model(torch.randn(rows + i, WIDTH)) for i in range(count)]


@pytest.mark.parametrize("disk", [False, True])
def test_what_stays_is_not_moved_again(disk: bool, tmp_path: Path, one_thread: None) -> None:
    expected = passes(model_of(), 12)
    limits = half()
    if disk:
        limits |= {"host_budget": 0, "disk_budget": "16MiB", "disk_path": tmp_path}
    with tp.Pager(**limits) as pager:
        model = pager.page_module(model_of())
        with pager.inference():
            assert_same(passes(model, 3), expected[:3])
            before = pager.stats()
            assert_same(passes(model, 12), expected)
            check_invariants(pager.core)
        after = pager.stats()
        weights = DEPTH * 4 * PAGE_BYTES
        moved = (after["bytes_in"] - before["bytes_in"]) / 12
        assert 0 < moved <= 0.7 * weights  # half, and two matrices that pass through
        assert after["faults"] - before["faults"] <= 2
        written = [
            s["channel_bytes"]["host-out"] + s["disk_bytes_written"] for s in (before, after)
        ]
        assert written[0] == written[1] <= weights
        assert after["peak_bytes"]["device"] <= pager.core.budget_bytes["device"]
        with pager.inference():  # what it knows it knows the next time
            assert_same(passes(model, 12), expected)
        assert (pager.stats()["bytes_in"] - after["bytes_in"]) / 12 <= 0.8 * weights


def moved(pager: tp.Pager, before: dict[str, Any], passes: int) -> float:
    """Bytes brought in by each of so many passes since ``before``."""
    return float(pager.stats()["bytes_in"] - before["bytes_in"]) / passes


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_passes_without_gradients_outside_of_it_do_the_same(off: Any, one_thread: None) -> None:
    expected = passes(model_of(), 12)
    weights = DEPTH * 4 * PAGE_BYTES
    with tp.Pager(**half()) as pager:
        core, model = pager.core, pager.page_module(model_of())
        with off():
            assert_same(passes(model, 3), expected[:3])
            before = pager.stats()
            assert_same(passes(model, 12), expected)
        check_invariants(core)
        stays = core.residency.frames * PAGE_BYTES
        assert 0 < moved(pager, before, 12) <= weights - stays + 3 * 4 * PAGE_BYTES
        assert pager.stats()["faults"] - before["faults"] <= 2
        assert pager.stats()["channel_bytes"]["host-out"] <= weights
        assert before["channel_bytes"]["host-out"] == pager.stats()["channel_bytes"]["host-out"]
        assert not core.inferring
        assert core.watch is None
        ours = torch.ones(8 << 20)  # between two passes, no matter of the budget
        with off():
            kept = []
            for _ in range(8):  # a cache: what passes have made counts for as long as it lives
                kept.append(passes(model, 1))
                with pytest.raises(tp.InfeasibleBudget, match="Raise device_budget"):
                    model(torch.ones(4 << 10, WIDTH))
                assert not core.inferring
        del ours
        before = pager.stats()
        for _ in range(3):  # with gradients, it is none
            model(torch.ones(1, WIDTH)).sum().backward()
        assert not core.residency.awaited
        assert moved(pager, before, 3) > weights


def test_a_model_that_is_gone_between_passes(one_thread: None) -> None:
    """Of what it has left nothing is let go that has its pages by now."""
    expected = passes(model_of(), 4)
    with tp.Pager(**half()) as pager:
        core, model = pager.core, pager.page_module(model_of())
        with pager.inference():
            assert_same(passes(model, 3), expected[:3])
            gone = {parameter._storage.run for parameter in model.parameters()}
            core.cycle._spent = dict.fromkeys(gone)  # as where what passes through is small
            del model
            gc.collect()
            kept = [pager.page(torch.full((WIDTH, WIDTH), float(i))) for i in range(DEPTH)]
            assert not gone.intersection(core.space.runs.values())
            small = pager.page_module(nn.Linear(WIDTH, WIDTH, bias=False))
            before = core.mover.bytes_out
            with torch.no_grad():
                small(torch.ones(1, WIDTH))
                kept[-1].sum()
            assert core.mover.bytes_out - before < 12 * PAGE_BYTES, "more than makes way"
        for i, one in enumerate(kept):
            assert torch.equal(one.to_dense(), torch.full((WIDTH, WIDTH), float(i)))
        check_invariants(core)


def test_a_pass_that_an_interrupt_ends(one_thread: None) -> None:
    """Of it no hook is told: nothing of it is left when another begins."""

    def interrupt(module: nn.Module, args: Any) -> None:
        raise KeyboardInterrupt

    expected = passes(model_of(), 2)
    with tp.Pager(**half()) as pager:
        core, model = pager.core, pager.page_module(model_of())
        other = pager.page_module(nn.Linear(WIDTH, WIDTH))
        for again in (lambda: passes(model, 2), lambda: [other(torch.ones(1, WIDTH))]):
            handle = model[3].register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                passes(model, 1)
            handle.remove()
            assert core.inferring
            with torch.no_grad():
                found = again()
            assert not core.inferring
            if len(found) == 2:
                assert_same(found, expected)
        handle = model[3].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            passes(model, 1)
        handle.remove()
        with pager.iteration():
            assert not core.inferring
            model(torch.ones(1, WIDTH)).sum().backward()
        check_invariants(core)


def test_passes_of_several_threads(one_thread: None) -> None:
    """Whose dense memory goes beyond the budget could not be told: none is held to it."""
    expected = passes(model_of(), 1)
    with tp.Pager(**half()) as pager:
        model = pager.page_module(model_of())
        inside, found = threading.Event(), []

        def beside(module: nn.Module, args: Any) -> None:
            handle.remove()
            thread = threading.Thread(target=lambda: found.append(passes_of_another()))
            thread.start()
            assert inside.wait(60)
            thread.join()

        def passes_of_another() -> list[torch.Tensor]:
            torch.set_num_threads(1)
            with torch.no_grad():
                inside.set()
                found = [model(torch.ones(5, WIDTH))]
                assert not pager.core.inferring
                torch.ones(8 << 20)
                return found

        handle = model[3].register_forward_pre_hook(beside)
        assert_same(passes(model, 1), expected)
        assert not pager.core.inferring
        assert len(found) == 1
        with torch.no_grad():
            assert_same([model(torch.ones(5, WIDTH))], found[0])


def test_under_chaos(one_thread: None) -> None:
    expected = passes(model_of(), 4)
    with tp.Pager(**half()) as pager, chaos(pager.core):
        model = pager.page_module(model_of())
        with pager.inference():
            assert_same(passes(model, 4), expected)


def test_dense_memory_takes_from_the_arena_what_it_asks_for(one_thread: None) -> None:
    """As a cache does that grows from pass to pass."""
    with tp.Pager(**half()) as pager:
        model = pager.page_module(model_of())
        with pager.inference():
            passes(model, 3)
            frames, cache = pager.core.residency.frames, []
            for _ in range(8):
                cache.append(torch.ones(150 << 10, dtype=torch.uint8))
                passes(model, 1)
            fewer = pager.core.residency.frames
            assert fewer < frames
        with pytest.raises(tp.InfeasibleBudget, match="Raise device_budget"), pager.inference():
            torch.ones(3 << 20, dtype=torch.uint8)  # of 2.5 in all
        with pager.inference():
            passes(model, 1)
        assert pager.stats()["peak_bytes"]["device"] <= pager.core.budget_bytes["device"]


def test_a_refusal_names_more_than_there_is(one_thread: None) -> None:
    """It named the pages of one op, also where dense tensors had the rest of the budget."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    budget = 16 * PAGE_BYTES
    with tp.Pager(budget, "4MiB", page_size=PAGE_BYTES, device="cpu") as pager:
        pager.page_module(layer)
        rows = budget // (4 * WIDTH) - 8
        with pytest.raises(tp.InfeasibleBudget) as refusal, pager.inference():
            layer(torch.ones(rows, WIDTH)[:1])
        assert refusal.value.minimum > budget


@pytest.mark.parametrize("policy", ["lp", "lru"])
@pytest.mark.parametrize("inside", [True, False])
def test_between_steps(policy: str, inside: bool, one_thread: None) -> None:
    """A training that reads in between is the same training, before its first step too."""
    ends = []
    for paged in (False, True):
        torch.manual_seed(3)
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        limits = half(device_budget="3MiB", policy=policy)
        pager = tp.Pager(**limits) if paged else None
        if pager is not None:
            pager.page_module(model)
            pager.optimizer(optimizer)
        found = []
        for _ in range(4):
            if pager is None:
                with torch.no_grad():
                    found.append(plain(loss_of(model)))
                loss_of(model).backward()
                optimizer.step()
            else:
                with pager.inference() if inside else torch.no_grad():
                    found.append(plain(loss_of(model)))
                with pager.iteration():
                    loss_of(model).backward()
                    optimizer.step()
            optimizer.zero_grad()
        ends.append([found, plain(model.state_dict())])
        if pager is not None:
            stats = pager.stats()
            assert stats["faults"] > 0
            assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]
            pager.close()
    assert_same(ends[1], ends[0])


def test_a_weight_used_twice_and_an_order_that_changes(one_thread: None) -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH) / 16)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

        def forward(self, x: torch.Tensor, which: list[int]) -> torch.Tensor:
            x = F.linear(x, self.shared)
            for i in which:
                x = torch.tanh(self.experts[i](x))
            return F.linear(x, self.shared)

    order = [[(7 * i + j) % DEPTH for j in range(5 + i % 3)] for i in range(12)]
    found = []
    for paged in (False, True):
        torch.manual_seed(6)
        model, x = Routed(), torch.randn(3, WIDTH)
        pager = tp.Pager(**half()) if paged else None
        if pager is None:
            with torch.no_grad():
                found.append([model(x, which) for which in order])
        else:
            pager.page_module(model)
            with pager.inference():
                found.append([model(x, which) for which in order])
                check_invariants(pager.core)
            pager.close()
    assert_same(*found)


def test_begin_and_end() -> None:
    with tp.Pager(**half()) as pager:
        model = pager.page_module(model_of())
        inference = pager.inference().begin()
        with pytest.raises(tp.PagerError, match="already running"):
            pager.inference().begin()
        with pytest.raises(tp.PagerError, match="already running"):
            pager.begin()
        assert not model(torch.ones(1, WIDTH)).requires_grad
        inference.end()
        assert torch.is_grad_enabled()
        assert pager.core.watch is None
        assert not pager.core.residency.awaited
        with pytest.raises(tp.PagerError, match="begin"):
            pager.end()
        pager.begin()
        with pytest.raises(tp.PagerError, match="already running"):
            pager.begin()
        pager.end()
        pager.begin()
        pager.end(ValueError("broke off"))
        assert "broke off" in pager.explain()


def runs_of(counts: list[int]) -> list[Extent]:
    return [Extent(i, 100 * i, count, "parameter") for i, count in enumerate(counts)]


def test_what_is_chosen_to_stay() -> None:
    alike = runs_of([4] * 12)
    assert _choose(alike, 48, ()) == alike
    staying = _choose(alike, 32, ())
    assert len(staying) == 6  # beside two that pass through
    places = sorted(run.id for run in staying)
    assert max(b - a for a, b in itertools.pairwise(places)) <= 3, "not spread over the pass"
    assert set(_choose(alike, 24, staying)) < set(staying)
    table = runs_of([20, *[2] * 10])
    assert table[0] in _choose(table, 30, ())  # else two of it would take all frames
    assert _choose(table, 10, ())  # it does not fit, and others do
    assert not _choose(runs_of([4, 4, 4]), 7, ())
    ends = runs_of([8, *[3, 1, 1] * 8, 8])
    assert {ends[0], ends[-1]} <= set(_choose(ends, 40, ()))  # else 16 frames are for two of them
    assert len({ends[0], ends[-1]} & set(_choose(ends, 40, (), 7))) < 2
