"""``tensorpager top``: look at a training while it runs."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import click

from ...planner.commands.options import json_option
from ...planner.commands.output import PIPE_WIDTH, emit, emit_json, emit_text
from ...planner.errors import PagerError
from .rates import History, description
from .reader import (
    NoSuchProcess,
    Training,
    find_trainings,
    open_training,
    remove_left_over,
)
from .view import Screen, format_duration, frame, listing

_KEY_SECONDS = 0.1  # between two looks at the keyboard and at the size of the terminal
_SECOND_RECORD_SECONDS = 2.0  # a training that lives publishes four times in this time


def _address(context: click.Context, option: click.Parameter, value: str | None) -> Any:
    """``[HOST:]PORT`` → ``(host, port)``."""
    if value is None:
        return None
    host, _, port = value.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise click.BadParameter(
            f"{value!r} is no port; write for example 9101, or 0.0.0.0:9101.", context, option
        )
    return host, int(port)


def _seconds(context: click.Context, option: click.Parameter, value: float) -> float:
    if not 0.1 <= value <= 3600:  # FloatRange lets NaN through
        raise click.BadParameter(f"{value:g} is not between 0.1 and 3600.", context, option)
    return value


@click.command()
@click.argument("target", metavar="[PID|PATH]", required=False)
@click.option(
    "--interval",
    type=float,
    default=1.0,
    callback=_seconds,
    show_default=True,
    metavar="SECONDS",
    help="Time between two frames.",
)
@click.option("--once", is_flag=True, help="Print one frame, after one interval, and end.")
@json_option
@click.option(
    "--prometheus",
    metavar="[HOST:]PORT",
    callback=_address,
    help="Serve http://HOST:PORT/metrics for Prometheus (host: 127.0.0.1).",
)
def top(
    target: str | None,
    interval: float,
    once: bool,
    as_json: bool,
    prometheus: tuple[str, int] | None,
) -> None:
    """Show a training while it runs: tiers, traffic, stalls, iterations.

    Finds the trainings of this user that were made with `Pager(..., metrics=True)`; where there are
    several, it lists them, and a PID chooses (`1234.2`: the second Pager of process 1234). q or
    Ctrl-C ends it; the training is not touched.

    \b
    Example:
      python train.py &
      tensorpager top
      tensorpager top 1234 --json | jq .stall_share
      tensorpager top --prometheus 9101
    """
    if prometheus is not None:
        if once or as_json:
            raise click.UsageError("--prometheus serves until it is ended; drop --once and --json.")
        _serve(target, *prometheus, interval)
        return
    try:
        trainings = [open_training(target)] if target is not None else find_trainings()
    except NoSuchProcess as reason:
        if as_json:
            emit_json({"name": target, "state": "ended"})
        else:
            click.echo(str(reason))
        return
    with ExitStack() as stack:
        for training in trainings:
            stack.callback(training.close)
        if not trainings:
            raise PagerError(
                "no training of this user publishes metrics; make its Pager with metrics=True "
                "(train_lm.py: --metrics)"
            )
        if len(trainings) > 1:
            _choose(trainings, json=as_json)
        else:
            _show(trainings[0], interval, once=once, json=as_json)


def _choose(trainings: list[Training], *, json: bool) -> None:
    if json:
        emit_json({"trainings": [_described(training) for training in trainings]})
        return
    names = f"tensorpager top {trainings[-1].name}"
    emit(listing(trainings), "", f"Several trainings run; choose one: {names}")


def _described(training: Training) -> dict[str, Any]:
    history = History()
    history.add(training.record)
    return description(training, history)


def _show(training: Training, interval: float, *, once: bool, json: bool) -> None:
    if training.ended:
        _say_ended(training, json=json)
        return
    history = History()
    history.add(training.record)
    if once or json:
        _second_record(training, history, interval)
        if json:
            emit_json(description(training, history))
        elif training.ended:
            _say_ended(training, json=False)
        else:
            emit(frame(training, history, _screen()))
        return
    with suppress(KeyboardInterrupt):
        if sys.stdout.isatty():
            _live(training, history, interval)
        else:
            _frames(training, history, interval)
    if training.ended:
        _say_ended(training, json=False)


def _second_record(training: Training, history: History, interval: float) -> None:
    """Wait until rates over ``interval`` are known; not for ever, the training may be stopped."""
    deadline = time.monotonic() + interval + _SECOND_RECORD_SECONDS
    while history.span_seconds < interval and time.monotonic() < deadline:
        if training.ended:
            return
        time.sleep(min(interval, 0.1))
        history.add(training.read())


def _screen() -> Screen:
    """What a single frame is printed on."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH
    return Screen(width, plain=_plain())


