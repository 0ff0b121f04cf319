"""Checkpoints as targets for fuzzing: safetensors headers, and files of ``torch.save``.

Beside ``fuzz_targets.py`` because these need torch.
"""

from __future__ import annotations

import io
import json
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from fuzz_targets import Target, odd_bytes, odd_tree

from tensorpager.pager.checkpoint.safetensors_file import map_safetensors
from tensorpager.pager.checkpoint.torch_file import map_torch

_FOLDER = tempfile.TemporaryDirectory(prefix="tensorpager-fuzz-")
_TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.int8)}
_HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "I8", "shape": [4], "data_offsets": [24, 28]},
}


def _safetensors(header: Any) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(28)


def _saved() -> bytes:
    file = io.BytesIO()
    torch.save({"model": _TENSORS, "step": 3, "names": ["x"]}, file)
    return file.getvalue()


_SAVED = _saved()


def odd_saved(random: Random) -> bytes:
    """A file of ``torch.save`` with other bytes in its pickle, or anywhere."""
    if random.random() < 0.4:
        return odd_bytes(_SAVED, random)
    file = io.BytesIO()
    source = zipfile.ZipFile(io.BytesIO(_SAVED))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as sink:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("data.pkl"):
                changed = bytearray(content)
                for _ in range(random.choice((1, 1, 2, 4))):
                    changed[random.randrange(len(changed))] = random.randrange(256)
                content = odd_bytes(bytes(changed), random)
            sink.writestr(name, content)
    return file.getvalue()


def _reader(load: Callable[[Path], tuple[Any, ...]]) -> Callable[[bytes], None]:
    path = Path(_FOLDER.name, "checkpoint")

    def read(content: bytes) -> None:
        path.write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of deprecated things in old files
            _touch(load(path)[0])

    return read


def _touch(tree: Any) -> None:
    """Every byte that a tensor claims is there."""
    if isinstance(tree, torch.Tensor) and tree.layout is torch.strided:
        tree.detach().clone()
    elif isinstance(tree, dict):
        for value in tree.values():
            _touch(value)


TARGETS = {
    target.name: target
    for target in (
        Target(
            "safetensors",
            _safetensors(_HEADER),
            _reader(map_safetensors),
            lambda random: odd_bytes(_safetensors(odd_tree(_HEADER, random)), random),
        ),
        Target("torch-checkpoint", _SAVED, _reader(map_torch), odd_saved),
    )
}
