"""Ctrl-C while the pager works: the interrupt waits until that is done.

Python raises ``KeyboardInterrupt`` between any two instructions of the main thread, and most of a
training's Python is ours: amid a move of pages it would leave frames that nobody owns, or pages
that are nowhere. So the first Pager puts a handler in the place of Python's own. An interrupt that
arrives while functions of this folder run is raised when they have returned, by the next
instruction of their caller; that is how debuggers stop a frame::

    user's frame    model(x) .................... | next instruction: KeyboardInterrupt
    ours               ops, moves of pages ->|
    Ctrl-C                  ^ noted

A second one is raised at once, for a disk that does not answer. So is the first where the caller
cannot be stopped, because a debugger or a tracer is at work; and everything is as ever in programs
that handle the signal themselves.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

_PACKAGE = __name__.rpartition(".moves.")[0]
# Waiting for a plan changes nothing, and commands are programs by themselves.
_NOT_OURS = f"{_PACKAGE}.plan.planning", f"{_PACKAGE}.cli"

_stopping: list[FrameType] = []  # the frame that will raise, if an interrupt was noted


def guard_interrupts() -> None:
    """From now on, if Python's own handler is in place and this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    if _stopping:
        _forget()
    elif sys.gettrace() is None and (caller := _caller_of_ours(frame)) is not None:
        _stop(caller)
        return
    signal.default_int_handler(number, frame)


def _caller_of_ours(frame: FrameType | None) -> FrameType | None:
    """Of the first function of ours that is running, beside those of ``contextlib`` between; or
    ``None`` if there is none, or it only waits."""
    outermost, innermost = None, True
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_PACKAGE):
            if innermost and name in _NOT_OURS:
                return None
            innermost = False
            if name not in _NOT_OURS and not name.endswith("command"):
                outermost = frame
        frame = frame.f_back
    caller = outermost.f_back if outermost is not None else None
    while caller is not None and caller.f_globals.get("__name__") == "contextlib":
        caller = caller.f_back
    return caller


def _stop(caller: FrameType) -> None:
    """Its next instruction raises."""
    _stopping.append(caller)
    caller.f_trace, caller.f_trace_opcodes = _raise, True
    sys.settrace(_trace_nothing_else)


def _trace_nothing_else(frame: FrameType, event: str, arg: Any) -> None:
    """Of frames that begin while an interrupt waits."""


def _raise(frame: FrameType, event: str, arg: Any) -> Any:
    if event == "return" and frame.f_back is not None:  # an exception has passed through
        _forget()
        _stop(frame.f_back)
        return None
    if event not in ("opcode", "return"):
        return _raise
    _forget()
    raise KeyboardInterrupt


def _forget() -> None:
    sys.settrace(None)
    caller = _stopping.pop()
    caller.f_trace, caller.f_trace_opcodes = None, False
