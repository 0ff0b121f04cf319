"""What can go wrong, by name. Every message says who, how much, and what to do about it."""


class PagerError(Exception):
    """Base of all tensorpager errors."""


class InfeasibleBudget(PagerError):  # noqa: N818 (public name, fixed by the design)
    """The device budget is smaller than the largest working set.

    ``minimum`` is the smallest ``device_budget`` in bytes that works for the shapes seen so far.
    """

    def __init__(self, message: str, *, minimum: int) -> None:
        super().__init__(message)
        self.minimum = minimum


class TierFull(PagerError):  # noqa: N818
    """No tier has room for a page that must leave the device. Nothing was moved or lost."""


class CorruptPage(PagerError):  # noqa: N818
    """A page read back from disk does not match the checksum it was written with."""


class TraceError(PagerError):
    """A trace file that cannot be read as one."""