def _plain() -> bool:
    return not (sys.stdout.encoding or "").lower().startswith("utf")


def _say_ended(training: Training, *, json: bool) -> None:
    record = training.record
    removed = remove_left_over(training)
    if json:
        emit_json(_described(training))
        return
    ran = format_duration((record.updated_ns - record.started_ns) / 1e9)
    how = "" if record.closed else " without closing its Pager"
    text = (
        f"{record.script} (PID {training.name}) has ended{how}, after "
        f"{record.counters['iterations']:,} iterations and {ran}"
    )
    emit_text(text + (f"; removed {training.path}, which it left" if removed else ""))


# -- frame after frame ---------------------------------------------------------------------------
def _frames(training: Training, history: History, interval: float) -> None:
    """Into a pipe or a file: one below the other."""
    while not training.ended:
        emit(frame(training, history, _screen()), "")
        time.sleep(interval)
        history.add(training.read())


def _live(training: Training, history: History, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(markup=False, emoji=False, highlight=False)
    with (
        _keyboard() as key,
        Live(
            console=console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as live,
    ):
        while not training.ended:
            size = console.size
            screen = Screen(size.width, size.height, plain=_plain())
            view = frame(training, history, screen, keys=True)
            live.update(view, refresh=True)
            until = time.monotonic() + interval
            while (left := until - time.monotonic()) > 0 and console.size == size:
                if key(min(left, _KEY_SECONDS)) in ("q", "Q", "\x03", "\x04"):
                    return
            history.add(training.read())


@contextmanager
def _keyboard() -> Iterator[Callable[[float], str | None]]:
    """A function that waits so many seconds for a key. The terminal is as before afterwards."""
    import os
    import select

    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds)
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def key(seconds: float) -> str | None:
        ready, _, _ = select.select([terminal], [], [], seconds)
        return os.read(terminal, 1).decode(errors="replace") or "q" if ready else None

    try:
        tty.setcbreak(terminal)
        yield key
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


# -- Prometheus ----------------------------------------------------------------------------------
def _serve(target: str | None, host: str, port: int, interval: float) -> None:
    """Until Ctrl-C, or until ``target`` has ended."""
    from .prometheus import Server, render

    def scrape() -> str:
        trainings = find_trainings() if target is None else _one(target)
        try:
            return render(trainings)
        finally:
            for training in trainings:
                training.close()

    if not _goes_on(target):
        click.echo(f"training {target} has ended")
        return
    try:
        server = Server(host, port, scrape)
    except OSError as error:
        raise PagerError(
            f"--prometheus {host}:{port} cannot be served: {error.strerror}; take another port"
        ) from error
    with server:
        click.echo(f"serving {server.url}; Ctrl-C ends it", err=True)
        server.timeout = interval
        try:
            while _goes_on(target):
                server.handle_request()
        except KeyboardInterrupt:
            return
    click.echo(f"training {target} has ended")


def _goes_on(target: str | None) -> bool:
    if target is None:
        return True
    found = _one(target)
    for training in found:
        training.close()
    return bool(found)


def _one(target: str) -> list[Training]:
    """The training, or nothing if it has ended."""
    try:
        training = open_training(target)
    except NoSuchProcess:
        return []
    if training.ended:
        training.close()
        return []
    return [training]
