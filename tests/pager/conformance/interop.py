"""What the door tests share: a door is right, or refuses in words; it is never silently wrong."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import tensorpager as tp

from ... import programs
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
    lanes = [name for name in ("chaos", "scattered") if getattr(lane, name)]
    ended = programs.run("-c", _IN_PROCESS, body, *lanes, timeout=PATIENCE_S)
    assert ended.returncode >= 0, f"killed by signal {-ended.returncode}"
    answers = [line for line in ended.stdout.splitlines() if line.startswith(_ANSWER)]
    if answers:
        return answers[0].removeprefix(_ANSWER)
    assert ended.returncode, "ended without an answer"
    assert CLEAR.search(ended.stderr), f"unclear refusal: {ended.stderr}"
    return "refused"


PATIENCE_S = 300
_ANSWER = "answer: "
_IN_PROCESS = f"""
import contextlib, copy, ctypes, numpy, sys, torch
import tensorpager as tp
from tensorpager.pager.debug import chaos as debug_lanes

pager = tp.Pager(device_budget="64MiB", host_budget="64MiB", page_size="64KiB",
                 dense_reserve="16MiB", device="cpu")
torch.manual_seed(0)
x = torch.randn({ROWS}, {COLUMNS})
p = pager.page(x)

def answer(word):
    print({_ANSWER!r} + word, flush=True)

with contextlib.ExitStack() as stack:
    for name in sys.argv[2:]:
        stack.enter_context(getattr(debug_lanes, name)(pager.core))
    exec(sys.argv[1], globals())
"""
