"""``tensorpager top``: look at a training while it runs."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import nullcontext, suppress
from typing import Any

import click

from ...planner.commands.options import json_option
from ...planner.commands.output import PIPE_WIDTH, draws_over, emit, emit_json, emit_text
from ...planner.errors import PagerError
from .rates import History, description
from .reader import NoSuchProcess, Training, find_trainings, open_training

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
@click.argument("target", metavar="[PID]", required=False)
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
    help="Serve http://HOST:PORT/metrics for Prometheus (host: 127.0.0.1); needs "
    "tensorpager[prometheus].",
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
    several, it lists them, and a PID chooses (`1234.2`: the second Pager of process 1234). Ctrl-C
    ends it; the training is not touched.

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
        _serve(target, *prometheus)
        return
    trainings = [open_training(target)] if target is not None else find_trainings()
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
    from .view import listing

    if json:
        emit_json({"trainings": [description(t, History(t.latest)) for t in trainings]})
        return
    names = f"tensorpager top {trainings[-1].name}"
    emit(listing(trainings), "", f"Several trainings run; choose one: {names}")


def _show(training: Training, interval: float, *, once: bool, json: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    from .view import Screen, format_duration, frame

    history, terminal = History(training.latest), sys.stdout.isatty()
    if once or json:
        _second_record(training, history, interval)
        if json:
            emit_json(description(training, history))
            return
        if not training.ended:
            columns = shutil.get_terminal_size().columns if terminal else PIPE_WIDTH
            emit(frame(training, history, Screen(columns)))
    else:
        console = Console(markup=False, emoji=False, highlight=False)
        over = terminal and draws_over()
        live = Live(console=console, screen=True, auto_refresh=False) if over else None
        with suppress(KeyboardInterrupt), live or nullcontext():
            while not training.ended:
                if live is not None:
                    live.update(frame(training, history, Screen(*console.size)), refresh=True)
                else:  # into a pipe or a file: one below the other
                    emit(frame(training, history, Screen(PIPE_WIDTH)), "")
                time.sleep(interval)
                history.add(training.read())
    if training.ended:
        latest = training.latest
        ran = format_duration(latest["updated"] - latest["started"])
        emit_text(
            f"{latest['script']} (PID {training.name}) has ended, after "
            f"{latest['iterations']:,} iterations and {ran}"
        )


def _second_record(training: Training, history: History, interval: float) -> None:
    """Wait until rates over ``interval`` are known; not for ever, the training may be stopped."""
    deadline = time.monotonic() + interval + _SECOND_RECORD_SECONDS
    while history.span_seconds < interval and time.monotonic() < deadline and not training.ended:
        time.sleep(min(interval, 0.1))
        history.add(training.read())


def _serve(target: str | None, host: str, port: int) -> None:
    """Until Ctrl-C."""
    from .prometheus import serve

    def find() -> list[Training]:
        try:
            return find_trainings() if target is None else [open_training(target)]
        except NoSuchProcess:
            return []

    try:
        server, thread = serve(host, port, find)
    except ImportError as error:
        raise PagerError(
            "--prometheus needs its client library: pip install 'tensorpager[prometheus]'"
        ) from error
    except OSError as error:
        raise PagerError(
            f"--prometheus {host}:{port} cannot be served: {error.strerror}; take another port"
        ) from error
    click.echo(f"serving http://{host}:{server.server_port}/metrics; Ctrl-C ends it", err=True)
    with suppress(KeyboardInterrupt):
        thread.join()
    server.server_close()
