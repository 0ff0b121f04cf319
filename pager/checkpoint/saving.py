"""``state_dict`` of all that a pager pages, as ordinary tensors.

Why copies, and not a mapping that makes a tensor when it is asked for: what takes a state dict
(``load_state_dict``, ``torch.save``, ``torch.distributed.checkpoint``) first collects all of its
values, so that such a mapping would be the whole model in memory after all; and its tensors would
change with training and be gone after ``close()``. Copies in a file are neither, and are ordinary
to whoever gets them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .save_load import load_all, references
from .snapshot import snapshot

if TYPE_CHECKING:
    from ..core import Core


def state_dict(pager: Core) -> dict[str, Any]:
    """See ``Pager.state_dict``."""
    return snapshot(pager, references(pager))  # type: ignore[no-any-return]


def load_state_dict(pager: Core, state: dict[str, Any]) -> None:
    """See ``Pager.load_state_dict``."""
    load_all(pager, state, loaded=lambda: None)
