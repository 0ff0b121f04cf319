"""What one rank does of what all have said: ``test_distributed.py`` has the ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import tensorpager as tp
from tensorpager.pager.distributed import agreement as module
from tensorpager.pager.distributed.agreement import Agreement, note_meeting, plan_together
from tensorpager.pager.errors import PagerError
from tensorpager.pager.plan.access_log import AccessLog
from tensorpager.pager.plan.planning import PlanningProcess, PlanRefused, Question, _Run
from tensorpager.pager.plan.signatures import StepSignature
from tensorpager.planner.hardware import Hardware
from tensorpager.planner.trace import make_trace

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


class Kind:
    """Of iterations, that is to be planned."""

    compiled = refused = turned_down = recorded = process = None
    left, cancelled = False, 0

    def __init__(self) -> None:
        tensors = [(n, 3 * 65536, True) for n in range(4)]
        ops = [(f"op.{n}", 100.0, [n], [n]) for n in range(4)]
        self.recorded = SimpleNamespace(
            trace=make_trace(tensors, ops, page_size=65536), position=[0, 1, 2, 3]
        )

    def met_seconds(self) -> list[float]:
        return []

    def cancel(self) -> None:
        self.process, self.cancelled = None, self.cancelled + 1


def due(follower: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """The latest kind of iterations, for which a plan is to be made, and what is asked for one."""
    kind, asked = Kind(), list[Any]()
    machine = Hardware(8 << 20, 64 << 20, 0, 2e9, 3e9, page_size=65536)

    def ask(kind: Any, question: Any) -> PlanningProcess:
        process = object.__new__(PlanningProcess)
        process._run = _Run(said=b'{"error": "none"}')
        process._run.answer.set_exception(PagerError("none"))
        kind.process = process
        asked.append(question)
        return process

    follower.learned, follower.ask = kind, ask
    follower.to_plan = lambda: kind if kind.process is None else None
    follower.is_due = lambda: kind.process is None
    follower.question = lambda kind: Question(kind.recorded.trace, machine, True, "lp")
    monkeypatch.setattr(type(follower), "is_calibrated", True)
    return kind, asked


def of_two(pager: Any, other: Any, sent: bytes, *, first: bool) -> Agreement:
    """An agreement with a rank that asks what is asked ``other``, and ``sent`` what it was told."""
    agreement, _ = agreed(pager, {})
    told = [other.hardware.d2h_bytes_per_s] if other is not None else [math.inf]
    number = module._number_of(other, [0, 1, 2, 3]) if other is not None else 0.0

    def least(*mine: float) -> list[float]:
        if len(mine) != 7:
            return list(mine)
        theirs = [number, -number, *told, *mine[3:]]
        return [min(pair) for pair in zip(mine, theirs)]

    agreement._least = least  # type: ignore[method-assign]
    agreement._from_first = lambda said: said if first else sent  # type: ignore[method-assign]
    return agreement


def test_the_first_rank_plans_for_all_by_the_slowest_channels(
    follower: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Agreement, "_is_first", True)
    kind, asked = due(follower, monkeypatch)
    other = follower.question(kind)
    other = other._replace(hardware=other.hardware.with_(d2h_bytes_per_s=1e9))
    agreement = of_two(follower._pager, other, b"", first=True)
    ended(agreement)
    assert [(q.hardware.d2h_bytes_per_s, q.hardware.h2d_bytes_per_s) for q in asked] == [(1e9, 3e9)]
    ended(agreement)  # it has answered
    assert agreement._together is None


def test_another_rank_has_the_plan_of_the_first(
    follower: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Agreement, "_is_first", False)
    kind, asked = due(follower, monkeypatch)
    other, said = follower.question(kind), b'{"refused": "too small", "minimum": 4711}'
    agreement = of_two(follower._pager, other, said, first=False)
    ended(agreement)
    assert not asked
    assert not kind.process.done()
    assert not follower.is_planning
    ended(agreement)
    with pytest.raises(PlanRefused, match="too small"):
        kind.process.result()


def test_a_plan_that_the_first_rank_gives_up_is_awaited_by_nobody(
    follower: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Agreement, "_is_first", False)
    kind, asked = due(follower, monkeypatch)
    agreement = of_two(follower._pager, follower.question(kind), b"", first=False)
    ended(agreement)
    assert kind.process is not None
    ended(agreement)
    assert kind.cancelled == 1
    assert kind.process is None
    ended(agreement)
    assert kind.process is not None, "it is planned again, and that is awaited"
    agreement.stop()
    assert kind.process is None
    assert not asked


@pytest.mark.parametrize("other", ["nothing", "fewer frames", "more pages"])
def test_ranks_with_other_questions_plan_each_for_itself(
    follower: Any, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    monkeypatch.setattr(Agreement, "_is_first", False)
    kind, asked = due(follower, monkeypatch)
    question: Any = follower.question(kind)
    if other == "nothing":
        theirs = None
    elif other == "fewer frames":
        theirs = question._replace(hardware=question.hardware.with_(device_bytes=4 << 20))
    else:
        more = replace(question.trace, tensor_bytes=question.trace.tensor_bytes + 65536)
        theirs = question._replace(trace=more)
    ended(of_two(follower._pager, theirs, b"", first=False))
    assert asked == [question]


def test_one_rank_alone_agrees_with_nobody() -> None:
    with tp.Pager("16MiB", device="cpu", page_size="64KiB") as pager:
        plan_together(pager.core, (0,), None)
        assert pager.core.follower is not None
        assert pager.core.follower.others is None
