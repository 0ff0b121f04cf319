"""A plan of ``tensorpager estimate --plan``, for iterations before there is one of this training.

Such a plan is of ops that nobody has run. What it shares with the training are names of parameters
and optimizer states, and the order in which ops use them. So its moves of these are queued where
that order says; everything else is paged on demand. The first use that is another one ends it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from ...planner.errors import PlanError
from ...planner.plan import read_plan
from ...planner.sizes import format_bytes
from ...planner.trace import Trace
from ..core import Core
from ..errors import PagerError
from ..memory.space import Extent
from ..tensor.names import named_parameters, named_runs
from .access_log import Keys
from .compiled_plan import ANYWHERE, Action
from .planned import PlannedMoves
from .recorder import Recorder

_KINDS = ("parameter", "optimizer")


def uses_by_name(trace: Trace) -> dict[str, Any]:
    """For a plan's ``extra``: ``tensors``, number → [name, bytes], and ``uses``, [op, numbers]."""
    named = {
        tensor: int(trace.tensor_ids[tensor])
        for tensor, kind in enumerate(trace.tensor_kinds)
        if kind in _KINDS and trace.tensor_names[tensor] is not None
    }
    uses: dict[int, dict[int, None]] = {}
    for op, tensor in zip(trace.access_op.tolist(), trace.access_tensor.tolist()):
        if tensor in named:
            uses.setdefault(op, {})[named[tensor]] = None
    sizes = trace.tensor_bytes.tolist()
    tensors = {str(number): [trace.tensor_names[t], sizes[t]] for t, number in named.items()}
    return {"tensors": tensors, "uses": [[op, list(several)] for op, several in uses.items()]}


