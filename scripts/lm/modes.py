"""Modes of a benchmark: which ones are asked for, in turn, each in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import click


def chosen(text: str, known: Collection[str]) -> list[str]:
    """Of ``--modes A,B,…``. Raises ``click.UsageError`` for one that is not ``known``."""
    modes = text.split(",")
    unknown = [mode for mode in modes if mode not in known]
    if unknown:
        raise click.UsageError(f"--modes names {unknown[0]!r}; choose of {', '.join(known)}")
    return modes


def in_turn(modes: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, mode), another one first in each round."""
    for turn in range(rounds):
        first = turn % len(modes)
        for mode in (*modes[first:], *modes[:first]):
            yield turn, mode


def in_child(script: str, request: dict[str, Any]) -> dict[str, Any]:
    """The last line that ``script --child REQUEST`` prints, which is JSON."""
    command = [sys.executable, script, "--child", json.dumps(request)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
