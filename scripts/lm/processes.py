"""Commands with a time limit, of which no process is left over."""

import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GRACE_SECONDS = 4.0  # between the request to end and the end of all of its processes
TIMED_OUT = 124
IDLE_SECONDS = 300.0  # without CPU time, after which what is limited by it counts as stuck
_LOOK_SECONDS = 0.5  # between two looks at CPU time
_TICKS = os.sysconf("SC_CLK_TCK")

Record = dict[str, Any]

_running: set[int] = set()  # sessions of processes that have not ended


def run_command(
    command: Sequence[str], seconds: float, more: Mapping[str, str], *, of_cpu: bool = False
) -> Record:
    """Run `command` in the repository's root, for so many `seconds` at most; with ``of_cpu``, of
    CPU time of all its processes, so that it has as long on a machine where others work.

    It has a session of its own, none of whose processes survives. At the end of its time it is
    first interrupted, as by Ctrl-C, so that it can say how far it came. `more` is added to the
    environment, in which the package can be imported.

    Returns exit_code (TIMED_OUT if it took too long), seconds and output.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, **more}
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _running.add(process.pid)
        code = TIMED_OUT
        try:
            most = max(seconds - GRACE_SECONDS, 0.1)
            code = _wait_by_cpu_time(process, most) if of_cpu else process.wait(most)
        except subprocess.TimeoutExpired:
            _signal_session(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        finally:
            _signal_session(process.pid, signal.SIGKILL)  # also what it left behind
            _running.discard(process.pid)
            process.wait()
        output.seek(0)
        text = output.read()
    return {"exit_code": code, "seconds": round(time.monotonic() - began, 1), "output": text}


def ended_cpu_seconds() -> float:
    """CPU time of all processes that this one started and that ended: a clock for ``of_cpu``."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _wait_by_cpu_time(process: subprocess.Popen[str], seconds: float) -> int:
    """Its exit code. Raises ``TimeoutExpired`` where its session took more CPU time, or none at all
    for IDLE_SECONDS."""
    used, since = 0.0, time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_LOOK_SECONDS)
        now, before = _session_cpu_seconds(process.pid), used
        used = max(used, now)
        if used > before:
            since = time.monotonic()
        if used >= seconds or time.monotonic() - since >= IDLE_SECONDS:
            raise subprocess.TimeoutExpired(process.args, seconds)


def _session_cpu_seconds(leader: int) -> float:
    """Of the session's processes, and of those that they have waited for."""
    ticks = 0  # of their own and their children's, in user and in kernel mode
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader:
                    ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS


def _signal_session(leader: int, which: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, which)


@contextmanager
def ending_all() -> Iterator[None]:
    """Within it, Ctrl-C and SIGTERM end what is running too, which has sessions of its own."""

    def end(number: int, _frame: object) -> None:
        for leader in list(_running):
            _signal_session(leader, signal.SIGKILL)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
