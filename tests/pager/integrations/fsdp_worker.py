"""Trains a tiny Llama by Trainer's and accelerate's FSDP2 on torchrun's ranks: plain, in pages, and
in pages from the plain one's checkpoint. ``OUT/rank-N.json``: what each has come to.

accelerate has FSDP2 for accelerators only. On these CPUs it is told that it has it.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[3]))

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import Trainer, TrainingArguments

import tensorpager as tp
from tests.pager.integrations.tiny import llama, texts


def trainer(out: Path) -> Trainer:
    arguments = TrainingArguments(
        str(out), use_cpu=True, per_device_train_batch_size=2, max_steps=6, logging_steps=1,
        save_steps=3, gradient_accumulation_steps=2, report_to=[], disable_tqdm=True, fsdp=True,
        fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                     "state_dict_type": "SHARDED_STATE_DICT"},
    )  # fmt: skip
    made = Trainer(llama(), arguments, train_dataset=texts(64))
    if not made.is_fsdp_enabled:
        with pytest.raises(tp.PagerError, match="fsdp= with which accelerate shards nothing"):
            tp.hf.attach(made)
    state = made.accelerator.state
    state.distributed_type, made.is_fsdp_enabled = DistributedType.FSDP, True
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
    return made


def train(out: Path, *, paged: bool, resume: Path | None = None) -> dict[str, Any]:
    made, pager = trainer(out), None
    if paged:
        sizes = {"device_budget": "7MiB", "host_budget": "32MiB", "page_size": "64KiB"}
        pager = tp.hf.attach(made, **sizes)
    made.train(resume_from_checkpoint=None if resume is None else str(resume))
    digest = hashlib.sha256()
    for name, parameter in sorted(made.model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().full_tensor().contiguous().numpy().tobytes())
    logged = [[entry["loss"], entry["grad_norm"]] for entry in made.state.log_history
              if "loss" in entry]  # fmt: skip
    stats = None
    if pager is not None:
        stats = pager.stats()
        pager.close()
    return {"logged": logged, "sha256": digest.hexdigest(), "stats": stats}


def main() -> None:
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    plain = train(out / "plain", paged=False)
    found = {
        "plain": plain,
        "paged": train(out / "paged", paged=True),
        "resumed": train(out / "resumed", paged=True, resume=out / "plain" / "checkpoint-3"),
    }
    (out / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


main()
