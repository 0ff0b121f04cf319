"""Faults in the runtime's own ordering, one line each, to see that the lanes here find them.

``python -m simdev.mutants CASE...``, with a broken copy of the package in front of PYTHONPATH,
prints what is found as a JSON object: how ("race", "bytes", "error"), in which case, and the text;
all null where nothing is.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Mutant(NamedTuple):
    """In ``file``, where ``before`` is once, ``line`` is replaced by ``fault``."""

    file: str
    line: str
    fault: str
    case: str  # a training that finds it, under the schedule "lazy"
    before: str = ""  # what precedes the line, if that is there more than once


ACCELERATOR = "pager/devices/accelerator.py"
MUTANTS = {
    "an out-copy waits for no op": Mutant(
        ACCELERATOR,
        "        self._after_compute(self._out)\n",
        "",
        "tight",
    ),
    "an in-copy waits for no op": Mutant(
        ACCELERATOR,
        "        self._after_compute(self._in)\n",
        "",
        "tight",
    ),
    "an op does not wait for in-copies": Mutant(
        ACCELERATOR,
        "        self._here().wait_stream(self._in)\n",
        "        pass\n",
        "tight",
    ),
    "the host does not wait for out-copies": Mutant(
        ACCELERATOR,
        "        self._out.synchronize()\n",
        "",
        "disk",
    ),
    "the host does not wait for in-copies": Mutant(
        ACCELERATOR,
        "        self._in.synchronize()\n",
        "",
        "disk",
    ),
    "a mark is of no moment": Mutant(
        ACCELERATOR,
        "        event.record(self._compute)\n",
        "",
        "lp",
    ),
    "a mark is made of another stream": Mutant(
        ACCELERATOR,
        "        event.record(self._compute)\n",
        "        event.record(self._in)\n",
        "tight",
    ),
    "a new stream of ops does not wait for the others": Mutant(
        ACCELERATOR,
        "                here.wait_stream(stream)\n",
        "                pass\n",
        "side stream",
    ),
    "a planned copy does not wait for its mark": Mutant(
        ACCELERATOR,
        "            stream.wait_event(mark)\n",
        "            pass\n",
        "lp",
    ),
    "a planned copy ends before its bytes have moved": Mutant(
        ACCELERATOR,
        "        stream.synchronize()\n",
        "",
        "lp",
    ),
    "copies are queued among the ops": Mutant(
        ACCELERATOR,
        "        with on_stream(stream):\n",
        "        if True:\n",
        "disk",
    ),
    "ops of the runtime are queued wherever": Mutant(
        ACCELERATOR,
        "        return on_stream(self._compute)\n",
        "        return on_stream(torch.Stream(self.device))\n",
        "lp",
    ),
    "the stream of ops is not looked at": Mutant(
        "pager/api.py",
        "            self.backend.note_compute()\n",
        "",
        "side stream",
        "    def pin(self, runs: Sequence[PageRun]) -> None:\n"
        '        """Bring ``runs`` onto the device and keep them there until :meth:`unpin`."""\n'
        "        if self.closed_reason is not None:\n"
        "            self.check_open()\n"
        "        with self.lock:\n",
    ),
    "frames are given back without a mark": Mutant(
        "pager/moves/residency.py",
        "        self.note_use(frames)\n",
        "",
        "lp",
        "    def _give_back(self, frames: Int32) -> None:\n",
    ),
    "what comes in may be used at once": Mutant(
        "pager/moves/migration.py",
        "        self.backend.use_frames()\n",
        "",
        "tight",
    ),
    "the disk writes before its bytes are there": Mutant(
        "pager/moves/migration.py",
        "                    self.backend.host_ready()\n",
        "",
        "disk",
        "                    self.backend.copy_out(batch)\n",
    ),
    "a staging buffer is filled again while it is read": Mutant(
        "pager/moves/migration.py",
        "                self.backend.host_ready()\n",
        "",
        "disk",
        "                self.backend.copy_in(batch)\n",
    ),
    "a planned out-copy is given no mark": Mutant(
        "pager/moves/transfers.py",
        "                to_device=False, mark=self._backend.mark(),\n",
        "                to_device=False, mark=None,\n",
        "lp",
    ),
    "a planned in-copy is given no mark": Mutant(
        "pager/moves/transfers.py",
        "            to_device=True, mark=self._residency.mark_of(together),\n",
        "            to_device=True, mark=None,\n",
        "lp",
    ),
    "a kernel reads the frames of later": Mutant(
        "pager/memory/page_table.py",
        "        return upload("
        "torch.from_numpy(self.frame[first : first + count]), self._device)\n",
        "        return upload(torch.from_numpy(self.frame[:count]), self._device)\n",
        "scattered",
    ),
}


def broken_copy(mutant: Mutant | None, folder: Path) -> None:
    """The package in ``folder``, with one line changed."""
    for name in ("pager", "kernels", "planner"):
        shutil.copytree(
            ROOT / name,
            folder / "tensorpager" / name,
            ignore=shutil.ignore_patterns("__pycache__", "vendor", "web"),
        )
    for path in (ROOT / "tensorpager").glob("*.py"):
        shutil.copy(path, folder / "tensorpager")
    if mutant is not None:
        path = folder / "tensorpager" / mutant.file
        text, old = path.read_text(), mutant.before + mutant.line
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {mutant.file}"
        path.write_text(text.replace(old, mutant.before + mutant.fault))


def look(names: list[str], folder: Path) -> dict[str, str | None]:
    """The first case in which something is wrong."""
    import pytest
    import torch

    from .device import simulated
    from .references import queue_references
    from .trainings import CASES, expected_of, run

    torch.set_num_threads(1)
    machine = simulated()
    queue_references(machine, pytest.MonkeyPatch())
    for name in names:
        case = CASES[name]
        expected = expected_of(case, machine, folder) if case.like_plain else None
        machine.schedule("lazy")
        try:
            outcome = run(case, machine, folder)
            races = machine.races()
        except Exception as error:
            return {"how": "error", "case": name, "text": f"{type(error).__name__}: {error}"}
        if races:
            return {"how": "race", "case": name, "text": races[0]}
        if expected is not None and not outcome.same(expected):
            return {"how": "bytes", "case": name, "text": ""}
    return {"how": None, "case": None, "text": None}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        print(json.dumps(look(sys.argv[1:], Path(made))))
