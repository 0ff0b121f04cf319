"""``pager.save`` and ``pager.load``: files from and to pages, with no model in memory.

What passes through memory is one slab of a tensor at a time: files are written in place
(``torch_file.py``, ``safetensors_file.py``), and loaded as maps of the file, which PyTorch's own
``load_state_dict`` copies into pages one by one. So names, shapes and dtypes are treated, and
complained about, as ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..core import Core
from ..errors import PagerError
from ..optim.optimizer import load_optimizer
from ..tensor.module import warn_of_empty
from ..tensor.paged_tensor import PagedTensor
from ..tensor.sharded import as_sharded, is_sharded, local_of
from ..tensor.tensor_bytes import Read, chunks
from .safetensors_file import save_safetensors
from .snapshot import snapshot
from .sources import SAFETENSORS_SUFFIX, TORCH_SUFFIXES, open_checkpoint
from .torch_file import save_torch
from .tree import memory_of, tensors_of


class Loaded(NamedTuple):
    """What :func:`load` says. The first two as ``load_state_dict`` gives them, of all models."""

    missing_keys: list[str]
    unexpected_keys: list[str]
    metadata: dict[str, str]


# -- saving --------------------------------------------------------------------------------------
def save(
    pager: Core,
    path: str | os.PathLike[str],
    state: Any = None,
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a checkpoint. The format is that of the file's suffix:

    * ``.pt``, ``.pth``, ``.bin``, ``.ckpt``: a file of ``torch.save``, with all models and
      optimizers that this pager pages, as :meth:`Pager.state_dict` has them.
    * ``.safetensors``: the weights of the one model that it pages, for others to read.

    ``state``: what to write instead; dicts, lists and tuples of tensors, in pages or not, and plain
    values, such as ``{"model": model.state_dict(), "step": 7}``. For safetensors a dict of tensors.
    ``metadata``: texts for the header of a safetensors file.

    Memory: one slab (16 MiB) above the budget; as much as one tensor where its memory format is not
    the default one and the file is safetensors'. The file appears whole, mode 0600, or not at all:
    a failure or a kill leaves an older one as it was.

    Raises ``OSError``; ``ValueError`` for other suffixes; ``TypeError`` for what such a file cannot
    hold.

    Tensors sharded by ``fully_shard`` are put together: all ranks call this with the same path,
    rank 0 writes one ordinary file, and the others send their shards, which takes two messages of
    16 MiB beside the slab (where shards are not rows: the whole of one tensor on rank 0). Plain
    tensors are rank 0's. When it returns the file is there; an error of one rank is raised on all.
    """
    path = Path(path)
    flat = path.suffix == SAFETENSORS_SUFFIX
    if state is None:
        state = _only_model(pager, path).state_dict() if flat else references(pager)
    elif flat and isinstance(state, Mapping):
        state = dict(state)

    def check() -> None:
        _refuse_path(path)
        if flat and not isinstance(state, Mapping):
            raise TypeError(
                f"{path}: a safetensors file holds a dict of tensors, not {type(state).__name__}"
            )
        if metadata is not None and not flat:
            raise ValueError(f"{path}: only safetensors files have metadata; put it into state")

    def write(read: Read) -> None:
        _refuse_folder(path)
        if flat:
            save_safetensors(path, state, metadata, read)
        else:
            save_torch(path, state, read)

    if any(map(is_sharded, tensors_of(state))):
        from .together import save_together  # torch.distributed, which others need not load

        save_together(path, state, check, write)
        return
    check()
    write(chunks)


def references(pager: Core) -> dict[str, list[Any]]:
    """What :meth:`Pager.state_dict` copies: tensors in pages as they are."""
    return {
        "models": [model.state_dict() for model in _living(pager.models)],
        "optimizers": [optimizer.state_dict() for optimizer in _living(pager.optimizers)],
    }


def _refuse_path(path: Path) -> None:
    if path.suffix not in (*TORCH_SUFFIXES, SAFETENSORS_SUFFIX):
        known = ", ".join((*TORCH_SUFFIXES, SAFETENSORS_SUFFIX))
        raise ValueError(f"{path}: the suffix says what is written; take one of {known}")


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.absolute().parent}; make it")


def _only_model(pager: Core, path: Path) -> torch.nn.Module:
    models: list[torch.nn.Module] = _living(pager.models)
    if len(models) != 1:
        raise ValueError(
            f"{path}: this pager pages {len(models)} models, and it takes one; pass "
            "state=model.state_dict() to save, or model= to load"
        )
    return models[0]


def _living(references: list[Any]) -> list[Any]:
    return [owner for known in references if (owner := known()) is not None]


