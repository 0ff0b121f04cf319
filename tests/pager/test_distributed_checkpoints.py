"""Sharded models: saved by all ranks, loaded by any number of them, updated during backward."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tensorpager.pager.checkpoint.sources import open_checkpoint
from tensorpager.pager.checkpoint.together import put

from .distributed_worker import make_model
from .models import SEED, assert_same, make_pager, mlp, plain

ROOT = Path(__file__).parents[2]


def ranks_do(folder: Path, ranks: int, *cases: str) -> list[dict[str, Any]]:
    """What each of ``ranks`` found in ``cases`` of ``sharded_worker.py``."""
    command = [sys.executable, "-m", "tests.pager.sharded_worker", str(folder), *cases]
    command.append(f"--ranks={ranks}")
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def test_elements_go_where_they_belong() -> None:
    """Pieces of any length, into a block of rows and columns, and into one of three dimensions."""
    for size, block in (((7, 10), (slice(2, 6), slice(3, 8))),
                        ((4, 5, 6), (slice(1, 3), slice(0, 5), slice(2, 5)))):  # fmt: skip
        expected = torch.zeros(size)
        values = torch.arange(1.0, expected[block].numel() + 1)
        expected[block] = values.view(expected[block].shape)
        for step in (1, 4, 7, len(values)):
            whole = torch.zeros(size)
            for start in range(0, len(values), step):
                put(whole[block], start, values[start : start + step])
            assert torch.equal(whole, expected), step


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_in_one_shard(one_rank: None, one_thread: None, tmp_path: Path) -> None:
    """All that several ranks do but for sending."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(SEED)
    expected = plain(mlp().state_dict())
    with make_pager() as pager:
        torch.manual_seed(SEED)
        model = pager.page_module(fully_shard(mlp()))
        for name in ("a.pt", "a.safetensors"):
            pager.save(tmp_path / name)
        state = pager.state_dict()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert pager.load(tmp_path / "a.safetensors") == ([], [], {})
        whole = {name: t.full_tensor() for name, t in model.state_dict().items()}
        assert_same(plain(whole), expected)
    assert_same(torch.load(tmp_path / "a.pt", weights_only=True)["models"][0], expected)
    for name, tensor in state["models"][0].items():
        assert type(tensor).__name__ == "DTensor"
        assert torch.equal(tensor.to_local(), expected[name])


# -- several ranks -------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_training_goes_on_exactly(ranks: int, tmp_path: Path) -> None:
    """From one file of all ranks, and from each rank's ``state_dict()``: the same losses,
    parameters and states."""
    for found in ranks_do(tmp_path, ranks, "resume"):
        assert all(found["resume"].values()), found
    with zipfile.ZipFile(tmp_path / "all.pt") as container:
        assert container.testzip() is None


