"""The tensor that a name or a number on the command line means."""

from __future__ import annotations

from typing import Any

from ..errors import PagerError
from ..trace import Trace
from .tables import short

OFFERED = 5  # names in an error
_COMPARED = 5000  # names that are compared letter by letter with a misspelt one
_NAME_WIDTH = 60


def find_tensor(trace: Trace, text: str, where: str) -> int:
    """Index of the tensor called ``text``, of that number, or else the only one whose name has
    ``text`` in it. Raises ``PagerError`` that offers the closest ones; ``where`` names the trace.
    """
    if text.isdecimal() and text.isascii() and len(text) < 19:  # fits 64 bits
        numbered = (trace.tensor_ids == int(text)).nonzero()[0]
        if len(numbered):
            return int(numbered[0])
    names = _all_names(trace)
    exact = [index for index, name in names if name == text]
    within = exact or [index for index, name in names if text.lower() in name.lower()]
    within = list(dict.fromkeys(within))
    if len(within) == 1:
        return within[0]
    if within:
        what = f"{len(within)} tensors are called" if exact else f"{len(within)} tensors match"
        raise PagerError(
            f"{where}: {what} '{short(text, _NAME_WIDTH)}': {_offer(trace, within)}; "
            "give one's number or its whole name"
        )
    raise PagerError(f"{where}: no tensor '{short(text, _NAME_WIDTH)}'; {_closest(names, text)}")


def shared_names(trace: Trace, tensor: int) -> list[str]:
    """Names of all that shares this tensor's pages, as the recorder notes them; its own first."""
    shared: Any = trace.metadata.get("shared")
    found = shared.get(str(trace.tensor_ids[tensor])) if isinstance(shared, dict) else None
    own = trace.tensor_names[tensor]
    others = [name for name in found if isinstance(name, str)] if isinstance(found, list) else []
    return others or ([own] if own else [])


def _all_names(trace: Trace) -> list[tuple[int, str]]:
    """(tensor, name), those of shared runs under each name."""
    names = [(index, name) for index, name in enumerate(trace.tensor_names) if name]
    if isinstance(trace.metadata.get("shared"), dict):
        for index in range(trace.tensors):
            names += [(index, name) for name in shared_names(trace, index)]
    return names


def _offer(trace: Trace, tensors: list[int]) -> str:
    shown = [
        f"{trace.tensor_ids[index]} ({short(trace.name_of(index), _NAME_WIDTH)})"
        for index in tensors[:OFFERED]
    ]
    more = len(tensors) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _closest(names: list[tuple[int, str]], text: str) -> str:
    if not names:
        return "tensors have no names here; give a number, as 'show TRACE' lists them"
    from difflib import get_close_matches

    parts = [part for part in text.lower().replace(":", ".").split(".") if len(part) > 1]
    known = list(dict.fromkeys(name for _, name in names))
    if len(known) > _COMPARED:  # those first that share the most parts
        known.sort(key=lambda name: -sum(part in name.lower() for part in parts))
    close = get_close_matches(text, known[:_COMPARED], OFFERED, cutoff=0.3) or known[:OFFERED]
    return "the closest names: " + ", ".join(short(name, _NAME_WIDTH) for name in close)
