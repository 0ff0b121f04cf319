"""The device budget of a Trainer's training, its evaluation and a generation, as the system sees
it. (A checkpoint of the weights has up to 16 MiB more in memory, ``tensor/images.py``.)"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ... import programs

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

CHILD = """
import gc, json, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import torch, tensorpager as tp
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
torch.set_num_threads(1)
folder = Path(sys.argv[1])

def save(name, width, layers):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder / name)

def run(name, budgets):
    pager = tp.Pager(page_size="64KiB", device="cpu", disk_path=folder, **budgets)
    if pager.core.follower is not None:
        pager.core.follower.most_plans = 1
    model = tp.hf.from_pretrained(LlamaForCausalLM, folder / name, pager)
    rows = [{"input_ids": torch.arange(3, 51), "labels": torch.arange(3, 51)}] * 16
    trainer = Trainer(model, TrainingArguments(str(folder / "out"), max_steps=5, use_cpu=True,
        per_device_train_batch_size=2, per_device_eval_batch_size=2, eval_strategy="steps",
        eval_steps=4, save_strategy="no", report_to=[], disable_tqdm=True), train_dataset=rows,
        eval_dataset=rows[:4])
    tp.hf.attach(trainer, pager)
    trainer.train()
    pager.plan()  # and what plans are made with
    with pager.inference():
        prompt = torch.arange(3, 13)[None]
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12,
            eos_token_id=None)
    return pager.stats()

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

save("small", 64, 1)
save("model", 256, 4)
run("small", {"device_budget": "8MiB", "disk_budget": "8MiB"})  # what libraries load by the way
gc.collect()
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
stats = run("model", {"device_budget": "24MiB", "disk_budget": "80MiB"})
peak = status("VmHWM") - before
print("\\n" + json.dumps({"peak": peak, **{k: stats[k] for k in ("faults", "peak_bytes", "fits")}}))
"""


def test_half_of_the_need_from_disk(tmp_path: Path) -> None:
    """A model of 12.5 MiB, 50 with gradients and states, in 24 MiB."""
    ended = programs.run("-c", CHILD, str(tmp_path))
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["faults"] > 0
    assert not found["fits"]
    assert found["peak_bytes"]["device"] <= 24 << 20
    assert found["peak"] <= (24 << 20) * 11 // 10 + (12 << 20), "code, and what libraries keep"
