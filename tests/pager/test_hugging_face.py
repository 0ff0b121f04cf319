"""transformers and accelerate on paged models. Importing them takes seconds: few tests, here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorpager as tp

from .models import make_pager


@pytest.fixture
def accelerate() -> Iterator[Any]:
    module = pytest.importorskip("accelerate")
    yield module
    module.state.AcceleratorState._reset_state(reset_partial_state=True)  # which is the process's


def model_of(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    shape = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": kind == "Llama",
    }
    if kind == "Mixtral":  # whose weights are cut in pieces to be saved
        shape["num_local_experts"] = 2
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**shape)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["Llama", pytest.param("Mixtral", marks=pytest.mark.slow)])
def test_save_pretrained(kind: str, tmp_path: Path, accelerate: Any) -> None:
    """The same files, whole and in shards, and by accelerate; loaded again they are the model."""
    with make_pager() as pager:
        for name, model in (
            ("plain", model_of(kind)),
            ("paged", pager.page_module(model_of(kind))),
        ):
            model.save_pretrained(tmp_path / "whole" / name)
            model.save_pretrained(tmp_path / "shards" / name, max_shard_size="100KB")
            accelerate.Accelerator(cpu=True).save_model(model, tmp_path / "accelerate" / name)
        for way in ("whole", "shards", "accelerate"):
            files = files_in(tmp_path / way / "plain")
            assert files == files_in(tmp_path / way / "paged"), way
            assert len(files) > 3 if way == "shards" else "model.safetensors" in files
        loaded = type(model).from_pretrained(tmp_path / "whole" / "paged")
        for name, parameter in model.named_parameters():
            assert type(parameter) is tp.PagedTensor
            assert torch.equal(parameter, loaded.get_parameter(name)), name
