"""What commands print and write: JSON, tables, progress, and files that are whole or not there."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..files import whole_file

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Progress = Callable[[str, float], None]
PIPE_WIDTH = 80
PICTURE_WIDTH = 100


def emit_text(text: str) -> None:
    """A line on stdout; colours are dropped where it is not a terminal."""
    click.echo(text)


def emit_json(content: Any) -> None:
    click.echo(json.dumps(content, indent=2, allow_nan=False))


def output_width() -> int:
    """Columns that ``emit`` fills: the terminal's, or ``PIPE_WIDTH`` where stdout is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH


def emit(*parts: RenderableType) -> None:
    """Prints tables and lines: as wide as the terminal, or 80 columns without colour in a pipe.

    They are rendered first and printed by click, which leaves a closed pipe to us.
    """
    console = _console(output_width(), force_terminal=sys.stdout.isatty())
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    lines = (line.rstrip() for line in capture.get().splitlines())
    click.echo("\n".join(lines))
    _add_to_picture(parts)


def _console(width: int, **more: Any) -> Console:
    """Renders text as it is, ``width`` columns wide on whatever terminal: rich takes a dumb one for
    80 columns unless it is given a height too."""
    from rich.console import Console

    plain: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
    return Console(file=StringIO(), width=width, height=100, **plain, **more)


def _add_to_picture(parts: Sequence[RenderableType]) -> None:
    """What is printed, in colour as an SVG file too, if ``tensorpager --svg FILE`` asks for it."""
    context = click.get_current_context(silent=True)
    root = context.find_root() if context is not None else None
    path = root.params.get("svg") if root is not None else None
    if root is None or path is None:
        return
    printed = root.ensure_object(list)
    printed.extend(parts)
    console = _console(
        PICTURE_WIDTH, record=True, force_terminal=True, color_system="truecolor", no_color=False
    )
    for part in printed:
        console.print(part)
    picture = console.export_svg(title=f"tensorpager {root.invoked_subcommand}")
    # A picture loads nothing from the net: rich names a web font.
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    with whole_file(path) as part:
        part.write_text(picture, encoding="utf-8")


def draws_over() -> bool:
    """Whether the terminal can draw over what it has printed."""
    return os.environ.get("TERM", "dumb").lower() not in ("dumb", "unknown")


@contextmanager
def progress_bar(terminal: bool | None = None) -> Iterator[Progress | None]:
    """A callback (what is being done, share done) that draws a bar on stderr; ``None`` if stderr
    is no terminal, or one that cannot draw over it. The bar is gone when the work is done."""
    if not (sys.stderr.isatty() and draws_over() if terminal is None else terminal):
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True, force_terminal=terminal), transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def report(what: str, share: float) -> None:
            bar.update(task, description=what, completed=min(max(share, 0.0), 1.0))

        yield report


def output_path(context: click.Context, option: click.Parameter, value: Path | None) -> Path | None:
    """Refuses before any work is done what could not be written when it is."""
    if value is None:
        return None
    folder = value.parent
    if value.is_dir():
        raise click.BadParameter(f"{value} is a folder; name a file in it.", context, option)
    if not folder.is_dir():
        raise click.BadParameter(f"there is no folder {folder}; make it first.", context, option)
    if not os.access(value if value.exists() else folder, os.W_OK):
        raise click.BadParameter(f"{value} cannot be written (permissions).", context, option)
    return value
