"""How hard the pager is pressed while an op runs, and how many samples each run gets."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

import tensorpager as tp
from tensorpager.pager.debug.chaos import chaos, scattered

FULL = os.environ.get("TENSORPAGER_FULL") == "1"


@dataclass(frozen=True)
class Lane:
    """``chaos``: everything is evicted and its frames poisoned after each dispatch.

    ``scattered``: frames are never consecutive, and small inputs lie across a page boundary,
    so that every input is gathered and every result written back in parts.

    ``opened``: an iteration in which everything fits: ops are given weights as plain tensors.

    ``lent``: an iteration that is not metered: nodes of autograd are lent what they have saved.

    ``saved``: the same with results of ops for inputs, and all that is saved of them in pages,
    however small it is.

    ``inference``: the call runs in ``torch.inference_mode()``, in both worlds.
    """

    name: str
    chaos: bool = False
    scattered: bool = False
    opened: bool = False
    lent: bool = False
    saved: bool = False
    inference: bool = False

    def around(self, call: Callable[..., object]) -> Callable[..., object]:
        """``call`` as it is made in this lane, in the plain world too."""
        if self.saved:
            return lambda world: call(replace(world, inputs=tree_map(_result, world.inputs)))
        return torch.inference_mode()(call) if self.inference else call

    @contextmanager
    def on(self, pager: tp.Pager) -> Iterator[None]:
        with ExitStack() as stack:
            if self.scattered:
                stack.enter_context(scattered(pager.core))
            if self.chaos:
                stack.enter_context(chaos(pager.core))
            if self.opened or self.lent or self.saved:
                stack.enter_context(_iteration(pager, fits=self.opened))
            if self.saved:
                pager.core.saved.threshold = 1  # type: ignore[attr-defined]
            yield


def _result(value: Any) -> Any:
    """Of an op, on a tensor: plain."""
    return value.clone() if isinstance(value, torch.Tensor) else value


@contextmanager
def _iteration(pager: tp.Pager, *, fits: bool) -> Iterator[None]:
    """One that is not metered."""
    before = pager.core.fits, pager.core.budget.settled
    pager.core.fits, pager.core.budget.settled = fits, True
    profile_run = pager.core.profile_run
    profile_run.note_shapes = lambda *args: None  # type: ignore[method-assign]
    try:
        with pager.iteration():
            if fits:
                pager.core.saved.take_off()  # as where shapes are known
            yield
    finally:
        pager.core.fits, pager.core.budget.settled = before
        del profile_run.note_shapes


PLAIN = Lane("plain")
CHAOS = Lane("chaos", chaos=True)
SCATTERED = Lane("scattered", scattered=True)
BOTH = Lane("chaos+scattered", chaos=True, scattered=True)
OPEN = Lane("open", opened=True)
LENT = Lane("lent", chaos=True, lent=True)
SAVED = Lane("saved", chaos=True, saved=True)
INFERENCE = Lane("inference", chaos=True, scattered=True, inference=True)

LANES = (PLAIN, CHAOS, SCATTERED, BOTH) if FULL else (PLAIN, BOTH)


def sample_limit(lane: Lane, *, quick: int, full: int | None = None) -> int | None:
    """Samples of one op in ``lane``; None for all. A quick run presses hard on one of them."""
    if FULL:
        return full
    return quick if lane == PLAIN else 1
