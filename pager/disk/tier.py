"""The disk tier: page slots in one preallocated, nameless file, read and written by threads.

Rules, beside those of disk/file.py:

1. A page written to a slot can be read once the future of its write has a result. Two batches in
   flight must not share a slot, unless both read it.
2. A future is done only when no thread uses the batch's buffers any more, failed or not. Until
   then writers must not change them and readers must not look at them.
3. Each slot has a stamp in memory (integrity.py), with a checksum, set when the whole batch of its
   write has succeeded. A slot without one, or whose bytes do not match it when they are read a
   second time too, raises CorruptPage; it never gives wrong numbers.
4. A forked child has no disk tier: its descriptor is closed there at once, because a file without
   a name takes up space for as long as any process has it open.
5. Reads and writes have threads of their own: what is queued in one direction does not hold up the
   other.
"""

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import xxhash

from ..errors import CorruptPage, PagerError
from ..memory.frame_pool import FramePool
from . import file as disk_io
from .batch import TASK_BYTES, THREADS, Batch, IoThreads, SlotRun, Slots, Task, share_out, split
from .engine import Engine, Wrap, check_name, make_engine
from .integrity import Stamps, Sums, device_sums, page_sums

_tiers: weakref.WeakSet["DiskTier"] = weakref.WeakSet()


