#!/usr/bin/env python3
"""Fine-tune a language model of a local Hugging Face folder inside a memory budget.

    finetune_hf.py model texts.jsonl --output tuned --device-budget 8GiB --host-budget 40GiB
    finetune_hf.py model texts.jsonl --output tuned --lora 16 --dtype bfloat16
    finetune_hf.py model notes.txt --output tuned --no-pager
    torchrun --nproc-per-node 2 finetune_hf.py model texts.jsonl --output tuned ...

The data is a JSONL file with a "text" in each line, or "messages" for the tokenizer's chat
template, or else plain text, in which empty lines part the texts. The whole model is trained, or
low-rank adapters (--lora), by transformers' Trainer. What is written is a folder that
``from_pretrained`` reads, or that of an adapter. With the pager and without it losses and weights
are the same, bit for bit.

Under torchrun each rank has a copy of the model and its part of the data (DDP), a batch is that of
one rank, and ranks of one node share its budgets. One rank prints and writes.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hf.memory import add_memory_arguments, load_model, open_pager, peft_unheard, say_memory
from transformers import AutoTokenizer, Trainer, TrainingArguments

import tensorpager as tp


def read_texts(path: Path, tokenizer: Any) -> list[str]:
    """Raises ``ValueError`` that names the line which holds no text."""
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return [part.strip() for part in content.split("\n\n") if part.strip()]
    texts = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        if isinstance(entry, dict) and isinstance(entry.get("text"), str):
            texts.append(entry["text"])
        elif isinstance(entry, dict) and isinstance(entry.get("messages"), list):
            texts.append(tokenizer.apply_chat_template(entry["messages"], tokenize=False))
        else:
            raise ValueError(
                f'{path}, line {number} has neither a "text" nor "messages": {line[:60]}'
            )
    return texts


def tokenize(texts: list[str], tokenizer: Any, length: int) -> list[dict[str, list[int]]]:
    """At most ``length`` tokens of each, the end included."""
    found = []
    for text in texts:
        ids = tokenizer(text).input_ids
        if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
            ids = [*ids, tokenizer.eos_token_id]
        if len(ids) > 1:
            found.append({"input_ids": ids[:length]})
    return found


class Pad:
    """Batches as long as their longest text; what fills the others is no label."""

    def __init__(self, pad: int) -> None:
        self._pad = pad

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        length = max(len(row["input_ids"]) for row in rows)
        ids = torch.full((len(rows), length), self._pad)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for at, row in enumerate(rows):
            text = torch.tensor(row["input_ids"])
            ids[at, : len(text)], labels[at, : len(text)], mask[at, : len(text)] = text, text, 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def with_adapters(model: Any, options: argparse.Namespace) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=options.lora,
        lora_alpha=2 * options.lora,
        target_modules=options.lora_targets or "all-linear",
        task_type="CAUSAL_LM",
    )
    with peft_unheard():
        return get_peft_model(model, config)


def train(options: argparse.Namespace, pager: tp.Pager | None) -> dict[str, Any]:
    """What came out, for --json."""
    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    rows = tokenize(read_texts(options.data, tokenizer), tokenizer, options.length)
    if not rows:
        raise ValueError(f"{options.data} holds no text of two tokens or more")
    model = load_model(options, pager)
    torch.manual_seed(options.seed)
    if options.lora:
        model = with_adapters(model, options)
    pad = tokenizer.pad_token_id
    settings = TrainingArguments(
        output_dir=str(options.output),
        max_steps=options.steps,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.lr,
        warmup_steps=options.warmup,
        max_grad_norm=options.clip,
        activation_checkpointing=options.checkpointing,
        save_strategy="steps" if options.save_steps else "no",
        save_steps=options.save_steps or 500,
        logging_steps=1,
        seed=options.seed,
        use_cpu=next(model.parameters()).device.type == "cpu",
        report_to=[],
    )
    trainer = Trainer(
        model,
        settings,
        data_collator=Pad(0 if pad is None else pad),
        train_dataset=rows,
        processing_class=tokenizer,
    )
    if pager is not None:
        tp.hf.attach(trainer, pager)
    began = time.perf_counter()
    trainer.train(resume_from_checkpoint=options.resume or None)
    seconds = time.perf_counter() - began
    trainer.save_model(str(options.output))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "seconds": seconds, "steps": trainer.state.global_step}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a folder with a model and its tokenizer")
    parser.add_argument("data", type=Path, help="a .jsonl or text file")
    parser.add_argument("--output", type=Path, required=True, help="the folder that is written")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters")
    parser.add_argument("--lora-targets", nargs="+", help="names of modules; default: all linears")
    parser.add_argument("--steps", type=int, default=-1, help="instead of --epochs")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a text, at most")
    parser.add_argument("--lr", type=float, default=None, help="default: 2e-5, adapters 2e-4")
    parser.add_argument("--warmup", type=int, default=0, help="steps")
    parser.add_argument("--clip", type=float, default=1.0, help="norm of gradients; 0: not at all")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--save-steps", type=int, default=0, help="a checkpoint after so many")
    parser.add_argument("--resume", help="go on from this checkpoint's folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="a file for losses and peaks")
    add_memory_arguments(parser)
    options = parser.parse_args(arguments)
    if not options.model.is_dir():
        parser.error(f"{options.model} is no folder; scripts/make_tiny_model.py makes one to try")
    if not options.data.is_file():
        parser.error(f"{options.data} is no file")
    if options.lr is None:
        options.lr = 2e-4 if options.lora else 2e-5
    return options


def of_all_ranks(mine: dict[str, Any]) -> list[dict[str, Any]]:
    if not dist.is_initialized():
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    is_first = os.environ.get("RANK", "0") == "0"  # of torchrun's
    try:
        pager = open_pager(options)
        try:
            result = train(options, pager)
            if pager is not None:
                stats = pager.stats()
                mine = {k: stats[k] for k in ("peak_bytes", "budget_bytes", "mode", "faults")}
                result |= {**mine, "ranks": of_all_ranks(mine)}
            if is_first:
                say_memory(pager)
        finally:
            if pager is not None:
                pager.close()
    except (ValueError, OSError, tp.PagerError) as error:
        print(f"finetune_hf.py: {error}")
        return 1
    if not is_first:
        return 0
    losses = result["losses"]
    print(f"{result['steps']} steps in {result['seconds']:.1f} s; loss {losses[0]:.4f} to "
          f"{losses[-1]:.4f}; {options.output}")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
