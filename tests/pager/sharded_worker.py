"""What several ranks do with one sharded model: save and load it, and update it early.

    python -m tests.pager.sharded_worker OUT resume --ranks 2

Runs as ``distributed_worker.py`` does; what is saved is in ``OUT`` for the next call.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F

import tensorpager as tp
from tensorpager.pager.checkpoint import safetensors_file, together
from tensorpager.pager.disk import watch as io_watch
from tensorpager.pager.tensor import tensor_bytes
from tests.pager import distributed_worker
from tests.pager.distributed_worker import (
    PAGE_BYTES,
    Found,
    main,
    make_model,
    make_pager,
    sharded,
    whole,
)
from tests.pager.faulty_engine import break_disk

Models = tuple[nn.Module, torch.optim.Optimizer]
distributed_worker.RANK_BYTES["device"] = 3 << 20  # of which the gathered layers take most


def paged(pager: tp.Pager, model: nn.Module | None = None, **options: Any) -> Models:
    """A sharded model, and AdamW, in pages."""
    model = pager.page_module(sharded(make_model()) if model is None else model)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    return model, pager.optimizer(optimizer, **options)


def train(pager: tp.Pager | None, models: Models, steps: range) -> list[float]:
    """This rank's losses; step *n* sees the same data whenever it is done."""
    model, optimizer = models
    losses = []
    for step in steps:
        data = torch.Generator().manual_seed(100 * step + dist.get_rank())
        inputs = torch.randn(32, 128, generator=data)
        labels = torch.randint(10, (32,), generator=data)
        with pager.iteration() if pager is not None else nullcontext():
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values(models: Models) -> list[torch.Tensor]:
    """All parameters and states, whole."""
    model, optimizer = models
    parameters = list(model.parameters())  # whichever of them got its state first
    states = [v for p in parameters for _, v in sorted(optimizer.state[p].items())]
    return [whole(value) for value in [*parameters, *states]]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


# -- saving and going on -------------------------------------------------------------------------
def resume(folder: Path, **options: Any) -> Found:
    """Two steps, a checkpoint of each kind, two more; the same two after loading each."""
    with make_pager(folder, "lru") as pager:
        models = paged(pager, **options)
        train(pager, models, range(2))
        pager.save(folder / "all.pt")
        pager.save(folder / "model.safetensors")
        copy = pager.state_dict()
        expected = train(pager, models, range(2, 4))
        stats = pager.stats()
        peak, budget = stats["peak_bytes"], stats["budget_bytes"]
        end = values(models)
    found = {
        "within": all(peak[tier] <= budget[tier] for tier in peak),
        "pressed": stats["faults"] > 0,
    }
    for kind in ("file", "copy"):
        with make_pager(folder, "lru") as pager:
            models = paged(pager, **options)
            if kind == "file":
                pager.load(folder / "all.pt")
            else:
                pager.load_state_dict(copy)
            losses = train(pager, models, range(2, 4))
            found[kind] = losses == expected and same(values(models), end)
    with make_pager(folder, "lru") as pager:
        models = paged(pager)
        loaded = pager.load(folder / "model.safetensors")
        found["names"] = loaded == ([], [], {})
        locals_ = [copy["models"][0][name]._local_tensor for name in copy["models"][0]]
        mine = [p._local_tensor for p in models[0].state_dict().values()]
        found["weights"] = same(list(map(whole, mine)), locals_)
    return found


def resume_8bit(folder: Path) -> Found:
    # Room for what is decoded of a whole parameter.
    with mock.patch.dict(distributed_worker.RANK_BYTES, device=4 << 20):
        return resume(folder, states="8bit")


