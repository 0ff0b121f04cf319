"""What can go wrong in planning, by name. The runtime's errors build on these."""

from typing import Any


class PagerError(Exception):
    """Base of all tensorpager errors."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Whatever the constructor asks for, an error comes whole out of another process."""
        return _again, (type(self), self.args), self.__dict__


def _again(kind: type[PagerError], args: tuple[Any, ...]) -> PagerError:
    return kind.__new__(kind, *args)


class InfeasibleBudget(PagerError):  # noqa: N818 (public name, fixed by the design)
    """The device budget is smaller than the largest working set.

    ``minimum`` is the smallest device budget in bytes that works for what was asked. In inference,
    where nothing goes on beyond the budget, it works for what was done so far.
    """

    def __init__(self, message: str, *, minimum: int) -> None:
        super().__init__(message)
        self.minimum = minimum


class TraceError(PagerError):
    """A file that cannot be read as a trace. The message names the place and the reason."""


class PlanError(PagerError):
    """A file that cannot be read as a plan, or a plan for another trace."""


class HardwareError(PagerError):
    """A hardware description that misses a value or holds an impossible one."""


class PolicyRefusal(PagerError):  # noqa: N818 (an honest answer of a policy, not a fault)
    """A policy that has no plan for this trace on this hardware, and says why."""