class StartingPlan:
    """Of one pager, under its lock. ``refused``: why it is not followed (any more), or ``None``;
    ``runs``: an iteration follows it; ``iterations`` that it was followed in, to their end;
    ``moves`` that it has queued."""

    def __init__(self, path: Path, page_size: int) -> None:
        """Raises ``PlanError`` for what is no such plan."""
        self.path, self._plan = path, read_plan(path)
        if self._plan.page_size != page_size:
            raise PlanError(
                f"{path} is a plan of pages of {format_bytes(self._plan.page_size)}, this pager's "
                f"have {format_bytes(page_size)}; estimate with --page-size {page_size}"
            )
        self._read(self._plan.extra.get("accesses"))
        self._moves = [move for move in self._plan.moves if move.tensor in self._tensors]
        self._moves.sort(key=lambda move: move.issue_op)  # those of one op stay in their order
        self.refused: str | None = None
        self.runs = self.told = False
        self.iterations = self.moves = 0

    def _read(self, content: Any) -> None:
        try:
            self._tensors = {
                int(n): (str(name), int(s)) for n, (name, s) in content["tensors"].items()
            }
            self._uses = [(int(op), frozenset(map(int, some))) for op, some in content["uses"]]
            good = self._tensors.keys() >= frozenset().union(*(some for _, some in self._uses))
        except (AttributeError, KeyError, TypeError, ValueError):
            good = False
        if not good:
            raise PlanError(
                f"{self.path} does not say in which order parameters are used; plans of "
                "'tensorpager estimate --plan' do"
            )

    def __str__(self) -> str:
        if self.refused is not None:
            return f"{self.path} is not followed: {self.refused}"
        return (
            f"{self.path} was followed in {self.iterations} iterations, until there is a plan of "
            f"this training; {self.moves} of its moves were queued"
        )

    # -- an iteration ----------------------------------------------------------------------------
    def begin(self, pager: Core, recorder: Recorder, planned: PlannedMoves) -> None:
        """The iteration that begins follows it, unless the tensors are not those of the plan."""
        if self.refused is not None:
            return
        found = self._find(pager)
        if self.refused is not None:
            return
        assert recorder.log is not None
        for run in found.values():
            if not run.key:
                recorder.names.name(run)
        self._pager, self._planned, self._names = pager, planned, recorder.names
        self._found, self._of_key = found, {run.key: n for n, run in found.items()}
        self._order: list[tuple[int, frozenset[int]]] = []
        for op, some in self._uses:
            mine = some & found.keys()
            if not mine <= (self._order[-1][1] if self._order else frozenset()):
                self._order.append((op, mine))
        self._at, self._issued = -1, 0
        self._now: frozenset[int] = frozenset()
        self._left: set[int] = set()  # of these, what was not used yet
        self.runs = bool(self._order)
        if self.runs:
            self._issue(self._missing())
            self.go_on()

    def _find(self, pager: Core) -> dict[int, Extent]:
        """The run of each tensor that is moved as a whole."""
        runs = {name: run for run, name in named_runs(pager)}
        parameters = {name for name, _ in named_parameters(pager)}
        found: dict[int, Extent] = {}
        for number, (name, nbytes) in self._tensors.items():
            run = runs.get(name)
            if run is None:
                if name not in parameters and name.rpartition(".")[0] not in parameters:
                    self.refused = f"it has {name!r}, which this training has not"
                    break
            elif run.small is None and not run.streamed and not run.in_slabs:
                if run.nbytes != nbytes:
                    self.refused = f"{name!r} has {nbytes} bytes there, and {run.nbytes} here"
                    break
                found[number] = run
        return found

    def _missing(self) -> Iterator[Action]:
        """What should be there as an iteration begins, in the order of first uses."""
        gone: dict[int, list[tuple[int, int]]] = {}
        for number, first, count, _ in self._plan.start:
            gone.setdefault(number, []).append((first, count))
        for number in dict.fromkeys(n for _, some in self._order for n in sorted(some)):
            run, begin = self._found[number], 0
            for first, count in [*sorted(gone.get(number, ())), (run.count, 0)]:
                for tier in ("host", "disk") if first > begin else ():
                    yield Action("in", tier, run.key, begin, first - begin, ANYWHERE)
                begin = first + count

    def accessed(self, _: Keys, of_order: Keys) -> None:
        """An access begins. What it uses is of the op that runs in the plan, or of the next one if
        all of that was used; anything else is where training and plan differ."""
        if not self.runs:
            return
        for key in chain.from_iterable(map(self._names.through, of_order)):
            number = self._of_key.get(key)
            if number is None:
                continue
            if number not in self._now:
                following = self._at + 1
                if self._left or following == len(self._order):
                    self._differ(number)
                    return
                before, self._now = self._now, self._order[following][1]
                self._at, self._left = following, set(self._now - before)
                if number not in self._now:
                    self._differ(number)
                    return
            self._left.discard(number)

    def go_on(self) -> None:
        """Nothing is used at this moment: what the plan moves up to its next op is queued."""
        if not self.runs:
            return
        following = self._at + (not self._left)
        until = self._order[following][0] if following < len(self._order) else None
        actions: list[Action] = []
        while self._issued < len(self._moves):
            move = self._moves[self._issued]
            if until is not None and move.issue_op > until:
                break
            self._issued += 1
            if move.action in ("in", "out") and move.tensor in self._found:
                key = self._found[move.tensor].key
                pages = move.first_page, move.page_count
                actions.append(Action(move.action, move.tier, key, *pages, ANYWHERE))
        if actions or self._planned.waiting:
            self._issue(actions)

    def _issue(self, actions: Any) -> None:
        """Of tiers that there are. What comes is used soon: others leave before it."""
        pager, tiers = self._pager, {"host": self._pager.host, "disk": self._pager.disk}
        mine = []
        for action in actions:
            store = tiers[action.tier]
            if store is not None and store.slots.count:
                mine.append(action)
                if action.what == "in":
                    pager.residency.touch(self._found[self._of_key[action.key]])
        self.moves += len(mine)
        self._planned.issue(mine, {})

    def end(self, *, ok: bool) -> None:
        if self.runs and ok and (self._left or self._at + 1 < len(self._order)):
            self._differ(None)
        self.iterations += self.runs and ok
        self.runs = False

    def _differ(self, number: int | None) -> None:
        """``number`` is used now, or the iteration ends."""
        wanted = self._left or (
            self._order[self._at + 1][1] if self._at + 1 < len(self._order) else ()
        )
        names = " and ".join(repr(self._tensors[n][0]) for n in sorted(wanted)[:2])
        now = "it ends" if number is None else f"{self._tensors[number][0]!r} is used"
        self.refused = (
            f"op {self._at + 1} of {len(self._order)} that use parameters or states: {now} where "
            f"the plan uses {names or 'no more of them'}"
        )
        self.runs = False


def starting_plan(path: Any, page_size: int, policy: str) -> StartingPlan:
    """Of ``Pager(plan=…)``. Raises ``PagerError``."""
    if policy == "lru":
        raise PagerError(
            f"plan={str(path)!r} with policy='lru', which follows no plan; use policy='lp' or "
            "'joint'"
        )
    try:
        return StartingPlan(Path(path), page_size)
    except PlanError as error:
        raise PagerError(f"plan: {error}") from error