# -- loading -------------------------------------------------------------------------------------
def load(
    pager: Core,
    path: str | os.PathLike[str],
    model: torch.nn.Module | None = None,
    *,
    strict: bool = True,
) -> Loaded:
    """Load a checkpoint into pages, whatever made it; nothing in it is run.

    * What :func:`save` wrote without ``state``: into the same models and optimizers, in the order
      in which they were paged.
    * A state dict, of plain PyTorch or Hugging Face: into ``model``, by default the one that this
      pager pages. ``path`` is a PyTorch file, a safetensors file, the index of shards
      (``….index.json``), or the folder that they are in. A name that is missing is no mistake if
      the weight is tied to one that is there.

    The tensors may be larger than the arena, and all together than device, host and memory: they
    are mapped, and read one after another. ``strict``: as ``load_state_dict`` takes it. Into a
    sharded model each rank loads its part of the same file, however many ranks saved it.

    Raises ``RuntimeError`` as ``load_state_dict`` does for names and shapes that do not match,
    ``PagerError`` for a file that is no checkpoint, ``OSError``.
    """
    opened = open_checkpoint(path)
    content = opened.content
    if model is None and isinstance(content, dict) and content.keys() == {"models", "optimizers"}:
        missing, unexpected = load_all(pager, content, strict=strict, loaded=opened.drop)
        return Loaded(missing, unexpected, opened.metadata)
    if not isinstance(content, dict) or not _is_flat(content):
        keys = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise PagerError(
            f"{os.fspath(path)} is not a state dict of tensors by their names, it has: "
            f"{keys[:200]}; open it with torch.load(mmap=True, weights_only=True) and pass the "
            "part that is one to model.load_state_dict()"
        )
    model = _only_model(pager, Path(path)) if model is None else model
    _add_tied(model, content)
    result = load_module(model, content, strict=strict, loaded=opened.drop)
    return Loaded(*result, opened.metadata)


def load_all(
    pager: Core, state: dict[str, Any], *, strict: bool = True, loaded: Callable[[], None]
) -> tuple[list[str], list[str]]:
    """Into all models and optimizers. ``loaded``: called when some tensors have been copied."""
    owners = {"models": _living(pager.models), "optimizers": _living(pager.optimizers)}
    for name, live in owners.items():
        if len(state[name]) != len(live):
            raise ValueError(
                f"the state has {len(state[name])} {name} and this pager {len(live)}; page the "
                "same ones in the same order first"
            )
    missing, unexpected = [], []
    for model, part in zip(owners["models"], state["models"]):
        some_missing, some_unexpected = load_module(model, part, strict=strict, loaded=loaded)
        missing += some_missing
        unexpected += some_unexpected
    for optimizer, part in zip(owners["optimizers"], state["optimizers"]):
        load_optimizer(optimizer, part, loaded)
    return missing, unexpected


def load_module(
    model: torch.nn.Module,
    tensors: Mapping[str, Any],
    *,
    strict: bool,
    loaded: Callable[[], None],
) -> tuple[list[str], list[str]]:
    """``model.load_state_dict``, with ``loaded`` called after each of its modules."""
    with _between_modules(model, loaded):
        result: Any = model.load_state_dict(as_sharded(model, tensors), strict=strict)
    loaded()
    warn_of_empty(model, stacklevel=5)
    return list(result.missing_keys), list(result.unexpected_keys)


@contextmanager
def _between_modules(model: torch.nn.Module, call: Callable[[], None]) -> Iterator[None]:
    with ExitStack() as stack:
        for module in model.modules():
            hook = module.register_load_state_dict_pre_hook(lambda *_: call())
            stack.callback(hook.remove)
        yield


def _is_flat(content: dict[Any, Any]) -> bool:
    """Tensors by names; a module's extra state may be anything."""
    tensors = [isinstance(value, torch.Tensor) for value in content.values()]
    return any(tensors) and all(
        isinstance(name, str) and (is_tensor or name.endswith("_extra_state"))
        for name, is_tensor in zip(content, tensors)
    )


def _add_tied(model: torch.nn.Module, tensors: dict[str, Any]) -> None:
    """Weights that the file has under another name; both are copied, to the same pages."""
    known = {}
    mine = {n: t for n, t in model.state_dict(keep_vars=True).items() if _in_pages(t)}
    for name, tensor in mine.items():
        if name in tensors:
            known[_identity(tensor)] = tensors[name]
    for name, tensor in mine.items():
        if name not in tensors and _identity(tensor) in known:
            tensors[name] = known[_identity(tensor)]


def _in_pages(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and type(local_of(value)) is PagedTensor


def _identity(tensor: torch.Tensor) -> Hashable:
    """Of a parameter; a rank's shard may be empty, which tells nothing."""
    return id(tensor) if is_sharded(tensor) else memory_of(tensor)


# -- state_dict ----------------------------------------------------------------------------------
def state_dict(pager: Core) -> dict[str, Any]:
    """All that ``pager`` pages, as ordinary tensors: copies in a file.

    A mapping that makes a tensor when it is asked for would be the whole model in memory after all:
    what takes a state dict first collects its values. And its tensors would change with training.
    """
    return snapshot(pager, references(pager))  # type: ignore[no-any-return]


def load_state_dict(pager: Core, state: dict[str, Any]) -> None:
    """What ``state_dict`` gave."""
    load_all(pager, state, loaded=lambda: None)
