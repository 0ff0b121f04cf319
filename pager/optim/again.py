"""Batches of updates by AdamW that are made again, as they were made the last time.

What a launch reads (which elements there are, and where) is the same in every step, but for the
addresses of gradients and of what has moved. So it is kept on the device, and before a batch is
made again it is only looked whether parameters, gradients and states are still those of the last
time. Where they are not, ``fused.py`` makes the updates anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

_SETTINGS = ("amsgrad", "maximize", "foreach", "fused", "differentiable", "capturable")


class _Place:
    """Where a tensor's first element is: ``inside`` bytes behind the first frame of ``run``, for as
    long as it is in these pages (``storage``), and has the geometry that it had (``shaped``)."""

    __slots__ = ("inside", "run", "shaped", "storage", "tensor")

    def __init__(self, tensor: PagedTensor) -> None:
        self.tensor, self.storage, self.shaped = tensor, tensor._storage, tensor._shaped
        self.run: Extent = tensor._storage.run
        offset = int(tensor.storage_offset())
        self.inside = tensor._storage.offset + offset * tensor.dtype.itemsize


class BatchAgain:
    """Updates of ``parameters``, of one group, that one launch has made. ``most``: pages that a
    batch could take then. ``steps``: their counters."""

    def __init__(
        self,
        group: dict[str, Any],
        rows: Sequence[tuple[Any, ...]],
        names: Sequence[str],
        most: int,
    ) -> None:
        """rows : of each update (parameter, its states by ``names``, step counter). All of them are
        contiguous, in pages or not, and alike in their dtypes."""
        self.parameters = [row[0] for row in rows]
        self.most = most
        self._names = names
        self._kept = [row[1:-1] for row in rows]
        self.steps = [row[-1] for row in rows]
        self._settings = _settings(group)
        grad: Any = self.parameters[0].grad
        self._grad_dtype = grad.dtype
        dtypes = [grad.dtype, *(value.dtype for value in rows[0][:-1])]
        numels = [parameter.numel() for parameter in self.parameters]
        self._tables = KeptTables(dtypes, numels, grad.device)
        self._stream = _stream_of(grad.device)
        # By operand, from the parameter on: what is dense, or its place in pages.
        self._places: list[list[Any]] = [
            [_Place(value) if type(value) is PagedTensor else value for value in column]
            for column in list(zip(*rows))[:-1]
        ]
        self._paged = [x for column in self._places for x in column if type(x) is _Place]
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
        alike = set()
        for update in updates:
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
        return cls(updates[0].group, rows, tuple(updates[0].states), most)

    def matches(self, paged: PagedOptimizer, group: dict[str, Any], some: Sequence[Any]) -> bool:
        """Whether ``some``, parameters that have gradients, are to be updated as they were."""
        if self._settings != _settings(group):
            return False
        if self._stream != _stream_of(self._tables.device):
            return False  # tables are on the device in the order of that stream
        state = paged.optimizer.state
        for parameter, before, kept, step in zip(some, self.parameters, self._kept, self.steps):
            if parameter is not before:
                return False
            grad = parameter.grad
            if grad.dtype is not self._grad_dtype or grad.layout is not torch.strided:
                return False
            if not grad.is_contiguous():  # on the parameter's device, as PyTorch sees to it
                return False
            now = state.get(parameter)
            if now is None or now.get("step") is not step or MASTER in now:
                return False
            for name, value in zip(self._names, kept):
                if now.get(name) is not value:
                    return False
        for place in self._paged:
            tensor = place.tensor
            if tensor._storage is not place.storage or tensor._shaped != place.shaped:
                return False
        return len(some) == len(self.parameters)

    @contextmanager
    def held(self, pager: Core) -> Iterator[npt.NDArray[np.int64] | None]:
        """Inside, all that the updates use is held, to be written. Gives the addresses for
        :meth:`launch`; ``None`` where something is not in one piece."""
        grads: list[Any] = [parameter.grad for parameter in self.parameters]
        rows = zip(grads, *self._places)
        runs: dict[int, Extent] = {}  # in the order in which updates name them
        for grad, *places in rows:
            if type(grad) is PagedTensor:
                runs[grad._storage.run.id] = grad._storage.run
            for place in places:
                if type(place) is _Place:
                    runs[place.run.id] = place.run
        written = {place.run.id: place.run for place in self._paged}
        held = list(runs.values())
        pager.take(held)
        try:
            pager.will_write([run for run in held if run.id in written])
            whole = all(run.base >= 0 for run in held)
            yield self._found(pager, grads) if whole else None
        finally:
            pager.release(held)

    def _found(self, pager: Core, grads: Sequence[Any]) -> npt.NDArray[np.int64]:
        arena, size = pager.backend.address, pager.page_size
        frames = [place.run.base for place in self._paged]
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
            steps=self.steps,
            **settings(torch.optim.AdamW, group),
            decoupled=group["decoupled_weight_decay"],
            inv_scale=inv_scale,
            found_inf=found_inf,
        )


def _stream_of(device: torch.device) -> torch.Stream | None:
    """That ops are queued on now."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device.index)


def _settings(group: dict[str, Any]) -> list[Any]:
    """Of which it depends who makes an update, and how."""
    return [
        *(group.get(name) for name in _SETTINGS),
        *(isinstance(x, torch.Tensor) for x in (*group["betas"], group["weight_decay"])),
    ]
