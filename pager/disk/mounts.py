"""The file system that a folder is in, as the kernel tells it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

IN_RAM = ("tmpfs", "ramfs")  # kinds of file systems that are memory
_MOST_BYTES = 1 << 20


def text_of(path: str | os.PathLike[str]) -> str:
    """A small text file of the system; "" if there is none or it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def number_in(path: str | os.PathLike[str]) -> int | None:
    """The whole number that a file of the system holds."""
    text = text_of(path).strip()
    return int(text) if text.isascii() and text.isdigit() else None


@dataclass(frozen=True)
class Mount:
    """The file system that a folder is in. ``drive``: its disk's name in /sys/block, if it has
    one."""

    point: str
    kind: str
    source: str
    options: str
    drive: str | None


def mount_of(folder: str | os.PathLike[str]) -> Mount | None:
    """The mount that ``folder`` is in; ``None`` where /proc does not tell."""
    path = os.path.realpath(folder)
    best: Mount | None = None
    for line in text_of("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if len(fields) < 6 or len(rest) < 3:
            continue
        point = _unescaped(fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and (best is None or len(point) >= len(best.point)):
            options = ",".join(dict.fromkeys([*fields[5].split(","), *rest[2].split(",")]))
            best = Mount(point, rest[0], _unescaped(rest[1]), options, _drive(fields[2]))
    return best


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _drive(device: str) -> str | None:
    """The whole disk of a device number "major:minor", not its partition."""
    link = os.path.realpath(f"/sys/dev/block/{device}")
    if not os.path.isdir(link):
        return None
    whole = os.path.dirname(link) if os.path.exists(f"{link}/partition") else link
    return os.path.basename(whole)
