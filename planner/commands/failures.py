"""How a command ends: exit code 0 (fine), 1 (a check failed) or 2 (bad usage or bad input), with
one line on stderr that says what, where and what to do."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import click

from ..errors import InfeasibleBudget, PagerError
from ..sizes import format_bytes

CHECK_FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


class CheckFailed(Exception):  # noqa: N818 (an answer, not a fault)
    """What the command was asked to check does not hold. The message says what, and where."""


class _CheckFailure(click.ClickException):
    exit_code = CHECK_FAILED


class _InputFailure(click.ClickException):
    exit_code = BAD_INPUT


@contextmanager
def in_one_line(context: click.Context) -> Iterator[None]:
    """Turns errors of planning and of files into click's, which carry the exit code."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (PagerError, OSError, CheckFailed, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError):
            if error.name != "torch":
                raise
            error = PagerError("this needs PyTorch: pip install torch")
        name = f" {context.invoked_subcommand}" if context.invoked_subcommand else ""
        kind = _CheckFailure if isinstance(error, CheckFailed) else _InputFailure
        raise kind(f"{context.command_path}{name}: {_message(error)}") from error


@contextmanager
def closed_pipe_ends_quietly() -> Iterator[None]:
    """A reader that has seen enough (``| head``) is no error: the command stops, with 0."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError as error:
        _send_stdout_nowhere()
        raise click.exceptions.Exit(0) from error


def run_and_exit(run: Callable[[], Any]) -> NoReturn:
    """Ends the process with what ``run``, a click ``main`` in non-standalone mode, comes to."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without "µ" still gets its table
    try:
        result = run()
    except click.Abort:
        _complain("tensorpager: interrupted")
        sys.exit(INTERRUPTED)
    except click.UsageError as error:
        _complain(_usage_message(error))
        sys.exit(BAD_INPUT)
    except click.ClickException as error:
        _complain(error.format_message())
        sys.exit(error.exit_code)
    sys.exit(result if isinstance(result, int) else 0)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        return f"{where}{error.strerror}"
    if isinstance(error, InfeasibleBudget) and str(error.minimum) not in str(error):
        size = f"{error.minimum} bytes ({format_bytes(error.minimum)})"
        return f"{error}; the smallest device budget is {size}"
    return str(error)


def _usage_message(error: click.UsageError) -> str:
    path = error.ctx.command_path if error.ctx else "tensorpager"
    return f"{path}: {error.format_message()} Try '{path} --help'."


def _complain(message: str) -> None:
    """One line, whatever line breaks and control characters the message had."""
    line = " ".join(message.split())
    with suppress(BrokenPipeError):
        click.echo("".join(c if c.isprintable() else "?" for c in line), err=True)


def _send_stdout_nowhere() -> None:
    """So that the interpreter's last flush does not complain again. Where stdout is no real file,
    there is no such flush."""
    with suppress(OSError, ValueError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)
