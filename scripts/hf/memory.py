"""Arguments of the pager, and a model in its pages or without it."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import tensorpager as tp
from tensorpager.planner.sizes import format_bytes


def add_memory_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "memory", "Bytes as '8GiB', or '80%%' of what is free. Without any budget all are derived."
    )
    group.add_argument("--device-budget", help="weights, states, activations and what is dense")
    group.add_argument("--host-budget", help="host memory for what does not fit there")
    group.add_argument("--disk-budget", help="a file for what does not fit there either")
    group.add_argument("--disk-path", help="the folder that it is in")
    group.add_argument("--page-size", default="2MiB", help="64KiB to 16MiB; small for small models")
    group.add_argument("--device", help="default: CUDA if there is one")
    group.add_argument("--no-pager", action="store_true", help="the same without tensorpager")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"),
        help="of the weights; auto: as they are in the folder",
    )  # fmt: skip


@contextmanager
def peft_unheard() -> Iterator[None]:
    """peft asks transformers for a name that is deprecated, of which users would be warned."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield


def open_pager(options: argparse.Namespace) -> tp.Pager | None:
    if options.no_pager:
        return None
    return tp.Pager(
        device_budget=options.device_budget,
        host_budget=options.host_budget,
        disk_budget=options.disk_budget,
        disk_path=options.disk_path,
        page_size=options.page_size,
        device=options.device,
    )


def load_model(options: argparse.Namespace, pager: tp.Pager | None) -> Any:
    dtype = "auto" if options.dtype == "auto" else getattr(torch, options.dtype)
    if pager is None:
        model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=dtype, local_files_only=True
        )
        return model.to(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return tp.hf.from_pretrained(AutoModelForCausalLM, options.model, pager, dtype=dtype)


def say_memory(pager: tp.Pager | None) -> None:
    if pager is None:
        return
    stats = pager.stats()
    for tier, peak in stats["peak_bytes"].items():
        budget = stats["budget_bytes"][tier]
        if budget:
            print(f"{tier}: at most {format_bytes(peak)} of {format_bytes(budget)}")
