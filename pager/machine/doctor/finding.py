"""What ``tensorpager doctor`` finds, and how it looks at a machine's text files."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

State = Literal["ok", "warning", "problem"]
_INDENT = " " * 9


@dataclass(frozen=True)
class Finding:
    """One line of ``doctor``. ``state``: "ok", "warning" (works, but slower or with less) or
    "problem" (will not work). ``remedy``: what to do about it, if there is anything to do."""

    what: str
    state: State
    detail: str
    remedy: str = ""


def lines_of(finding: Finding, width: int) -> list[str]:
    """The finding in at most ``width`` columns; the first line begins with its state."""
    lines = _wrapped(f"{finding.state:<8} {finding.what}: {finding.detail}", width, _INDENT)
    if finding.remedy:
        lines += _wrapped(f"{_INDENT}-> {finding.remedy}", width, f"{_INDENT}   ")
    return lines


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        max(width, 40),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


def installed(name: str) -> str | None:
    """Version of a Python package, ``None`` if it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def format_rate(bytes_per_s: float | None) -> str:
    rate = bytes_per_s or 0.0
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.2f} MB/s"
