#!/usr/bin/env python3
"""Trainers of others beside an own loop: what a step takes with each of them, plain and paged.

    bench_integrations.py --rounds 3
    bench_integrations.py --modes own,trainer --share 60

All train the same Llama on batches of one size with AdamW and clipping, each in a process of its
own, in turn, with one thread. "own sft" is an own loop around the loss of TRL's SFTTrainer, which
takes more than the model's. A step is from one call of the model to the next; medians, after
warm-up.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by libraries when they load
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import click
import torch
from lm.modes import chosen, in_child, in_turn
from lm.report import run_facts, write_json

import tensorpager as tp

BATCH, LENGTH, VOCABULARY = 2, 128, 512
RATE, CLIP = 1e-3, 1.0


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def rows(steps: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (steps * BATCH, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row, "attention_mask": row * 0 + 1} for row in ids]


def own(model: Any, pager: tp.Pager | None, steps: int, folder: str) -> None:
    loop(model, pager, torch.utils.data.DataLoader(rows(steps), BATCH), lambda b: model(**b).loss)


def loop(model: Any, pager: tp.Pager | None, batches: Any, loss_of: Callable[..., Any]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    if pager is not None:
        pager.page_module(model)
        pager.optimizer(optimizer)

    def step(batch: Any) -> None:
        loss_of(batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    for batch in batches:
        if pager is None:
            step(batch)
        else:
            with pager.iteration():
                step(batch)


def trainer(model: Any, pager: tp.Pager | None, steps: int, folder: str) -> None:
    from transformers import Trainer, TrainingArguments

    made = Trainer(model, TrainingArguments(**settings(steps, folder)), train_dataset=rows(steps))
    if pager is not None:
        tp.hf.attach(made, pager)
    made.train()


def settings(steps: int, folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": BATCH,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": CLIP,
        "logging_steps": steps,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }


def sft_trainer(model: Any, steps: int, folder: str) -> Any:
    import datasets
    from make_tiny_model import make_tokenizer
    from trl import SFTConfig, SFTTrainer

    data = [{"input_ids": row["input_ids"].tolist()} for row in rows(steps)]
    config = SFTConfig(**settings(steps, folder), max_length=LENGTH, bf16=False)
    dataset = datasets.Dataset.from_list(data)
    return SFTTrainer(model, config, train_dataset=dataset, processing_class=make_tokenizer())


def sft(model: Any, pager: tp.Pager | None, steps: int, folder: str) -> None:
    made = sft_trainer(model, steps, folder)
    if pager is not None:
        tp.hf.attach(made, pager)
    made.train()


def own_sft(model: Any, pager: tp.Pager | None, steps: int, folder: str) -> None:
    made = sft_trainer(model, steps, folder)
    model.train()
    loop(model, pager, made.get_train_dataloader(), lambda b: made.compute_loss(model, b))


def accelerate(model: Any, pager: tp.Pager | None, steps: int, folder: str) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    objects = model, optimizer, torch.utils.data.DataLoader(rows(steps), BATCH)
    if pager is None:
        model, optimizer, loader = accelerator.prepare(*objects)
    else:
        model, optimizer, loader = tp.hf.prepare(accelerator, pager, *objects)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()


def lightning(model: Any, pager: tp.Pager | None, steps: int, folder: str) -> None:
    import lightning as library

    class Module(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=RATE)

    strategy = {} if pager is None else {"strategy": tp.lightning.TensorPagerStrategy(pager)}
    library.Trainer(
        max_steps=steps, accelerator="cpu", gradient_clip_val=CLIP, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, **strategy,
    ).fit(Module().train(), torch.utils.data.DataLoader(rows(steps), BATCH))  # fmt: skip


MODES = {
    "own": own, "trainer": trainer, "accelerate": accelerate, "lightning": lightning,
    "own sft": own_sft, "sft": sft,
}  # fmt: skip


def child(request: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, steps, pager = llama(), request["steps"], None
    if request["share"]:
        need = 4 * sum(p.nbytes for p in model.parameters())
        pager = tp.Pager(
            device_budget=need * request["share"] // 100 + request["dense"],
            host_budget=4 * need, page_size="64KiB", device="cpu",
        )  # fmt: skip
    times: list[tuple[float, float]] = []
    model.register_forward_pre_hook(
        lambda *_: times.append((time.perf_counter(), time.process_time()))
    )
    with tempfile.TemporaryDirectory() as folder:
        MODES[request["mode"]](model, pager, steps, folder)
    found: dict[str, Any] = {
        name: [after[which] - before[which] for before, after in pairwise(times)]
        for which, name in enumerate(("wall", "cpu"))
    }
    if pager is not None:
        stats = pager.stats()
        found |= {name: stats[name] for name in ("planned_iterations", "bytes_in", "fits")}
        pager.close()
    return found


@click.command(help=__doc__.replace("\n\n    bench", "\n\n\b\n    bench") if __doc__ else None)
@click.option("--modes", default=",".join(MODES), show_default=True)
@click.option("--steps", default=40, show_default=True)
@click.option("--warm-up", default=16, show_default=True, help="Of these steps, not timed.")
@click.option("--share", default=50, show_default=True,
              help="Percent of weights, gradients and states on the device.")  # fmt: skip
@click.option("--rounds", default=1, show_default=True)
@click.option("--json", "out", type=Path, help="Write what was measured here.")
@click.option("--child", "request", hidden=True)
def main(
    modes: str,
    steps: int,
    warm_up: int,
    share: int,
    rounds: int,
    out: Path | None,
    request: str | None,
) -> None:
    if request is not None:
        print(json.dumps(child(json.loads(request))))
        return
    found: dict[str, list[dict[str, Any]]] = {}
    for _, mode in in_turn(chosen(modes, MODES), rounds):
        for part in (0, share):
            dense = (24 << 20) if "sft" in mode else (8 << 20)
            spec = {"mode": mode, "steps": steps, "share": part, "dense": dense}
            name = f"{mode}, {'paged' if part else 'plain'}"
            found.setdefault(name, []).append(in_child(__file__, spec))
    for name, runs in found.items():
        said = []
        for what in ("cpu", "wall"):
            ms, base = (
                statistics.median(statistics.median(run[what][warm_up:]) for run in some) * 1e3
                for some in (runs, found.get(_own(name), runs))
            )
            said.append(f"{what} {ms:6.1f} ms a step, {ms / base:.2f} of an own loop")
        planned = f", {runs[-1]['planned_iterations']} planned" if "fits" in runs[-1] else ""
        print(f"{name:18} {'; '.join(said)}{planned}")
    if out is not None:
        write_json(out, {"runs": found, "facts": run_facts("cpu")})


def _own(name: str) -> str:
    """The own loop that a mode is compared with."""
    mode, part = name.split(", ")
    return f"{'own sft' if 'sft' in mode else 'own'}, {part}"


if __name__ == "__main__":
    main()
