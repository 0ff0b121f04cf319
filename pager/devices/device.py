"""What the runtime asks of a device. Two implementations: ``cpu`` and ``accelerator``.

Note: stream order
------------------
Streams: *compute* (those that ops run on), and one for copies in each direction of each lane: what
is urgent, what was planned, what passes through buffers of the disk. Ops may run
on several streams, one after the other: a stream that is current where pages are used is noted
(``note_compute``), and waits then for the stream of the ops before. So uses
of pages are one order, that of the program, whatever stream they are on; *compute* in a mark
below means every stream that was noted.

1. A *mark* is a point in the order of work: events. ``mark()`` is all that *compute* has queued so
   far, and each copy gives the mark at which its bytes are there.
2. A copy is queued behind a mark of *compute* that was made when it was decided, so the last use of
   what was in its frame is complete, and behind the marks of the transfers before it that use its
   frames or its slots (``moves/tickets.py``): a frame is filled again when its bytes have left, a
   slot is read when its bytes have come.
3. ``reach`` makes *compute* wait for a mark: no op sees a page that is still arriving, and
   what the runtime itself writes to a frame, in ``on_compute``, comes after the bytes that leave
   it.
   What *compute* has reached is behind every later ``mark()``, so by rule 2 nobody else need know
   of it: its ticket is forgotten.
4. The CPU touches host memory (disk I/O, checksums, saving) only after ``wait``.
5. Disk I/O straight on device frames is no stream's work: its thread waits for the marks of rule 2,
   and what is queued after the I/O has returned finds the bytes there.
6. Host memory and the arena are given back at the end when *compute* has reached all marks of
   copies, and the CPU has waited for a mark that was made then.

On the CPU every copy is complete when the call returns, and a mark is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from .dense_meter import Timeline
from .dense_refusal import Peak

Bytes = npt.NDArray[np.uint8]
Mark = tuple[Any, ...]
"""A point in the order of work; marks are joined by ``+``. Empty: it is reached."""
URGENT, PLANNED, THROUGH_DISK = LANES = ("urgent", "planned", "disk")


class Copy(NamedTuple):
    """``len(host)`` bytes between the arena at byte ``offset`` and host memory. ``address``: of
    these, where that is known: asking NumPy takes longer than queueing the copy."""

    offset: int
    host: Bytes
    address: int = 0


class Copies(list[Copy]):
    """That are queued again and again. ``ready``: what the device has made of them for that."""

    def __init__(self, copies: Iterable[Copy] = ()) -> None:
        super().__init__(copies)
        self.ready: dict[Any, Any] = {}


def bytes_of(memory: torch.UntypedStorage, start: int, nbytes: int) -> torch.Tensor:
    """Some of them, uint8 [nbytes]."""
    empty: Any = torch.empty(0, dtype=torch.uint8, device=memory.device)
    return torch._C.TensorBase.set_(empty, memory, start, (nbytes,), (1,))


def fill_by_torch(
    arena: torch.Tensor, offset: int, memory: torch.UntypedStorage, start: int, nbytes: int
) -> None:
    """See :meth:`Device.fill`."""
    arena[offset : offset + nbytes].copy_(bytes_of(memory, start, nbytes))


@dataclass
class HostMemory:
    """One piece of host memory that copies to and from the device run on at full speed.

    bytes : uint8 [n]; not to be touched after ``give_back()``.
    """

    bytes: Bytes
    give_back: Callable[[], None]


class Device(Protocol):
    """Owns the arena, its streams and events, and knows the dense memory beside it.

    What can be done with one is asked by the names below, never by its type.
    """

    device: torch.device
    granularity: int  # bytes; the border is at a multiple of it
    alignment: int  # bytes, of the memory that PyTorch's allocator gives tensors there
    reserved_bytes: int  # that the arena can have at most
    host_addressable: bool  # the CPU can read and write frames in place, and ops are over at return
    can_unmap: bool  # the border moves and nothing else does; otherwise see ``remake``
    caps_dense: bool  # ``limit_dense`` is a cap on what the allocator holds, fragments included
    knows_dense: bool  # dense memory can be measured
    takes_drives: bool  # drives can read and write frames, with NVIDIA's cuFile
    copies_by_core: bool  # a copy below takes a core for all of its time: it waits for no link
    batches_copies: bool  # the copies of one call below are one call of the driver, however many
    arena: torch.Tensor  # uint8; only what is committed may be touched
    address: int  # of the arena's first byte

    def commit(self, nbytes: int) -> None:
        """Move the border between arena and dense memory. All or nothing: if it raises, what could
        be touched before can be touched still."""

    def discard(self, start: int, nbytes: int) -> None:
        """These bytes of the arena are lost, and take no memory until they are written again."""

    def remake(self, nbytes: int, *, empty: bool) -> bool:
        """Where not ``can_unmap``: an arena of ``nbytes`` in place of this one, the same bytes in
        it as far as it goes. No view of the old one may be in use; ``arena`` and ``address`` are
        others afterwards. ``False``, and nothing has changed, where the budget or the device has no
        room for both at once. ``empty``: no byte counts, so the old one is given back first. If
        there is no memory for the new one, the old size is there again."""

    def fill(self, offset: int, memory: torch.UntypedStorage, start: int, nbytes: int) -> None:
        """So many bytes of the arena, from ``offset`` on, become those of ``memory`` from ``start``
        on, wherever it is. In the order of what the calling thread queues."""

    def frames_view(self, offset: int, nbytes: int) -> Any:
        """Arena bytes for disk I/O in place: an array where ``host_addressable``, else a tensor."""

    def host_memory(self, nbytes: int) -> list[HostMemory]:
        """Host memory of so many bytes all together, page-locked where the device can, in as few
        pieces as may be. More than one only if ``nbytes`` is no power of two; each is then, the
        largest first."""

    def register_host(self, memory: Bytes) -> None:
        """Page-lock memory that is there, where that is possible, so that copies run at link
        speed."""

    def unregister_host(self, memory: Bytes) -> None:
        """Undo ``register_host``."""

    def stamp(self) -> Any:
        """A moment in the order of what the calling thread queues. ``None`` where ops are over when
        they return, or the device has no clock: the host's clock is as good then."""

    def elapsed(self, before: Any, after: Any) -> float:
        """Seconds of the device between two stamps. Waits for the second one."""

    def copy(self, copies: Sequence[Copy], lane: str, after: Mark, *, to_device: bool) -> Mark:
        """Queue copies between the arena and host memory, behind ``after`` (rule 2); when they are
        complete. If it raises none is under way. Any thread, without the GIL while bytes move."""

    def note_compute(self) -> None:
        """The calling thread's current stream is the one that ops run on from now on. To be called
        when pages are there, before they are used. Any thread."""

    def on_compute(self) -> AbstractContextManager[Any]:
        """What the calling thread queues inside goes to the stream of ops, after all uses of pages
        so far."""

    def order_ops(self) -> None:
        """What the stream of ops gets from now on comes after all uses of pages so far."""

    def mark(self) -> Mark:
        """All that ops have queued so far. Any thread."""

    def reach(self, mark: Mark) -> None:
        """Ops that are queued from now on come after ``mark`` (rule 3)."""

    def wait(self, mark: Mark) -> None:
        """Block the caller, without the GIL, until ``mark`` is reached. Any thread."""

    def slide(self, source: int, target: int, pages: int, page_size: int) -> None:
        """Copy frames from ``source`` on to those from ``target`` on, which is lower; the two runs
        may overlap. Compute-stream order."""

    def exchange(self, one: int, other: int, pages: int, page_size: int) -> None:
        """What is in the frames from ``one`` on for what is in those from ``other`` on, which do
        not overlap them, without memory for it. Compute-stream order."""

    def limit_dense(self, nbytes: int | None, *, counted: int = 0, roomy: bool = False) -> None:
        """Make ``nbytes`` a hard cap of dense memory where the device can; ``None`` lifts it. On
        top of them is what was alive, and not measured, when the last measurement began, but for
        ``counted``: dense bytes of that which are among ``nbytes``. ``roomy``: there is plenty, so
        the allocator may keep freed memory for reuse."""

    def limit_guests(self, nbytes: int | None) -> None:
        """No thread is a guest any more. From now on a guest is refused what brings all dense
        memory above ``nbytes``, where that is known, with ``torch.OutOfMemoryError``."""

    def add_guest(self) -> None:
        """The calling thread works beside the iteration: its dense memory is no part of what is
        measured, where that can be told apart."""

    def cap_dense(self, nbytes: int | None, make_room: Callable[[int], bool] | None = None) -> None:
        """An iteration begins: count its dense bytes from now on, and those that earlier ones have
        made and that live, where the device can count. What would go beyond ``nbytes`` asks
        ``make_room``, in the middle of an op of this thread, for the bytes that are missing;
        ``torch.OutOfMemoryError`` if that returns ``False``. ``None``: it is over."""

    def raise_cap(self, nbytes: int | None) -> None:
        """Another cap from now on, ``None`` for none, of what has been counted so far too."""

    def count_anew(self) -> None:
        """Count from 0 on; what is alive now is not counted any more."""

    def lend_idle(self, most: int) -> AbstractContextManager[int]:
        """How many bytes of RAM, ``most`` at most, the caller may use inside, beside the tiers.
        Where dense memory is RAM too, it keeps so many less of what is idle meanwhile."""

    def dense_now(self) -> int:
        """Dense bytes that are alive, of whoever's; to be compared with what it was before."""

    def dense_peak(self) -> int:
        """Most dense bytes that were counted at once since ``cap_dense``; 0 where not known."""

    def look_at_dense(self) -> None:
        """Where allocations ask nobody in the middle of an op: what went beyond the cap so far asks
        ``make_room`` now; ``torch.OutOfMemoryError`` if that returns ``False``."""

    def most_held(self) -> int:
        """Most bytes of arena and dense tensors at once, of those that are counted, where the arena
        may be larger than its frames are many (not ``can_unmap``); else 0."""

    def refusal(self) -> str:
        """What was refused last, in words; empty where not known."""

    def meter_start(self, *, go_on: bool = False) -> None:
        """Begin to measure the peak of dense memory (temporaries inside ops included), of what has
        been counted so far and is alive too. ``go_on``: another part of an iteration."""

    def meter_sample(self) -> None:
        """Look now, where a peak can only be found by looking often."""

    def meter_stop(self) -> int:
        """Peak dense bytes since ``meter_start``, on top of what was alive then and does not
        count."""

    def meter_alive(self) -> int:
        """Bytes that are alive, of those that it counts; where ``meter_level`` is ``None``, at the
        last ``meter_stop``."""

    def dense_of(self, action: Callable[[], None]) -> int:
        """Peak dense bytes of tensors that ``action`` makes, while nothing is measured; not what an
        allocator holds beyond them, which is at least 2 MiB on CUDA."""

    def meter_peak(self) -> Peak | None:
        """What made the peak of the last measurement; ``None`` where not known."""

    def meter_level(self) -> int | None:
        """The peak so far, while it is measured; ``None`` where only the end tells."""

    def meter_timeline(self) -> Timeline:
        """When dense memory was how large in the last measurement; empty where not known."""

    def living(self) -> Timeline:
        """Large tensors that are counted and alive: when each was made, its bytes and its birth;
        empty where not known."""

    def meter_forget(self) -> None:
        """Of the last measurement nobody will ask when and where anything was made."""

    def birth_at(self, address: int) -> int:
        """Of the tensor there, as ``meter_timeline`` has it; 0 where not known."""

    def close(self) -> None:
        """Give everything back; nothing that is queued uses it any more. Idempotent."""
