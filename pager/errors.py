"""What can go wrong, by name. Every message says who, how much, and what to do about it."""

from ..planner.errors import InfeasibleBudget, PagerError, TraceError

__all__ = [
    "CorruptPage",
    "DiskWriteLimit",
    "HungDisk",
    "InfeasibleBudget",
    "PagerError",
    "TierFull",
    "TraceError",
]


class TierFull(PagerError):  # noqa: N818 (public name, fixed by the design)
    """No tier has room for a page that must leave the device. Nothing was moved or lost."""


class CorruptPage(PagerError):  # noqa: N818
    """A page that comes back is not the one that was written. It was not used.

    ``tier``: ``host`` or ``disk``. ``slot`` of that tier; ``page``: virtual page, and ``tensor``:
    its name, where known.
    """

    def __init__(
        self,
        message: str,
        *,
        tier: str = "disk",
        slot: int = -1,
        page: int = -1,
        tensor: str | None = None,
    ) -> None:
        super().__init__(message)
        self.tier = tier
        self.slot = slot
        self.page = page
        self.tensor = tensor


class DiskWriteLimit(PagerError):  # noqa: N818
    """As much as ``disk_write_limit`` was written in a day. No iteration was begun; checkpoints can
    be saved, and all goes on when the next day begins."""


class HungDisk(PagerError):  # noqa: N818
    """The disk does not answer for ``io_timeout`` seconds. Pages are where they were; what was
    under way may still end."""
