"""Files without a name, for bytes that are not to be memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

from ..errors import PagerError
from .file import open_unlinked

_IN_RAM = ("tmpfs", "ramfs")


def open_scratch_files(folder: str | None, nbytes: int) -> Iterator[int]:
    """Files without a name, in ``folder`` and in that for temporary files, all of each allocated;
    the caller closes them. None for what is too much, and where there is no disk."""
    for place in (folder, tempfile.gettempdir()):
        if place is None or _kind(place) in _IN_RAM:
            continue
        try:
            descriptor = open_unlinked(place, nbytes)
        except PagerError:
            continue
        yield descriptor


def _kind(folder: str) -> str:
    """Of the file system that ``folder`` is on; empty if that cannot be told."""
    path, found = os.path.realpath(folder), ("", "")
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
            lines = [line.split() for line in mounts]
    except OSError:
        return ""
    for _, place, kind, *_ in lines:
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(found[0]):
            found = place, kind
    return found[1]
