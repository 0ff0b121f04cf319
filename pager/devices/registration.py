"""The arena registered with cuFile, so that GPUDirect Storage moves frames without a copy between.

cuFile moves device memory that it does not know through buffers of its own on the GPU, and memory
that was registered with it (``cuFileBufRegister``) directly. Both are right; one is a copy less.

1. *What is registered* is one mapping of device memory after another. The arena is mapped in pieces
   (devices/cuda_memory.py), and KvikIO tells cuFile the mapping that a pointer lies in, when it
   registers as when it moves; cuFile knows a buffer by where it begins.
2. *When*: a piece is registered after it was mapped and before the first I/O on it. It is given
   back before it is unmapped, when no I/O uses it any more. Its device does both where it moves
   its border, because it owns the memory; a process that is killed leaves both to the driver.
3. *Limits*: a GPU shows only so much memory to other devices at once (BAR1), and cuFile registers
   only so much (``max_device_pinned_mem_size_kb`` in cufile.json). A call registers all that was
   asked for or nothing new, and the first failure is the last try: ``note`` says so once.
4. *A piece that cuFile does not give back* must stay mapped: a drive could write to it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Protocol

from ...planner.sizes import format_bytes
from ..errors import PagerError

LIMITS = (
    "raise max_device_pinned_mem_size_kb in cufile.json, look at BAR1 (nvidia-smi -q -d MEMORY), "
    "or lower device_budget"
)


class BufferCalls(Protocol):
    """``kvikio.buffer``: both act on the whole mapping that ``buf`` begins in."""

    def memory_register(self, buf: Any) -> None: ...

    def memory_deregister(self, buf: Any) -> None: ...


class Registration:
    """Of the front of one arena. Not for several threads: the caller moves the arena's border.

    ``most_bytes``: what cuFile says that it registers; ``None`` if it does not say. ``note``: why
    some of the arena, or all of it, is not registered; ``None`` if nothing went wrong.
    """

    def __init__(self, calls: BufferCalls, most_bytes: int | None = None) -> None:
        self.note: str | None = None
        self._calls = calls
        self.most_bytes = most_bytes
        self._arena: Any = None
        self._count = self._piece_bytes = 0

    @property
    def registered_bytes(self) -> int:
        return self._count * self._piece_bytes

    def cover(self, arena: Any, nbytes: int, piece_bytes: int) -> None:
        """Registers what is not yet of the first ``nbytes`` of ``arena`` (uint8, one-dimensional,
        mapped in pieces of ``piece_bytes``). Never raises: without it transfers work too."""
        self._arena, self._piece_bytes = arena, piece_bytes
        wanted, before = -(-nbytes // piece_bytes), self._count
        if wanted <= before or self.note is not None:
            return
        if self.most_bytes is not None and wanted * piece_bytes > self.most_bytes:
            limit = format_bytes(self.most_bytes)
            self._give_up(wanted, f"cuFile registers {limit} at most")
            return
        try:
            while self._count < wanted:
                self._calls.memory_register(self._piece(self._count))
                self._count += 1
        except Exception as error:  # KvikIO's RuntimeError, or what another version of it raises
            self._give_up(wanted, _reason(error))
            with suppress(PagerError):  # then they stay registered, which does no harm
                self.keep(before * piece_bytes)

    def keep(self, nbytes: int) -> None:
        """Gives back all but the first ``nbytes``, for whoever is about to unmap the rest.

        Raises PagerError for a piece that cuFile does not give back; that one, and those before
        it, are still registered and must stay mapped.
        """
        while self._count and (self._count - 1) * self._piece_bytes >= nbytes:
            try:
                self._calls.memory_deregister(self._piece(self._count - 1))
            except Exception as error:
                raise PagerError(
                    f"cuFile does not give back {self.registered_bytes} registered bytes of the "
                    f"arena ({_reason(error)}), so they stay where they are; save and start again, "
                    "with io_engine='posix' if it happens again"
                ) from error
            self._count -= 1

    def _piece(self, index: int) -> Any:
        return self._arena[index * self._piece_bytes :][: self._piece_bytes]

    def _give_up(self, wanted: int, reason: str) -> None:
        whole = format_bytes(wanted * self._piece_bytes)
        self.note = (
            f"an arena of {whole} could not be registered ({reason}), so what is not goes through "
            f"cuFile's own buffers; {LIMITS}"
        )


def _reason(error: Exception) -> str:
    """What KvikIO says, without the place in its source that comes first."""
    return str(error).rpartition(": ")[2] or type(error).__name__
