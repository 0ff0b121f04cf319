"""What a virtual page is called in messages: by its tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...planner.sizes import format_bytes
from ..plan.names import named_runs, shared_name

if TYPE_CHECKING:
    from ..core import Core
    from .space import PageRun


def page_name(pager: Core, page: int) -> str:
    """``"page 2 of 4 of 'layers.0.weight'"``. For messages only: it looks through all tensors. Any
    thread, with or without the pager's lock."""
    run = pager.space.runs.get(int(pager.table.owner[page]))
    if run is None:
        return f"page {page}, of a tensor that is gone"
    return f"page {page - run.first + 1} of {run.count} of {run_name(pager, run)!r}"


def run_name(pager: Core, run: PageRun) -> str:
    """The tensors in ``run`` by their place in the models, or what kind they are."""
    try:
        members = [label for other, label in named_runs(pager) if other is run]
    except RuntimeError:  # an optimizer got a state while we looked
        members = []
    return shared_name(members) or f"{run.kind} (run {run.id})"


def name_pages(pager: Core) -> None:
    """Errors of the tiers and reports about the disk call pages by their tensors."""

    def name_of(page: int) -> str:
        return page_name(pager, page)

    if pager.migration.host_stamps is not None:
        pager.migration.host_stamps.name_of = name_of
    disk = pager.disk
    if disk is None:
        return
    disk.stamps.name_of = name_of
    size, stamps = pager.page_size, disk.stamps

    def tell(offset: int, nbytes: int) -> str:
        slot, count = offset // size, -(-nbytes // size)
        page = stamps.page_of(slot)
        name = f", {page_name(pager, page)}" if page >= 0 else ""
        pages = f"{count} pages from slot {slot} on" if count > 1 else f"the page in slot {slot}"
        return f"{pages} ({format_bytes(nbytes)}{name})"

    pager.io_watch.tell = tell
