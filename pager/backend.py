"""What the runtime asks of a device. Two implementations: ``cpu_backend`` and ``cuda_backend``.

Note: stream order
------------------
Three streams: *compute* (the user's current stream), *out* (device → host), *in* (host → device).

1. ``copy_out`` makes *out* wait for everything queued on *compute* so far: the last use of a page
   is complete before its bytes leave.
2. A frame that was emptied is filled again only after its bytes have left and its last use is
   complete: ``copy_in`` makes *in* wait for *out* and for *compute*, and ``reuse_frames`` makes
   *compute* wait for *out*.
3. ``use_frames`` makes *compute* wait for *in*: an op never sees a page that is still arriving.
4. The CPU touches host slots (disk I/O, checksums) only after ``host_ready``.
5. A host slot given back by a write may be filled again at once: by rule 3 the copy-in that last
   read it precedes that write on *compute*, and by rule 1 the next copy-out waits for *compute*.

6. Planned moves run on threads of their own (``carry_out``, ``carry_in``): each waits for a *mark*,
   then copies on a stream of its own, and is complete when the call returns. The mark of an out is
   made when it starts, after the last use was queued; that of an in is the latest one of its
   frames, made when they were given back.
7. A kernel on *compute* may read host slots (``host_rows.py``). It is queued under the pager's
   lock, together with the look at the page table: a valid slot loses its page only under it.
   Whoever fills the slot again took it later and waits for *compute*, by rule 1 or by its mark. An
   empty ``copy_in`` behind the kernel makes *in* wait for it, so ``host_ready``, which comes before
   host memory is given back, does too.
8. Disk I/O straight on device frames is no stream's work. ``wait`` blocks its thread until the
   mark of rule 6 has been reached (for a fault: one made then), and what is queued after the I/O
   has returned finds the bytes there. Memory that cuFile knows (``register_frames``) is known from
   after it was mapped until before it is unmapped.

On the CPU backend every copy is complete when the call returns, so the waits do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from .dense_meter import Timeline
from .dense_refusal import Peak

if TYPE_CHECKING:
    from .disk.registration import Registration

Bytes = npt.NDArray[np.uint8]


class Copy(NamedTuple):
    """``len(host)`` bytes between the arena at byte ``offset`` and host memory."""

    offset: int
    host: Bytes


class Backend(Protocol):
    """Owns the arena, its streams and events, and knows the dense memory beside it."""

    device: torch.device
    arena: torch.Tensor  # uint8 [reserved bytes]; only what is committed may be touched
    address: int
    granularity: int  # bytes; the border is at a multiple of it
    host_addressable: bool  # the CPU can read and write frames in place

    def commit(self, nbytes: int) -> None:
        """Move the border between arena and dense memory."""

    def register_frames(self, registration: Registration) -> None:
        """Keep ``registration`` in step with the memory behind the arena, from now until the arena
        is closed. Before the first I/O on frames."""

    def frames_view(self, offset: int, nbytes: int) -> Any:
        """Arena bytes for disk I/O in place: an array where ``host_addressable``, else a tensor."""

    def register_host(self, memory: Bytes) -> None:
        """Page-lock ``memory`` so that copies run at link speed."""

    def unregister_host(self, memory: Bytes) -> None:
        """Undo ``register_host``."""

    def copy_out(self, copies: Sequence[Copy]) -> None:
        """Queue arena → host copies (rule 1)."""

    def copy_in(self, copies: Sequence[Copy]) -> None:
        """Queue host → arena copies (rule 2)."""

    def note_compute(self) -> None:
        """The calling thread's current stream is the one that ops run on from now on."""

    def on_compute(self) -> AbstractContextManager[Any]:
        """What the calling thread queues inside goes to the stream of ops."""

    def mark(self) -> Any:
        """A point in the order of work: all that was queued so far by ops and by copies of faults.
        ``None`` where calls complete when they return. Any thread."""

    def wait(self, mark: Any) -> None:
        """Block the caller, without the GIL, until ``mark`` is reached (rule 8). Any thread."""

    def carry_out(self, copies: Sequence[Copy], mark: Any) -> None:
        """Arena → host, after ``mark``; complete when it returns. Any thread, without the GIL
        while bytes move."""

    def carry_in(self, copies: Sequence[Copy], mark: Any) -> None:
        """Host → arena, likewise."""

    def slide(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Arena copies ``(source offset, destination offset, bytes)`` towards lower addresses, in
        order; source and destination of one move may overlap. Compute-stream order."""

    def reuse_frames(self) -> None:
        """Rule 2 for frames that ops will write."""

    def use_frames(self) -> None:
        """Rule 3."""

    def host_ready(self) -> None:
        """Rule 4: blocks the caller, without the GIL, until queued copies are complete."""

    def limit_dense(self, nbytes: int | None, *, roomy: bool = False) -> None:
        """Make ``nbytes`` a hard cap of dense memory where the device can; ``None`` lifts it.
        ``roomy``: there is plenty, so the allocator may keep freed memory for reuse."""

    def limit_guests(self, nbytes: int | None) -> None:
        """No thread is a guest any more. From now on a guest is refused what brings all dense
        memory above ``nbytes``, where that is known, with ``torch.OutOfMemoryError``."""

    def add_guest(self) -> None:
        """The calling thread works beside the iteration: its dense memory is no part of what is
        measured, where that can be told apart."""

    def cap_dense(self, nbytes: int | None) -> None:
        """An iteration begins that is not metered: count its dense bytes from now on, and raise
        ``torch.OutOfMemoryError`` beyond ``nbytes`` where the device can count. ``None``: it is
        over."""

    def count_anew(self) -> None:
        """What is alive now was counted; count from 0 on, as a metered iteration does when the
        optimizer steps."""

    def dense_peak(self) -> int:
        """Most dense bytes that were counted at once since ``cap_dense``; 0 where not known."""

    def refusal(self) -> str:
        """What was refused last, in words; empty where not known."""

    def meter_start(self) -> None:
        """Begin to measure the peak of dense memory (temporaries inside ops included)."""

    def meter_sample(self) -> None:
        """Look now, where a peak can only be found by looking often."""

    def meter_stop(self) -> int:
        """Peak dense bytes since ``meter_start``, on top of what was alive then."""

    def meter_peak(self) -> Peak | None:
        """What made the peak of the last measurement; ``None`` where not known."""

    def meter_level(self) -> int | None:
        """The peak so far, while it is measured; ``None`` where only the end tells."""

    def meter_timeline(self) -> Timeline:
        """When dense memory was how large in the last measurement; empty where not known."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


def make_backend(device: torch.device, reserved_bytes: int, committed_bytes: int) -> Backend:
    """The backend for ``device`` (``cpu`` or ``cuda``)."""
    if device.type == "cpu":
        from .cpu_backend import CpuBackend

        return CpuBackend(reserved_bytes, committed_bytes)
    if device.type == "cuda":
        from .cuda_backend import CudaBackend

        return CudaBackend(device, reserved_bytes, committed_bytes)
    raise ValueError(f"device={str(device)!r} has no backend; pass 'cpu' or 'cuda'")