def columns(folder: Path) -> Found:
    """Shards of columns are put together, and cut again, as they are of rows."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    with make_pager(folder, "lru") as pager, mock.patch.object(together, "BUFFER_BYTES", 4 * 1000):
        model = make_model()
        expected = model.state_dict()
        fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)
        pager.page_module(model)
        pager.save(folder / "columns.pt")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        pager.load(folder / "columns.pt")
        back = [whole(p) for p in model.parameters()]
    saved = torch.load(folder / "columns.pt", weights_only=True)["models"][0]
    return {"file": same(list(saved.values()), list(expected.values())),
            "back": same(back, list(expected.values()))}  # fmt: skip


# -- other numbers of ranks ----------------------------------------------------------------------
def save_all(folder: Path) -> Found:
    """For ``load_all``: a file of all ranks, one of DCP, and what both should hold."""
    with make_pager(folder, "lru") as pager:
        models = paged(pager)
        train(pager, models, range(2))
        _save(pager, models, folder)
        expected = values(models)
        if dist.get_rank() == 0:
            torch.save([v.cpu() for v in expected], folder / "expected.pt")
    return {}


def _save(pager: tp.Pager, models: Models, folder: Path) -> None:
    pager.save(folder / "all.pt")
    model, optimizer = get_state_dict(models[0], models[1])
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder / "dcp")


def load_all(folder: Path) -> Found:
    """Into a model on another number of ranks; then DCP saves it from there."""
    expected = torch.load(folder / "expected.pt", weights_only=True)
    found: Found = {}
    for kind in ("file", "dcp"):
        with make_pager(folder, "lru") as pager:
            models = paged(pager)
            if kind == "file":
                pager.load(folder / "all.pt")
            else:
                train(pager, models, range(1))  # so that it has other states
                model, optimizer = get_state_dict(models[0], models[1])
                state = {"model": model, "optimizer": optimizer}
                dcp.load(state, checkpoint_id=folder / "dcp")
                set_state_dict(
                    models[0], models[1], model_state_dict=model, optim_state_dict=optimizer
                )
            found[kind] = same(values(models), expected)
            local = [t._local_tensor for t in models[0].parameters()]  # type: ignore[attr-defined]
            found[f"{kind} in pages"] = all(type(t) is tp.PagedTensor for t in local)
            if kind == "dcp":
                (folder / "again").mkdir(exist_ok=True)
                dist.barrier()
                _save(pager, models, folder / "again")
    return found


def chain(folder: Path) -> Found:
    """Load what other ranks have saved by DCP, compare, and save it for the next."""
    number = len(list(folder.glob("chain-*")))
    dist.barrier()
    found: Found = {}

    def load(models: Models, reader: Any) -> bool:
        model, optimizer = get_state_dict(*models)
        dcp.load({"model": model, "optimizer": optimizer}, storage_reader=reader)
        set_state_dict(*models, model_state_dict=model, optim_state_dict=optimizer)
        return same(values(models), torch.load(folder / "chain.pt", weights_only=True))

    before = folder / f"chain-{number - 1}"
    with make_pager(folder, "lru") as pager:
        models = paged(pager)
        train(pager, models, range(1 if number else 3))
        if number:
            found["same"] = load(models, tp.dcp.Reader(before))
        elif (expected := values(models)) and dist.get_rank() == 0:
            torch.save([value.clone() for value in expected], folder / "chain.pt")
        model, optimizer = get_state_dict(*models)
        state = {"model": model, "optimizer": optimizer}
        if number == 1:  # beside a step of training
            expected_loss = train(pager, models, range(7, 8))
            load(models, tp.dcp.Reader(before))
            model, optimizer = get_state_dict(*models)
            state = {"model": model, "optimizer": optimizer}
            writer, group = (
                tp.dcp.Writer(folder / f"chain-{number}"),
                dist.new_group(backend="gloo"),
            )
            future: Any = dcp.async_save(state, storage_writer=writer, process_group=group)
            found["training"] = train(pager, models, range(7, 8)) == expected_loss
            future.result()
        else:
            dcp.save(state, storage_writer=tp.dcp.Writer(folder / f"chain-{number}"))
        stats = pager.stats()
        peak, budget = stats["peak_bytes"], stats["budget_bytes"]
        found["within"] = all(peak[tier] <= budget[tier] for tier in peak)
    bare = sharded(make_model())
    models = bare, torch.optim.AdamW(bare.parameters(), lr=1e-2, foreach=False)
    train(None, models, range(1))
    found["plain"] = load(models, dcp.FileSystemReader(folder / f"chain-{number}"))
    return found


# -- when it cannot be saved ---------------------------------------------------------------------
def failures(folder: Path) -> Found:
    """What each rank is told; and what is left on disk."""
    io_watch.RETRY_PAUSES_SECONDS = (0.001,) * 3
    rank = dist.get_rank()
    path = folder / "broken.safetensors"
    found: Found = {}

    def attempt(name: str, where: Path, **options: Any) -> None:
        try:
            pager.save(where, **options)
        except (tp.PagerError, OSError, TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    with make_pager(folder, "lru") as pager:
        models = paged(pager)
        train(pager, models, range(2))
        attempt("paths", folder / f"rank-{rank}.pt")
        attempt("suffix", folder / "a.txt")
        attempt("folder", folder / "none" / "a.pt")
        state = models[0].state_dict()
        if rank == 1:
            state.popitem()
        attempt("tensors", path, state=state)
        engine = break_disk(pager)
        with pager.core.quiet():
            for run in list(pager.core.space.runs.values()):
                pager.core.residency.evict_run(run)
        if rank == 1:
            engine.fail("read", errno.EIO)
        attempt("read", path)
        engine.heal()
        before = safetensors_file.reserve if rank == 0 else None

        def write_error(file: Any, nbytes: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        if before is not None:
            with mock.patch.object(safetensors_file, "reserve", write_error):
                attempt("room", path)
        else:
            attempt("room", path)
        dist.barrier()
        found["no file"] = not any(name.startswith("broken") for name in os.listdir(folder))
        dist.barrier()
        engine.fail("write", errno.EIO)  # nothing can leave the device: it is saved all the same
        kept = []
        with suppress(tp.PagerError):
            while True:
                kept.append(pager.page(torch.randn(PAGE_BYTES // 4)))
        found["write"] = pager.core.mover.disk_refuses
        attempt("saved", path)
        engine.heal()
    return found


# -- updates during backward ---------------------------------------------------------------------
class Twice(nn.Module):
    """A sharded layer that runs twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(128, 256)
        self.layer = nn.Linear(256, 256)
        self.last = nn.Linear(256, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.first(inputs).relu()).relu()
        out: torch.Tensor = self.last(self.layer(hidden).relu())
        return out


