#!/usr/bin/env python3
"""What ``tensorpager simulate --ranks`` says, and what ranks on this machine do.

    bench_ranks.py --json ranks.json
    bench_ranks.py --ranks 2 --fits --json fits.json

One iteration of one process is recorded. Then so many ranks train the same model with FSDP2, one
thread each, plain, on demand and planned, with links so slow that cores are not the limit; each
rank has as much data as the process had. The network, what ops take while as many ranks compute,
and how much ranks differ, are measured in the plain run, and the pager's own work in the planned
one. Exits 1 if an iteration takes not what the model says (--within), if planned is not --faster
times as fast as on demand, or if losses differ from those without us. The model counts on any free
frames, where training needs consecutive ones.

--fits compares the CPU time of paged steps, in budgets that hold everything, with plain FSDP2's, in
turns: another one first in each round.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import click
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from lm.data import load_corpus
from lm.measure import settled
from lm.memory import Memory, PagedMemory, PlainMemory
from lm.model import PRESETS
from lm.options import parse_options, resolve_budget
from lm.ranks import Ranks, ranks_of
from lm.report import run_facts, write_json
from lm.slow_disk import slow_link
from lm.trainer import Trainer
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

import tensorpager as tp
from tensorpager.planner.trace_file import read_trace, write_trace

TENSORPAGER = (sys.executable, "-c", "from tensorpager.pager.cli import main; main()")
POLICIES = {"demand": "lru", "planned": "lp"}
MOST_WARM_UP_STEPS = 24
SIZES = (4 << 10, 8 << 20)  # bytes that are gathered to measure the network
SECONDS = 900.0  # for one training
NEED_RUNS = 3

Record = dict[str, Any]


# -- one rank --------------------------------------------------------------------------------------
class Meetings:
    """Seconds that this process has spent in FSDP2's gathers and reduce-scatters."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for kind in (_fsdp_collectives.DefaultAllGather, _fsdp_collectives.DefaultReduceScatter):
            kind.__call__ = self._timed(kind.__call__)  # type: ignore[method-assign]

    def _timed(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return real(*given, **named)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def train(spec: Record) -> Record:
    """As one of ``spec["ranks"]``; what all of them found, by rank."""
    torch.set_num_threads(1)
    meetings = Meetings()
    options = parse_options([*spec["flags"], "--no-pager"])
    with ranks_of(options) as ranks, ExitStack() as stack:
        pager = None
        memory: Memory = PlainMemory("cpu", measure=spec["mode"] == "plain" and spec["needed"])
        if spec["mode"] != "plain":
            pager = tp.Pager(
                ranks.place.local_size * spec["budget"],
                ranks.place.local_size * spec["host"],
                page_size=spec["page_size"],
                policy=POLICIES.get(spec["mode"], "lp"),
                device="cpu",
            )
            stack.enter_context(pager)
            memory = PagedMemory(pager)
            if spec["link_rate"]:
                slow_link(pager.core, spec["link_rate"])
        trainer = Trainer(options, memory, load_corpus(options.data, options.seq), ranks)
        losses = warm_up(trainer, pager, ranks, spec)
        seconds, computing, cpu = [], [], time.process_time()
        for _ in range(spec["steps"]):
            began, met = time.perf_counter(), meetings.seconds
            losses.append(trainer.step())
            seconds.append(time.perf_counter() - began)
            computing.append(seconds[-1] - (meetings.seconds - met))
        cpu = (time.process_time() - cpu) / spec["steps"]
        found: Record = {
            "step_seconds": seconds,
            "own_seconds": computing,
            "cpu_seconds": cpu,
            "needed_bytes": memory.report().needed_bytes,
            "pager": None if pager is None else pager.stats(),
            "explained": None if pager is None else pager.explain(),
        }
        return {"losses": losses, "network": network(ranks), "ranks": ranks.all(found)}


def warm_up(trainer: Trainer, pager: tp.Pager | None, ranks: Ranks, spec: Record) -> list[float]:
    """The losses of steps that are not timed: until all have followed their last plans."""
    losses: list[float] = []
    while len(losses) < MOST_WARM_UP_STEPS:
        losses.append(trainer.step())
        if pager is not None and spec["mode"] == "planned":
            pager.plan()  # waits for plans that are being made
            if ranks.most(not settled(pager)):
                continue
        if len(losses) >= spec["warm_up"]:
            break
    return losses


def network(ranks: Ranks) -> Record | None:
    """Bytes a second and µs of a step, as a ring takes (``planner/ranks.py``) what is gathered."""
    count = ranks.place.size
    if count == 1:
        return None
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    taken = []
    for nbytes in SIZES:
        mine = torch.zeros(nbytes // 4 // count)
        whole = torch.empty(count * len(mine))
        times = []
        for _ in range(12):
            dist.barrier()
            began = time.perf_counter()
            gather(whole, mine)
            times.append(time.perf_counter() - began)
        taken.append(statistics.median(times))
    moved = (SIZES[1] - SIZES[0]) * (count - 1) / count
    rate = moved / max(taken[1] - taken[0], 1e-9)
    return {"fabric": rate, "latency_us": 1e6 * taken[0] / (count - 1)}


# -- all of them -----------------------------------------------------------------------------------
def run_ranks(count: int, spec: Record) -> Record:
    """What ``train`` found in ``count`` processes, as torchrun would start them."""
    with tempfile.TemporaryDirectory(prefix="bench_ranks-") as folder:
        result = Path(folder, "result.json")
        request = json.dumps({**spec, "ranks": count})
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place = {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        children = []
        for rank in range(count):
            more = {} if count == 1 else {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, __file__, "--child", request, str(result)]
            children.append(subprocess.Popen(command, env={**os.environ, **more}))
        try:
            codes = [child.wait(SECONDS) for child in children]
        finally:
            for child in children:
                child.kill()
        if any(codes):
            raise click.ClickException(f"{count} ranks, {spec['mode']}: they ended with {codes}")
        found: Record = json.loads(result.read_text())
        return found


def step_us(found: Record) -> float:
    """Median, of the slowest rank in each step."""
    steps = zip(*(rank["step_seconds"] for rank in found["ranks"]))
    return 1e6 * statistics.median(map(max, steps))


def spread_of(found: Record) -> float:
    """How much ranks differ in what they take by themselves: the standard deviation of their
    medians, as a share of the mean."""
    own = [statistics.median(rank["own_seconds"]) for rank in found["ranks"]]
    return statistics.pstdev(own) / statistics.mean(own) if len(own) > 1 else 0.0


def own_us(found: Record) -> float:
    """What a step takes a rank by itself."""
    return 1e6 * statistics.median(
        statistics.median(rank["own_seconds"]) for rank in found["ranks"]
    )


def paced(trace: Path, us: float) -> Path:
    """The same trace, of ops that take ``us`` in all."""
    recorded = read_trace(trace)
    factor = us / recorded.ideal_us
    scaled = {name: factor * getattr(recorded, name) for name in ("op_start_us", "op_duration_us")}
    made = trace.with_stem(f"{trace.stem}-paced")
    write_trace(made, replace(recorded, **scaled))
    return made


def work_us(planned: Record, plain: Record) -> float:
    """The pager's own work in a step, in whatever thread: the CPU time that it takes a rank beside
    plain's, the median of ranks."""
    both = (statistics.median(r["cpu_seconds"] for r in of["ranks"]) for of in (planned, plain))
    of_planned, of_plain = both
    return 1e6 * max(0.0, of_planned - of_plain)


def simulated(trace: Path, count: int, given: list[str], plain: Record, pager_us: float) -> Record:
    """By policy, µs of an iteration that ``tensorpager simulate --ranks`` gives for ``count``."""
    command = [*TENSORPAGER, "simulate", str(trace), *given]
    net = plain["network"]
    more = ["--ranks", str(count), "--spread", f"{100 * spread_of(plain)}", "--json"]
    more += ["--pager-us", f"{pager_us}"]
    if net is not None:
        more += ["--fabric", f"{net['fabric']}", "--network-latency-us", f"{net['latency_us']}"]
    done = subprocess.run([*command, *more], capture_output=True, text=True)
    if not done.stdout:
        raise click.ClickException(f"simulate --ranks {count}: {done.stderr[-500:]}")
    points = [p for p in json.loads(done.stdout)["points"] if p["ranks"] == count]
    return {"command": more, "points": points,
            **{p["policy"]: p["iteration_us"] for p in points}}  # fmt: skip


def recorded(flags: list[str], trace: Path) -> None:
    """An iteration of one process, without us."""
    script = [sys.executable, str(Path(__file__).with_name("train_lm.py"))]
    command = [*TENSORPAGER, "record", "-o", str(trace), "--iteration", "4", "--", *script]
    done = subprocess.run([*command, *flags, "--no-pager", "--steps=6"], capture_output=True)
    if not trace.exists():
        raise click.ClickException(f"tensorpager record: {done.stderr.decode()[-500:]}")


class Bench:
    """``flags`` are of train_lm.py but for the batch, which is of one rank."""

    def __init__(self, flags: list[str], batch: int, common: Record, share: str) -> None:
        self.flags, self.batch, self.common, self.share = flags, batch, common, share

    def run(self, count: int, mode: str, **more: Any) -> Record:
        flags = [*self.flags, f"--batch={count * self.batch}"]
        flags += ["--parallel=fsdp2"] if count > 1 else []
        spec = {"mode": mode, "flags": flags, "needed": False, "warm_up": 2, **self.common, **more}
        found = run_ranks(count, spec)
        print(f"{count} ranks, {mode}: {step_us(found) / 1e3:.1f} ms a step", flush=True)
        return found

    def need(self, count: int) -> int:
        """Bytes of a rank at its peak without us. Gloo's threads free what was gathered sooner or
        later, so this is the most of several runs."""
        runs = [self.run(count, "plain", needed=True, steps=1) for _ in range(NEED_RUNS)]
        return max(rank["needed_bytes"] for run in runs for rank in run["ranks"])

    def compare(self, count: int, trace: Path, given: list[str]) -> Record:
        """All modes, and what the model says of them."""
        need = self.need(count)
        plain = self.run(count, "plain")
        budget = resolve_budget(self.share, "--share", need)
        found = {mode: self.run(count, mode, budget=budget, host=4 * need) for mode in POLICIES}
        sizes = ["--device-bytes", str(budget), "--host-bytes", str(count * 4 * need)]
        model = simulated(
            paced(trace, own_us(plain)), count, [*given, *sizes, "--disk-bytes", "0"], plain,
            work_us(found["planned"], plain),
        )  # fmt: skip
        us = {mode: step_us(one) for mode, one in found.items()}
        steps = min(len(one["losses"]) for one in (plain, *found.values()))
        return {
            "ranks": count,
            "need_bytes": need,
            "budget_bytes": budget,
            "network": plain["network"],
            "spread": spread_of(plain),
            "plain_us": step_us(plain),
            "measured_us": us,
            "simulated": model,
            "off": {
                mode: model[POLICIES[mode]] / us[mode] - 1
                for mode in us
                if model.get(POLICIES[mode])
            },
            "times_demand": us["demand"] / us["planned"],
            "same_losses": all(one["losses"][:steps] == plain["losses"][:steps]
                               for one in found.values()),
            "within_budget": all(
                rank["pager"]["peak_bytes"][tier] <= rank["pager"]["budget_bytes"][tier]
                for one in found.values() for rank in one["ranks"] for tier in ("device", "host")),
            "runs": {"plain": plain, **found},
        }  # fmt: skip

    def fits(self, count: int, rounds: int) -> Record:
        """CPU seconds of a step, of all ranks and threads, with pages and without, in turns."""
        need = self.need(count)
        taken: dict[str, list[float]] = {"plain": [], "roomy": []}
        losses = []
        for turn in range(rounds):
            for mode in sorted(taken, reverse=bool(turn % 2)):
                found = self.run(count, mode, budget=2 * need, host=need, link_rate=0.0)
                pagers = [rank["pager"] for rank in found["ranks"] if rank["pager"] is not None]
                if not all(stats["fits"] for stats in pagers):
                    raise click.ClickException(f"2 × {need} bytes do not hold everything")
                taken[mode].append(sum(rank["cpu_seconds"] for rank in found["ranks"]))
                losses.append(found["losses"])
        pairs = [roomy / plain for plain, roomy in zip(taken["plain"], taken["roomy"])]
        return {
            "ranks": count,
            "cpu_seconds_a_step": taken,
            "of_medians": statistics.median(taken["roomy"]) / statistics.median(taken["plain"]),
            "of_pairs": pairs,
            "same_losses": all(one == losses[0] for one in losses),
        }


@click.command(help=__doc__.replace("\n\n    bench", "\n\n\b\n    bench") if __doc__ else None)
@click.option("--ranks", "counts", type=click.IntRange(1), multiple=True, default=[1, 2, 4],
              show_default=True)  # fmt: skip
@click.option("--preset", type=click.Choice(list(PRESETS)), default="10m", show_default=True)
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Of one rank.")
@click.option("--seq", type=click.IntRange(1), default=32, show_default=True)
@click.option("--share", default="50%", show_default=True, help="Of each rank's need.")
@click.option("--link-rate", type=click.FloatRange(0), default=25.0, show_default=True,
              help="MB/s between each rank's device and host tier.")  # fmt: skip
@click.option("--page-size", default="64KiB", show_default=True)
@click.option("--steps", type=click.IntRange(1), default=4, show_default=True, help="Timed.")
@click.option("--within", type=click.FloatRange(0), default=15.0, show_default=True,
              help="% that planned iterations may take more or less than simulated.")  # fmt: skip
@click.option("--faster", type=click.FloatRange(0), default=1.3, show_default=True,
              help="Times as fast as on demand that planned has to be.")  # fmt: skip
@click.option("--fits", is_flag=True, help="CPU time where everything fits, against plain.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Of --fits.")
@click.option("--most", type=click.FloatRange(0), default=2.0, show_default=True,
              help="% of CPU time more than plain's, with --fits.")  # fmt: skip
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--child", type=(str, click.Path(path_type=Path)), hidden=True)
def main(
    counts: tuple[int, ...],
    preset: str,
    batch: int,
    seq: int,
    share: str,
    link_rate: float,
    page_size: str,
    steps: int,
    within: float,
    faster: float,
    fits: bool,
    rounds: int,
    most: float,
    json_path: Path | None,
    child: tuple[str, Path] | None,
) -> None:
    if child is not None:
        request, result = child
        found = train(json.loads(request))
        if os.environ.get("RANK", "0") == "0":
            write_json(result, found)
        os._exit(0)  # threads of gloo's may still be at their end, and abort an orderly exit
    os.environ["OMP_NUM_THREADS"] = "1"  # of the children
    flags = [f"--preset={preset}", f"--seq={seq}", "--steps=1000"]
    common = {"steps": steps, "link_rate": 1e6 * link_rate, "page_size": page_size}
    bench = Bench(flags, batch, common, share)
    record: Record = {
        "settings": {"preset": preset, "batch": batch, "seq": seq, "share": share, **common}
    }
    rows: list[Record] = []
    good = True
    with tempfile.TemporaryDirectory(prefix="bench_ranks-") as folder:
        trace = Path(folder, "trace.parquet")
        if not fits:
            recorded([*flags[:-1], f"--batch={batch}"], trace)
        rate = f"{1e6 * link_rate}"
        given = [
            "--hardware",
            "cpu",
            "--policies",
            "lp,lru",
            "--d2h",
            rate,
            "--h2d",
            rate,
            "--page-size",
            page_size,
        ]
        for count in counts:
            if fits:
                row = bench.fits(count, rounds)
                row["good"] = row["same_losses"] and row["of_medians"] <= 1 + most / 100
                told = f"CPU time {row['of_medians']:.4f} × plain's, of pairs " + ", ".join(
                    f"{pair:.4f}" for pair in row["of_pairs"]
                )
            else:
                row = bench.compare(count, trace, given)
                row["good"] = (
                    row["same_losses"]
                    and row["within_budget"]
                    and (
                        abs(row["off"].get("planned", 1.0)) <= within / 100
                        and row["times_demand"] >= faster
                    )
                )
                told = f"planned is {row['times_demand']:.2f} × as fast as on demand"
                for mode, us in row["measured_us"].items():
                    off = f"{100 * row['off'][mode]:+.1f} %" if mode in row["off"] else "no plan"
                    told += f"; {mode} {us / 1e3:.1f} ms, simulated {off}"
            rows.append(row)
            good = good and row["good"]
            same = "" if row["same_losses"] else "; LOSSES DIFFER"
            print(
                f"{count} ranks: {told}{same}  {'good' if row['good'] else 'NOT GOOD'}", flush=True
            )
            if json_path is not None:
                write_json(json_path, {**record, "rows": rows, "facts": run_facts("cpu")})
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
