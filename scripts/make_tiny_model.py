#!/usr/bin/env python3
"""Make a small language model with a byte-level tokenizer in a folder, for trying. No network.

    make_tiny_model.py tiny
    make_tiny_model.py tiny --layers 8 --width 512 --experts 4 --texts 200

The weights are random, and the same for the same options. What is made is a folder as
transformers has them: ``AutoModelForCausalLM.from_pretrained("tiny")`` and ``AutoTokenizer`` read
it, and so do ``finetune_hf.py`` and ``generate.py``. With ``--texts`` there is a ``texts.jsonl``
beside them to train on.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

SPECIAL = ("<pad>", "<s>", "</s>")
CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
WORDS = ("page", "frame", "slot", "device", "host", "disk", "plan", "moves", "stays", "before")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte: it reads any text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, begin, end = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=begin,
        eos_token=end,
        chat_template=CHAT,
    )


def make_model(options: argparse.Namespace, vocabulary: int) -> Any:
    shape = {
        "vocab_size": vocabulary,
        "hidden_size": options.width,
        "intermediate_size": 3 * options.width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": max(1, options.heads // 2),
        "max_position_embeddings": options.length,
        "tie_word_embeddings": options.tied,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(options.seed)
    if options.experts:
        return MixtralForCausalLM(MixtralConfig(num_local_experts=options.experts, **shape))
    return LlamaForCausalLM(LlamaConfig(**shape))


def write_texts(path: Path, count: int, seed: int) -> None:
    """Sentences of very different lengths."""
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            text = " ".join(draw.choices(WORDS, k=draw.randint(2, 60)))
            file.write(json.dumps({"text": text}) + "\n")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where it is made; must not be there, or empty")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="a multiple of --heads times 2")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024, help="positions")
    parser.add_argument("--experts", type=int, default=0, help="a mixture of so many experts")
    parser.add_argument("--tied", action="store_true", help="the embedding is also the head")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--texts", type=int, default=0, help="lines of texts.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.folder.exists() and (not options.folder.is_dir() or any(options.folder.iterdir())):
        parser.error(f"{options.folder} is there already; name a folder that is not")
    if options.width % (2 * options.heads):
        parser.error(
            f"--width={options.width} is no multiple of twice --heads={options.heads}, which the "
            f"rotary positions need; {2 * options.heads} is the smallest"
        )
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    tokenizer = make_tokenizer()
    model = make_model(options, len(tokenizer)).to(getattr(torch, options.dtype))
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    options.folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    if options.texts:
        write_texts(options.folder / "texts.jsonl", options.texts, options.seed)
    count = sum(p.numel() for p in model.parameters())
    print(f"{options.folder}: {type(model).__name__}, {count:,} parameters, {options.dtype}")


if __name__ == "__main__":
    main()
