"""What the door tests share: a door is right, or refuses in words; it is never silently wrong."""

import multiprocessing
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import tensorpager as tp

from .bits import difference
from .lanes import PLAIN, Lane

# Says that the tensor is paged, or what to do.
CLEAR = re.compile(r"paged|to_dense", re.IGNORECASE)
ROWS, COLUMNS = 5, 10_001  # 200 KB of float32: three pages and a part of a fourth


@dataclass
class Twins:
    """A paged tensor and a plain one with the same values."""

    plain: torch.Tensor
    paged: torch.Tensor

    def __iter__(self):
        return iter((self.plain, self.paged))

    def check(self) -> None:
        same(self.plain, self.paged)


def twins(
    pager: tp.Pager,
    *shape: int,
    dtype: torch.dtype = torch.float32,
    requires_grad: bool = False,
) -> Twins:
    shape = shape or (ROWS, COLUMNS)
    torch.manual_seed(len(shape))
    values = torch.randn(shape)
    plain = (values if dtype.is_floating_point else values * 100).to(dtype)
    paged = pager.page(plain)
    return Twins(plain.requires_grad_(requires_grad), paged.requires_grad_(requires_grad))


def same(expected: object, got: object) -> None:
    found = difference(expected, got, at="it")
    assert found is None, found


def must_be_clear(error: Exception) -> None:
    """Pass a refusal that says that the tensor is paged, or what to do; raise for any other."""
    if not CLEAR.search(str(error)):
        raise AssertionError(f"unclear refusal: {type(error).__name__}: {error}") from error


def right_or_refused(expected: object, action: Callable[[], object]) -> bool:
    """True if ``action`` gave ``expected``, False if it refused in words that name the remedy."""
    try:
        got = action()
    except Exception as error:
        must_be_clear(error)
        return False
    same(expected, got)
    return True


def raises_alike(twin: Twins, action: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(Exception) as plain:
        action(twin.plain)
    with pytest.raises(plain.type):
        action(twin.paged)
    twin.check()


def in_process(body: str, lane: Lane = PLAIN) -> str:
    """Run ``body`` on a paged ``p`` and its plain twin ``x`` in a process of its own.

    What may crash the interpreter goes here. Returns what it passed to ``answer``, or "refused"
    if it ended with a clear refusal.
    """
    receive, send = _PROCESSES.Pipe(duplex=False)
    lanes = [name for name in ("chaos", "scattered") if getattr(lane, name)]
    process = _PROCESSES.Process(
        target=exec, args=(_IN_PROCESS, {"send": send, "body": body, "lanes": lanes})
    )
    process.start()
    send.close()
    try:
        answer, message = receive.recv() if receive.poll(PATIENCE_S) else ("nothing", "timed out")
    except EOFError:
        answer, message = "nothing", "ended without an answer"
    process.join(PATIENCE_S)
    assert process.exitcode is not None, "the process hangs"
    assert process.exitcode >= 0, f"killed by signal {-process.exitcode}"
    assert answer != "error" or CLEAR.search(message), f"unclear refusal: {message}"
    assert answer != "nothing", message
    return "refused" if answer == "error" else answer


PATIENCE_S = 300
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["torch"])
_IN_PROCESS = f"""
import contextlib, copy, ctypes, numpy, torch, traceback
import tensorpager as tp
from tensorpager.pager.debug import chaos as debug_lanes

pager = tp.Pager(device_budget="64MiB", host_budget="64MiB", page_size="64KiB",
                 dense_reserve="16MiB", device="cpu")
torch.manual_seed(0)
x = torch.randn({ROWS}, {COLUMNS})
p = pager.page(x)

def answer(word):
    send.send((word, ""))

try:
    with contextlib.ExitStack() as stack:
        for name in lanes:
            stack.enter_context(getattr(debug_lanes, name)(pager.core))
        exec(body, globals())
except Exception:
    send.send(("error", traceback.format_exc()))
"""
