"""LoRA by peft on a paged base: the base is only read, and written below once at most."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorpager as tp

from ..models import assert_same, plain
from .tiny import PAGE_BYTES, llama, texts

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
from transformers import Trainer, TrainingArguments

DENSE_BYTES = 2 << 20
STEPS = 8


def lora(dtype: torch.dtype = torch.float32, *, zero: bool = True, tied: bool = False) -> Any:
    model = llama(layers=4, width=128, tied=tied).to(dtype)
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=zero,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config)


def half_of_base(model: torch.nn.Module, **more: Any) -> dict[str, Any]:
    base = sum(p.nbytes for p in model.parameters())
    budget = base // 2 + DENSE_BYTES
    return {
        "device_budget": budget,
        "host_budget": 3 * base,
        "page_size": PAGE_BYTES,
        "device": "cpu",
    } | more


class Moves:
    """How often each page of a frozen parameter is written below, and pages of adapters that are
    moved in steps, either way, after the first one, or of their states that leave after the second,
    on demand."""

    def __init__(self, pager: tp.Pager, model: torch.nn.Module) -> None:
        self.written: Counter[int] = Counter()
        self.adapters = 0
        frozen, adapters = (
            {
                page
                for p in model.parameters()
                if p.requires_grad is learns
                for page in p._storage.run.pages.tolist()
            }
            for learns in (False, True)
        )
        transfer = pager.core.mover._transfer

        def noted(tier: str, moved: Any, *args: Any, to_device: bool) -> Any:
            if not to_device:
                self.written.update(frozen.intersection(moved.tolist()))
            if pager.core.iterations and pager.core.inside:
                self.adapters += len(adapters.intersection(moved.tolist()))
            later = pager.core.iterations > 1 and pager.core.inside
            if later and not to_device and pager.core.follower.known:
                owners = pager.core.table.owner[moved].tolist()
                kinds = Counter(pager.core.space.runs[owner].kind for owner in owners)
                self.adapters += kinds["optimizer"]
            return transfer(tier, moved, *args, to_device=to_device)

        pager.core.mover._transfer = noted


def train(model: Any, folder: Path, pager: tp.Pager | None) -> list[Any]:
    settings = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=STEPS,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, settings, train_dataset=texts(16))
    if pager is not None:
        tp.hf.attach(trainer, pager)
    trainer.train()
    return [entry.get("loss") for entry in trainer.state.log_history]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_training_and_saving(dtype: torch.dtype, tmp_path: Path) -> None:
    expected = lora(dtype)
    losses = train(expected, tmp_path / "plain", None)
    model = lora(dtype)
    with tp.Pager(**half_of_base(model)) as pager:
        pager.page_module(model)
        moves = Moves(pager, model)
        assert train(model, tmp_path / "paged", pager) == losses
        assert_same(plain(model.state_dict()), plain(expected.state_dict()))
        assert set(moves.written.values()) == {1}
        assert moves.adapters == 0
        stats = pager.stats()
        assert stats["channel_bytes"]["host-in"] > 0
        assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]
        name = f"checkpoint-{STEPS}/adapter_model.safetensors"
        assert (tmp_path / "paged" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def _written() -> int:
    """Bytes that this process has given to the kernel to write, as the kernel counts them."""
    (line,) = [x for x in Path("/proc/self/io").read_text().splitlines() if x.startswith("wchar")]
    return int(line.split()[1])


def test_a_base_on_disk_is_written_once_as_the_system_counts(tmp_path: Path) -> None:
    model = lora()
    base = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    budgets = half_of_base(model, host_budget=0, disk_budget="64MiB", disk_path=tmp_path)
    budgets["policy"] = "lru"  # for a plan, the disk's speed would be measured by writing to it
    short = texts(2, length=8)  # what a step makes of it stays dense
    with tp.Pager(**budgets) as pager:
        pager.page_module(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = pager.optimizer(torch.optim.AdamW(trained, lr=1e-3))
        counts, reads = [_written()], []
        for _ in range(12):
            with pager.iteration():
                for text in short:
                    model(**{name: row[None] for name, row in text.items()}).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            counts.append(_written())
            reads.append(pager.stats()["channel_bytes"]["disk-in"])
        assert reads[-1] - reads[4] > base, "what does not fit is read again and again"
        written = [after - before for before, after in pairwise(counts)]
        assert base // 4 < written[0] < 1.5 * base, "once"
        assert max(written[1:]) < base // 10, "adapters' gradients and states"


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_adapters_are_loaded_merged_and_taken_off_again(tmp_path: Path, tied: bool) -> None:
    other = lora(zero=False, tied=tied)
    other.save_pretrained(tmp_path)
    x = {"input_ids": texts(2)[0]["input_ids"][None]}
    ends = []
    for paged in (False, True):
        model = lora(tied=tied)
        pager = tp.Pager(**half_of_base(model)) if paged else None
        if pager is not None:
            pager.page_module(model)
        found = []
        with torch.no_grad():
            model.load_adapter(str(tmp_path), "other")
            model.set_adapter("other")
            found.append(plain(model(**x).logits))
            model.merge_adapter()
            found.append(plain(model(**x).logits))
            model.unmerge_adapter()
            found.append(plain(model.state_dict()))
            with model.disable_adapter():
                found.append(plain(model(**x).logits))
            merged = model.merge_and_unload()
            found.append(plain(merged(**x).logits))
            found.append(plain(merged.state_dict()))
        assert merged.config.tie_word_embeddings is tied
        merged.save_pretrained(tmp_path / f"{paged}")
        ends.append(found)
        if pager is not None:
            assert type(merged.lm_head.weight) is tp.PagedTensor
            pager.close()
    assert_same(ends[1], ends[0])
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("False", "True")]
    assert files[0] == files[1]
