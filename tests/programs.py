"""Runs Python programs in processes of their own, without the seconds that loading PyTorch takes.

``run(script, …)`` and ``run("-c", code, …)`` do what ``python script …`` does. One process, started
with the first program, loads what such programs import, and forks for each of them a child that has
run nothing else. It ends with the process that started it.

In full runs it loads nothing, and programs are started as users start them. (Not by the process
that runs the tests: the kernel lets a program's peak memory begin with that of who started it.)
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

FULL = os.environ.get("TENSORPAGER_FULL") == "1"
SECONDS = 1800.0  # no program takes that long, on the busiest machine
LOADED = ("torch._dynamo", "torch.profiler", "tensorpager.pager.api")


@dataclass(frozen=True)
class Ended:
    """``max_rss``: bytes at the peak, as the kernel counted them."""

    returncode: int
    stdout: str
    stderr: str
    max_rss: int


def run(*arguments: str, env: dict[str, str] | None = None, timeout: float = SECONDS) -> Ended:
    """A program that is killed after ``timeout`` seconds. ``env``: instead of this process's."""
    with ExitStack() as stack:
        out, err = (stack.enter_context(tempfile.NamedTemporaryFile("r+")) for _ in range(2))
        returncode, max_rss = _Server.start(
            [str(argument) for argument in arguments],
            dict(os.environ if env is None else env),
            (out.name, err.name),
            timeout,
        )
        return Ended(returncode, out.read(), err.read(), max_rss)


class _Server:
    """The process that forks: this file as a script."""

    process: subprocess.Popen[str] | None = None

    @classmethod
    def start(
        cls, arguments: list[str], env: dict[str, str], files: tuple[str, str], timeout: float
    ) -> tuple[int, int]:
        if cls.process is None:
            cls.process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
        assert cls.process.stdin is not None
        assert cls.process.stdout is not None
        job = {"arguments": arguments, "env": env, "files": files, "folder": os.getcwd()}
        print(json.dumps(job), file=cls.process.stdin, flush=True)
        pid = int(cls.process.stdout.readline())
        timer = threading.Timer(timeout, _kill, (pid,))
        timer.start()
        try:
            returncode, max_rss = json.loads(cls.process.stdout.readline())
        finally:
            timer.cancel()
        return returncode, max_rss


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, 9)


def _serve() -> dict[str, Any]:
    """Forks a child for each job. Returns in the child."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            job: dict[str, Any] = json.loads(line)
            return job
        print(pid, flush=True)
        _, status, usage = os.wait4(pid, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), usage.ru_maxrss << 10]), flush=True)
    sys.exit()


def _become(job: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give this process what Python gives a program; its code, and what that runs in."""
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["folder"])
    for descriptor, path in enumerate([os.devnull, *job["files"]]):
        flags = os.O_WRONLY if descriptor else os.O_RDONLY
        os.dup2(os.open(path, flags), descriptor)
    if FULL:
        os.execv(sys.executable, [sys.executable, *job["arguments"]])
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    what, *rest = job["arguments"]
    if what == "-c":
        source, name, sys.path[0] = rest.pop(0), "<string>", ""
    else:
        source, name, sys.path[0] = Path(what).read_text(), what, str(Path(what).parent)
        main.__file__ = what
    sys.argv = [what, *rest]
    return compile(source, name, "exec", dont_inherit=True), main.__dict__


if __name__ == "__main__":
    for _name in () if FULL else LOADED:
        __import__(_name)
    gc.freeze()  # a child does not look through, and so copy, all that is loaded when it ends
    exec(*_become(_serve()))
