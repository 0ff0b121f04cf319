#!/usr/bin/env python3
"""What the CPU does per training step for a GPU, where kernels and copies take no time.

    scripts/fake_gpu.sh python scripts/bench_host_path.py --json FILE

A GPU waits for Python wherever a step takes Python longer than it takes the GPU. Here a CUDA
library takes the calls and does nothing (tests/fakecuda; only copies up to 64 KiB, which can hold
values that the CPU reads, are made), so what is left is the CPU's part. Each case has a process of
its own:

    plain     PyTorch alone; its peak of memory is what the others' budgets are shares of
    fits      everything fits: twice the need
    planned   --share of the need, pages moved by a plan, as for a link of --link-rate
    lru       the same, without a plan

Times are CPU time of the whole process (--steps steps after warm-up, median), and of it the time of
the thread that trains (autograd has one of its own). The library counts calls. The floor is what as
many calls cost through PyTorch with nothing around them: a launch, a copy, an event's record, a
wait for an event, each timed alone; for copies that are queued in batches, a share of a batch.
"""

import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import torch
from cuda.bindings.driver import (
    CUdeviceptr,
    CUmemcpyAttributes,
    CUmemcpySrcAccessOrder,
    cuMemcpyBatchAsync,
)
from lm.measure import MOST_WARM_UP_STEPS, WARM_UP_STEPS
from lm.model import PRESETS, VOCABULARY, meta_model
from lm.report import on_fake_cuda, run_facts, write_json

import tensorpager as tp
from tensorpager.pager.machine.calibration import measure as calibration

MODES = ("plain", "fits", "planned", "lru")
SEQUENCE = 512
TOTAL_BYTES = 1 << 38  # of the pretended GPU: 7B fits twice
CALLS = 2000  # timed for the cost of one
BATCH = 16  # copies of a batch that is timed
COUNTED = ("launches", "copies", "batches", "batched_copies", "pageable_copies")
COUNTED += ("synchronizations", "event_records", "event_waits", "event_creations", "mallocs")

Record = dict[str, Any]


def counts() -> dict[str, int]:
    asked = ctypes.CDLL(None).fakecuda_counts
    asked.restype = ctypes.c_char_p
    found: dict[str, int] = json.loads(asked())
    return found


def cost_us(call: Callable[[], object]) -> float:
    """CPU time of one call: the best of five rounds."""
    rounds = []
    for _ in range(5):
        began = time.thread_time()
        for _ in range(CALLS):
            call()
        rounds.append(1e6 * (time.thread_time() - began) / CALLS)
    return min(rounds)


def costs() -> dict[str, float]:
    """Microseconds of one call of PyTorch by what the library counts it as."""
    device = torch.zeros(256, device="cuda")
    host = torch.zeros(256).pin_memory()
    event, stream = torch.cuda.Event(), torch.cuda.current_stream()
    event.record()
    to, from_ = ([CUdeviceptr(one.data_ptr())] * BATCH for one in (device, host))
    how = CUmemcpyAttributes()
    how.srcAccessOrder = CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    aside = torch.cuda.Stream().cuda_stream

    def batch() -> None:
        cuMemcpyBatchAsync(to, from_, [4] * BATCH, BATCH, [how], [0], 1, aside)

    return {
        "launches": cost_us(lambda: device.add_(1)),
        "copies": cost_us(lambda: device.copy_(host, non_blocking=True)),
        "batched_copies": cost_us(batch) / BATCH,
        "event_records": cost_us(lambda: event.record(stream)),
        "event_waits": cost_us(lambda: stream.wait_event(event)),
    }


