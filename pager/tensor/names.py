"""What tensors are called: by the module, parameter or state that they belong to; their pages in
messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from ...planner.sizes import format_bytes
from ..core import Core
from ..memory.space import TRANSIENT_KINDS, Extent
from .paged_tensor import PagedTensor

OUTSIDE = "iteration"  # stands for the module where none is running


def named_models(pager: Core) -> Iterator[tuple[str, torch.nn.Module]]:
    """The paged models that are alive, each with what its names begin with: nothing if it is the
    only one, else ``GPT[0].``, ``Head[1].``."""
    models = [model for ref in pager.models if (model := ref()) is not None]
    for index, model in enumerate(models):
        yield (f"{type(model).__name__}[{index}]." if len(models) > 1 else ""), model


def named_parameters(pager: Core) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of the paged models and of the paged optimizers, each once: by their path in the
    model (the first one, if they are tied); those of no model as ``optimizer[0].parameter[3]``."""
    seen: set[int] = set()
    for prefix, model in named_models(pager):
        for path, parameter in model.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield prefix + path, parameter
    for number, optimizer in enumerate(_optimizers(pager)):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"optimizer[{number}].parameter[{index}]", parameter


def named_runs(pager: Core) -> Iterator[tuple[Extent, str]]:
    """Runs of parameters, their gradients (``….grad``) and optimizer states (``….exp_avg``) that
    are in pages now; a run of several tensors comes once for each."""
    optimizers = list(_optimizers(pager))
    for name, parameter in named_parameters(pager):
        values: dict[str, Any] = {name: parameter, f"{name}.grad": parameter.grad}
        for optimizer in optimizers:
            states = optimizer.state.get(parameter, {})
            values |= {f"{name}.{key}": value for key, value in states.items()}
        for label, value in values.items():
            value = getattr(value, "_local_tensor", value)  # of a sharded one, this rank's shard
            if type(value) is PagedTensor:
                yield value._storage.run, label


def streamed_names(pager: Core) -> list[str]:
    """Weights that go through the device slab by slab, by the verdict of ``placement.py`` or as an
    op on them (their mean, say) found no room for more; gradients and activations of which an op
    found none, and casts of weights that stream, which each iteration makes anew. Those that belong
    to no model or optimizer are named by their size."""
    names: dict[int, str] = {}
    for run, name in named_runs(pager):
        transient = run.kind in TRANSIENT_KINDS
        if (run.streamed or (run.in_slabs and not transient)) and run.id not in names:
            names[run.id] = name
    for run in list(pager.space.runs.values()):
        if run.streamed and run.storages and run.id not in names:
            names[run.id] = f"tensor of {run.nbytes} bytes"
    found = {*names.values(), *pager.space.passed_in_slabs}
    for nbytes in pager.budget.placement.streamed_copies():  # perhaps there is none just now
        size = f" of {nbytes} bytes"
        if not any(name.endswith(size) for name in found):
            found.add(f"tensor{size}")
    return sorted(found)


def _optimizers(pager: Core) -> Iterator[torch.optim.Optimizer]:
    return (optimizer for ref in pager.optimizers if (optimizer := ref()) is not None)


def shared_name(members: list[str]) -> str | None:
    """The name of a run that ``members`` live in: one name, and how many more there are."""
    if not members:
        return None
    return members[0] if len(members) == 1 else f"{members[0]} +{len(members) - 1} more"


# -- pages, for messages --------------------------------------------------------------------------
def page_name(pager: Core, page: int) -> str:
    """``"page 2 of 4 of 'layers.0.weight'"``. For messages only: it looks through all tensors. Any
    thread, with or without the pager's lock."""
    run = pager.space.runs.get(int(pager.table.owner[page]))
    if run is None:
        return f"page {page}, of a tensor that is gone"
    return f"page {page - run.first + 1} of {run.count} of {run_name(pager, run)!r}"


def run_name(pager: Core, run: Extent) -> str:
    """The tensors in ``run`` by their place in the models, or what kind they are."""
    try:
        members = [label for other, label in named_runs(pager) if other is run]
    except RuntimeError:  # an optimizer got a state while we looked
        members = []
    return shared_name(members) or f"{run.kind} (run {run.id})"


def name_pages(pager: Core) -> None:
    """Errors of the tiers and reports about the disk call pages by their tensors."""

    def name_of(page: int) -> str:
        return page_name(pager, page)

    if pager.mover.carrier.host_stamps is not None:
        pager.mover.carrier.host_stamps.name_of = name_of
    disk = pager.disk
    if disk is None:
        return
    disk.stamps.name_of = name_of
    size, stamps = pager.page_size, disk.stamps

    def tell(offset: int, nbytes: int) -> str:
        slot, count = offset // size, -(-nbytes // size)
        page = stamps.page_of(slot)
        name = f", {page_name(pager, page)}" if page >= 0 else ""
        pages = f"{count} pages from slot {slot} on" if count > 1 else f"the page in slot {slot}"
        return f"{pages} ({format_bytes(nbytes)}{name})"

    pager.io_watch.tell = tell


# -- modules ---------------------------------------------------------------------------------------
class ModulePaths:
    """Which module's ``forward`` is running, by its path in the paged model; per thread.

    Global hooks and not hooks of the modules: a model copied or saved meanwhile takes none along.
    """

    def __init__(self, pager: Core) -> None:
        self._models = [model for _, model in named_models(pager)]  # keeps the ids below theirs
        self._paths: dict[int, str] = {}
        for prefix, model in named_models(pager):
            for path, module in model.named_modules():
                self._paths[id(module)] = prefix + path if path else _root(prefix, model)
        self._running = threading.local()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the models inside the block."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    @property
    def current(self) -> str:
        """Path of the innermost module that runs in this thread."""
        paths = self._stack()
        return paths[-1] if paths else OUTSIDE

    def _stack(self) -> list[str]:
        found: list[str] = self._running.__dict__.setdefault("paths", [])
        return found

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        path = self._paths.get(id(module))
        if path is not None:
            self._stack().append(path)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        # A module that was running already when the watching began was never entered.
        if id(module) in self._paths and (paths := self._stack()):
            paths.pop()


def _root(prefix: str, model: torch.nn.Module) -> str:
    return prefix.removesuffix(".") or type(model).__name__
