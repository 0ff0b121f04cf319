#!/usr/bin/env python3
"""Generate text with a model of a local Hugging Face folder inside a memory budget.

    generate.py model --prompt "The page" --device-budget 8GiB --host-budget 40GiB
    generate.py model --prompt "The page" --adapter tuned --sample --temperature 0.8

As many weights as the budget holds stay on the device, the others come ahead of use; the tokens are
those of the model without the pager.
"""

import argparse
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from hf.memory import add_memory_arguments, load_model, open_pager, peft_unheard, say_memory
from transformers import AutoTokenizer

import tensorpager as tp
from tensorpager.planner.sizes import format_bytes


def generate(options: argparse.Namespace, pager: tp.Pager | None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    model = load_model(options, pager)
    if options.adapter:
        from peft import PeftModel

        with peft_unheard():
            model = PeftModel.from_pretrained(model, str(options.adapter), local_files_only=True)
        if pager is not None:
            pager.page_module(model)
    model.eval()
    device = next(model.parameters()).device
    how: dict[str, Any] = {"max_new_tokens": options.tokens, "do_sample": options.sample}
    if options.sample:
        how["temperature"] = options.temperature
    torch.manual_seed(options.seed)
    for prompt in options.prompt:
        given = tokenizer(prompt, return_tensors="pt").to(device)
        before = 0 if pager is None else pager.stats()["bytes_in"]
        began = time.perf_counter()
        with pager.inference() if pager is not None else nullcontext():
            ids = model.generate(**given, **how)[0]
        seconds, count = time.perf_counter() - began, len(ids) - given.input_ids.size(1)
        print(tokenizer.decode(ids, skip_special_tokens=True))
        line = f"-- {count} tokens in {seconds:.2f} s"
        if pager is not None and count:
            moved = (pager.stats()["bytes_in"] - before) / count
            line += f"; for each, {format_bytes(moved)} came in"
        print(line)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a folder with a model and its tokenizer")
    parser.add_argument("--prompt", action="append", required=True, help="may be given again")
    parser.add_argument("--adapter", type=Path, help="the folder of one, as finetune_hf.py makes")
    parser.add_argument("--tokens", type=int, default=64, help="new ones, at most")
    parser.add_argument("--sample", action="store_true", help="draw them, not the likeliest")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    add_memory_arguments(parser)
    options = parser.parse_args(arguments)
    for folder in (options.model, options.adapter):
        if folder is not None and not folder.is_dir():
            parser.error(f"{folder} is no folder; scripts/make_tiny_model.py makes one to try")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        pager = open_pager(options)
        try:
            generate(options, pager)
            say_memory(pager)
        finally:
            if pager is not None:
                pager.close()
    except (ValueError, OSError, tp.PagerError) as error:
        print(f"generate.py: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