def _shard_twice() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = Twice()
    fully_shard(model.layer)
    fully_shard(model)
    return model


def overlap(folder: Path) -> Found:
    """The same bits as without."""
    found: Found = {}
    for name, build in (("chain", lambda: sharded(make_model())), ("twice", _shard_twice)):
        runs = []
        for early in (False, True):
            with (
                make_pager(folder, "lru") as pager,
                warnings.catch_warnings(record=True) as caught,
            ):
                warnings.simplefilter("always")
                models = paged(pager, build(), overlap=early)
                losses = train(pager, models, range(5))
                runs.append((losses, values(models)))
                told = [str(w.message) for w in caught if "the overlap of" in str(w.message)]
                updates = pager.core.in_backward.updates
        found[name] = {
            "same": runs[0][0] == runs[1][0] and same(runs[0][1], runs[1][1]),
            "updates": updates,
            "told": told,
        }
    return found


def unsuitable(folder: Path) -> Found:
    """Optimizers that cannot update shards by themselves, and states that no file could hold."""
    found: Found = {}
    for name in ("Muon", "Adafactor"):
        with make_pager(folder, "lru") as pager:
            model = pager.page_module(sharded(make_model()))
            weights = [p for p in model.parameters() if p.dim() == 2]
            optimizer = pager.optimizer(getattr(torch.optim, name)(weights, lr=1e-3))
            try:
                train(pager, (model, optimizer), range(1))
            except tp.PagerError as error:
                found[name] = str(error)
    with make_pager(folder, "lru") as pager:
        torch.manual_seed(1)
        uneven = sharded(nn.Sequential(nn.Linear(128, 255), nn.Linear(255, 10)))
        try:
            train(pager, paged(pager, uneven, states="8bit"), range(1))
        except tp.PagerError as error:
            found["8bit"] = str(error)
    return found


CASES = {
    "resume": resume, "resume_8bit": resume_8bit, "columns": columns, "save_all": save_all,
    "load_all": load_all, "chain": chain, "failures": failures, "overlap": overlap,
    "unsuitable": unsuitable,
}  # fmt: skip

if __name__ == "__main__":
    assert tensor_bytes.BUFFER_BYTES == together.BUFFER_BYTES
    sys.exit(main(CASES))
