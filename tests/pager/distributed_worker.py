"""Trains on several ranks, plain and then paged, and compares the two bit for bit.

    torchrun --nproc-per-node 4 tests/pager/distributed_worker.py OUT ddp fsdp2
    python tests/pager/distributed_worker.py OUT ddp --ranks 2     forks the ranks itself

Each rank writes ``OUT/rank-N.json``: by kind, what was found.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from lm import forked

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.tensor.paged_tensor import dense_twin
from tensorpager.planner.trace import Trace

LAYERS = 5
STEPS = 8  # so that ranks follow a plan in the last ones
PAGE_BYTES = 64 << 10
RANK_BYTES = {"device": 2 << 20, "host": 1 << 20, "disk": 8 << 20}  # far less than all together
TIMEOUT = timedelta(seconds=300)  # of a rank that is gone; generous, as machines are busy
Found = dict[str, Any]
Cases = dict[str, Callable[[Path], Found]]


def make_model() -> nn.Sequential:
    """Shards of the middle matrices take 2 pages on two ranks; 10 rows do not divide by four."""
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(128, 256), nn.GELU()]
    for _ in range(3):
        layers += [nn.Linear(256, 256), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def sharded(model: nn.Sequential) -> nn.Sequential:
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


def make_pager(folder: Path, policy: str) -> tp.Pager:
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    device, host, disk = (RANK_BYTES[tier] * ranks for tier in ("device", "host", "disk"))
    if policy == "roomy":  # everything fits
        device, policy = 64 * device, "lru"
    return tp.Pager(device, host, disk, folder, page_size=PAGE_BYTES, device="cpu", policy=policy)


def train(kind: str, pager: tp.Pager | None) -> tuple[list[float], list[torch.Tensor]]:
    """The losses and gradient norms of this rank, and the whole parameters at the end."""
    model: nn.Module = make_model()
    if kind == "fsdp2":
        model = sharded(model)  # type: ignore[arg-type]
    if pager is not None:
        pager.page_module(model)
    if kind.startswith("ddp"):
        # gloo adds the parts of a bucket in an order that depends on their places, on more than two
        # ranks; and DDP moves them, after the first step, to the order in which gradients came.
        model = DistributedDataParallel(model, bucket_cap_mb=0.3)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    if pager is not None:
        optimizer = pager.optimizer(optimizer)
        if pager.core.follower is not None:
            pager.core.follower.only_if_faster = False
    data = torch.Generator().manual_seed(dist.get_rank())
    figures = []
    for step in range(STEPS):
        with pager.iteration() if pager is not None else nullcontext():
            for _ in range(2 if step == 2 else 1):  # step 2 accumulates two gradients
                inputs = torch.randn(32, 128, generator=data)
                labels = torch.randint(10, (32,), generator=data)
                loss = F.cross_entropy(model(inputs), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                figures.append(loss.item())
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            figures.append(whole(norm).item())
            optimizer.step()
            optimizer.zero_grad()
        if pager is not None:
            check_invariants(pager.core)
            if pager.policy == "lp":
                pager.plan()
    if kind == "fsdp2":  # as a checkpoint has them: sharded like the parameters
        states = [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]
        return figures, [whole(value) for value in [*model.parameters(), *states]]
    return figures, [whole(parameter) for parameter in model.parameters()]


def whole(value: Any) -> torch.Tensor:
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return dense_twin(value).detach() if isinstance(value, tp.PagedTensor) else value.detach()


def compare(kind: str, folder: Path, policies: list[str]) -> Found:
    expected, parameters = train(kind, None)
    found: Found = {}
    for policy in policies:
        with make_pager(folder, policy) as pager:
            figures, paged = train(kind, pager)
            stats = pager.stats()
            facts = ("peak_bytes", "budget_bytes", "faults", "fits", "planned_iterations")
            found[policy] = {
                "same_figures": figures == expected,
                "same_tensors": len(paged) == len(parameters)
                and all(torch.equal(a, b) for a, b in zip(paged, parameters)),
                "dense_baseline": pager.core.budget.dense_baseline,
                "opened": len(pager.core.opened._known),
                **{name: stats[name] for name in facts},
            }
    return found


def refusals(folder: Path) -> Found:
    """What each wrong order is told; ``None`` where nobody minds."""

    def sharded_last(pager: tp.Pager) -> None:
        sharded(pager.page_module(make_model()))

    def replicated_first(pager: tp.Pager) -> None:
        pager.page_module(DistributedDataParallel(make_model()))

    def replicated_inside(pager: tp.Pager) -> None:
        model = DistributedDataParallel(make_model())
        pager.page_module(model.module)
        model(torch.randn(2, 128))

    def bucket_views(pager: tp.Pager) -> None:
        model = pager.page_module(make_model())
        DistributedDataParallel(model, gradient_as_bucket_view=True)(torch.randn(2, 128))

    def gathered(pager: tp.Pager) -> None:
        model: Any = sharded(make_model())
        model[0].unshard()
        pager.page_module(model)

    cases: tuple[Callable[[tp.Pager], None], ...] = (
        sharded_last, replicated_first, replicated_inside, bucket_views, gathered,
    )  # fmt: skip
    said: Found = {}
    for case in cases:
        with make_pager(folder, "lru") as pager:
            try:
                case(pager)
            except tp.PagerError as error:
                said[case.__name__] = str(error)
            else:
                said[case.__name__] = None
    return said


def collectives(folder: Path) -> Found:
    """Collectives on paged tensors, with everything evicted after each op."""
    from tensorpager.pager.debug.chaos import chaos

    rank, ranks = dist.get_rank(), dist.get_world_size()
    base = torch.arange(40_000.0)
    found: Found = {}
    with make_pager(folder, "lru") as pager, chaos(pager.core):
        mine = pager.page(base + rank)
        total = base * ranks + sum(range(ranks))
        work = dist.all_reduce(tensor := pager.page(base + rank), async_op=True)
        work.wait()
        found["all_reduce"] = torch.equal(tensor.to_dense(), total)
        dist.broadcast(tensor := pager.page(base + rank), ranks - 1)
        found["broadcast"] = torch.equal(tensor.to_dense(), base + ranks - 1)
        parts = [pager.page(torch.zeros_like(base)) for _ in range(ranks)]
        dist.all_gather(parts, mine)
        found["all_gather"] = all(torch.equal(p.to_dense(), base + n) for n, p in enumerate(parts))
        if rank == 0:
            dist.send(mine, 1)
        if rank == 1:
            dist.recv(got := torch.empty_like(base), 0)
            found["send"] = torch.equal(got, base)
        try:
            dist.recv(mine, 0)
        except tp.PagerError as error:
            found["recv"] = str(error)
    return found


SLOW_UNTIL, LEAVES_IN, TOGETHER_STEPS = 7, 12, 15


def together(folder: Path) -> Found:
    """Which iterations followed a plan, where the planner is slow at first, and rank 0
    leaves its plan in the end."""
    expected = train_together(None, {})
    found: Found = {"measured": 0, "asked": 0, "modes": []}
    with make_pager(folder, "lp") as pager:
        losses, parameters = train_together(pager, found)
        stats, found["said"] = pager.stats(), pager.explain()
    peak, budget = stats["peak_bytes"], stats["budget_bytes"]
    found["within"] = all(peak[tier] <= budget[tier] for tier in budget)
    found["same"] = losses == expected[0] and all(map(torch.equal, parameters, expected[1]))
    return found


def train_together(pager: tp.Pager | None, found: Found) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of this rank, and all parameters at the end; ``found``: how it went."""
    model, rank, follower = sharded(make_model()), dist.get_rank(), None
    if pager is not None:
        pager.page_module(model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    if pager is not None:
        optimizer, follower = pager.optimizer(optimizer), pager.core.follower
        assert follower is not None
        _watch_planning(follower, found)
    data, losses = torch.Generator().manual_seed(rank), []
    for step in range(TOGETHER_STEPS):
        with pager.iteration() if pager is not None else nullcontext():
            inputs = torch.randn(32, 128, generator=data)
            labels = torch.randint(10, (32,), generator=data)
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if follower is not None and step == LEAVES_IN:
                kind = follower.signatures.all[-1]
                assert kind.recorded is not None
                found["uses"] = uses_of_shards(kind.recorded.trace)
                found["met"] = collectives_of(kind.recorded.trace)
                found["planned"] = pager.explain() if pager is not None else ""
                assert kind.compiled is not None
                found["moves"] = kind.compiled.plan.moves
                if rank == 0:
                    kind.leave("it took longer")
        losses.append(loss.item())
        if pager is not None and follower is not None:
            found["modes"].append(follower.last_mode)
            follower.wait_for_plans()
            check_invariants(pager.core)
    return losses, [whole(parameter) for parameter in model.parameters()]


def uses_of_shards(trace: Trace) -> list[int]:
    """How often each extent of parameters is accessed, which shards are as they are gathered."""
    used = Counter(trace.access_tensor.tolist())
    kinds = enumerate(trace.tensor_kinds)
    return [used[tensor] for tensor, kind in kinds if kind == "parameter"]


def collectives_of(trace: Trace) -> Found:
    """How many gathers and reduce-scatters, whether each takes time and no page, and whether what
    comes before a gather is an access of shards."""
    met = {op: name for op, name in enumerate(trace.op_names) if name in ("gather", "reduce")}
    kinds = [trace.tensor_kinds[tensor] for tensor in trace.access_tensor.tolist()]
    uses: dict[int, set[str]] = {}
    for op, kind in zip(trace.access_op.tolist(), kinds):
        uses.setdefault(op, set()).add(kind)
    gathers = [op for op, name in met.items() if name == "gather"]
    return {
        **Counter(met.values()),
        "pages": any(op in uses for op in met),
        "least_us": min(float(trace.op_duration_us[op]) for op in met),
        "before": all(uses[op - 1] == {"parameter"} for op in gathers),
    }


def _watch_planning(follower: Any, found: Found) -> None:
    """Counts how often channels are measured; how often a planner is asked, whose
    plan is not there before ``SLOW_UNTIL``."""
    calibrate, ask = follower.calibrate, follower.ask

    def counted(*, fresh: bool = False) -> Any:
        found["measured"] += 1
        found["fresh"] = fresh
        return calibrate(fresh=fresh)

    def asked_late(kind: Any, question: Any) -> Any:
        found["asked"] += 1
        process = ask(kind, question)
        done = process.done
        process.done = lambda: done() and len(found["modes"]) >= SLOW_UNTIL
        return process

    follower.only_if_faster = False
    follower.calibrate = counted
    follower.ask = asked_late


def run(out: Path, kinds: list[str], policies: list[str], cases: Cases) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    found: Found = {}
    try:
        for kind in kinds:
            case = cases.get(kind)
            found[kind] = compare(kind, out, policies) if case is None else case(out)
    finally:
        (out / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
        dist.destroy_process_group()


def fork_ranks(
    ranks: int,
    body: Callable[[], object],
    local: int | None = None,
    peaks: dict[int, int] | None = None,
) -> int:
    """What ``torchrun`` does, with PyTorch loaded once: ``body`` on each rank, ``local`` of them on
    a node. The exit code of the first that fails. ``peaks``: filled with the most memory that each
    rank had, in bytes, as the kernel counted."""
    for module in ("torch._dynamo", "torch.distributed.fsdp"):  # which each rank would load else
        importlib.import_module(module)
    children, _store = forked.fork_ranks(ranks, lambda rank: body(), local)
    worst = 0
    end = time.monotonic() + TIMEOUT.total_seconds() + 60
    while children:
        pid, status, usage = os.wait4(-1, os.WNOHANG)
        if pid:
            rank = children.pop(pid)
            if peaks is not None:
                peaks[rank] = usage.ru_maxrss << 10
            worst = worst or os.waitstatus_to_exitcode(status)
        if worst or time.monotonic() > end:  # the others wait for it in vain
            for child in children:
                os.kill(child, 9)
                os.waitpid(child, 0)
            return worst or 1
        time.sleep(0.02)
    return 0


def main(cases: Cases) -> int:
    """``cases``: what else than training there is, by kind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("kinds", nargs="+")
    parser.add_argument("--ranks", type=int, help="fork them (default: torchrun has)")
    parser.add_argument("--policies", default="lru,lp")
    options = parser.parse_args()
    policies = options.policies.split(",")
    if options.ranks is not None:
        return fork_ranks(options.ranks, lambda: run(options.out, options.kinds, policies, cases))
    run(options.out, options.kinds, policies, cases)
    return 0


if __name__ == "__main__":
    sys.exit(main({"refusals": refusals, "collectives": collectives, "together": together}))
