"""Batches of updates by AdamW that are made again, as they were made the last time.

What a launch reads (which elements there are, and where) is the same in every step, but for the
addresses of gradients and of what has moved. So it is kept on the device, and before a batch is
made again it is only looked whether parameters, gradients and states are still those of the last
time. Where they are not, ``fused.py`` makes the updates anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ...kernels.adam import adam_step_again
from ...kernels.launch import runs_triton
from ...kernels.update import KeptTables
from ..memory.space import Extent
from ..tensor.paged_tensor import PagedTensor
from .fused_states import MASTER
from .paged_optimizer import PagedOptimizer
from .torch_fused import settings

if TYPE_CHECKING:
    from ..core import Core

_GRAD, _STORAGE, _SHAPED = attrgetter("grad"), attrgetter("_storage"), attrgetter("_shaped")
_DTYPE, _LAYOUT, _RUN = attrgetter("dtype"), attrgetter("layout"), attrgetter("run")
_SETTINGS = ("amsgrad", "maximize", "foreach", "fused", "differentiable", "capturable")


class _Place:
    """Where a tensor's first element is: ``inside`` bytes behind the first frame of ``run``, for as
    long as it is in these pages, and has the geometry that it had."""

    __slots__ = ("inside", "run")

    def __init__(self, tensor: PagedTensor) -> None:
        self.run: Extent = tensor._storage.run
        offset = int(tensor.storage_offset())
        self.inside = tensor._storage.offset + offset * tensor.dtype.itemsize


class BatchAgain:
    """Updates of ``parameters``, of one group, that one launch has made. ``most``: pages that a
    batch could take then. ``counters``: what counts their steps."""

    def __init__(
        self,
        group: dict[str, Any],
        rows: Sequence[tuple[Any, ...]],
        states: Sequence[dict[str, Any]],
        names: Sequence[str],
        most: int,
    ) -> None:
        """rows : of each update (parameter, its states by ``names``, step counter). All of them are
        contiguous, in pages or not, and alike in their dtypes. states : what the optimizer keeps of
        each."""
        self.parameters = [row[0] for row in rows]
        self.most = most
        self._states = list(states)
        self._lengths = [len(state) for state in states]
        self._values_of = itemgetter(*names, "step")
        self._values = [value for row in rows for value in row[1:]]
        steps = [row[-1] for row in rows]
        self.counters = _share_memory(steps)
        self._steps, self._step_addresses = steps, [step.data_ptr() for step in steps]
        self._settings = _settings(group)
        grad: Any = self.parameters[0].grad
        self._grad_dtype = grad.dtype
        dtypes = [grad.dtype, *(value.dtype for value in rows[0][:-1])]
        numels = [parameter.numel() for parameter in self.parameters]
        self._tables = KeptTables(dtypes, numels, grad.device)
        self._stream = _stream_of(grad.device)
        # By operand, from the parameter on: what is dense, or its place in pages.
        columns = list(zip(*rows))[:-1]
        self._places: list[list[Any]] = [
            [_Place(value) if type(value) is PagedTensor else value for value in column]
            for column in columns
        ]
        self._paged = [value for value in chain(*columns) if type(value) is PagedTensor]
        self._storages = [*map(_STORAGE, self._paged)]
        self._shaped = [*map(_SHAPED, self._paged)]
        self._changes = -1  # of geometries when they were looked at
        self._runs = [storage.run for storage in self._storages]
        self._written = list(dict.fromkeys(self._runs))
        self._frames: list[int] = []  # of the first page of each of these
        self._addresses = np.empty((1 + len(self._places), len(rows)), np.int64)

    @classmethod
    def of(cls, paged: PagedOptimizer, updates: Sequence[Any], most: int) -> BatchAgain | None:
        """``None`` where updates are not such as can be made again. They have just been made."""
        if paged.kind not in (torch.optim.AdamW, torch.optim.Adam) or paged.format.chosen:
            return None
        if not runs_triton(paged.pager.device):
            return None
        rows: list[tuple[Any, ...]] = []
        states = [paged.state_of(update.parameter) for update in updates]
        alike = set()
        for update, state in zip(updates, states):
            if MASTER in state:
                return None
            values = [update.parameter, *update.states.values()]
            if update.grad is not update.parameter.grad or update.step is None:
                return None
            if not all(isinstance(x, torch.Tensor) and x.is_contiguous() for x in values):
                return None
            if not update.grad.is_contiguous():
                return None
            alike.add((update.grad.dtype, *(value.dtype for value in values)))
            rows.append((*values, update.step))
        if len(alike) > 1:
            return None
        return cls(updates[0].group, rows, states, tuple(updates[0].states), most)

    def matches(self, paged: PagedOptimizer, group: dict[str, Any], some: Sequence[Any]) -> bool:
        """Whether ``some``, parameters that have gradients, are to be updated as they were. They
        may be thousands, so what is looked at in each is left to C."""
        if len(some) != len(self.parameters) or not all(map(is_, some, self.parameters)):
            return False
        if self._settings != _settings(group):
            return False
        if self._stream != _stream_of(self._tables.device):
            return False  # tables are on the device in the order of that stream
        grads = [*map(_GRAD, some)]  # on the parameter's device, as PyTorch sees to it
        if not all(map(is_, map(_DTYPE, grads), repeat(self._grad_dtype))):
            return False
        if not all(map(is_, map(_LAYOUT, grads), repeat(torch.strided))):
            return False
        if not all(map(torch.Tensor.is_contiguous, grads)):
            return False
        if not all(map(is_, map(paged.optimizer.state.get, some), self._states)):
            return False
        try:
            values = chain.from_iterable(map(self._values_of, self._states))
            if not all(map(is_, values, self._values)):
                return False
        except KeyError:
            return False
        if [*map(len, self._states)] != self._lengths:  # with masters, for example
            return False
        if [*map(torch.Tensor.data_ptr, self._steps)] != self._step_addresses:
            return False
        changes = paged.pager.changed_in_place
        if changes != self._changes:
            in_place = all(map(is_, map(_STORAGE, self._paged), self._storages))
            in_place = in_place and all(map(is_, map(_RUN, self._storages), self._runs))
            if not in_place or [*map(_SHAPED, self._paged)] != self._shaped:
                return False
            self._changes = changes
        return True

    @contextmanager
    def held(self, pager: Core) -> Iterator[npt.NDArray[np.int64] | None]:
        """Inside, all that the updates use is held, to be written. Gives the addresses for
        :meth:`launch`; ``None`` where something is not in one piece."""
        grads = [*map(_GRAD, self.parameters)]
        held = self._in_order(grads) if PagedTensor in map(type, grads) else self._order
        pager.take(held)
        try:
            pager.will_write(self._written)
            whole = all(run.base >= 0 for run in held)
            yield self._found(pager, grads) if whole else None
        finally:
            pager.release(held)

    @cached_property
    def _order(self) -> list[Extent]:
        """What is held where no gradient is in pages."""
        return self._in_order([None] * len(self.parameters))

    def _in_order(self, grads: Sequence[Any]) -> list[Extent]:
        """All that is held, in the order in which updates name it."""
        runs: dict[Extent, None] = {}
        for grad, *places in zip(grads, *self._places):
            if type(grad) is PagedTensor:
                runs[grad._storage.run] = None
            for place in places:
                if type(place) is _Place:
                    runs[place.run] = None
        return list(runs)

    def _found(self, pager: Core, grads: Sequence[Any]) -> npt.NDArray[np.int64]:
        arena, size = pager.backend.address, pager.page_size
        frames = [run.base for run in self._runs]
        if frames != self._frames:
            self._frames = frames
            for row, column in enumerate(self._places, 1):
                self._addresses[row] = [
                    arena + place.run.base * size + place.inside
                    if type(place) is _Place
                    else place.data_ptr()
                    for place in column
                ]
        self._addresses[0] = [
            pager.address_of(grad._storage) + int(grad.storage_offset()) * grad.dtype.itemsize
            if type(grad) is PagedTensor
            else grad.data_ptr()
            for grad in grads
        ]
        return self._addresses

    def launch(
        self,
        group: dict[str, Any],
        addresses: npt.NDArray[np.int64],
        inv_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Queue the updates, whose step counters count this step already."""
        adam_step_again(
            *(self._tables, addresses),
            steps=self.counters,
            **settings(torch.optim.AdamW, group),
            decoupled=group["decoupled_weight_decay"],
            inv_scale=inv_scale,
            found_inf=found_inf,
        )


def _share_memory(steps: list[torch.Tensor]) -> list[torch.Tensor]:
    """Counters on the host become elements of one tensor, which counts for all of them: that, or
    ``steps`` where they cannot. They stay the tensors that they are."""
    if len({step.dtype for step in steps}) > 1 or any(step.device.type != "cpu" for step in steps):
        return steps
    if any(type(step) is not torch.Tensor or step.dim() for step in steps):
        return steps
    together = torch.stack(steps)
    for step, place in zip(steps, together):
        step.data = place
    return [together]


def _stream_of(device: torch.device) -> torch.Stream | None:
    """That ops are queued on now."""
    # Asked so, it takes a tenth of the time.
    return None if device.type == "cpu" else torch._C._accelerator_getStream(device.index)


def _settings(group: dict[str, Any]) -> list[Any]:
    """Of which it depends who makes an update, and how."""
    return [
        *(group.get(name) for name in _SETTINGS),
        *(isinstance(x, torch.Tensor) for x in (*group["betas"], group["weight_decay"])),
    ]