def measure(
    mode: str, preset: str, tokens: int, steps: int, budgets: dict[str, int], link_rate: float
) -> Record:
    """One case, in this process. ``budgets``: device and host bytes; empty for plain."""
    model = meta_model(preset, torch.bfloat16)
    pager = None
    if mode == "plain":
        model.to_empty(device="cuda")
    else:
        policy = "lru" if mode == "lru" else "lp"
        pager = tp.Pager(
            budgets["device"], host_budget=budgets["host"], device="cuda", policy=policy
        )
        if pager.core.follower is not None:
            # A plan is what is measured here, not whether it is faster.
            pager.core.follower.only_if_faster = False
            rates = calibration.Calibration(link_rate * 1e9, link_rate * 1e9, 5.0)
            calibration.calibrate = lambda **_: rates
        pager.page_module(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if pager is not None:
        optimizer = pager.optimizer(optimizer)
    tokens_in = torch.zeros(tokens // SEQUENCE, SEQUENCE, dtype=torch.int64, device="cuda")
    assert int(tokens_in.max()) < VOCABULARY

    def step() -> Record:
        began = counts(), time.perf_counter(), time.process_time(), time.thread_time()
        with pager.iteration() if pager is not None else nullcontext():
            loss = model(tokens_in, tokens_in)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        row: Record = {
            "wall_ms": 1e3 * (time.perf_counter() - began[1]),
            "cpu_ms": 1e3 * (time.process_time() - began[2]),
            "thread_ms": 1e3 * (time.thread_time() - began[3]),
        }
        return row | {name: number - began[0][name] for name, number in counts().items()}

    warm_up = 0
    while warm_up < WARM_UP_STEPS or (mode == "planned" and not planned(pager)):
        if warm_up == MOST_WARM_UP_STEPS:
            raise SystemExit(f"no plan is followed after {warm_up} steps: {pager.stats()}")
        if mode == "planned" and warm_up >= 2:
            pager.plan(wait=True)
        step()
        warm_up += 1
    rows: list[Record] = []
    passed = 0
    while len(rows) < steps:
        followed = pager.stats()["planned_iterations"] if pager is not None else 0
        row = step()
        if pager is None or mode != "planned" or pager.stats()["planned_iterations"] > followed:
            rows.append(row)
        elif (passed := passed + 1) == MOST_WARM_UP_STEPS:
            raise SystemExit(f"{passed} steps followed no plan: {pager.stats()}")
    record: Record = {
        "median": {name: statistics.median(row[name] for row in rows) for name in rows[0]},
        "steps": rows,
        "warm_up_steps": warm_up,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "costs_us": costs(),
    }
    if pager is not None:
        stats = pager.stats()
        record["pager"] = {name: stats[name] for name in ("mode", "fits", "faults")}
        pager.close()
    record["floor_ms"] = 1e-3 * sum(
        microseconds * record["median"][name] for name, microseconds in record["costs_us"].items()
    )
    return record


def planned(pager: tp.Pager | None) -> bool:
    return pager is not None and pager.stats()["mode"] == "planned"


def in_a_process(case: Record) -> Record:
    with tempfile.TemporaryDirectory(prefix="bench_host_path-") as folder:
        target = Path(folder) / "case.json"
        command = [sys.executable, __file__, "--child", json.dumps(case), str(target)]
        settings = {"FAKECUDA_FREE_COPIES": "1", "FAKECUDA_TOTAL_BYTES": str(TOTAL_BYTES)}
        one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        ended = subprocess.run(
            command, env={**os.environ, **settings, **one}, stderr=subprocess.PIPE, text=True
        )
        if ended.returncode == 0:
            record: Record = json.loads(target.read_text())
            return record
    return {"error": ended.stderr[-4000:] or f"ended with {ended.returncode}"}


def line(case: Record, record: Record) -> str:
    name = f"{case['preset']:>5} {case['mode']:8}"
    if "error" in record:
        return f"{name} FAILED: {record['error'].strip().splitlines()[-1]}"
    median = record["median"]
    times = (median["cpu_ms"], median["thread_ms"], record["floor_ms"])
    counted = (median[column] for column in COUNTED)
    return name + "".join(f"{t:10.1f}" for t in times) + "".join(f"{n:17,.0f}" for n in counted)


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    ") if __doc__ else None)
@click.option("--preset", "presets", type=click.Choice(list(PRESETS)), multiple=True,
              default=["1b", "7b"], show_default=True)  # fmt: skip
@click.option("--mode", "modes", type=click.Choice(MODES), multiple=True, default=MODES,
              help="Plain always runs: it measures the need.")  # fmt: skip
@click.option("--tokens", type=click.IntRange(SEQUENCE), default=2048, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Timed.")
@click.option("--share", type=click.FloatRange(0, 1), default=0.5, show_default=True)
@click.option("--link-rate", type=click.FloatRange(0, min_open=True), default=25.0,
              show_default=True, help="GB/s, for the plan.")  # fmt: skip
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--child", type=(str, click.Path(path_type=Path)), hidden=True)
def main(
    presets: tuple[str, ...],
    modes: tuple[str, ...],
    tokens: int,
    steps: int,
    share: float,
    link_rate: float,
    json_path: Path | None,
    child: tuple[str, Path] | None,
) -> None:
    if child is not None:
        child[1].write_text(json.dumps(measure(**json.loads(child[0]))))
        return
    if not on_fake_cuda():
        raise click.UsageError(
            "this is measured on the fake CUDA; run it by "
            "scripts/fake_gpu.sh python scripts/bench_host_path.py"
        )
    print("per step     mode        CPU ms thread ms  floor ms", end="")
    print("".join(f"{name.replace('_', ' '):>17}" for name in COUNTED))
    results: Record = {}
    for preset in presets:
        need = 0
        for mode in ("plain", *(mode for mode in MODES if mode in modes and mode != "plain")):
            device = int(need * (2 if mode == "fits" else share))
            budgets = {} if mode == "plain" else {"device": device, "host": 2 * need}
            case = {"mode": mode, "preset": preset, "tokens": tokens, "steps": steps}
            case["link_rate"] = link_rate
            record = in_a_process({**case, "budgets": budgets})
            print(line(case, record), flush=True)
            results.setdefault(preset, {})[mode] = record | {"budgets": budgets}
            if mode == "plain":
                if "error" in record:
                    print(record["error"], file=sys.stderr)
                    break
                need = record["peak_allocated_bytes"]
            if json_path is not None:
                settings = {
                    "tokens": tokens,
                    "steps": steps,
                    "share": share,
                    "link_rate": link_rate,
                }
                facts = {**run_facts("cpu"), "load_average": os.getloadavg()}
                write_json(json_path, {**settings, "cases": results, "facts": facts})
    failed = [case for preset in results.values() for case in preset.values() if "error" in case]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
