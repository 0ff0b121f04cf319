"""``tensorpager record``: a trace of a training script that is left as it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import click

from ...planner.commands.failures import CheckFailed
from ...planner.commands.options import json_option
from ...planner.commands.output import emit_json, output_path
from ...planner.errors import PagerError
from .record import (
    DEFAULT_ITERATION,
    EVERY_VARIABLE,
    ITERATION_VARIABLE,
    PATH_VARIABLE,
    REPORT_VARIABLE,
)

PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
FROM_TERMINAL = ("SIGINT", "SIGQUIT")  # which a terminal sends to the command as well


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("trace.parquet"),
    show_default=True,
    callback=output_path,
    help="The trace, a Parquet file.",
)
@click.option(
    "--iteration",
    type=click.IntRange(min=1),
    default=DEFAULT_ITERATION,
    show_default=True,
    help="Which one to record; the first ones are not typical.",
)
@click.option(
    "--every",
    type=click.IntRange(min=1),
    metavar="N",
    help="Steps of optimizers that make an iteration, in a script without a Pager (default: one of "
    "each optimizer that steps).",
)
@json_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def record(
    context: click.Context,
    output: Path,
    iteration: int,
    every: int | None,
    as_json: bool,
    command: Sequence[str],
) -> None:
    """Run a training script and record one of its iterations.

    The script needs no change, and runs to its end. One that pages with tensorpager marks its
    iterations with `with pager.iteration():`. In any other PyTorch script an iteration ends with
    the step of its optimizer, the last one where there are several, or with every N-th step; on a
    GPU use torch.profiler for that, and `tensorpager import`.

    With --json what the script prints goes to stderr.

    \b
    Example:
      tensorpager record -o trace.parquet -- python train.py --steps 10

    Exits as the script does, and with 1 if the script is fine but the trace was not written.
    """
    with tempfile.TemporaryDirectory(prefix="tensorpager-record-") as folder:
        settings = {
            PATH_VARIABLE: os.path.abspath(output),
            ITERATION_VARIABLE: str(iteration),
            REPORT_VARIABLE: folder,
            "PYTHONPATH": _with_watch(Path(folder)),
            **({} if every is None else {EVERY_VARIABLE: str(every)}),
        }
        code = _run(command, settings, sys.stderr if as_json else None)
        reports = _reports(Path(folder))
    written = next((report for report in reports if report.get("written")), None)
    reason = None if written else f"{output} was not written: {_reason(reports, iteration)}"
    if as_json:
        facts = {name: (written or {}).get(name) for name in ("iterations", "ops", "tensors")}
        facts = {"iteration": facts.pop("iterations"), **facts}
        content = {"path": str(output), "written": bool(written), "reason": reason, **facts}
        emit_json({**content, "exit_code": code})
    if written is not None:
        said = f"iteration {written['iterations']}, {written['ops']} ops, {written['tensors']}"
        click.echo(f"tensorpager: wrote {output}: {said} tensors", err=True)
        context.exit(code)
    if code == 0:
        raise CheckFailed(str(reason))
    click.echo(f"tensorpager record: {reason} (it ended with exit code {code})", err=True)
    context.exit(code)


WATCH = """
# Python runs this at its start: when PyTorch has been loaded, tensorpager watches its optimizers.
import contextlib, os, sys

HERE = os.path.dirname(os.path.abspath(__file__))


class Torch:
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                with contextlib.suppress(ImportError):
                    from tensorpager.pager.plan.plain_script import watch
                    watch()

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Torch())
# The one that would have been run without us.
sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != HERE]
ours = sys.modules.pop("sitecustomize")
try:
    import sitecustomize
except ImportError:
    sys.modules["sitecustomize"] = ours
"""


def _with_watch(folder: Path) -> str:
    """PYTHONPATH with what starts watching in each Python of the program."""
    (folder / "start").mkdir()
    (folder / "start" / "sitecustomize.py").write_text(WATCH)
    before = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(folder / "start"), *([before] if before else [])])


def _run(command: Sequence[str], settings: dict[str, str], stdout: IO[str] | None) -> int:
    """The command's exit code, 128 + n if signal n ended it; it prints to ``stdout``, or ours."""
    try:
        child = subprocess.Popen(command, env={**os.environ, **settings}, stdout=stdout)
    except FileNotFoundError as error:
        raise PagerError(
            f"{command[0]}: no such command; write it as in a shell, after '--'"
        ) from error
    except OSError as error:
        raise PagerError(f"{command[0]}: cannot be run: {error.strerror}") from error
    with _signals_passed_on(child):
        code = child.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _signals_passed_on(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Signals to us are for the child, which decides what becomes of them."""

    def pass_on(number: int, frame: Any) -> None:
        if signal.Signals(number).name in FROM_TERMINAL and _in_foreground():
            return
        with suppress(ProcessLookupError):
            child.send_signal(number)

    before = {}
    for name in PASSED_ON:
        number = getattr(signal, name)
        before[number] = signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _in_foreground() -> bool:
    """Whether a terminal's keys send signals to our group of processes, the child among them."""
    try:
        return sys.stdin is not None and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # not a terminal, or closed
        return False


def _reports(folder: Path) -> list[dict[str, Any]]:
    """What each Pager of the run left: ``iterations`` completed, ``written`` or ``error``."""
    found = []
    for path in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError):  # one that was killed in the middle of it
            found.append(json.loads(path.read_text()))
    return found


def _reason(reports: list[dict[str, Any]], iteration: int) -> str:
    errors = [report["error"] for report in reports if "error" in report]
    if errors:
        return str(errors[0])
    if not reports:
        return "the program loaded no PyTorch, so there was nothing to record"
    done = max(report["iterations"] for report in reports)
    if done == 0:
        return (
            "no iteration was completed: no optimizer has stepped twice, or there is a Pager and "
            "no 'with pager.iteration():' (pager.record() in the script needs none)"
        )
    if done < iteration:
        return f"only {done} of {iteration} iterations were completed; lower --iteration"
    return f"iteration {iteration} began and was not completed; record another one (--iteration)"
