"""What the ops of an iteration take in plain PyTorch: the time that a plan is measured by.

Not the iteration's time without its stalls: our own work would be in that (pages chosen, views
made, activations copied into pages), and what moves take from the ops beside them. So in one
iteration on demand, in which nothing moves beside ops, each op is timed by itself, on the plain
operands that it runs on: all that a program without a pager would run, and nothing of ours. What
PyTorch and Python take between two ops is measured apart, with ops of one element.

On the CPU only: elsewhere the log's times are the device's own, and the host runs ahead of it.
"""

from __future__ import annotations

import statistics
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch

from ..core import Core
from ..tensor.dispatcher import OpWatcher, hide_from_dynamo
from ..tensor.op_info import our_modes
from ..tensor.paged_tensor import PagedTensor

_TINY_OPS, _ROUNDS = 64, 5
_between: list[float] = []


class OpTimes(OpWatcher):
    """Times the ops that run between ``start`` and ``stop``, which one thread calls: that which
    runs them."""

    def __init__(self, pager: Core) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pager = pager
        self._thread = threading.get_ident()
        self._on = True
        # Of ops with operands of the same shapes: those of the layers of a model are alike, and
        # what once took longer than the others was held up by something.
        self._seconds: defaultdict[Any, list[float]] = defaultdict(list)

    def start(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]
        our_modes.count += 1

    def stop(self) -> bool:
        """It times no more. ``False`` where it cannot be taken off, on another thread and below
        modes of others: until this is called again it passes ops through."""
        self._on = False
        stack = torch._C._len_torch_dispatch_stack()
        if threading.get_ident() != self._thread or not stack:
            return False
        if torch._C._get_dispatch_stack_at(stack - 1) is not self:
            return False
        self.__exit__(None, None, None)
        our_modes.count -= 1
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._on:
            return func(*args, **kwargs)
        # What runs in its place comes here again. (Without autograd composite ops come whole.)
        if PagedTensor in types and not torch.is_inference_mode_enabled():
            with self:
                return PagedTensor.__torch_dispatch__(func, types, args, kwargs)
        began = perf_counter()
        out = func(*args, **kwargs)
        seconds = perf_counter() - began
        if not self._is_ours(func, args):
            self._seconds[func, *_shapes(args)].append(seconds)
        return out

    def _is_ours(self, func: Any, args: Any) -> bool:
        """Whether bytes of pages are copied."""
        return (
            func is torch.ops.aten.copy_.default
            and args[0].dtype is torch.uint8
            and any(map(self._pager.holds, args[:2]))
        )

    def total_us(self) -> float:
        """Of all of them, and of what lies between."""
        seconds = sum(len(each) * statistics.median(each) for each in self._seconds.values())
        return (seconds + sum(map(len, self._seconds.values())) * between_ops()) * 1e6


hide_from_dynamo(OpTimes.__torch_dispatch__)


def can_time_ops(pager: Core) -> bool:
    """Not where compiled code runs, which a mode does not see inside of, or ranks wait for each
    other."""
    if pager.device.type != "cpu" or "torch._inductor.compile_fx" in sys.modules:
        return False
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized())


def _shapes(args: Any) -> Iterator[Any]:
    for value in args:
        if isinstance(value, torch.Tensor):
            yield value.shape
        elif isinstance(value, list | tuple):
            yield len(value)


def between_ops() -> float:
    """Seconds from one op of a program to the next: of Python, autograd and the dispatcher, beside
    what is timed of an op itself. Measured once in a process."""
    if not _between:
        with torch.enable_grad():
            chains = [_chain() for _ in range(_ROUNDS)]
        with torch.no_grad():
            ops = [_ops() for _ in range(_ROUNDS)]
        _between.append(max(0.0, statistics.median(chains) - statistics.median(ops)))
    return _between[0]


def _chain() -> float:
    """Seconds of an op of a chain that is differentiated, forward and backward."""
    start = torch.ones(1, device="cpu", requires_grad=True)
    began = perf_counter()
    end = start
    for _ in range(_TINY_OPS):
        end = torch.mul(end, 2.0)
    end.backward()
    return (perf_counter() - began) / (2 * _TINY_OPS)


def _ops() -> float:
    """Seconds of such an op by itself, as :class:`OpTimes` times it."""
    tensor, mul = torch.ones(1, device="cpu"), torch.ops.aten.mul.Tensor
    total = 0.0
    for _ in range(_TINY_OPS):
        began = perf_counter()
        mul(tensor, 2.0)
        total += perf_counter() - began
    return total / _TINY_OPS
