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
MOVER = "pager/moves/mover.py"
TICKETS = "pager/moves/tickets.py"
TRANSFERS = "pager/moves/transfers.py"
RESIDENCY = "pager/moves/residency.py"
ON_COMPUTE = "        with self.backend.on_compute():"
HERE = "        if True:"
MUTANTS = {
    # -- copies
    "an out-copy waits for no op": Mutant(
        MOVER,
        "        mark = self.backend.mark()\n",
        "        mark = ()\n",
        "pages_take_turns_in_one_frame",
    ),
    "an in-copy waits for no op": Mutant(
        MOVER,
        "        mark = self.backend.mark()\n",
        "        mark = ()\n",
        "a_late_op_and_a_page_that_comes",
    ),
    "a planned out-copy waits for no op": Mutant(
        MOVER,
        "        mark = self.backend.mark()\n",
        "        mark = ()\n",
        "a_planned_page_leaves_and_comes",
    ),
    "a planned in-copy waits for no op": Mutant(
        MOVER,
        "        mark = self.backend.mark()\n",
        "        mark = ()\n",
        "a_planned_page_comes_to_a_frame_that_was_in_use",
    ),
    "a copy for the disk waits for no op": Mutant(
        MOVER,
        "        mark = self.backend.mark()\n",
        "        mark = ()\n",
        "planned_pages_pass_through_the_disks_buffers",
    ),
    "a transfer drops the mark of ops": Mutant(
        TRANSFERS,
        "            self, self.mark + after\n",
        "            self, after\n",
        "a_planned_page_leaves_and_comes",
    ),
    "a copy waits for no mark": Mutant(
        ACCELERATOR,
        "                stream.wait_event(event)\n",
        "                pass\n",
        "pages_take_turns_in_one_frame",
    ),
    "a mark is of no moment": Mutant(
        ACCELERATOR,
        "            events[-1].record(stream)\n",
        "",
        "a_planned_page_leaves_and_comes",
    ),
    "a mark is made of another stream": Mutant(
        ACCELERATOR,
        "            events[-1].record(stream)\n",
        '            events[-1].record(self._copies["disk", 1])\n',
        "a_planned_page_leaves_and_comes",
    ),
    "ops reach no mark": Mutant(
        ACCELERATOR,
        "            self._compute.wait_event(event)\n",
        "            pass\n",
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
    "the host does not wait for a mark": Mutant(
        ACCELERATOR,
        "            event.synchronize()\n",
        "            pass\n",
        "a_buffer_of_the_disk_is_filled_again",
    ),
    "the disk writes before its bytes are there": Mutant(
        TRANSFERS,
        "            self._backend.wait(mark)\n            if transfer.urgent:\n",
        "            if transfer.urgent:\n",
        "disk",
    ),
    "a staging buffer is filled again while it is read": Mutant(
        TRANSFERS,
        "                self._backend.wait(self._staging_marks[user])  # they may still be read\n",
        "",
        "disk",
    ),
    "nobody knows who reads a staging buffer": Mutant(
        TRANSFERS,
        "                    mark = self._staging_marks[user] = "
        "self._copy(transfer, copies, after)\n",
        "                    mark = self._copy(transfer, copies, after)\n",
        "disk",
    ),
    "a checksum is made of bytes that have not arrived": Mutant(
        TRANSFERS,
        "        self._backend.wait(mark)\n        self.stamp_host(",
        "        self.stamp_host(",
        "pages_are_verified",
    ),
    "a page is saved before it has arrived": Mutant(
        TRANSFERS,
        "        backend.wait(backend.copy(copies, URGENT, backend.mark(), to_device=False))\n",
        "        backend.copy(copies, URGENT, backend.mark(), to_device=False)\n",
        "a_page_is_saved_from_where_it_is",
    ),
    "a page is saved before its copy is there": Mutant(
        TRANSFERS,
        "        backend.wait(backend.copy(copies, URGENT, backend.mark(), to_device=False))\n",
        "        backend.copy(copies, URGENT, backend.mark(), to_device=False)\n",
        "a_page_is_saved_from_the_device",
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
        "                self.backend.note_compute()\n",
        "                pass\n",
        "a_page_is_used_on_two_streams",
    ),
    "nor where a part is pinned": Mutant(
        "pager/core.py",
        "            self.backend.note_compute()\n",
        "",
        "a_part_is_used_on_another_stream",
        "keep_parts(parts, streamed=streamed)\n",
    ),
    # -- what the runtime queues among the ops
    "a frame is written while its page leaves": Mutant(
        RESIDENCY,
        '        tickets.wait(tickets.of(("device", frames)))\n',
        "        pass\n",
        "a_new_page_takes_the_frame_of_one_that_leaves",
    ),
    "a frame is written while a late op uses it": Mutant(
        ACCELERATOR,
        "            self._after_ops(self._compute)\n",
        "            pass\n",
        "a_late_op_and_a_new_page",
    ),
    "ops of the runtime are queued wherever": Mutant(
        ACCELERATOR,
        "        with nullcontext() if there else on_stream(self._compute):\n",
        "        with on_stream(torch.Stream(self.device)):\n",
        "a_late_op_and_a_new_page",
    ),
    "a new page takes its frame at once": Mutant(
        RESIDENCY,
        ON_COMPUTE + "\n            if not run.overwritten:\n",
        HERE + "\n            if not run.overwritten:\n",
        "a_late_op_and_a_new_page",
    ),
    "a page that a plan bears takes its frame at once": Mutant(
        RESIDENCY,
        "    " + ON_COMPUTE + "\n                self.arena[base",
        "    " + HERE + "\n                self.arena[base",
        "a_late_op_and_a_page_that_a_plan_bears",
    ),
    "a page that its maker writes takes its frame at once": Mutant(
        RESIDENCY,
        "            self.backend.order_ops()  # its maker writes it\n",
        "            pass\n",
        "a_late_op_and_a_page_that_its_maker_writes",
    ),
    "a page slides at once": Mutant(
        RESIDENCY,
        "    " + ON_COMPUTE,
        "    " + HERE,
        "pages_slide_to_the_frames_of_one_that_leaves",
        "        follows = self.mover.shift(pages, sources, targets)\n        try:\n",
    ),
    "a page moves at once": Mutant(
        RESIDENCY,
        "    " + ON_COMPUTE,
        "    " + HERE,
        "a_page_moves_to_the_frame_of_one_that_leaves",
        "            size, arena = self.page_size, self.arena\n",
    ),
    "chaos writes at once": Mutant(
        CHAOS,
        "                with pager.backend.on_compute():\n",
        "                if True:\n",
        "chaos_writes_to_the_frame_of_one_that_leaves",
    ),
    "a kernel reads the frames of later": Mutant(
        "pager/memory/page_table.py",
        "        frames = self.frame[first : first + count].astype(np.int32)\n",
        "        frames = self.frame[:count].astype(np.int32)\n",
        "scattered",
    ),
    # -- tickets
    "a transfer waits for no thread": Mutant(
        TICKETS,
        "            before.wait()\n",
        "            pass\n",
        "a_page_comes_to_the_frame_of_one_that_leaves_for_the_disk",
    ),
    "streams take what comes after a thread": Mutant(
        MOVER,
        "        if by_them and all(before.is_over for before in ticket.after):\n",
        "        if by_them:\n            ticket.after = []\n",
        "a_page_comes_to_the_frame_of_one_that_leaves_for_the_disk",
    ),
    "a transfer is behind no other": Mutant(
        TICKETS,
        "            error, after = error or before.error, after + before.mark\n",
        "            error = error or before.error\n",
        "a_page_comes_to_the_frame_of_one_that_leaves",
    ),
    "a slot is filled while it is read": Mutant(
        TICKETS,
        "            error, after = error or before.error, after + before.mark\n",
        "            error = error or before.error\n",
        "a_page_is_in_the_slot_of_one_that_came",
    ),
    "a fault is behind no transfer": Mutant(
        MOVER,
        "            mark = transfer.run(sum((ticket.mark for ticket in before), ()))\n",
        "            mark = transfer.run(())\n",
        "pages_take_turns_in_one_frame",
    ),
    "a fault has no ticket": Mutant(
        MOVER,
        '            tickets.take("a fault", frames, slots).end(mark=mark)\n',
        "            pass\n",
        "pages_take_turns_in_one_frame",
    ),
    "ops do not wait for what streams carry": Mutant(
        TICKETS,
        "                    self._reach(ticket.mark)\n",
        "",
        "a_page_comes_to_the_frame_of_one_that_leaves",
    ),
    "what streams carry is over when it is queued": Mutant(
        TICKETS,
        "            if ticket is not None and ticket.error is None and not ticket.mark:\n",
        "            if ticket is not None and ticket.error is None:\n",
        "a_page_comes_to_the_frame_of_one_that_leaves",
    ),
    "an op does not wait for its tickets": Mutant(
        RESIDENCY,
        "        return self.mover.tickets.wait(tickets, self.turns.lock)\n",
        "        return False\n",
        "a_page_comes_to_the_frame_of_one_that_leaves",
    ),
    "what is on its way may be used": Mutant(
        RESIDENCY,
        '        there = self.is_whole(run) and not self.mover.tickets.of(("device", frames))\n',
        "        there = self.is_whole(run)\n",
        "a_page_comes_to_the_frame_of_one_that_leaves",
    ),
    "a part that is on its way may be used": Mutant(
        RESIDENCY,
        '            bool((frames >= 0).all()) and not tickets.of(("device", frames))\n',
        "            bool((frames >= 0).all())\n",
        "a_part_is_on_its_way",
    ),
    "a new page does not wait for one that leaves": Mutant(
        RESIDENCY,
        '        tickets.wait(tickets.of(("device", frames)))\n',
        "        pass\n",
        "a_new_page_takes_the_frame_of_one_that_is_queued",
    ),
    "frames are erased while their pages leave": Mutant(
        CHAOS,
        "                pager.residency.reach(frames)\n",
        "",
        "chaos_writes_to_the_frame_of_one_that_leaves",
    ),
    # -- a disk that moves frames itself
    "the disk writes frames that are in use": Mutant(
        TRANSFERS,
        "            self._backend.wait(mark)\n            if transfer.urgent:\n",
        "            if transfer.urgent:\n",
        "the_disk_moves_frames",
    ),
    "the disk reads into frames that are in use": Mutant(
        TRANSFERS,
        "                    self._backend.wait(after)\n",
        "                    pass\n",
        "the_disk_fills_a_frame_that_was_in_use",
    ),
    "the disk writes frames before their mark": Mutant(
        TRANSFERS,
        "            self._backend.wait(mark)\n            if transfer.urgent:\n",
        "            if transfer.urgent:\n",
        "the_disk_moves_frames_as_planned",
    ),
    "the disk reads into frames before their mark": Mutant(
        TRANSFERS,
        "                    self._backend.wait(after)\n",
        "                    pass\n",
        "the_disk_moves_frames_as_planned",
    ),
    "the disk does not wait for a page that leaves for the host": Mutant(
        MOVER,
        "            mark = transfer.run(sum((ticket.mark for ticket in before), ()))\n",
        "            mark = transfer.run(())\n",
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
        "",
        "the_arena_is_given_back_under_what_is_queued",
    ),
    "the pager is closed under what nobody waited for": Mutant(
        MOVER,
        "        self.tickets.pass_over()\n",
        "",
        "host_memory_is_given_back_under_what_is_queued",
    ),
}


def found(mutants: Sequence[Mutant]) -> list[Finding]:
    """What is found in the case of each, in a process of its own.

    They are forked off one that has loaded PyTorch and nothing of the package.
    """
    given = json.dumps(mutants)
    done = subprocess.run(
        [sys.executable, "-m", "tests.simdev.mutants"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
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
        code = os.waitstatus_to_exitcode(status)
        if code > 0:  # an error of what looks for faults finds none
            raise RuntimeError(f"the case {mutant.case} could not be run; its error is above")
        if code:
            return Finding("error", f"ended by signal {-code}")
        return Finding(*json.loads(result.read_text()))


if __name__ == "__main__":
    import pytest  # noqa: F401
    import torch._dynamo
    import torch._meta_registrations  # noqa: F401

    print(json.dumps([_in_a_child(Mutant(*given)) for given in json.load(sys.stdin)]))
