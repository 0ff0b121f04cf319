"""What one rank does of what all have said: ``test_distributed.py`` has the ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import tensorpager as tp
from tensorpager.pager.distributed import agreement as module
from tensorpager.pager.distributed.agreement import Agreement, note_meeting, plan_together
from tensorpager.pager.plan.access_log import AccessLog
from tensorpager.pager.plan.signatures import StepSignature

from .models import make_pager


@pytest.fixture
def follower(monkeypatch: pytest.MonkeyPatch) -> Any:
    with make_pager(policy="lp") as pager:
        yield pager.core.follower


def agreed(pager: Any, answers: dict[str, bool]) -> tuple[Agreement, list[tuple[bool, ...]]]:
    """An agreement whose other ranks always give ``answers``; what this one says."""
    names = (
        "nobody_waits",
        "nobody_left",
        "nobody_ready",
        "nobody_plans",
        "nobody_due",
        "measured",
        "fewest",
        "most",
    )
    plan_together(pager, (0, 1), None)
    agreement, said = module._known[pager], []

    def exchange(*mine: bool) -> list[bool]:
        said.append(mine[:6])
        return [own and answers.get(name, True) for name, own in zip(names, mine)]

    agreement._least = exchange  # type: ignore[method-assign]
    return agreement, said


def ended(agreement: Agreement, times: int = 1) -> None:
    for _ in range(times):
        agreement.met = True
        agreement._ended()


def test_a_rank_that_is_late_is_given_a_quick_plan(follower: Any) -> None:
    agreement, _ = agreed(follower._pager, {"nobody_ready": False})
    asked: list[Any] = []
    follower.plan_quickly = asked.append
    ended(agreement, module.LATE - 1)
    assert not asked
    ended(agreement)
    assert len(asked) == 1
    ended(agreement, module.LATE)
    assert len(asked) == 2
    assert not agreement.may_follow


def test_a_full_plan_that_others_wait_for_is_given_up_for_a_quick_one(follower: Any) -> None:
    made: list[tuple[Any, bool]] = []
    follower._plan = lambda kind, *, quick: made.append((kind, quick))
    kind: Any = SimpleNamespace(compiled=None, refused=None, keys=[(1,)], process=None, plans=2)
    kind.cancel = lambda: setattr(kind, "process", None)
    kind.process = object()
    follower.plan_quickly(kind)
    assert kind.process is None
    assert made == [(kind, True)]
    kind.process, kind.plans = object(), 1  # a quick one already
    follower.plan_quickly(kind)
    assert len(made) == 1


def test_who_has_nothing_to_wait_for_holds_nobody_up(follower: Any) -> None:
    kind: Any = SimpleNamespace(compiled=None, left=False, refused=None, turned_down=None, plans=0)
    kind.process = None
    assert module._stand_of(follower, kind) == module._stand_of(follower, None) == "waits"
    kind.turned_down = "as good on demand"
    assert module._stand_of(follower, kind) == module._stand_of(None, None) == "none"
    kind.compiled = object()
    assert module._stand_of(follower, kind) == "ready"
    kind.compiled, kind.left = None, True
    assert module._stand_of(follower, kind) == "left"


def test_an_iteration_in_which_no_other_rank_was_met_ends_without_an_exchange(
    follower: Any,
) -> None:
    pager = follower._pager
    agreement, said = agreed(pager, {})
    note_meeting(pager)  # outside of an iteration
    agreement._ended()
    assert not said
    with pager.face.iteration():
        pass
    assert not said
    with pager.face.iteration():
        note_meeting(pager)
    assert len(said) == 1


def test_ranks_that_change_plan_each_for_itself(follower: Any) -> None:
    pager = follower._pager
    agreement, said = agreed(pager, {})
    assert follower.others is agreement
    plan_together(pager, (0, 1), None)
    assert follower.others is agreement
    plan_together(pager, (0, 2), None)
    assert follower.others is None
    ended(agreement)
    assert not said


def test_a_collective_takes_what_it_takes_the_last_rank_to_come(follower: Any) -> None:
    log = AccessLog()
    log.keys, log.collectives = [(1,), (), (2,)], {1: "gather"}
    log.began, log.times, log.ended = 0.0, [0.0, 1.0, 6.0], 8.0
    kind = follower.learned = StepSignature(1, log)
    assert kind.seconds() == [1.0, 5.0, 2.0]
    agreement, _ = agreed(follower._pager, {})
    agreement._least = lambda *mine: [0.5] if mine == (5.0,) else list(mine)  # type: ignore[method-assign]
    ended(agreement)
    assert kind.seconds() == [1.0, 0.5, 2.0]


def test_one_rank_alone_agrees_with_nobody() -> None:
    with tp.Pager("16MiB", device="cpu", page_size="64KiB") as pager:
        plan_together(pager.core, (0,), None)
        assert pager.core.follower is not None
        assert pager.core.follower.others is None
