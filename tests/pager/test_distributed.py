"""Several ranks: equal to the unpaged run bit for bit, each within its part of the budgets."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

import tensorpager as tp
from tensorpager.pager.distributed.shards import _watch_collectives
from tensorpager.pager.machine import ranks
from tensorpager.planner.sizes import parse_bytes

from .. import programs
from .distributed_worker import LAYERS, LEAVES_IN, SLOW_UNTIL
from .models import make_pager

WORKER = Path(__file__).with_name("distributed_worker.py")
MiB = 1 << 20
PARAMETER_BYTES = 4 * (128 * 256 + 256 + 3 * (256 * 256 + 256) + 256 * 10 + 10)


def found_by(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What each rank found."""
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def fork(folder: Path, ranks: int, *arguments: str) -> list[dict[str, Any]]:
    result = programs.run(str(WORKER), str(folder), *arguments, f"--ranks={ranks}")
    assert result.returncode == 0, result.stderr[-3000:]
    return found_by(folder, ranks)


def torchrun(folder: Path, ranks: int, *arguments: str) -> list[dict[str, Any]]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={ranks}", str(WORKER), str(folder), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return found_by(folder, ranks)


def assert_same_and_within(found: dict[str, Any], kind: str, policy: str) -> None:
    run = found[kind][policy]
    assert run["same_figures"], (kind, policy)
    assert run["same_tensors"], (kind, policy)
    assert run["budget_bytes"] == {"device": 2 * MiB, "host": MiB, "disk": 8 * MiB}
    for tier, peak in run["peak_bytes"].items():
        assert 0 < peak <= run["budget_bytes"][tier], tier
    assert run["faults"] > 0
    assert not run["fits"]
    assert run["dense_baseline"] == (0 if kind == "fsdp2" else PARAMETER_BYTES)
    if policy == "lp":
        assert run["planned_iterations"] > 0


def test_two_ranks(tmp_path: Path) -> None:
    for found in fork(tmp_path, 2, "ddp", "fsdp2", "--policies=lru"):
        assert_same_and_within(found, "ddp", "lru")
        assert_same_and_within(found, "fsdp2", "lru")


def test_replicas_that_fit(tmp_path: Path) -> None:
    """Ops are given the weights as plain tensors; buckets are filled as without a pager."""
    for found in fork(tmp_path, 2, "ddp", "--policies=roomy"):
        run = found["ddp"]["roomy"]
        assert run["fits"]
        assert run["opened"] == 10
        assert run["same_figures"]
        assert run["same_tensors"]


def test_ranks_enter_and_leave_plans_together(tmp_path: Path) -> None:
    """No rank follows a plan before it is there, nor after one has left; the first one's is that of
    both, and the channels are measured by both at once. Bits are plain FSDP2's, budgets hold."""
    first, second = (found["together"] for found in fork(tmp_path, 2, "together"))
    for found in (first, second):
        assert found["same"]
        assert found["within"]
        assert found["measured"] == 1
        assert found["fresh"]
        begin, end = SLOW_UNTIL, LEAVES_IN
        assert found["modes"] == first["modes"]
        assert len(found["uses"]) >= 4
        assert min(found["uses"]) >= 2, "shards are accessed as they are gathered"
        met = found["met"]
        assert met["before"], "a prefetch ends before the gather begins"
        assert not met["pages"]
        assert met["least_us"] > 0
        assert met["gather"] >= met["reduce"] == LAYERS
        count = met["gather"] + met["reduce"]
        assert f"are {count} gathers and reduce-scatters" in found["planned"]
        entered = found["modes"].index("planned")
        assert entered >= begin
        assert found["modes"][entered : end + 1] == ["planned"] * (end + 1 - entered)
        assert set(found["modes"][end + 1 :]) == {"demand"}
    assert first["moves"] == second["moves"] != []
    assert first["asked"] >= 1
    assert second["asked"] == 0
    assert "it took longer" in first["said"]
    assert "another rank has left its plan" in second["said"]


