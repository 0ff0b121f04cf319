"""Runs one call in the plain and in the paged world and compares everything that can be seen."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch.utils._pytree import tree_leaves

import tensorpager as tp

from .bits import difference, within
from .lanes import LANES, Lane, sample_limit
from .left_out import READS_UNINITIALISED
from .worlds import Recipe, World

SEED = 20_011
SHOWN_FAILURES = 5
REPETITIONS = 100
FILLS = (0.0, 1.0, -1.0, torch.nan, 1e30)

Call = Callable[[World], object]


@contextmanager
def known_memory(name: str) -> Iterator[None]:
    """Have PyTorch fill new memory while an op runs that reads it uninitialised."""
    if name not in READS_UNINITIALISED:
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def seed(value: int) -> None:
    """Like ``torch.manual_seed``, which also keeps a stack trace per call for absent devices."""
    torch.default_generator.manual_seed(value)


@dataclass
class Outcome:
    world: World
    result: object = None
    error: Exception | None = None


def attempt(call: Call, world: World) -> Outcome:
    """Run ``call`` from the same random state each time."""
    seed(SEED)
    for leaf in tree_leaves(world.inputs):
        if isinstance(leaf, torch.Generator):
            leaf.manual_seed(SEED)
    try:
        return Outcome(world, result=call(world))
    except Exception as error:
        return Outcome(world, error=error)


def reproducible(call: Call, recipe: Recipe) -> bool:
    """Whether the plain op always gives the same, whatever memory it finds.

    Between the runs small blocks of memory are filled, freed and moved about.
    """
    first = attempt(call, recipe.plain())
    kept = []
    for repetition in range(REPETITIONS):
        kept.append(torch.rand(1 + 5 * repetition))
        fill = FILLS[repetition % len(FILLS)]
        del [torch.full((n,), fill) for n in range(1, 65, 3)][:]
        if outcome_difference(first, attempt(call, recipe.plain())):
            return False
    return True


def outcome_difference(plain: Outcome, paged: Outcome, *, values: bool = True) -> str | None:
    if type(plain.error) is not type(paged.error):
        return f"{_said(plain)} became {_said(paged)}"
    found = difference(plain.result, paged.result, values=values, at="result")
    memories = plain.world.memory(), paged.world.memory()
    return found or difference(*memories, values=values, at="inputs")


@dataclass
class Trials:
    """The samples of one op (or module, or optimizer) in every lane, and what went wrong.

    ``bound``: relative difference that results may have; see ``left_out.OTHER_ORDER``.
    ``lanes``: to try each sample in. With a reason in ``left_out`` only shape, dtype and strides
    are compared. ``after`` runs on the result of each world once the results have been compared;
    then the inputs' memory is compared again.
    """

    pager: tp.Pager
    tally: dict[tuple[str, str, str, str, str], int]
    suite: str
    name: str
    dtype: str
    left_out: str | None = None
    bound: float | None = None
    after: Call | None = None
    lanes: tuple[Lane, ...] = LANES
    failures: list[str] = field(default_factory=list)
    cause: Exception | None = None

    def compare(self, samples: Iterable[tuple[object, Call]], *, quick: int, full: int | None):
        """Try ``samples``, pairs of an input tree and the call to make on a world of it."""
        limits = {lane: sample_limit(lane, quick=quick, full=full) for lane in self.lanes}
        most = None if None in limits.values() else max(limits.values())
        for index, (inputs, call) in enumerate(list(islice(samples, most))):
            for lane, limit in limits.items():
                if limit is None or index < limit:
                    with known_memory(self.name):
                        self.compare_one(index, lane, inputs, call)
        self.finish()

    def compare_one(self, index: int, lane: Lane, inputs: object, call: Call) -> None:
        recipe = Recipe(inputs, straddle=lane.scattered)
        call = lane.around(call)
        plain = attempt(call, recipe.plain())
        try:
            with lane.on(self.pager):
                paged = attempt(call, recipe.paged(self.pager))
                found = outcome_difference(plain, paged, values=not self.left_out)
                if self.after and plain.error is None and not found:
                    found = self._after_difference(plain, paged, lane)
        except Exception as error:
            paged = Outcome(World(), error=error)
            found = f"the comparison raised {_said(paged)}"
        if found and self.bound is not None and within(plain.result, paged.result, self.bound):
            self._count(lane, "within bound", f"{self.name}, relative {self.bound:g}")
        elif found and not self.left_out and not reproducible(call, recipe):
            self._count(lane, "not comparable", self.name)
        elif found:
            self.failures.append(f"{lane.name} sample {index}: {found}")
            self.cause = self.cause or paged.error
            self._count(lane, "failed", self.name)
        elif plain.error is not None:
            self._count(lane, "raised alike", "")
        elif self.left_out:
            self._count(lane, "left out", f"{self.left_out}: {self.name}")
        else:
            self._count(lane, "passed", "")

    def finish(self) -> None:
        """Raise if anything differed, from the first exception of the paged world if any."""
        if self.failures:
            more = len(self.failures) - SHOWN_FAILURES
            shown = self.failures[:SHOWN_FAILURES] + ([f"and {more} more"] if more > 0 else [])
            raise AssertionError(
                f"{self.suite} {self.name} {self.dtype}:\n" + "\n".join(shown)
            ) from self.cause

    def _after_difference(self, plain: Outcome, paged: Outcome, lane: Lane) -> str | None:
        after = lane.around(self.after)
        outcomes = [
            attempt(lambda world, result=outcome.result: after(result), outcome.world)
            for outcome in (plain, paged)
        ]
        found = outcome_difference(*outcomes)
        return f"after writing into the result, {found}" if found else None

    def _count(self, lane: Lane, outcome: str, detail: str) -> None:
        self.tally[self.suite, lane.name, self.dtype, outcome, detail] += 1


def tensors(tree: object) -> Iterator[torch.Tensor]:
    """The strided tensors of ``tree``, in order."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            yield leaf


def _said(outcome: Outcome) -> str:
    if outcome.error is None:
        return "a result"
    return f"{type(outcome.error).__name__}({str(outcome.error)[:300]!r})"
