"""A simulated accelerator for PyTorch, device ``"queued"``: its work is queued, and runs later.

What makes programs for an accelerator wrong is there: device memory that the host cannot touch,
work that runs as late as its order permits, copies that overtake each other. The C++ is in
``csrc``; ``machine.h`` says what the check of races knows.

PyTorch has room for one device from outside in a process (PrivateUse1), so what uses this one runs
in a process of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from ctypes import CFUNCTYPE, c_bool, c_char_p, c_double, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from tensorpager.pager.devices.allocator_build import Recipe, library

NAME = "queued"
SCHEDULES = ("threads", "lazy", "random")
_SOURCES = Path(__file__).with_name("csrc")
_RECIPE = Recipe(
    "simdev",
    tuple(sorted(_SOURCES.glob("*.cpp"))),
    tuple(sorted(_SOURCES.glob("*.h"))),
    ("torch_cpu", "c10"),
    "-O1",
)
_RUN = CFUNCTYPE(c_int, c_int64)
_SIGNATURES: dict[str, tuple[Any, ...]] = {  # result, then arguments
    "schedule": (c_char_p, c_int, c_size_t, c_int, c_double),
    "races": (c_char_p,),
    "check": (None, c_bool),
    "lock_pages": (c_bool, c_size_t, c_size_t),
    "unlock_pages": (c_bool, c_size_t),
    "page_locked": (c_size_t,),
    "touch": (None, c_size_t, c_size_t, c_bool),
    "bytes_of": (c_size_t, c_size_t),
    "limit": (None, c_size_t),
    "total": (None, c_size_t),
    "fail_allocation": (None, c_int64),
    "fail_copy": (None, c_int64),
    "counts": (None, c_void_p),
    "enqueue": (None, c_char_p, _RUN, c_int64),
}


class Counts(NamedTuple):
    """Since the process began."""

    queued: int  # ops
    waited: int  # ops for which the host had to wait, since what they return was not known before
    waits: int  # of the host: for events, streams, values, blocking copies
    pageable: int  # copies from or to memory that is not page-locked
    executed: int  # pieces of work that have run


class Machine:
    """What PyTorch does not ask of a device."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(self._library, f"simdev_{name}")
            function.restype, function.argtypes = result, arguments
        self._waiting: dict[int, Callable[[], None]] = {}
        self._number = 0
        self._run = _RUN(self._run_one)

    def schedule(
        self, mode: str, seed: int = 0, *, delay_us: int = 500, probability: float = 0.3
    ) -> None:
        """Wait for all work, then run what comes by ``mode``, one of ``SCHEDULES``.

        probability : for ``threads`` that of a delay before a piece of work, of up to ``delay_us``;
            for ``random`` that more work runs at a call.
        """
        failed = self._library.simdev_schedule(
            SCHEDULES.index(mode), seed, delay_us, probability if mode != "lazy" else 0.0
        )
        if failed:
            raise RuntimeError(failed.decode())

    def races(self) -> list[str]:
        """Wait for all work; the races found since the last call."""
        found = self._library.simdev_races().decode().splitlines()
        return list(dict.fromkeys(found))

    def check(self, yes: bool) -> None:
        self._library.simdev_check(yes)

    def lock_pages(self, address: int, nbytes: int) -> None:
        if not self._library.simdev_lock_pages(address, nbytes):
            raise RuntimeError(f"some of {nbytes} bytes at {address:#x} is page-locked already")

    def unlock_pages(self, address: int) -> None:
        if not self._library.simdev_unlock_pages(address):
            raise RuntimeError(f"memory at {address:#x} is not page-locked")

    def page_locked_bytes(self) -> int:
        return int(self._library.simdev_page_locked())

    def touch(self, address: int, nbytes: int, *, write: bool) -> None:
        """The caller accesses these bytes now: device memory inside ``queue``, page-locked memory
        anywhere. Other memory is not looked at."""
        self._library.simdev_touch(address, nbytes, write)

    def bytes_of(self, address: int) -> int:
        """Where the bytes of a device address are; only queued work may look."""
        return int(self._library.simdev_bytes_of(address))

    def limit(self, nbytes: int | None) -> None:
        """Of what the allocator reserves."""
        self._library.simdev_limit(2**63 if nbytes is None else nbytes)

    def set_total(self, nbytes: int) -> None:
        """How large the device's memory is."""
        self._library.simdev_total(nbytes)

    def fail_allocation(self, after: int) -> None:
        """The allocation after this many has no room; -1: none."""
        self._library.simdev_fail_allocation(after)

    def fail_copy(self, after: int) -> None:
        """The copy after this many raises; -1: none."""
        self._library.simdev_fail_copy(after)

    def counts(self) -> Counts:
        values = (c_int64 * len(Counts._fields))()
        self._library.simdev_counts(values)
        return Counts(*values)

    def queue(self, what: str, run: Callable[[], None]) -> None:
        """``run`` is a piece of work on the current stream. It says what it accesses: ``touch``."""
        self._number += 1
        self._waiting[self._number] = run
        self._library.simdev_enqueue(what.encode(), self._run, self._number)

    def _run_one(self, number: int) -> int:
        try:
            with torch.no_grad():
                self._waiting.pop(number)()
        except BaseException:
            import traceback

            traceback.print_exc()
            return 1
        return 0


class _Module:
    """``torch.queued``: what PyTorch and programs ask of a device's module."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None: ...

    def device(self, device: Any) -> Any:
        return nullcontext()

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...  # its numbers are the CPU's

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def get_device_properties(self, device: Any = None) -> Any:
        total = torch.accelerator.get_memory_info()[1]
        return SimpleNamespace(name="simulated accelerator", total_memory=total)


@contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    """``stream`` is this thread's current one inside (``with stream:`` of one object from two
    threads swaps their streams)."""
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


_machine: Machine | None = None


def simulated() -> Machine:
    """Build what is not there, register the device with PyTorch, and give the machine. Later calls
    give the same one. Raises :class:`tensorpager.pager.devices.allocator_build.NotBuiltError`."""
    global _machine
    if _machine is None:
        import torch._meta_registrations  # kernels for the meta device that are written in Python

        machine = Machine(library(_RECIPE))
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, _Module())
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
        _machine = machine
    return _machine
