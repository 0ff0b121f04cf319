"""What can go wrong, by name. Every message says who, how much, and what to do about it."""

from ..planner.errors import InfeasibleBudget, PagerError, TraceError

__all__ = ["CorruptPage", "InfeasibleBudget", "PagerError", "TierFull", "TraceError"]


class TierFull(PagerError):  # noqa: N818 (public name, fixed by the design)
    """No tier has room for a page that must leave the device. Nothing was moved or lost."""


class CorruptPage(PagerError):  # noqa: N818
    """A page read back from disk does not match the checksum it was written with."""
