"""One of several ranks: its shards, what it gathers and reduces, and what the network takes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorpager.planner import sweep
from tensorpager.planner.commands import ranks as ranks_command
from tensorpager.planner.hardware import Hardware, load_hardware
from tensorpager.planner.lifetimes import live_pages
from tensorpager.planner.ranks import Cluster, group_of, margin, rank_trace
from tensorpager.planner.simulator import simulate
from tensorpager.planner.sweep import Outcome, Task, evaluate
from tensorpager.planner.trace import READ, WRITE, Trace, make_trace
from tensorpager.planner.trace_file import read_trace, write_trace
from tensorpager.planner.validator import validate

from .command_line import refused, run, run_json

PAGE = 1024
BLOCKS, BLOCK_BYTES, HEAD_BYTES = 4, 64 * PAGE, 8 * PAGE
OP_US = 100.0


def training() -> Trace:
    """Blocks of one weight and a head: forward, backward, and updates with one state each."""
    names = [*(f"blocks.{n}.weight" for n in range(BLOCKS)), "head.weight"]
    count = len(names)
    sizes = [*[BLOCK_BYTES] * BLOCKS, HEAD_BYTES]
    tensors, kinds, called = [], {}, {}
    for kind, (offset, lasting, suffix) in {
        "parameter": (0, True, ""),
        "gradient": (count, False, ".grad"),
        "optimizer": (2 * count, True, ".exp_avg"),
    }.items():
        for n, name in enumerate(names):
            tensors.append((offset + n, sizes[n], lasting))
            kinds[offset + n], called[offset + n] = kind, name + suffix
    saved = 3 * count
    tensors += [(saved + n, 16 * PAGE, False) for n in range(count)]
    ops = [("forward", OP_US, [n], [saved + n]) for n in range(count)]
    ops += [("backward", 2 * OP_US, [n, saved + n], [count + n]) for n in reversed(range(count))]
    ops += [
        ("update", OP_US, [n, count + n, 2 * count + n], [n, 2 * count + n]) for n in range(count)
    ]
    return make_trace(tensors, ops, page_size=PAGE, kinds=kinds, names=called)


def fast(ranks: int, nodes: int = 1) -> Cluster:
    return Cluster(ranks, nodes, fabric=math.inf, network=math.inf, latency_us=0.0)


def test_groups_are_the_numbered_blocks() -> None:
    assert group_of("model.layers.12.mlp.up.weight") == "model.layers.12"
    assert group_of("0.weight") == "0"
    assert group_of("embed.weight") == group_of(None) == "root"
    assert group_of("blocks.0.norm.weight +49 more") == "root", "they share pages"


def test_one_rank_has_the_iteration_of_the_trace() -> None:
    trace = training()
    rank = rank_trace(trace, Cluster(1))
    assert rank.op_names == trace.op_names
    assert rank.op_duration_us.tolist() == trace.op_duration_us.tolist()
    sizes = [dict(zip(t.tensor_names, t.tensor_bytes.tolist())) for t in (trace, rank)]
    names = {*sizes[0]} - {None}
    assert {n: sizes[1][n] for n in names} == {n: sizes[0][n] for n in names}


def test_memory_is_what_training_with_pages_has() -> None:
    """Pages of 64 KiB: small weights share them, small activations and those of one pass alone are
    in none, and an update on a CPU makes two copies of its weight. Training with such pages is
    asked the same in ``scripts/bench_ranks.py``."""
    page = 64 * PAGE
    tensors = [(n, PAGE, True) for n in range(6)] + [(6, page, True)]
    tensors += [(10, 40 * PAGE, False), (11, 40 * PAGE, False), (12, 2 * PAGE, False)]
    tensors += [(13, 40 * PAGE, False), (20, PAGE, False), (21, page, False)]
    kinds = dict.fromkeys(range(7), "parameter") | {20: "gradient", 21: "gradient"}
    ops = [
        ("forward", 1.0, [*range(7)], [10, 12, 13]),
        ("forward", 1.0, [10, 13], [11]),
        ("loss", 1.0, [11], [20]),
        ("backward", 1.0, [10, 12], [21]),
        ("update", 1.0, [6, 21], [6]),
        ("update", 1.0, [5, 20], [5]),
    ]
    names = {n: f"w.{n}" for n in range(7)}
    trace = make_trace(tensors, ops, page_size=PAGE, kinds=kinds, names=names, device="cpu")
    rank = rank_trace(trace, Cluster(1), page)
    counts = Counter(rank.tensor_kinds)
    assert counts == {"parameter": 2, "gradient": 2, "activation": 2, "workspace": 1}
    assert "w.0 +5 more" in rank.tensor_names
    (dense,) = (n for n, kind in zip(rank.tensor_bytes, rank.tensor_kinds) if kind == "workspace")
    assert dense == 2 * page
    # One of those that share a page is written: the others' bytes stay.
    shared = rank.tensor_names.index("w.0 +5 more")
    last = rank.access_op == rank.ops - 1
    assert rank.access_mode[last & (rank.access_tensor == shared)].tolist() == [READ | WRITE]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_has_its_part_and_gathers_the_blocks(ranks: int, tmp_path: Path) -> None:
    trace = training()
    rank = rank_trace(trace, fast(ranks))
    sizes = dict(zip(rank.tensor_names, rank.tensor_bytes.tolist()))
    assert sizes["blocks.0.weight"] == math.ceil(BLOCK_BYTES / ranks)
    assert sizes["blocks.0.weight.grad"] == sizes["blocks.0.weight.exp_avg"]
    gathers = Counter(name for name in rank.op_names if name.startswith("gather"))
    blocks = {f"gather blocks.{n}": 2 for n in range(BLOCKS)}  # forward, backward
    assert gathers == {**blocks, "gather root": 1}
    reduced = [name for name in rank.op_names if name.startswith("reduce")]
    assert reduced == [*(f"reduce blocks.{n}" for n in (3, 2, 1, 0)), "reduce root"]
    assert not any(name.startswith("wait") for name in rank.op_names)
    # Computing takes as long, updates an N-th; a written file is a valid trace.
    assert rank.ideal_us == pytest.approx(15 * OP_US + 5 * OP_US / ranks)
    write_trace(tmp_path / "rank.parquet", rank)
    assert read_trace(tmp_path / "rank.parquet").ops == rank.ops


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_what_is_dense_leaves_pages_as_much_in_every_op(device: str) -> None:
    """Two blocks and the root are gathered, the root's gradient and a block's are whole, and the
    copy that the block before was reduced from is still there. gloo copies what it gathers, while
    the block's own gradient is not yet there."""
    rank = rank_trace(replace(training(), device=device), fast(1024))
    dense = np.array([kind == "workspace" for kind in rank.tensor_kinds])
    (nbytes,) = rank.tensor_bytes[dense].tolist()
    assert nbytes == 4 * BLOCK_BYTES + 2 * HEAD_BYTES
    assert set(live_pages(rank, PAGE, dense).tolist()) == {nbytes // PAGE}


def test_a_cpu_computes_nothing_while_ranks_meet() -> None:
    trace, cluster = training(), Cluster(2, fabric=1e9)
    both = [rank_trace(replace(trace, device=name), cluster).ideal_us for name in ("cpu", "cuda")]
    met = (4 * 3 * BLOCK_BYTES + 2 * HEAD_BYTES) / 2 / 1e9 * 1e6 + 14 * cluster.latency_us
    assert both[0] == pytest.approx(15 * OP_US + 5 * OP_US / 2 + met)
    assert both[1] < both[0]


def test_the_network_is_waited_for_where_it_takes_longer_than_the_ops() -> None:
    trace, base = training(), 15 * OP_US + 5 * OP_US / 2
    slow = Cluster(2, fabric=BLOCK_BYTES / 2 / (3 * OP_US) * 1e6, latency_us=0.0)
    assert slow.collective_us(BLOCK_BYTES) == pytest.approx(3 * OP_US)
    rank = rank_trace(trace, slow)
    named = zip(rank.op_names, rank.op_duration_us.tolist())
    waits = [(name, us) for name, us in named if name.startswith("wait")]
    assert rank.ideal_us == pytest.approx(base + sum(us for _, us in waits))
    hidden = next(us for name, us in waits if name == "wait for weights of blocks.1")
    assert hidden == pytest.approx(2 * OP_US), "but for the op of the block before"
    ideal = [rank_trace(trace, Cluster(2, fabric=rate)).ideal_us for rate in (1e9, 1e10, 1e12)]
    assert ideal == sorted(ideal, reverse=True)


def test_ranks_of_a_node_share_host_and_disk() -> None:
    node = Hardware(1 << 30, 8 << 30, 80 << 30, 50e9, 50e9, 8e9, 4e9, host_adam_bytes_per_s=80e9)
    part = Cluster(16, 2, host=160e9).part_of(node)
    assert part.device_bytes == node.device_bytes
    assert (part.host_bytes, part.disk_bytes) == (1 << 30, 10 << 30)
    assert (part.disk_read_bytes_per_s, part.disk_write_bytes_per_s) == (1e9, 0.5e9)
    assert part.h2d_bytes_per_s == part.d2h_bytes_per_s == 10e9
    assert part.host_adam_bytes_per_s == 10e9
    assert Cluster(16, 16).part_of(node) == node
    with pytest.raises(ValueError, match="7 ranks cannot be spread evenly over 2 nodes"):
        Cluster(7, 2)


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_the_slowest_of_ranks_that_differ_decides(ranks: int) -> None:
    trace = training()
    times = np.random.default_rng(0).normal(1.0, 0.1, (20_000, ranks))
    alike, differ = (
        Cluster(ranks, fabric=math.inf, latency_us=0.0, spread=spread) for spread in (0.0, 0.1)
    )
    assert alike.slowest == 1
    assert differ.slowest == pytest.approx(times.max(axis=1).mean(), rel=0.005)
    took = rank_trace(trace, alike).ideal_us, rank_trace(trace, differ).ideal_us
    assert took[1] == pytest.approx(took[0] * differ.slowest)
    assert Cluster(1, spread=0.1).slowest == 1


def test_between_nodes_the_slower_link_decides() -> None:
    one, two = Cluster(8, 1, 300e9, 50e9, 10.0), Cluster(8, 2, 300e9, 50e9, 10.0)
    assert one.collective_us(8e6) == pytest.approx(70 + 7e6 / 300e9 * 1e6)
    assert two.collective_us(8e6) == pytest.approx(70 + 7e6 / 50e9 * 1e6)
    assert Cluster(1).collective_us(8e6) == 0


def test_plans_for_a_rank_run_by_simulator_and_validator() -> None:
    rank = rank_trace(training(), Cluster(2, fabric=1e9))
    peak = int(live_pages(rank, PAGE).max())
    hardware = Hardware(int(0.85 * peak) * PAGE, 1 << 30, 0, 1e9, 1e9, page_size=PAGE)
    outcome = evaluate(rank, Task("lp", hardware, quick=True, keep_plan=True))
    assert outcome.plan is not None, outcome.reason
    assert simulate(rank, hardware, outcome.plan).feasible
    assert validate(rank, hardware, outcome.plan).feasible


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    write_trace(path, training())
    given = [str(path), "--hardware", "cpu", "--page-size", str(PAGE), "--device-bytes", "60%"]
    asked = ["simulate", *given, "--ranks", "4", "--nodes", "2", "--tokens", "100"]
    points = run_json(*asked, "--price", "2")["points"]
    assert [point["ranks"] for point in points if point["policy"] == "lp"] == [1, 2, 4]
    assert [point["nodes"] for point in points if point["policy"] == "lp"] == [1, 1, 2]
    first = points[0]
    assert first["policy"] == "without paging"
    assert first["iteration_us"] is None
    assert "of each device" in first["reason"]
    for point in points:
        if us := point["iteration_us"]:
            assert point["tokens_per_s"] == pytest.approx(1e6 * point["ranks"] * 100 / us)
            assert point["price_per_million_tokens"] == pytest.approx(2 * us / 3600e6 / 100 * 1e6)
            assert point["cost"] == pytest.approx(us / training().ideal_us)
    assert points[-1]["need_bytes"] < first["need_bytes"]
    text = run(*asked).stdout
    assert "does not fit" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "speed and cost by number of devices" in text


def test_blocks_run_again_with_paging_and_without(tmp_path: Path) -> None:
    """What is stored of four blocks fits neither into a device nor through its link in time."""
    blocks, stored, op_us = 4, 32 * PAGE, 1000.0
    tensors = [(n, PAGE, True) for n in range(blocks)]
    ops, segments, kinds = [], [], dict.fromkeys(range(blocks), "parameter")
    for n in range(blocks):
        kept, given, grad = 100 + n, 200 + n, 300 + n
        tensors += [(kept, stored, False), (given, PAGE, False), (grad, PAGE, False)]
        kinds |= {grad: "gradient"}
        before = [199 + n] if n else []
        ops += [("a", op_us, [n, *before], [kept]), ("b", op_us, [kept], [given])]
        segments.append((2 * n, 2 * n + 1, f"blocks.{n}"))
    for n in reversed(range(blocks)):
        used = [n, 100 + n, 200 + n, *([199 + n] if n else [])]
        ops.append(("backward", 2 * op_us, used, [300 + n]))
    ops += [("update", op_us, [n, 300 + n], [n]) for n in range(blocks)]
    names = {n: f"blocks.{n}.weight" for n in range(blocks)}
    path = tmp_path / "trace.parquet"
    trace = make_trace(
        tensors, ops, page_size=PAGE, kinds=kinds, names=names, segments=segments, device="cuda"
    )
    write_trace(path, trace)
    given = ["--hardware", "cpu", "--page-size", str(PAGE), "--device-bytes", str(100 * PAGE)]
    slow = ["--d2h", "1MB", "--h2d", "1MB", "--policies", "lp,joint", "--ranks", "1"]
    none, again, moves, jointly = run_json("simulate", str(path), *given, *slow)["points"]
    assert none["iteration_us"] is None
    assert 0 < again["blocks_again"] < blocks
    assert again["iteration_us"] == trace.ideal_us + 2 * op_us * again["blocks_again"]
    assert jointly["iteration_us"] <= again["iteration_us"] < moves["iteration_us"]
    text = run("simulate", str(path), *given, *slow).stdout
    assert f"no, {again['blocks_again']} again" in text
    assert "% of the ideal speed" in text


def test_on_demand_what_leaves_has_left_before_others_come(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    write_trace(path, training())
    given = [str(path), "--hardware", "cpu", "--page-size", str(PAGE), "--device-bytes", "60%"]
    asked = [
        "simulate",
        *given,
        "--d2h",
        "1GB",
        "--h2d",
        "1GB",
        "--policies",
        "lru",
        "--ranks",
        "1",
    ]
    us = run_json(*asked)["points"][-1]["iteration_us"]
    rank = rank_trace(training(), Cluster(1))
    device = int(0.6 * int(live_pages(training(), PAGE).max())) * PAGE
    machine = load_hardware("cpu").with_(
        page_size=PAGE,
        device_bytes=device - margin(rank),
        d2h_bytes_per_s=1e9,
        h2d_bytes_per_s=1e9,
    )
    predicted = evaluate(rank, Task("lru", machine)).predicted
    assert predicted is not None
    moved = predicted.bytes_out + predicted.bytes_in
    assert us == pytest.approx(predicted.ideal_us + moved / machine.h2d_bytes_per_s * 1e6)
    assert us > predicted.iteration_us


def test_what_paging_takes_by_itself_is_a_part_of_paged_iterations(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    write_trace(path, training())
    given = ["simulate", str(path), "--hardware", "cpu", "--page-size", str(PAGE), "--ranks", "1"]
    given += ["--d2h", "1MB", "--h2d", "1MB", "--policies", "lp,lru", "--device-bytes"]
    work = 1e6
    for device, is_paged in (("60%", True), ("300%", False)):
        without, with_work = (
            run_json(*given, device, *more)["points"] for more in ([], ["--pager-us", str(work)])
        )
        for row, other in zip(without, with_work, strict=True):
            assert row["ideal_us"] == other["ideal_us"]
            if row["policy"] == "without paging" or not is_paged:
                assert row == other
            else:
                longer = other["iteration_us"] - row["iteration_us"]
                assert 0 <= longer <= work + 1e-6, "some of it while pages move"
                assert other["iteration_us"] >= row["ideal_us"] + work
                assert other["percent_of_ideal"] < row["percent_of_ideal"]


def test_joined_ops_are_planned_by_a_quick_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of many numbers of ranks would take minutes for what hardly differs."""
    monkeypatch.setattr(ranks_command, "PLANNED_OPS", 8)
    tasks: list[Task] = []

    def noted(trace: Trace, task: Task) -> Outcome:
        tasks.append(task)
        return evaluate(trace, task)

    monkeypatch.setattr(sweep, "evaluate", noted)
    hardware = Hardware(40 * PAGE, 1 << 30, 0, 1e9, 1e9, page_size=PAGE)
    asked: Any = SimpleNamespace(trace=training(), policies=["lp"], quick=False)
    fleet = ranks_command.Fleet(2, 1, 1e9, 1e9, 1.0, math.inf, 0.0)
    ranks_command._rows(asked, fleet, 2, hardware)
    assert tasks
    assert all(task.quick for task in tasks)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "3", "--nodes", "2"], "cannot be spread evenly over --nodes 2"),
        (["--network", "1GB"], "say how many with --ranks"),
        (["--spread", "2"], "say how many with --ranks"),
        (["--pager-us", "2"], "--pager-us is of several devices; say how many with --ranks"),
        (["--ranks", "2", "--target", "90%"], "leave out --target"),
        (["--ranks", "2", "--sweep", "device=50%:100%:2"], "leave out --sweep"),
    ],
)
def test_what_does_not_go_together(options: list[str], said: str) -> None:
    assert said in refused("simulate", "--example", "--hardware", "cpu", *options)
