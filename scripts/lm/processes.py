"""Commands with a time limit, of which no process is left over."""

import os
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

Record = dict[str, Any]

_running: set[int] = set()  # sessions of processes that have not ended


def run_command(command: Sequence[str], seconds: float, more: Mapping[str, str]) -> Record:
    """Run `command` in the repository's root, for so many `seconds` at most.

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
            code = process.wait(max(seconds - GRACE_SECONDS, 0.1))
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
