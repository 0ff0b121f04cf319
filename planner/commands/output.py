"""What commands print and write: JSON, tables, progress, and files that are whole or not there."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

Progress = Callable[[str, float], None]
PIPE_WIDTH = 80


def emit_text(text: str) -> None:
    """A line on stdout; colours are dropped where it is not a terminal."""
    click.echo(text)


def emit_json(content: Any) -> None:
    click.echo(json.dumps(content, indent=2, allow_nan=False))


def emit(*parts: RenderableType) -> None:
    """Prints tables and lines: as wide as the terminal, or 80 columns without colour in a pipe.

    They are rendered first and printed by click, which leaves a closed pipe to us.
    """
    from rich.console import Console

    terminal = sys.stdout.isatty()
    console = Console(
        file=StringIO(),
        force_terminal=terminal,
        width=shutil.get_terminal_size().columns if terminal else PIPE_WIDTH,
        markup=False,
        emoji=False,
        highlight=False,
    )
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    lines = (line.rstrip() for line in capture.get().splitlines())
    click.echo("\n".join(lines))


@contextmanager
def progress_bar(terminal: bool | None = None) -> Iterator[Progress | None]:
    """A callback (what is being done, share done) that draws a bar on stderr; ``None`` if stderr
    is no terminal. The bar is gone when the work is done."""
    if not (sys.stderr.isatty() if terminal is None else terminal):
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


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to; the file takes the place of ``path``, mode 0600, when the block is left
    without an error. Until then, and after an error, ``path`` is as it was.

    What is not a regular file (``/dev/stdout``) is written into, not replaced.
    """
    special = path.exists() and not path.is_file()
    target = path.resolve()
    descriptor, name = tempfile.mkstemp(
        prefix=f".{target.name}.", suffix=".part", dir=None if special else target.parent
    )
    os.close(descriptor)
    part = Path(name)
    try:
        yield part
        if special:
            with part.open("rb") as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink)
            return
        part.chmod(0o600)
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
