"""Methods of a user's own object that are replaced for as long as a pager is open."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Replaced:
    """Of one pager: bound methods of objects that the user made, by ours. :meth:`undo` puts back
    what was there; what somebody else has put over ours stays."""

    def __init__(self) -> None:
        self._put: list[tuple[Any, str, Any, Any]] = []

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """``owner.name(…)`` becomes ``around(original, …)``."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self._put.append((owner, name, ours, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, ours)

    def undo(self) -> None:
        while self._put:
            owner, name, ours, before = self._put.pop()
            if vars(owner).get(name) is not ours:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
