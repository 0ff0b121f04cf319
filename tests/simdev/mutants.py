"""Faults in the runtime's own ordering, one line each, to see that the tests here find them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Mutant(NamedTuple):
    """In ``file``, where ``before`` is once, ``line`` is replaced by ``fault``."""

    file: str
    line: str
    fault: str
    case: str  # of orders.py, or a training, that finds it under the schedule "lazy"
    before: str = ""  # what precedes the line, if that is there more than once

    def broken(self) -> str:
        """The text of ``file`` then."""
        text, old = (ROOT / self.file).read_text(), self.before + self.line
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {self.file}"
        return text.replace(old, self.before + self.fault)


class Finding(NamedTuple):
    """``how``: "race", "bytes" or "error"; ``None`` where nothing is wrong."""

    how: str | None
    text: str = ""


CHAOS = "pager/debug/chaos.py"
ACCELERATOR = "pager/devices/accelerator.py"
MIGRATION = "pager/moves/migration.py"
MOVER = "pager/moves/mover.py"
TRANSFERS = "pager/moves/transfers.py"
RESIDENCY = "pager/moves/residency.py"
ON_COMPUTE = "        with self.backend.on_compute():"
HERE = "        if True:"
MUTANTS = {
    # -- copies of faults
    "an out-copy waits for no op": Mutant(
        ACCELERATOR,
        "        self._after_ops(self._out)\n",
        "",
        "pages_take_turns_in_one_frame",
    ),
    "an in-copy waits for no op": Mutant(
        ACCELERATOR,
        "        self._after_ops(self._in)\n",
        "",
        "a_late_op_and_a_page_that_comes",
    ),
    "an in-copy waits for no out-copy": Mutant(
        ACCELERATOR,
        "        self._in.wait_stream(self._out)\n",
        "",
        "pages_take_turns_in_one_frame",
    ),
    "an op does not wait for in-copies": Mutant(
        ACCELERATOR,
        "        self._compute.wait_stream(self._in)\n",
        "        pass\n",
        "pages_take_turns_in_one_frame",
    ),
    "what comes in may be used at once": Mutant(
        MIGRATION,
        "        self.backend.use_frames()\n",
        "",
        "pages_take_turns_in_one_frame",
    ),
    "copies are queued among the ops": Mutant(
        ACCELERATOR,
        "        with on_stream(stream):\n",
        HERE + "\n",
        "a_buffer_of_the_disk_is_filled_again",
    ),
    "copies go on when one has failed": Mutant(
        ACCELERATOR,
        "            stream.synchronize()"
        "  # frames and slots are given back, and some may be queued\n",
        "",
        "a_copy_fails_behind_others",
    ),
    # -- the host
    "the host does not wait for out-copies": Mutant(
        ACCELERATOR,
        "        self._out.synchronize()\n",
        "",
        "a_buffer_of_the_disk_is_filled_again",
        "    def host_ready(self) -> None:\n",
    ),
    "the host does not wait for in-copies": Mutant(
        ACCELERATOR,
        "        self._in.synchronize()\n",
        "",
        "a_buffer_of_the_disk_is_filled_again",
    ),
    "the disk writes before its bytes are there": Mutant(
        TRANSFERS,
        "                    self._backend.host_ready()\n",
        "                    pass\n",
        "disk",
    ),
    "a staging buffer is filled again while it is read": Mutant(
        TRANSFERS,
        "                self._backend.host_ready()\n",
        "                pass\n",
        "disk",
        "            if copies and not transfer.queued:\n",
    ),
    "a checksum is made of bytes that have not arrived": Mutant(
        TRANSFERS,
        "                self._backend.host_ready()\n",
        "                pass\n",
        "pages_are_verified",
        "            if not transfer.queued:\n",
    ),
    "a page is saved before it has arrived": Mutant(
        TRANSFERS,
        "        self._backend.host_ready()\n",
        "",
        "a_page_is_saved_from_where_it_is",
        "        self._verify_host(pages, versions, slots)\n",
    ),
    "the clock is read before the work is done": Mutant(
        ACCELERATOR,
        "        after.synchronize()\n",
        "",
        "the_clock_is_read_when_the_work_is_done",
    ),
    "the link is measured with what is not there yet": Mutant(
        "pager/machine/calibration/link.py",
        "    stream.wait_stream(torch.accelerator.current_stream(backend.device))"
        "  # which fills it\n",
        "",
        "the_link_is_measured",
    ),
    "the link is measured while it is at work": Mutant(
        "pager/machine/calibration/link.py",
        "        ended.synchronize()  # so nothing uses the memory on either side any more\n",
        "",
        "the_link_is_measured",
    ),
    # -- several streams of ops
    "a new stream of ops does not wait for the others": Mutant(
        ACCELERATOR,
        "            self._after_ops(here)\n",
        "",
        "a_page_is_used_on_two_streams",
    ),
    "only the latest stream of ops counts": Mutant(
        ACCELERATOR,
        "        yield from self._others\n",
        "",
        "a_late_op_and_a_page_that_leaves",
    ),
    "the stream of ops is not looked at": Mutant(
        "pager/core.py",
        "            self.backend.note_compute()\n",
        "",
        "a_page_is_used_on_two_streams",
    ),
    "nor where a part is pinned": Mutant(
        "pager/tensor/slabs.py",
        "        pager.backend.note_compute()\n",
        "",
        "a_part_is_used_on_another_stream",
    ),
    # -- what the runtime queues among the ops
    "a frame is written while its page leaves": Mutant(
        ACCELERATOR,
        "        self._compute.wait_stream(self._out)\n",
        "",
        "a_new_page_takes_the_frame_of_one_that_leaves",
    ),
    "a frame is written while a late op uses it": Mutant(
        ACCELERATOR,
        "        self._after_ops(self._compute)\n",
        "",
        "a_late_op_and_a_new_page",
    ),
    "ops of the runtime are queued wherever": Mutant(
        ACCELERATOR,
        "        with on_stream(self._compute):\n",
        "        with on_stream(torch.Stream(self.device)):\n",
        "a_new_page_takes_the_frame_of_one_that_leaves",
    ),
    "a new page takes its frame at once": Mutant(
        RESIDENCY,
        ON_COMPUTE + "\n            if not run.overwritten:\n",
        HERE + "\n            if not run.overwritten:\n",
        "a_new_page_takes_the_frame_of_one_that_leaves",
    ),
    "a page slides at once": Mutant(
        RESIDENCY,
        "    " + ON_COMPUTE,
        "    " + HERE,
        "pages_slide_to_the_frames_of_one_that_leaves",
    ),
    "a page moves at once": Mutant(
        RESIDENCY,
        ON_COMPUTE,
        HERE,
        "a_page_moves_to_the_frame_of_one_that_leaves",
        "        device = self.backend.device\n",
    ),
    "chaos writes at once": Mutant(
        CHAOS,
        "                with pager.backend.on_compute():\n",
        "                if True:\n",
        "chaos_writes_to_the_frame_of_one_that_leaves",
    ),
    "a kernel reads the frames of later": Mutant(
        "pager/memory/page_table.py",
        "        return upload("
        "torch.from_numpy(self.frame[first : first + count]), self._device)\n",
        "        return upload(torch.from_numpy(self.frame[:count]), self._device)\n",
        "scattered",
    ),
    # -- planned moves
    "a mark is of no moment": Mutant(
        ACCELERATOR,
        "            events[-1].record(stream)\n",
        "",
        "a_planned_page_leaves_and_comes",
    ),
    "a mark is made of another stream": Mutant(
        ACCELERATOR,
        "            events[-1].record(stream)\n",
        "            events[-1].record(self._in)\n",
        "a_planned_page_leaves_and_comes",
    ),
    "a planned copy does not wait for its mark": Mutant(
        ACCELERATOR,
        "            stream.wait_event(event)\n",
        "            pass\n",
        "a_planned_page_leaves_and_comes",
    ),
    "a planned copy does not wait for those of faults": Mutant(
        ACCELERATOR,
        "        stream.wait_stream(self._out)\n",
        "",
        "a_page_that_left_by_a_fault_comes_as_planned",
    ),
    "a planned copy ends before its bytes have moved": Mutant(
        ACCELERATOR,
        "        stream.synchronize()\n",
        "",
        "a_planned_page_leaves_and_comes",
        "        self._copy(stream, copies, to_device=to_device)\n",
    ),
    "a planned out-copy is given no mark": Mutant(
        MOVER,
        "        mark = self._residency.backend.mark()\n",
        "        mark = None\n",
        "a_planned_page_leaves_and_comes",
    ),
    "a planned in-copy is given no mark": Mutant(
        MOVER,
        "            mark = self._residency.mark_of(ends)\n",
        "            mark = None\n",
        "a_planned_page_comes_to_a_frame_that_was_in_use",
    ),
    "a planned in-copy is given the oldest mark of its frames": Mutant(
        RESIDENCY,
        "        return max(marks, key=lambda mark: mark[0])[1] if marks else None\n",
        "        return min(marks, key=lambda mark: mark[0])[1] if marks else None\n",
        "frames_of_a_planned_page_were_given_back_one_by_one",
    ),
    "frames are given back without a mark": Mutant(
        RESIDENCY,
        "        self.note_use(frames)\n",
        "",
        "a_planned_page_comes_to_a_frame_that_was_in_use",
        "    def _give_back(self, frames: Int32) -> None:\n",
    ),
    "chaos writes, and its frames have no mark": Mutant(
        CHAOS,
        "                pager.residency.note_use(frames)\n",
        "",
        "a_planned_page_comes_to_a_frame_that_chaos_has_written",
    ),
    "a page moves, and its frames have no mark": Mutant(
        RESIDENCY,
        "        self.note_use(old)\n",
        "",
        "a_planned_page_comes_to_a_frame_that_one_has_moved_from",
    ),
    "a page slides, and its frames have no mark": Mutant(
        RESIDENCY,
        "            self.note_use(sources)\n",
        "",
        "a_planned_page_comes_to_a_frame_that_one_has_slid_from",
    ),
    "a planned out-copy to the host has no mark": Mutant(
        TRANSFERS,
        "            backend.carry_out(copies, mark)\n",
        "            backend.carry_out(copies, None)\n",
        "a_planned_page_leaves_and_comes",
    ),
    "a planned in-copy from the host has no mark": Mutant(
        TRANSFERS,
        "            backend.carry_in(copies, mark)\n",
        "            backend.carry_in(copies, None)\n",
        "a_planned_page_comes_to_a_frame_that_was_in_use",
    ),
    "a planned out-copy to the disk has no mark": Mutant(
        TRANSFERS,
        "            backend.carry_out(copies, mark)\n",
        "            backend.carry_out(copies, None)\n",
        "planned_pages_pass_through_the_disks_buffers",
    ),
    "a planned in-copy from the disk has no mark": Mutant(
        TRANSFERS,
        "            backend.carry_in(copies, mark)\n",
        "            backend.carry_in(copies, None)\n",
        "planned_pages_pass_through_the_disks_buffers",
    ),
    # -- tickets
    "a transfer does not wait for those before it": Mutant(
        "pager/moves/tickets.py",
        "                before.wait()\n",
        "                pass\n",
        "a_page_comes_to_the_frame_of_one_that_leaves",
    ),
    "an op does not wait for its tickets": Mutant(
        RESIDENCY,
        "        self.migration.tickets.wait(tickets, self.turns.lock)\n",
        "",
        "a_page_comes_to_the_frame_of_one_that_leaves",
    ),
    "what is on its way may be used": Mutant(
        RESIDENCY,
        "        there = self.is_whole(run) and "
        'not self.migration.tickets.of(("device", frames))\n',
        "        there = self.is_whole(run)\n",
        "a_page_comes_to_the_frame_of_one_that_leaves",
    ),
    "a new page does not wait for one that leaves": Mutant(
        RESIDENCY,
        '        tickets.wait(tickets.of(("device", frames)))\n',
        "        pass\n",
        "a_new_page_takes_the_frame_of_one_that_is_queued",
    ),
    # -- a disk that moves frames itself
    "the disk writes frames that are in use": Mutant(
        TRANSFERS,
        "                self._reach(transfer)\n",
        "                pass\n",
        "the_disk_moves_frames",
        "            else:\n",
    ),
    "the disk reads into frames that are in use": Mutant(
        TRANSFERS,
        "                self._reach(transfer)\n",
        "                pass\n",
        "the_disk_fills_a_frame_that_was_in_use",
        "            if not copies:\n",
    ),
    "the disk writes frames before their mark": Mutant(
        TRANSFERS,
        "                self._reach(transfer)\n",
        "                pass\n",
        "the_disk_moves_frames_as_planned",
        "            else:\n",
    ),
    "the disk reads into frames before their mark": Mutant(
        TRANSFERS,
        "                self._reach(transfer)\n",
        "                pass\n",
        "the_disk_moves_frames_as_planned",
        "            if not copies:\n",
    ),
    "the host does not wait for a mark": Mutant(
        ACCELERATOR,
        "            event.synchronize()\n",
        "            pass\n",
        "the_disk_moves_frames",
    ),
    "the disk does not wait for a page that leaves for the host": Mutant(
        ACCELERATOR,
        "            event.synchronize()\n        self._out.synchronize()\n",
        "            event.synchronize()\n",
        "the_disk_fills_a_frame_whose_page_leaves",
    ),
    # -- memory that is given back
    "the border moves under ops": Mutant(
        ACCELERATOR,
        "        if self.can_unmap:\n            self._settle()\n",
        "",
        "the_border_moves_under_what_is_queued",
    ),
    "memory is given back under copies": Mutant(
        ACCELERATOR,
        "        torch.accelerator.synchronize(self.device)\n",
        "",
        "the_border_moves_under_what_is_queued",
    ),
    "the arena is made anew under copies": Mutant(
        ACCELERATOR,
        "        self._settle()\n",
        "",
        "the_arena_is_made_anew_under_what_is_queued",
        "    def remake(self, nbytes: int, *, empty: bool) -> bool:\n",
    ),
    "the old arena is given back while it is read": Mutant(
        "pager/devices/plain_memory.py",
        "        torch.accelerator.synchronize(self._device)"
        "  # the old one may be memory of another stream\n",
        "",
        "the_arena_is_made_anew_on_another_stream",
    ),
    "the pager is closed under copies": Mutant(
        "pager/core.py",
        "            self.backend.wait(self.backend.mark())\n",
        "",
        "host_memory_is_given_back_under_what_is_queued",
    ),
    "the pager is closed under ops": Mutant(
        "pager/core.py",
        "            self.backend.wait(self.backend.mark())\n",
        "            self.backend.host_ready()\n",
        "the_arena_is_given_back_under_what_is_queued",
    ),
}


def found(mutants: Sequence[Mutant]) -> list[Finding]:
    """What is found in the case of each, in a process of its own.

    They are forked off one that has loaded PyTorch and nothing of the package.
    """
    given = json.dumps(mutants)
    done = subprocess.run(
        [sys.executable, "-m", "simdev.mutants"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        input=given, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [Finding(*finding) for finding in json.loads(done.stdout)]


def _broken_copy(mutant: Mutant, folder: Path) -> None:
    """The package in ``folder``, with one line changed."""
    for name in ("pager", "kernels", "planner"):
        shutil.copytree(
            ROOT / name,
            folder / "tensorpager" / name,
            ignore=shutil.ignore_patterns("__pycache__", "vendor", "web"),
        )
    for path in (ROOT / "tensorpager").glob("*.py"):
        shutil.copy(path, folder / "tensorpager")
    (folder / "tensorpager" / mutant.file).write_text(mutant.broken())


def _look(name: str, folder: Path) -> Finding:
    """What is wrong in this case."""
    import pytest
    import torch

    from .device import simulated
    from .orders import SCRIPTS
    from .references import queue_references
    from .trainings import CASES, expected_of, run

    torch.set_num_threads(1)
    machine = simulated()
    queue_references(machine, pytest.MonkeyPatch())
    wrong = False
    try:
        if name in SCRIPTS:
            machine.schedule("lazy")
            SCRIPTS[name](machine, folder)
        else:
            expected = expected_of(CASES[name], machine, folder)
            machine.schedule("lazy")
            wrong = not run(CASES[name], machine, folder).same(expected)
    except AssertionError:
        wrong = True
    except Exception as error:
        return Finding("error", f"{type(error).__name__}: {error}")
    if races := machine.races():
        return Finding("race", races[0])
    return Finding("bytes" if wrong else None)


def _in_a_child(mutant: Mutant) -> Finding:
    with tempfile.TemporaryDirectory() as made:
        folder, result = Path(made), Path(made, "result")
        _broken_copy(mutant, folder)
        pid = os.fork()
        if not pid:
            os.dup2(2, 1)
            sys.path.insert(0, made)
            result.write_text(json.dumps(_look(mutant.case, folder)))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status:
            return Finding("error", f"ended with {os.waitstatus_to_exitcode(status)}")
        return Finding(*json.loads(result.read_text()))


if __name__ == "__main__":
    import pytest  # noqa: F401
    import torch._dynamo
    import torch._meta_registrations  # noqa: F401

    print(json.dumps([_in_a_child(Mutant(*given)) for given in json.load(sys.stdin)]))
