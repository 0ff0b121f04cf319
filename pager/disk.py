"""The disk tier: page slots in one preallocated, nameless file, read and written by threads.

Rules, beside those of disk_io.py:

1. A page written to a slot can be read once the future of its write has a result. Two batches in
   flight must not share a slot, unless both read it.
2. A future is done only when no thread uses the batch's buffers any more, failed or not. Until
   then writers must not change them and readers must not look at them.
3. Each slot has a checksum in memory, set when the whole batch of its write has succeeded. A slot
   without one, or with one that does not match, raises CorruptPage; it never gives wrong numbers.
4. A forked child has no disk tier: its descriptor is closed there at once, because a file without
   a name takes up space for as long as any process has it open.
5. Reads and writes have threads of their own, and each a rate limit of its own: what is queued in
   one direction does not hold up the other.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import xxhash

from . import disk_io
from .disk_batch import Batch, SlotRun, Slots, Task, share_out, slots_of, split
from .disk_io import Bytes
from .errors import CorruptPage, PagerError
from .frame_pool import FramePool
from .rate_limit import RateLimit

_tiers: weakref.WeakSet["DiskTier"] = weakref.WeakSet()


class DiskTier:
    """``capacity_bytes // page_size`` page slots in a file in ``directory``.

    ``slots`` says which are free; it belongs to the caller, which allocates before it writes.
    Methods may be called from several threads. ``direct``: whether to bypass the page cache with
    O_DIRECT; by default wherever that works. ``threads``: how many read, and how many write.
    ``bytes_per_s``: a limit for reads and another, of the same rate, for writes.

    Raises PagerError, and leaves nothing behind, if the file cannot be had.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        capacity_bytes: int,
        page_size: int,
        *,
        threads: int = 4,
        direct: bool | None = None,
        bytes_per_s: float | None = None,
    ) -> None:
        if page_size <= 0 or threads <= 0:
            raise ValueError(f"{page_size=} and {threads=} must be positive")
        self._read_limit, self._write_limit = RateLimit(bytes_per_s), RateLimit(bytes_per_s)
        self._page_size = page_size
        self._directory = os.path.abspath(directory)
        self._slot_bytes(capacity_bytes)
        self.slots = FramePool(capacity_bytes // page_size)
        self.bytes_written = 0
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._closed = False
        self._owner_pid = os.getpid()
        self._bounce = disk_io.BounceBuffers()
        self._fd = disk_io.open_unlinked(self._directory, self.capacity_bytes)
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        self._checksums = np.zeros(self.slots.count, np.uint64)
        self._written = np.zeros(self.slots.count, np.bool_)
        _tiers.add(self)
        self._direct = direct is not False and disk_io.enable_direct(
            self._fd, page_size, self.capacity_bytes
        )
        if direct and not self._direct:
            self._close_fd()
            raise PagerError(
                f"disk_path={self._directory!r} does not take O_DIRECT with {page_size=}; leave "
                "direct=None, or use another file system or a multiple of 4096 bytes"
            )
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="tensorpager-disk-in")
        self._writers = ThreadPoolExecutor(threads, thread_name_prefix="tensorpager-disk-out")

    @property
    def directory(self) -> str:
        return self._directory

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def capacity_bytes(self) -> int:
        """Exact size of the file."""
        return self.slots.count * self._page_size

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self._direct

    @property
    def rate_limit(self) -> float | None:
        """Bytes per second that reads may reach, and writes; ``None`` if there is no limit."""
        return self._read_limit.bytes_per_s

    def set_rate_limit(self, bytes_per_s: float | None) -> None:
        """Another rate limit for transfers that are submitted from now on; ``None``: none.

        Raises ``ValueError``, and changes nothing, for a rate that is not a finite number above 0.
        """
        self._read_limit.set(bytes_per_s)
        self._write_limit.set(bytes_per_s)

    def fileno(self) -> int:
        """The file's descriptor, for those who look at it from outside: tests and benchmarks."""
        self._refuse_if_gone()
        return self._fd

    def write(self, runs: Sequence[SlotRun], *, here: bool = False) -> None:
        """``submit_write``, and wait. ``here``: the calling thread does it all by itself, for those
        who have threads of their own; it wakes up once, not once for each hand-over."""
        self.submit_write(runs, here=here).result()

    def read(self, runs: Sequence[SlotRun], *, here: bool = False) -> None:
        """``submit_read``, and wait; ``here`` as above."""
        self.submit_read(runs, here=here).result()

    def submit_write(self, runs: Sequence[SlotRun], *, here: bool = False) -> Future[None]:
        """Starts to write; the arrays must not change until the future is done.

        All or nothing: if the future has an exception (PagerError), none of the slots can be read,
        and the pages are where they were, in ``runs``. Slots count as unwritten meanwhile.
        """
        self._refuse_if_gone()
        tasks = split(runs, self._page_size)
        slots = self._slots_of(tasks)
        assert (np.diff(slots) > 0).all(), "a slot is written twice in one batch"
        checksums = np.empty(slots.size, np.uint64)
        share_out(tasks, checksums)

        def on_success() -> None:
            with self._lock:
                self._checksums[slots] = checksums
                self._written[slots] = True

        with self._lock:
            self._written[slots] = False
        return self._submit("written", tasks, on_success, here=here)

    def submit_read(self, runs: Sequence[SlotRun], *, here: bool = False) -> Future[None]:
        """Starts to read; the arrays may be used when the future has a result.

        If it has an exception (CorruptPage, PagerError) the arrays hold anything, and the slots
        what they held.
        """
        self._refuse_if_gone()
        tasks = split(runs, self._page_size)
        slots = self._slots_of(tasks)
        with self._lock:
            unwritten = slots[~self._written[slots]]
            share_out(tasks, self._checksums[slots])
        if unwritten.size:
            failed: Future[None] = Future()
            failed.set_exception(self._corrupt(int(unwritten[0]), "was never written"))
            return failed
        return self._submit("read", tasks, lambda: None, here=here)

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
        disk_io.refuse_if_too_large(self._directory, new, have=old)
        disk_io.allocate(self._fd, self._directory, old, new)
        with self._lock:
            more = (new - old) // self._page_size
            self._checksums = np.concatenate([self._checksums, np.zeros(more, np.uint64)])
            self._written = np.concatenate([self._written, np.zeros(more, np.bool_)])
            self.slots.resize(new // self._page_size)

    def close(self) -> None:
        """Waits for what is in flight and gives the space back. The pages are gone. Idempotent."""
        if self._owner_pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._readers.shutdown(wait=True)
        self._writers.shutdown(wait=True)
        self._close_fd()

    def _slot_bytes(self, capacity_bytes: int) -> int:
        """Bytes of the whole slots in ``capacity_bytes``."""
        if capacity_bytes < self._page_size:
            raise ValueError(
                f"disk_budget={capacity_bytes} is less than one page ({self._page_size} bytes); "
                "raise disk_budget or lower page_size"
            )
        return capacity_bytes - capacity_bytes % self._page_size

    def _refuse_if_gone(self) -> None:
        if self._owner_pid != os.getpid():
            raise PagerError(
                f"the disk tier in {self._directory!r} belongs to process {self._owner_pid}; "
                "a forked child has to make its own"
            )
        if self._closed:
            raise PagerError(f"the disk tier in {self._directory!r} is closed; make a new one")

    def _forget_in_child(self) -> None:
        if self._close_fd.alive:
            self._close_fd()

    def _slots_of(self, tasks: list[Task]) -> Slots:
        slots = slots_of(tasks)
        assert not slots.size or 0 <= slots[0] <= slots[-1] < self.slots.count, f"{slots}"
        return slots

    def _submit(
        self, verb: str, tasks: list[Task], on_success: Callable[[], None], *, here: bool
    ) -> Future[None]:
        writes = verb == "written"
        move = self._write_task if writes else self._read_task
        limit = self._write_limit if writes else self._read_limit
        pool = self._writers if writes else self._readers
        batch = Batch(tasks, on_success)

        def run(task: Task, slot_end: float) -> None:
            try:
                move(task)
                limit.wait_until(slot_end)
            except OSError as error:
                failure = self._failed(verb, task, f"{error.strerror} (errno {error.errno})")
                failure.__cause__ = error
                batch.task_ended(failure)
            except Exception as error:
                batch.task_ended(error)
            else:
                batch.task_ended()

        ends = [limit.reserve(task.page_count * self._page_size) for task in tasks]
        if here:
            for task in tasks:
                run(task, ends[-1] if task is tasks[-1] else 0.0)
            return batch.future
        for task, slot_end in zip(tasks, ends):
            try:
                pool.submit(run, task, slot_end)
            except RuntimeError as error:  # closed meanwhile, or no thread to be had
                batch.task_ended(self._failed(verb, task, str(error)))
        return batch.future

    def _write_task(self, task: Task) -> None:
        buffers = task.buffers
        if self._needs_bounce(buffers):
            bounce = self._bounce.get(task.page_count * self._page_size)
            np.concatenate(buffers, out=bounce)
            buffers = [bounce]
        for index, page in enumerate(self._pages(buffers)):
            task.checksums[index] = xxhash.xxh3_64_intdigest(page)
        disk_io.write_at(self._fd, buffers, self._offset(task), unit=self._unit)
        with self._lock:
            self.bytes_written += task.page_count * self._page_size

    def _read_task(self, task: Task) -> None:
        buffers = task.buffers
        if self._needs_bounce(buffers):
            buffers = [self._bounce.get(task.page_count * self._page_size)]
        disk_io.read_at(self._fd, buffers, self._offset(task), unit=self._unit)
        with self._lock:
            self.bytes_read += task.page_count * self._page_size
        for index, page in enumerate(self._pages(buffers)):
            if task.checksums[index] != xxhash.xxh3_64_intdigest(page):
                raise self._corrupt(
                    task.first_slot + index, "is not what was written (checksum differs)"
                )
        if buffers is not task.buffers:
            ends = np.cumsum([target.nbytes for target in task.buffers])
            for target, part in zip(task.buffers, np.split(buffers[0], ends), strict=False):
                target[:] = part

    @property
    def _unit(self) -> int:
        return disk_io.ALIGNMENT if self._direct else 1

    def _offset(self, task: Task) -> int:
        return task.first_slot * self._page_size

    def _needs_bounce(self, buffers: list[Bytes]) -> bool:
        return self._direct and not all(map(disk_io.is_aligned, buffers))

    def _pages(self, buffers: list[Bytes]) -> Iterator[Bytes]:
        for buffer in buffers:
            yield from buffer.reshape(-1, self._page_size)

    def _failed(self, verb: str, task: Task, reason: str) -> PagerError:
        where = "stay where they were" if verb == "written" else "are still on the disk only"
        return PagerError(
            f"{task.page_count} pages could not be {verb} from slot {task.first_slot} on, in the "
            f"disk tier in {self._directory!r}: {reason}; the pages {where}. Look at the drive and "
            "the kernel's log (dmesg), or set disk_path to another disk"
        )

    def _corrupt(self, slot: int, what: str) -> CorruptPage:
        return CorruptPage(
            f"the page in slot {slot} of the disk tier in {self._directory!r} {what}; it was not "
            "used. Check the drive (dmesg, smartctl) and go on from the last checkpoint"
        )


def _forget_in_child() -> None:
    for tier in list(_tiers):
        tier._forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)