@pytest.mark.slow
def test_8bit_states(tmp_path: Path) -> None:
    """Of shards of whole blocks the scales of all ranks are those of the whole parameter."""
    for found in ranks_do(tmp_path, 2, "resume_8bit"):
        assert all(found["resume_8bit"].values()), found
    content: Any = open_checkpoint(tmp_path / "all.pt").content
    saved = content["optimizers"][0]["state"][2]
    assert saved["exp_avg_scales"].shape == (2, 256 * 256 // 256 // 2)
    with make_pager() as pager:
        model = pager.page_module(make_model())
        optimizer = pager.optimizer(torch.optim.AdamW(model.parameters()), states="8bit")
        pager.load(tmp_path / "all.pt")
        loaded = optimizer.state[model[2].weight]
        assert torch.equal(plain(loaded["exp_avg_codes"]), saved["exp_avg_codes"])
        assert torch.equal(plain(loaded["exp_avg_scales"]), saved["exp_avg_scales"].view(-1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_other_numbers_of_ranks(tmp_path: Path) -> None:
    """2 ranks save, 4 load; what these save is a checkpoint for one process without shards."""
    ranks_do(tmp_path, 2, "save_all")
    for found in ranks_do(tmp_path, 4, "load_all"):
        assert all(found["load_all"].values()), found
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    for folder in (tmp_path, tmp_path / "again"):
        model = make_model()
        content = torch.load(folder / "all.pt", weights_only=True)
        model.load_state_dict(content["models"][0])
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.load_state_dict(content["optimizers"][0])
        assert_same(plain(values(model, optimizer)), expected)
        twin = make_model()
        dcp.load({"model": twin.state_dict()}, checkpoint_id=folder / "dcp")
        assert_same(plain(list(twin.parameters())), expected[: len(list(twin.parameters()))])
        with make_pager() as pager:
            paged = pager.page_module(make_model())
            optimizer = pager.optimizer(torch.optim.AdamW(paged.parameters()))
            pager.load(folder / "all.pt")
            assert_same(plain(values(paged, optimizer)), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_dcp_on_4_2_1_and_3_ranks(tmp_path: Path) -> None:
    """Each loads what those before have saved, two of them while they train on; so does plain FSDP2
    on as many, and a plain process at the end."""
    for number, ranks in enumerate((4, 2, 1, 3)):
        for found in ranks_do(tmp_path, ranks, "chain"):
            told = found["chain"]
            assert told.keys() == {"plain", "within", *(["same"] if number else []),
                                   *(["training"] if number == 1 else [])}  # fmt: skip
            assert all(told.values()), (ranks, told)
    twin = make_model()
    dcp.load({"model": twin.state_dict()}, checkpoint_id=tmp_path / "chain-3")
    expected = torch.load(tmp_path / "chain.pt", weights_only=True)
    assert_same(plain(list(twin.parameters())), expected[: len(list(twin.parameters()))])


def values(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
    return [*model.parameters(), *states]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, ranks_do(folder, 2, "columns", "failures", "overlap", "unsuitable")


@pytest.mark.slow
def test_shards_of_columns(two_ranks: Any) -> None:
    for found in two_ranks[1]:
        assert found["columns"] == {"file": True, "back": True}


@pytest.mark.slow
def test_what_goes_wrong_on_one_rank_is_said_on_all(two_ranks: Any) -> None:
    """Nobody waits for ever, and no file is left; a disk that takes no page keeps no one from
    saving."""
    folder, (first, second) = two_ranks
    for found in (first["failures"], second["failures"]):
        assert "name the same path on all ranks" in found["paths"]
        assert "take one of .pt" in found["suffix"]
        assert "there is no folder" in found["folder"]
        assert "rank 1 saves other tensors than rank 0" in found["tensors"]
        assert "No space left on device" in found["room"]
        assert found["no file"] is True
        assert found["write"] is True
        assert "saved" not in found
    one, other = first["failures"]["read"], second["failures"]["read"]
    assert one.startswith("PagerError: rank 1 could not read its part of a tensor")
    assert re.search(r"'[0-9]\.(weight|bias)( \+\d more)?' cannot be read", other)
    assert "Input/output error" in other
    saved = folder / "broken.safetensors"  # at last, while the disk took no page
    content: Any = open_checkpoint(saved).content
    assert len(content) == 10
    assert saved.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_shards_are_updated_during_backward(two_ranks: Any) -> None:
    for found in two_ranks[1]:
        for name, parameters in (("chain", 10), ("twice", 6)):
            expected = {"same": True, "updates": 3 * parameters, "told": []}
            assert found["overlap"][name] == expected, name


@pytest.mark.slow
def test_optimizers_that_do_not_suit_shards_are_refused(two_ranks: Any) -> None:
    for found in two_ranks[1]:
        said = found["unsuitable"]
        assert "use an optimizer that updates each element by itself" in said["Muon"]
        assert "use an optimizer that updates each element by itself" in said["Adafactor"]
        assert "(255, 128) on 2 ranks" in said["8bit"]
        assert "use states='bf16'" in said["8bit"]
