"""``from_pretrained`` into pages: one weight after another, from a map of the file.

transformers' own ``from_pretrained`` runs, with its names, conversions, ties and initialisation. It
is given the checkpoint as tensors over maps of its files, and makes one parameter of them after
another. Each that it puts into a module becomes pages there (PyTorch's hook on the registration of
parameters) before the next one is made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoModelClass, _get_model_class

from ..api import Pager
from ..budget.fits import bytes_in_pages, check_capacity
from ..checkpoint.sources import Opened, open_checkpoint
from ..errors import PagerError
from ..tensor.module import lists_of, page_parameter

_REFUSED = ("device_map", "tp_plan", "tp_size", "distributed_config", "quantization_config")
_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"  # else all weights are made ahead, by threads


def from_pretrained(cls: Any, folder: str | os.PathLike[str], pager: Pager, **kw: Any) -> Any:
    """``cls.from_pretrained(folder, **kw)`` with the weights in pages of ``pager``. ::

        model = tp.hf.from_pretrained(AutoModelForCausalLM, "folder", pager, dtype=torch.bfloat16)

    The checkpoint (safetensors, in one file or in shards, or PyTorch's) may be larger than device
    and memory: what is in memory beside the budgets is one parameter, or the experts of one layer
    where transformers merges these, and nothing of it where the file has the dtype that is wanted.
    Names that have changed, tied weights, other dtypes and keys that are missing are treated, and
    told of, as transformers does. Random initial values of missing keys are those that it gives.
    ``model.save_pretrained`` writes shards that this function reads.

    cls : a class of transformers' models, or an ``AutoModel…``.
    folder : on this machine; nothing is downloaded.

    Raises ``TierFull`` before anything is read if all tiers together cannot hold the weights, and
    ``PagerError`` for arguments that place the model or quantise it.
    """
    pager.core.check_open()
    for name in _REFUSED:
        if kw.get(name) is not None:
            raise PagerError(
                f"from_pretrained() was given {name}={kw[name]!r}, and a paged model is placed by "
                "its pager, in plain dtypes; leave it out"
            )
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{os.fspath(folder)} is no folder; give one with a checkpoint")
    cls, config = _model_class(cls, folder, kw.get("config"))
    if getattr(config, "quantization_config", None) is not None:
        raise PagerError(
            f"{os.fspath(folder)} holds a quantised checkpoint, whose kernels read its memory; "
            "take one in bfloat16"
        )
    loader = _loader(cls, pager)
    result = loader.from_pretrained(folder, **{"local_files_only": True, **kw})
    model = result[0] if isinstance(result, tuple) else result
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(pager.device)
    pager.page_module(model)
    return result


def _model_class(cls: Any, folder: Any, config: Any) -> tuple[Any, Any]:
    """The class of the model, and its config."""
    is_class = isinstance(cls, type)
    if not is_class or not issubclass(cls, PreTrainedModel | _BaseAutoModelClass):
        raise TypeError(
            "from_pretrained() takes a class of transformers' models or an AutoModel… class, and "
            f"got {cls!r}"
        )
    if not hasattr(config, "model_type"):
        config = AutoConfig.from_pretrained(config or folder, local_files_only=True)
    if issubclass(cls, PreTrainedModel):
        return cls, config
    if type(config) not in cls._model_mapping:
        raise ValueError(
            f"{cls.__name__} knows no model for a {type(config).__name__}; give the class of the "
            "model itself"
        )
    return _get_model_class(config, cls._model_mapping), config


def _loader(cls: Any, pager: Pager) -> Any:
    """A subclass of ``cls`` whose ``from_pretrained`` gives a ``cls`` in pages."""

    class Loader(cls):  # type: ignore[misc]
        def __new__(klass, *args: Any, **kwargs: Any) -> Any:
            return cls(*args, **kwargs)

        @staticmethod
        def _load_pretrained_model(
            model: Any, state_dict: Any, files: Any, load_config: Any, expected_keys: Any = None
        ) -> Any:
            _check_room(pager, model)
            opened: list[Opened] = []
            if state_dict is None:
                opened = [open_checkpoint(file) for file in files]
                state_dict = {k: t for one in opened for k, t in one.content.items()}
            with _one_by_one(), _into_pages(pager, model, opened):
                return cls._load_pretrained_model(
                    model, state_dict, None, load_config, expected_keys
                )

        @staticmethod
        def _finalize_model_loading(model: Any, load_config: Any, loading_info: Any) -> Any:
            with _into_pages(pager, model, []):
                return cls._finalize_model_loading(model, load_config, loading_info)

    Loader.__name__, Loader.__qualname__ = cls.__name__, cls.__qualname__
    Loader.__module__ = cls.__module__
    return Loader


def _check_room(pager: Pager, model: Any) -> None:
    tied = set(getattr(model, "all_tied_weights_keys", ()))
    weights = (p for name, p in model.named_parameters() if name not in tied)
    with pager.core.lock:
        need = bytes_in_pages(pager.core.space, weights)
        check_capacity(pager.core.budget, need, f"the parameters of {type(model).__name__}")


@contextmanager
def _one_by_one() -> Iterator[None]:
    before = os.environ.get(_ONE_BY_ONE)
    os.environ[_ONE_BY_ONE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ONE_BY_ONE]
        else:
            os.environ[_ONE_BY_ONE] = before


@contextmanager
def _into_pages(pager: Pager, model: torch.nn.Module, opened: list[Opened]) -> Iterator[None]:
    """Inside, a parameter with values that a module of ``model`` is given becomes pages. What was
    read of the files is dropped from memory then."""
    paths = {id(module): path for path, module in model.named_modules()}
    lists = lists_of(model)

    def page(module: torch.nn.Module, name: str, parameter: Any) -> Any:
        if type(parameter) is not torch.nn.Parameter or parameter.is_meta:
            return None
        path = paths.get(id(module))
        if path is None:
            return None
        with torch.no_grad():
            label = f"{path}.{name}" if path else name
            paged = page_parameter(pager.core, parameter, label, lists[path])
        for one in opened:
            one.drop()
        return paged

    handle = register_module_parameter_registration_hook(page)
    try:
        yield
    finally:
        handle.remove()
