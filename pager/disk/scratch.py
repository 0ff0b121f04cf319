"""Files without a name, for bytes that are not to be memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from ..errors import PagerError
from .file import open_unlinked
from .mounts import mount_of

_IN_RAM = ("tmpfs", "ramfs")


def open_scratch_files(folder: str | None, nbytes: int) -> Iterator[int]:
    """Files without a name, in ``folder`` and in that for temporary files, all of each allocated;
    the caller closes them. None for what is too much, and where there is no disk."""
    for place in (folder, tempfile.gettempdir()):
        mount = None if place is None else mount_of(place)
        if place is None or (mount is not None and mount.kind in _IN_RAM):
            continue
        try:
            descriptor = open_unlinked(place, nbytes)
        except PagerError:
            continue
        yield descriptor
