"""``tp.hf.from_pretrained``: the model that transformers loads, in pages, and no more in memory
than the budgets and a slab."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorpager as tp

from ... import programs
from ..models import assert_same, plain
from .tiny import PAGE_BYTES, llama, mixtral, texts

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)


def small(**more: Any) -> tp.Pager:
    limits = {
        "device_budget": "2MiB",
        "dense_reserve": "1MiB",
        "host_budget": "10MiB",
        "page_size": PAGE_BYTES,
        "device": "cpu",
    }
    return tp.Pager(**(limits | more))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints: tied and in shards, in one file, of a mixture of experts, one by one."""
    made = {}
    for name, model, options in (
        ("tied", llama(width=128, tied=True), {"max_shard_size": "400KB"}),
        ("plain", llama(width=128), {}),
        ("mixtral", mixtral(), {}),
    ):
        made[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(made[name], **options)
    return made


@pytest.mark.parametrize(
    ("name", "cls", "options"),
    [
        ("tied", AutoModelForCausalLM, {}),
        ("tied", LlamaForCausalLM, {"dtype": torch.bfloat16}),
        ("plain", AutoModelForCausalLM, {"dtype": "auto", "attn_implementation": "eager"}),
        ("plain", LlamaForSequenceClassification, {"num_labels": 3}),  # whose head is missing
        ("mixtral", AutoModelForCausalLM, {}),
    ],
)
def test_the_model_is_the_librarys(
    name: str, cls: Any, options: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    expected = cls.from_pretrained(folders[name], local_files_only=True, **options)
    with small() as pager:
        torch.manual_seed(1)
        model = tp.hf.from_pretrained(cls, folders[name], pager, **options)
        assert type(model) is type(expected)
        assert all(type(p) is tp.PagedTensor for p in model.parameters())
        assert_same(plain(model.state_dict()), plain(expected.state_dict()))
        assert_same(plain(dict(model.named_buffers())), plain(dict(expected.named_buffers())))
        tied = {n for n, p in expected.named_parameters(remove_duplicate=False)}
        assert {n for n, _ in model.named_parameters(remove_duplicate=False)} == tied
        ids = {"input_ids": texts(1)[0]["input_ids"][None]}
        with pager.inference():
            result = model(**ids).logits
        with torch.no_grad():
            assert torch.equal(result, expected(**ids).logits)
        assert pager.stats()["faults"] > 0
        model.save_pretrained(tmp_path / "again", max_shard_size="300KB")
        loaded = cls.from_pretrained(tmp_path / "again", local_files_only=True)
        assert_same(plain(loaded.state_dict()), plain(expected.state_dict()))


def test_what_cannot_be_loaded_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["plain"]
    with small(host_budget="1MiB") as pager:
        with pytest.raises(tp.TierFull, match="LlamaForCausalLM"):
            tp.hf.from_pretrained(AutoModelForCausalLM, folder, pager)
        assert not pager.core.space.live_pages
        with pytest.raises(tp.PagerError, match="device_map='auto'"):
            tp.hf.from_pretrained(LlamaForCausalLM, folder, pager, device_map="auto")
        with pytest.raises(FileNotFoundError, match="no folder"):
            tp.hf.from_pretrained(LlamaForCausalLM, tmp_path / "none", pager)
        with pytest.raises(TypeError, match="AutoModel"):
            tp.hf.from_pretrained(torch.nn.Linear, folder, pager)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(tp.PagerError, match="quantised"):
            tp.hf.from_pretrained(LlamaForCausalLM, tmp_path, pager)
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ


CHILD = """
import gc, sys
from pathlib import Path
import torch, tensorpager as tp
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
folder, device, host = Path(sys.argv[1]), 9 << 20, 8 << 20
def load(name):
    pager = tp.Pager(device_budget=device, dense_reserve=2 << 20, host_budget=host,
                     disk_budget=96 << 20, disk_path=folder, page_size="256KiB", device="cpu")
    return pager, tp.hf.from_pretrained(AutoModelForCausalLM, folder / name, pager)
load("tiny")[0].close()  # what the libraries load by the way
gc.collect()
def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
pager, model = load("large")
print(status("VmHWM") - before, device + host, sum(p.nbytes for p in model.parameters()),
      max(p.nbytes for p in model.parameters()))
"""


def test_more_than_device_and_host_are_loaded_inside_the_budgets(tmp_path: Path) -> None:
    """Seen from outside, code and pages of the file included: 54 MiB through 17."""
    for name, layers in (("tiny", 1), ("large", 6)):
        config = LlamaConfig(
            vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=layers,
            num_attention_heads=8, num_key_value_heads=2,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(tmp_path / name)
    ended = programs.run("-c", CHILD, str(tmp_path))
    assert ended.returncode == 0, ended.stderr[-3000:]
    peak, budgets, weights, largest = map(int, ended.stdout.split())
    assert weights >= 3 * budgets
    assert peak <= budgets + largest + (4 << 20)
