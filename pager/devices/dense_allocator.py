"""PyTorch's CPU allocator while a pager is open: counts, caps and reuses dense blocks.

The allocator is ``dense_allocator.cpp``; this is how Python reaches it. :func:`load` gives it, or
``None`` where it cannot be had, and :func:`why_not` says why: then dense memory is measured by
PyTorch's profiler (``dense_meter.py``) and not capped, as before there was one.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .allocator_build import NotBuiltError, library
from .dense_meter import NO_TIMELINE, Timeline
from .dense_refusal import Block, Peak, Place, describe, place

NO_LIMIT = -1
_Ask = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_Tell = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_uint64, ctypes.c_int64)
_LARGEST = 3  # blocks that are told
_int, _long, _pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "install": (_int, []),
    "open": (_int, []),
    "close": (None, [_int]),
    "reset": (None, [_int, _int]),
    "restart": (None, [_int, _int]),
    "pause": (None, [_int]),
    "resume": (None, [_int]),
    "current": (_long, [_int]),
    "peak": (_long, [_int]),
    "limit": (None, [_int, _long, _long]),
    "guests": (None, [_int, _long]),
    "guest": (None, [_int]),
    "events": (_long, [_int, _pointer, _pointer, _pointer, _long]),
    "living": (_long, [_int, _pointer, _pointer, _pointer, _long]),
    "birth": (_long, [ctypes.c_uint64]),
    "totals": (None, [_pointer] * 4),
    "largest": (_int, [_int, _pointer, _pointer, _int]),
    "at_peak": (_int, [_int, _pointer, _pointer, _pointer, _int, _pointer]),
    "calls": (None, [_int, _int, _int]),
    "callbacks": (None, [_pointer, _pointer]),
}


class Totals(NamedTuple):
    """Bytes. ``live``: of blocks made while an account was open; ``free``: kept mapped to be used
    again; ``mapped`` and ``unmapped``: asked of the system and given back to it, so far."""

    live: int
    free: int
    mapped: int
    unmapped: int


class DenseAllocator:
    """The library, which every CPU tensor of this process is made by from now on."""

    def __init__(self, path: str) -> None:
        loaded = ctypes.CDLL(path)
        self.calls: dict[str, Any] = {}
        for name, (result, arguments) in _SIGNATURES.items():
            call = getattr(loaded, f"tp_dense_{name}")
            call.restype, call.argtypes = result, arguments
            self.calls[name] = call
        if not self.calls["install"]():
            raise NotBuiltError("another library has replaced PyTorch's CPU allocator")
        self._callbacks = _Ask(_note_refusal), _Tell(_note_place)
        self.calls["callbacks"](*(ctypes.cast(c, ctypes.c_void_p) for c in self._callbacks))

    def totals(self) -> Totals:
        numbers = (ctypes.c_int64 * 4)()
        at = ctypes.addressof(numbers)
        self.calls["totals"](*(at + 8 * i for i in range(4)))
        return Totals(*numbers)


class Account:
    """Counts the blocks that are made after it was last reset, in all threads, and not while it is
    paused. Bytes are those that
    PyTorch asked for. Raises ``NotBuiltError`` if too many accounts are open."""

    def __init__(self, allocator: DenseAllocator) -> None:
        self._calls = allocator.calls
        self._number: int = self._calls["open"]()
        if self._number < 0:
            raise NotBuiltError("too many pagers are open")
        self.close = weakref.finalize(self, self._calls["close"], self._number)
        self.refusal = ""  # the last one: what asked, and what was there
        self._make_room: Callable[[int], bool] = lambda missing: False
        self._asks = False
        self.places: dict[int, Place] = {}  # where blocks were made, by their births
        _accounts[self._number] = self

    def reset(self, *, log: bool = False) -> None:
        """Count from zero. ``log``: remember each change too, for :meth:`timeline`."""
        if self.close.alive:
            self._calls["reset"](self._number, int(log))

    def restart(self, *, log: bool = False) -> None:
        """Go on counting, with a new peak and, if ``log``, a new log, both of what is there now."""
        if self.close.alive:
            self._calls["restart"](self._number, int(log))

    def pause(self) -> None:
        """What is made from now on does not count, for as long as it lives."""
        if self.close.alive:
            self._calls["pause"](self._number)

    def resume(self) -> None:
        """The end of :meth:`pause`: go on counting, with a new peak."""
        if self.close.alive:
            self._calls["resume"](self._number)

    @property
    def current(self) -> int:
        return int(self._calls["current"](self._number)) if self.close.alive else 0

    @property
    def peak(self) -> int:
        return int(self._calls["peak"](self._number)) if self.close.alive else 0

    def limit(self, nbytes: int | None, *, keep: int) -> None:
        """Cap what is counted, or not. What is freed stays mapped for reuse as long as it is, with
        what is counted, at most ``keep`` bytes."""
        if self.close.alive:
            self._calls["limit"](self._number, NO_LIMIT if nbytes is None else nbytes, keep)

    def guests(self, limit: int | None) -> None:
        """No thread is a guest any more. Those that become one from now on are refused (with
        ``torch.OutOfMemoryError``) what brings all that is counted above ``limit`` bytes."""
        if self.close.alive:
            self._calls["guests"](self._number, NO_LIMIT if limit is None else limit)

    def add_guest(self) -> None:
        """What the calling thread allocates from now on is in :attr:`current`, but neither in
        :attr:`peak` nor in :meth:`timeline`."""
        if self.close.alive:
            self._calls["guest"](self._number)

    def ask(self, make_room: Callable[[int], bool]) -> None:
        """From now on, what asks for too much on this thread asks ``make_room`` for the bytes that
        are missing, which raises the limit or returns ``False``; ``refusal`` says who asked then.
        (Others may be waited for by who holds the GIL, so Python cannot look there.)"""
        self.refusal = ""
        self._make_room, self._asks = make_room, True
        self._call_back(places=False)

    def note_places(self, on: bool) -> None:
        """From now on note in ``places`` where this thread makes blocks of 64 KiB or more, or no
        longer."""
        self._call_back(places=on)

    def _call_back(self, *, places: bool) -> None:
        if self.close.alive:
            self._calls["calls"](self._number, int(self._asks), int(places))

    def timeline(self) -> Timeline:
        """What the log has seen."""
        return self._columns("events")

    def living(self) -> Timeline:
        """Of each counted block of 64 KiB or more that lives, ``when`` it was made; where one line
        has made several (a list), the last of them."""
        living = self._columns("living")
        last: dict[Place, float] = {}
        lines = [self.places.get(birth) for birth in living.birth.tolist()]
        for line, when in zip(lines, living.when.tolist()):
            if line is not None and line.code is not None:
                last[line] = max(when, last.get(line, when))
        for number, line in enumerate(lines):
            if line is not None and line in last:
                living.when[number] = last[line]
        return living

    def _columns(self, call: str) -> Timeline:
        if not self.close.alive:
            return NO_TIMELINE
        rows = self._calls[call](self._number, None, None, None, 0)
        line = Timeline(np.empty(rows), np.empty(rows, np.int64), np.empty(rows, np.int64))
        self._calls[call](self._number, *(column.ctypes.data for column in line), rows)
        return line

    def birth_at(self, address: int) -> int:
        """Of the block that a tensor begins with, as ``timeline`` has it."""
        return int(self._calls["birth"](address))

    def largest(self, most: int) -> list[tuple[int, int]]:
        """Address and bytes of the largest blocks that are counted, of 64 KiB or more."""
        if not self.close.alive:
            return []
        addresses, sizes = np.empty(most, np.uint64), np.empty(most, np.int64)
        count = self._calls["largest"](self._number, addresses.ctypes.data, sizes.ctypes.data, most)
        return list(zip(addresses[:count].tolist(), sizes[:count].tolist()))

    def at_peak(self) -> Peak | None:
        """What the log and ``places`` say of the peak; ``None`` where nothing was made."""
        if not self.close.alive:
            return None
        births, addresses = np.empty(_LARGEST, np.uint64), np.empty(_LARGEST, np.uint64)
        sizes, last = np.empty(_LARGEST, np.int64), ctypes.c_uint64()
        columns = births.ctypes.data, sizes.ctypes.data, addresses.ctypes.data
        count = self._calls["at_peak"](self._number, *columns, _LARGEST, ctypes.addressof(last))
        found = zip(births[:count].tolist(), sizes[:count].tolist(), addresses[:count].tolist())
        blocks = [Block(n, address, self.places.get(birth)) for birth, n, address in found]
        asked = max((birth for birth in self.places if birth <= last.value), default=0)
        return Peak(self.peak, self.places.get(asked), blocks) if blocks else None


_accounts: weakref.WeakValueDictionary[int, Account] = weakref.WeakValueDictionary()


def _note_refusal(number: int, missing: int, nbytes: int) -> int:
    """The allocator is about to refuse; called where that happens. 0: it may; else it looks
    again."""
    account = _accounts.get(number)
    if account is not None:
        try:
            if account._make_room(missing):
                return 1
            account.refusal = describe(nbytes, account.largest(_LARGEST))
        except Exception as error:  # the refusal counts, not its description
            account.refusal = f"an op asked for {nbytes} bytes ({error})."
    return 0


def _note_place(number: int, birth: int, nbytes: int) -> None:
    """A large block is about to be made; called where that happens."""
    account = _accounts.get(number)
    if account is not None:
        account.places[birth] = place()


class AllocatorMeter:
    """As :class:`~.dense_meter.DenseMeter`: exact, of all threads, inside backward and beside any
    profiler too. ``at_peak``: what made the peak of the last measurement, where ``places`` are to
    be noted."""

    def __init__(self, account: Account, *, places: bool = False) -> None:
        self.account = account
        self.timeline = NO_TIMELINE
        self.at_peak: Peak | None = None
        self.alive = 0
        self._places = places

    def sample(self) -> None:
        pass  # the allocator keeps its peak

    def start(self, *, go_on: bool = False) -> None:
        self.timeline = NO_TIMELINE
        self.account.restart(log=True)
        if not go_on:
            self.account.places = {}
        if self._places:
            self.account.note_places(True)

    def stop(self) -> int:
        peak = self.account.peak
        if self._places:
            self.at_peak = self.account.at_peak()
            self.account.note_places(False)
        self.timeline = self.account.timeline()
        self.alive = int(self.timeline.nbytes[-1]) if len(self.timeline.nbytes) else 0
        self.account.restart()
        return peak


_loading = threading.Lock()
os.register_at_fork(after_in_child=lambda: _unlock_in_child())
_loaded: DenseAllocator | None = None
_reason = ""


def load() -> DenseAllocator | None:
    """The allocator of this process, built and installed at the first call; ``None`` where that
    is not possible. Any thread."""
    global _loaded, _reason
    with _loading:
        if _loaded is None and not _reason:
            try:
                _loaded = DenseAllocator(os.fspath(library()))
            except NotBuiltError as error:
                _reason = str(error)
            except (OSError, AttributeError) as error:  # built for another machine, or damaged
                _reason = f"it cannot be loaded: {error}"
        return _loaded


def _unlock_in_child() -> None:
    """The thread that was loading it is not in a forked child, and would hold the lock there."""
    global _loading
    _loading = threading.Lock()


def loaded() -> DenseAllocator | None:
    """The allocator if this process has it already."""
    return _loaded


def why_not() -> str:
    """Why :func:`load` gave ``None``; empty if it did not."""
    return _reason
