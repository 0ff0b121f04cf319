"""Checkpoints as users have them: one file, shards with an index, or a folder with either."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import PagerError
from .file import MappedFile
from .safetensors_file import map_safetensors
from .torch_file import map_torch

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
SAFETENSORS_SUFFIX = ".safetensors"
_IN_FOLDERS = (  # in the order in which Hugging Face's transformers looks for them
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


@dataclass(frozen=True)
class Opened:
    """What a checkpoint holds; its tensors lie in ``maps`` and are read when they are used."""

    content: Any
    metadata: dict[str, str] = field(default_factory=dict)
    maps: tuple[MappedFile, ...] = ()

    def drop(self) -> None:
        """Memory that caches what was read so far is given back."""
        for mapped in self.maps:
            mapped.drop()


def open_checkpoint(path: str | os.PathLike[str]) -> Opened:
    """A ``.safetensors`` file, a PyTorch file, an index of shards (``….index.json``), or a folder
    as Hugging Face lays it out. Nothing in a file is run.

    Raises ``OSError`` for what cannot be read and ``PagerError`` for what is no checkpoint.
    """
    path = Path(path)
    if path.is_dir():
        path = _in_folder(path)
    if path.name.endswith(".json"):
        return _open_shards(path)
    return _open_file(path)


def _in_folder(folder: Path) -> Path:
    for name in _IN_FOLDERS:
        if (folder / name).is_file():
            return folder / name
    raise PagerError(f"{folder} holds none of {', '.join(_IN_FOLDERS)}; name the file itself")


def _open_file(path: Path) -> Opened:
    if path.suffix == SAFETENSORS_SUFFIX:
        tensors, metadata, mapped = map_safetensors(path)
        return Opened(tensors, metadata, (mapped,))
    content, mapped = map_torch(path)
    return Opened(content, {}, (mapped,))


def _open_shards(index: Path) -> Opened:
    """All shards. Names are those of the index; the files must be beside it."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        places = content["weight_map"]
        names = {str(name): str(shard) for name, shard in places.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise PagerError(
            f"{index} is not an index of shards: it must be JSON with an object 'weight_map' of "
            "names and files; name the file itself, or get it again"
        ) from None
    shards: dict[str, Opened] = {}
    tensors = {}
    for name, shard in names.items():
        if shard != Path(shard).name or shard in ("", ".", "..") or shard.endswith(".json"):
            raise PagerError(f"{index} names the shard {shard!r}; shards must be files beside it")
        if shard not in shards:
            shards[shard] = _open_file(index.parent / shard)
        inside = shards[shard].content
        if not isinstance(inside, dict) or name not in inside:
            raise PagerError(f"{index.parent / shard} lacks {name!r}, which {index.name} has in it")
        tensors[name] = inside[name]
    metadata = {key: value for opened in shards.values() for key, value in opened.metadata.items()}
    maps = tuple(mapped for opened in shards.values() for mapped in opened.maps)
    return Opened(tensors, metadata, maps)
