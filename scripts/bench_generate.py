#!/usr/bin/env python3
"""What a token takes in ``generate``: plain, and with a part of the weights on the device.

    bench_generate.py
    bench_generate.py --share 40 --rounds 3

The same Llama answers the same prompt, each time in a process of its own, with one thread, one
sequence and greedy. "paged" has its other weights in host memory, beside the device's, so both use
one memory bus; a token is to take at most 1.3 times what it takes plain and what copying in takes
that has to come, at the rate of a copy measured beside it. "link" has a link to host memory over
which the weights that the share leaves out take ``--link`` times as long as a token does plain; a
token is to take at most 1.3 times the longer of plain and what has to come over the link. A token
is from one call of the model to the next; medians, after warm-up. The tokens have to be plain's.
"""

import json
import os
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by libraries when they load
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import click
import torch
from lm.modes import chosen, in_child, in_turn
from lm.report import run_facts, write_json
from lm.slow_disk import slow_link

import tensorpager as tp

MODES = ("plain", "paged", "link")
VOCABULARY, PROMPT = 4096, 32
PAGE_BYTES = 256 << 10
DENSE_BYTES = 24 << 20  # for the cache, and what comes and goes
BOUND = 1.3


def llama(layers: int, width: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=1024,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def copy_rate(nbytes: int) -> float:
    """Bytes/s of copies of some MiB between memory that no cache holds."""
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    piece = 4 << 20
    rates = []
    for _ in range(5):
        began = time.perf_counter()
        for start in range(0, nbytes, piece):
            target[start : start + piece].copy_(source[start : start + piece])
        rates.append(nbytes / (time.perf_counter() - began))
    return statistics.median(rates)


def child(spec: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, pager = llama(spec["layers"], spec["width"]), None
    weights = sum(-(-p.nbytes // PAGE_BYTES) * PAGE_BYTES for p in model.parameters())
    if spec["mode"] != "plain":
        pager = tp.Pager(
            device_budget=weights * spec["share"] // 100 + DENSE_BYTES,
            host_budget=2 * weights, page_size=PAGE_BYTES, device="cpu",
        )  # fmt: skip
        if spec["rate"]:
            slow_link(pager.core, spec["rate"])
        pager.page_module(model)
    times: list[float] = []
    came: list[int] = []

    def note(*_: Any) -> None:
        times.append(time.perf_counter())
        came.append(pager.core.mover.bytes_in if pager is not None else 0)

    model.register_forward_pre_hook(note)
    prompt = torch.randint(3, VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    how = {"max_new_tokens": spec["tokens"], "do_sample": False, "eos_token_id": None}
    if pager is None:
        answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
    else:
        with pager.inference():
            answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
    seconds = [after - before for before, after in pairwise(times)]
    found: dict[str, Any] = {
        "seconds": seconds, "came": [after - before for before, after in pairwise(came)],
        "answer": answer[0].tolist(), "weights": weights, "copy_rate": copy_rate(128 << 20),
    }  # fmt: skip
    if pager is not None:
        stats = pager.stats()
        names = ("planned_iterations", "peak_bytes", "budget_bytes", "channel_bytes")
        found |= {name: stats[name] for name in names}
        pager.close()
    return found


def verdicts(found: dict[str, list[dict[str, Any]]], warm_up: int) -> dict[str, float | bool]:
    """What the runs say together; medians over rounds."""

    def median(mode: str, what: str) -> float:
        its = found[mode]
        return statistics.median(statistics.median(run[what][warm_up:]) for run in its)

    plain = median("plain", "seconds")
    said: dict[str, float | bool] = {"plain: ms a token": 1e3 * plain}
    for mode in (mode for mode in MODES[1:] if mode in found):
        token, came = median(mode, "seconds"), median(mode, "came")
        runs = found[mode]
        if mode == "paged":
            rate = statistics.median(run["copy_rate"] for run in runs)
            floor = plain + came / rate
        else:
            rate = runs[0]["rate"]
            floor = max(plain, came / rate)
        said |= {
            f"{mode}: tokens are plain's": all(
                run["answer"] == found["plain"][0]["answer"] for run in runs
            ),
            f"{mode}: ms a token": 1e3 * token,
            f"{mode}: part of the weights that comes in": came / runs[0]["weights"],
            f"{mode}: GB/s of a copy": rate / 1e9,
            f"{mode}: of its floor (at most {BOUND})": token / floor,
        }
    return said


@click.command(help=__doc__.replace("\n\n    bench", "\n\n\b\n    bench") if __doc__ else None)
@click.option("--modes", default=",".join(MODES), show_default=True)
@click.option("--layers", default=8, show_default=True)
@click.option("--width", default=1024, show_default=True)
@click.option("--tokens", default=96, show_default=True)
@click.option("--warm-up", default=32, show_default=True, help="Of these tokens, not timed.")
@click.option(
    "--share", default=50, show_default=True, help="Percent of the weights on the device."
)
@click.option("--link", default=2.0, show_default=True, help="Copying in, in tokens of plain.")
@click.option("--rounds", default=1, show_default=True)
@click.option("--json", "out", type=Path, help="Write what was measured here.")
@click.option("--child", "request", hidden=True)
def main(
    modes: str,
    layers: int,
    width: int,
    tokens: int,
    warm_up: int,
    share: int,
    link: float,
    rounds: int,
    out: Path | None,
    request: str | None,
) -> None:
    if request is not None:
        print(json.dumps(child(json.loads(request))))
        return
    wanted = chosen(modes, MODES)
    spec = {"layers": layers, "width": width, "tokens": tokens, "share": share, "rate": 0.0}
    first = in_child(__file__, {**spec, "mode": "plain"})
    left_out = first["weights"] * (100 - share) / 100
    slow = left_out / (link * statistics.median(first["seconds"][warm_up:]))
    found: dict[str, list[dict[str, Any]]] = {"plain": []}
    for _, mode in in_turn(wanted, rounds):
        rate = slow if mode == "link" else 0.0
        run = in_child(__file__, {**spec, "mode": mode, "rate": rate})
        found.setdefault(mode, []).append({**run, "rate": rate})
    if not found["plain"]:
        found["plain"].append(first)
    said = verdicts(found, warm_up)
    for name, value in said.items():
        print(f"{name:48} {value if isinstance(value, bool) else round(value, 3)}")
    if out is not None:
        write_json(out, {"verdicts": said, "runs": found, "facts": run_facts("cpu")})


if __name__ == "__main__":
    main()