def test_what_a_reduce_scatter_holds_is_given_back_before_it_is_over() -> None:
    """gloo's thread frees its copy a moment after the op has returned: what an iteration needs
    would depend on that moment."""
    late: list[threading.Timer] = []

    class Gloo(DefaultReduceScatter):
        def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor) -> None:  # type: ignore[override]
            copies = [input_tensor.clone()]
            output_tensor.copy_(copies[0][: len(output_tensor)])
            late.append(threading.Timer(0.05, copies.clear))
            late[-1].start()

    with make_pager() as pager:
        group = SimpleNamespace(_all_gather_comm=DefaultAllGather(), _reduce_scatter_comm=Gloo())
        _watch_collectives(pager.core, group)
        comm: Any = group._reduce_scatter_comm
        assert isinstance(comm, Gloo), "FSDP2 asks"
        whole, mine = torch.ones(1 << 20), torch.zeros(1 << 19)
        before = pager.core.backend.dense_now()
        for _ in range(3):
            comm(output_tensor=mine, input_tensor=whole)
            assert pager.core.backend.dense_now() - before < whole.nbytes
        assert mine.all()
    for timer in late:
        timer.join()
    comm(output_tensor=mine, input_tensor=whole)  # without the pager it is as it was


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_torchrun(tmp_path: Path, count: int) -> None:
    """With plans too; on four ranks some shards are padded."""
    kinds = ("ddp", "fsdp2")
    for found in torchrun(tmp_path, count, *kinds):
        for kind in kinds:
            for policy in ("lru", "lp"):
                assert_same_and_within(found, kind, policy)


@pytest.mark.slow
def test_wrong_orders_are_refused_with_the_remedy(tmp_path: Path) -> None:
    remedies = {
        "sharded_last": "call fully_shard(model) first, then pager.page_module(model)",
        "replicated_first": "call page_module(model) first, then DistributedDataParallel(model)",
        "replicated_inside": "call page_module(model) first, then DistributedDataParallel(model)",
        "bucket_views": "make it without that argument",
        "gathered": "model.reshard()",
    }
    for found in fork(tmp_path, 2, "refusals"):
        assert found["refusals"].keys() == remedies.keys()
        for case, remedy in remedies.items():
            assert remedy in (found["refusals"][case] or ""), case


@pytest.mark.slow
def test_collectives_on_paged_tensors(tmp_path: Path) -> None:
    for rank, found in enumerate(fork(tmp_path, 2, "collectives")):
        seen = found["collectives"]
        assert seen["all_reduce"]
        assert seen["broadcast"]
        assert seen["all_gather"]
        assert seen.get("send", rank == 0)
        assert "receive into a plain tensor" in seen["recv"]


def test_budgets_of_the_node_are_divided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with tp.Pager(
        "16MiB", "8MiB", "4MiB", tmp_path, "64KiB", dense_reserve="2MiB", device="cpu", policy="lru"
    ) as pager:
        given = {"device": 4 * MiB, "host": 2 * MiB, "disk": MiB}
        assert pager.stats()["budget_bytes"] == given
        assert pager.core.budget.fixed_reserve == MiB // 2
        assert pager.core.host.capacity_bytes == 2 * MiB
        assert pager.core.disk is not None
        assert pager.core.disk.capacity_bytes == MiB
        said = ranks.describe(pager.core.budget_bytes, "cpu")
    assert said == (
        "This is one of 4 ranks on the node; its part of the budgets is 4.00 MiB device, 2.00 "
        "MiB host, 1.00 MiB disk."
    )


def test_a_gpu_is_a_rank_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert ranks.share_of(parse_bytes("80GiB"), "device", "cuda") == 80 << 30
    assert ranks.share_of(parse_bytes("80GiB"), "host", "cuda") == 10 << 30
    assert ranks.facts("cuda") == {"device": 1, "host": 8, "disk": 8}
    assert "each rank has its own" in ranks.describe({"device": 1 << 30, "host": 1 << 30}, "cuda")


def test_parts_that_hold_no_page_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(tp.InfeasibleBudget, match="one of 4 ranks") as refusal:
        tp.Pager("6MiB", device="cpu")
    tp.Pager(refusal.value.minimum, device="cpu").close()
    with pytest.raises(ValueError, match="give at least 8388608 bytes, or smaller pages"):
        tp.Pager("64MiB", host_budget="6MiB", device="cpu")


@pytest.mark.parametrize("text", ["0", "-1", "two", "1e3", "9999999999"])
def test_what_is_no_number_of_ranks(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    with pytest.raises(ValueError, match=f"LOCAL_WORLD_SIZE='{text}'.*torchrun"):
        tp.Pager("64MiB", device="cpu")


def test_without_a_launcher_it_is_all_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks.ranks_on_node() == 1
    assert ranks.describe({"device": 1}, "cpu") == ranks.about_share("host", "cpu") == ""