class DiskTier:
    """``capacity_bytes // page_size`` page slots in a file in ``directory``.

    ``slots`` says which are free; it belongs to the caller, which allocates before it writes.
    Methods may be called from several threads. ``direct``: whether to bypass the page cache with
    O_DIRECT, wherever that works. ``threads``: how many read, and how many write.
    ``io_engine``: see ``engine.make_engine``; ``on_cuda``: whether the pages come from device
    memory. ``engine``: what to put around the engine (tests put faults there).

    Raises PagerError, and leaves nothing behind, if the file cannot be had.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        capacity_bytes: int,
        page_size: int,
        *,
        threads: int = THREADS,
        direct: bool = True,
        io_engine: str = "auto",
        on_cuda: bool = False,
        engine: Wrap | None = None,
    ) -> None:
        if page_size <= 0 or threads <= 0:
            raise ValueError(f"{page_size=} and {threads=} must be positive")
        check_name(io_engine)
        self.page_size = page_size
        self.threads = threads
        self.directory = os.path.abspath(directory)
        self._slot_bytes(capacity_bytes)
        self.slots = FramePool(capacity_bytes // page_size)
        self.bytes_written = 0  # of pages
        self.bytes_measured = 0  # written to find out how fast the disk is
        self.bytes_read = 0
        self.rereads = 0  # pages that were wrong when read once, and right when read again
        self._lock = threading.Lock()
        self._closed = False
        self._owner_pid = os.getpid()
        self._bounce = disk_io.BounceBuffers()
        self._fd = disk_io.open_unlinked(self.directory, self.capacity_bytes)
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        self.stamps = Stamps(self.slots.count, "disk", self.directory)
        _tiers.add(self)
        is_direct = direct and disk_io.enable_direct(self._fd, page_size, self.capacity_bytes)
        try:
            made = make_engine(
                io_engine,
                self._fd,
                direct=is_direct,
                callers=2 * threads,
                task_bytes=TASK_BYTES,
                on_cuda=on_cuda,
            )
            self.engine: Engine = made if engine is None else engine(made)
        except BaseException:
            self._close_fd()
            raise
        self._readers = IoThreads(threads, "tensorpager-disk-in")
        self._writers = IoThreads(threads, "tensorpager-disk-out")

    @property
    def capacity_bytes(self) -> int:
        """Exact size of the file."""
        return self.slots.count * self.page_size

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self.engine.direct

    def describe(self) -> dict[str, str | int | bool]:
        """How pages are moved here, for people."""
        return {
            "engine": self.engine.name,
            "direct": self.direct,
            "threads": self.threads,
            "moves_frames": self.engine.takes_device,
        }

    def fileno(self) -> int:
        """The file's descriptor, for those who look at it from outside: tests and benchmarks."""
        self._refuse_if_gone()
        return self._fd

    def write(self, runs: Sequence[SlotRun]) -> None:
        """:meth:`submit_write`, by the calling thread itself, for those who have threads of their
        own: it wakes up once, not once for each hand-over. Raises what the future would have."""
        if self.engine.takes_device:  # one thread moves one task of it at a time: the drive idles
            self.submit_write(runs).result()
            return
        tasks, slots, sums = self._to_write(runs)
        for task in tasks:
            self._move("written", task)
        self.stamps.wrote(slots, sums)

    def read(self, runs: Sequence[SlotRun]) -> None:
        """:meth:`submit_read`, likewise."""
        if self.engine.takes_device:
            self.submit_read(runs).result()
            return
        for task in self._to_read(runs):
            self._move("read", task)

    def submit_write(self, runs: Sequence[SlotRun]) -> Future[None]:
        """Starts to write; the arrays must not change until the future is done.

        All or nothing: if the future has an exception (PagerError), none of the slots can be read,
        and the pages are where they were, in ``runs``. Slots count as unwritten meanwhile.
        """
        tasks, slots, sums = self._to_write(runs)
        return self._submit("written", tasks, lambda: self.stamps.wrote(slots, sums))

    def submit_read(self, runs: Sequence[SlotRun]) -> Future[None]:
        """Starts to read; the arrays may be used when the future has a result.

        If it has an exception (CorruptPage, PagerError) the arrays hold anything, and the slots
        what they held.
        """
        try:
            tasks = self._to_read(runs)
        except CorruptPage as error:
            failed: Future[None] = Future()
            failed.set_exception(error)
            return failed
        return self._submit("read", tasks, lambda: None)

    def _to_write(self, runs: Sequence[SlotRun]) -> tuple[list[Task], Slots, Sums]:
        """Tasks; their slots, which cannot be read from now on; and room for their checksums."""
        self._refuse_if_gone()
        tasks = split(runs, self.page_size)
        slots = self._slots_of(tasks)
        assert (np.diff(slots) > 0).all(), "a slot is written twice in one batch"
        sums = np.empty(slots.size, np.uint64)
        share_out(tasks, sums)
        self.stamps.begin(slots)
        return tasks, slots, sums

    def _to_read(self, runs: Sequence[SlotRun]) -> list[Task]:
        """Tasks, with the checksums that their pages should have. Raises ``CorruptPage`` for a slot
        that was not written."""
        self._refuse_if_gone()
        tasks = split(runs, self.page_size)
        share_out(tasks, self.stamps.sums(self._slots_of(tasks)))
        return tasks

    def grow(self, capacity_bytes: int) -> None:
        """Enlarges the file in place. Slots keep their numbers and pages.

        Raises PagerError if there is no room; the tier is then as it was.
        """
        self._refuse_if_gone()
        old, new = self.capacity_bytes, self._slot_bytes(capacity_bytes)
        if new < old:
            raise ValueError(f"{capacity_bytes=} is less than the disk tier has ({old})")
        if new == old:
            return
        disk_io.refuse_if_too_large(self.directory, new, have=old, fd=self._fd)
        disk_io.allocate(self._fd, self.directory, old, new)
        with self._lock:
            self.stamps.resize(new // self.page_size)
            self.slots.resize(new // self.page_size)

    def close(self) -> None:
        """Waits for what is in flight and gives the space back. The pages are gone. Idempotent."""
        if self._owner_pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._readers.shutdown()
        self._writers.shutdown()
        self.engine.close()
        self._close_fd()

    def _slot_bytes(self, capacity_bytes: int) -> int:
        """Bytes of the whole slots in ``capacity_bytes``."""
        if capacity_bytes < self.page_size:
            raise ValueError(
                f"disk_budget={capacity_bytes} is less than one page ({self.page_size} bytes); "
                "raise disk_budget or lower page_size"
            )
        return capacity_bytes - capacity_bytes % self.page_size

    def _refuse_if_gone(self) -> None:
        if self._owner_pid != os.getpid():
            raise PagerError(
                f"the disk tier in {self.directory!r} belongs to process {self._owner_pid}; "
                "a forked child has to make its own"
            )
        if self._closed:
            raise PagerError(f"the disk tier in {self.directory!r} is closed; make a new one")

    def _slots_of(self, tasks: list[Task]) -> Slots:
        """Every slot of the tasks, in their order."""
        ranges = [np.arange(task.first_slot, task.end_slot) for task in tasks]
        slots = np.concatenate([np.empty(0, np.int64), *ranges])
        assert not slots.size or 0 <= slots[0] <= slots[-1] < self.slots.count, f"{slots}"
        return slots

    def _submit(self, verb: str, tasks: list[Task], on_success: Callable[[], None]) -> Future[None]:
        pool = self._writers if verb == "written" else self._readers
        batch = Batch(tasks, on_success)

        def run(task: Task) -> None:
            try:
                self._move(verb, task)
            except Exception as error:
                batch.task_ended(error)
            else:
                batch.task_ended()

        for task in tasks:
            try:
                pool.submit(run, task)
            except RuntimeError as error:  # closed meanwhile, or no thread to be had
                batch.task_ended(self._failed(verb, task, str(error)))
        return batch.future

    def _move(self, verb: str, task: Task) -> None:
        """By the calling thread. ``PagerError`` for what the system says."""
        try:
            (self._write_task if verb == "written" else self._read_task)(task)
        except OSError as error:
            reason = f"{error.strerror} (errno {error.errno})"
            raise self._failed(verb, task, reason) from error

    def _write_task(self, task: Task) -> None:
        buffers = task.buffers
        if self._needs_bounce(buffers):
            bounce = self._bounce.get(task.page_count * self.page_size)
            np.concatenate(buffers, out=bounce)
            buffers = [bounce]
        np.concatenate([self._sums(buffer) for buffer in buffers], out=task.checksums)
        self.engine.write(buffers, task.first_slot * self.page_size)
        with self._lock:
            self.bytes_written += task.page_count * self.page_size

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """What is written inside counts as ``bytes_measured``. No page may be on its way."""
        before = self.bytes_written
        try:
            yield
        finally:
            with self._lock:
                self.bytes_measured += self.bytes_written - before
                self.bytes_written = before

    def _read_task(self, task: Task) -> None:
        buffers = task.buffers
        if self._needs_bounce(buffers):
            buffers = [self._bounce.get(task.page_count * self.page_size)]
        self.engine.read(buffers, task.first_slot * self.page_size)
        with self._lock:
            self.bytes_read += task.page_count * self.page_size
        sums = np.concatenate([self._sums(buffer) for buffer in buffers])
        for index in np.flatnonzero(sums != task.checksums).tolist():
            pages = (page for buffer in buffers for page in buffer.reshape(-1, self.page_size))
            page = next(itertools.islice(pages, index, None))
            if not self._matches(page, task.checksums[index]):
                self._read_again(task.first_slot + index, page, task.checksums[index])
        if buffers is not task.buffers:
            ends = np.cumsum([target.nbytes for target in task.buffers])
            for target, part in zip(task.buffers, np.split(buffers[0], ends), strict=False):
                target[:] = part

    def _sums(self, buffer: Any) -> Sums:
        """Of all pages in ``buffer``, made where it is."""
        if isinstance(buffer, np.ndarray):
            return page_sums(buffer.reshape(-1, self.page_size))
        return device_sums(buffer, self.page_size)

    def _matches(self, page: Any, checksum: np.uint64) -> bool:
        """Whether ``page`` has it, although it was made of other memory: of the device's for what
        is read into the host's, or the other way round."""
        if not self.engine.takes_device:
            return False
        if isinstance(page, np.ndarray):
            return bool(device_sums(page, self.page_size)[0] == checksum)
        return bool(xxhash.xxh3_64_intdigest(page.cpu().numpy()) == checksum)

    def _read_again(self, slot: int, page: Any, checksum: np.uint64) -> None:
        """What came is not what was written; once more, in case it was changed on the way."""
        self.engine.read([page], slot * self.page_size)
        if self._sums(page)[0] != checksum and not self._matches(page, checksum):
            raise self.stamps.wrong(slot)
        with self._lock:
            self.rereads += 1

    def _needs_bounce(self, buffers: list[Any]) -> bool:
        if not self.engine.direct or not isinstance(buffers[0], np.ndarray):
            return False  # device memory is aligned as its frames are
        return not all(map(disk_io.is_aligned, buffers))

    def _failed(self, verb: str, task: Task, reason: str) -> PagerError:
        where = "stay where they were" if verb == "written" else "are still on the disk only"
        return PagerError(
            f"{task.page_count} pages could not be {verb} from slot {task.first_slot} on, in the "
            f"disk tier in {self.directory!r}: {reason}; the pages {where}. Look at the drive and "
            "the kernel's log (dmesg), or set disk_path to another disk"
        )


def _forget_in_child() -> None:
    for tier in list(_tiers):
        tier._close_fd()


os.register_at_fork(after_in_child=_forget_in_child)
