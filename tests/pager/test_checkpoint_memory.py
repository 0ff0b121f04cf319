"""Memory while checkpoints are written and read, as the kernel counts it, from another process."""

import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import os, sys
from pathlib import Path
import torch, tensorpager as tp
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._async_thread_executor import (
    _ThreadBasedAsyncCheckpointExecutor as Executor)
from tensorpager.pager.checkpoint.save_load import save, load
from tensorpager.pager.tensor.new_pages import empty_like_geometry
torch.set_num_threads(1)
folder = Path(sys.argv[1])
pager = tp.Pager(device_budget="24MiB", disk_budget="640MiB", disk_path=folder, page_size="256KiB",
                 dense_reserve="8MiB", device="cpu", policy="lru")
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(32)), nn.Linear(1024, 8192))
pager.page_module(model)
optimizer = pager.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
with torch.no_grad():
    for p in model.parameters():
        p.normal_()
        optimizer.state[p]["momentum_buffer"] = (
            empty_like_geometry(pager.core, p, "optimizer").fill_(0.5))
small = {"a": torch.ones(3), "b": pager.page(torch.ones(1 << 17))}
def all_of_it():
    return {"model": model.state_dict(), "optimizer": {
        str(n): optimizer.state[p]["momentum_buffer"] for n, p in enumerate(model.parameters())}}
def through_dcp(state, name):
    dcp.save(state, storage_writer=tp.dcp.Writer(folder / name), no_dist=True)
    dcp.load(state, storage_reader=tp.dcp.Reader(folder / name), no_dist=True)
def meanwhile(state, name):
    writer = tp.dcp.Writer(folder / name)
    saved = Executor().execute_save(writer.stage(state), storage_writer=writer, no_dist=True)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
            optimizer.state[p]["momentum_buffer"].mul_(0.5)
    saved.result()
stages = {
    "warm beside": lambda: meanwhile(small, "w.beside"),
    "warm dcp": lambda: through_dcp(small, "w.dcp"),
    "warm": lambda: [(save(pager.core, folder / f"w.{e}", small), load(pager.core,
        folder / f"w.{e}", strict=False, model=model)) for e in ("pt", "safetensors")],
    "save pt": lambda: save(pager.core, folder / "a.pt"),
    "save safetensors": lambda: save(pager.core, folder / "a.safetensors"),
    "load safetensors": lambda: load(pager.core, folder / "a.safetensors"),
    "load pt": lambda: load(pager.core, folder / "a.pt"),
    "state_dict": lambda: pager.state_dict(),
    "save dcp": lambda: dcp.save(all_of_it(), storage_writer=tp.dcp.Writer(folder / "a.dcp"),
        no_dist=True),
    "save dcp beside": lambda: meanwhile(all_of_it(), "b.dcp"),
    "load dcp": lambda: dcp.load(all_of_it(), storage_reader=tp.dcp.Reader(folder / "a.dcp"),
        no_dist=True),
}
for name, stage in stages.items():
    print(name, flush=True)
    sys.stdin.readline()
    stage()
print("end", flush=True)
sys.stdin.readline()
"""
SLACK = 16 << 20  # the interpreter's own, and threads that transfer pages
BESIDE = 4 << 20  # of a save that goes on beside a training which writes all pages


def _status(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pairs = [line.split() for line in lines if line.startswith(("VmHWM", "VmRSS"))]
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in pairs}


@pytest.mark.slow
def test_memory_while_saving_and_loading(tmp_path: Path) -> None:
    """160 MiB of parameters and as much of states under 24 MiB: the kernel's high-water mark,
    mapped file pages included, grows by one tensor and one buffer at most; by less than a tensor
    while all is written anew beside a save."""
    largest, buffer = 8192 * 1024 * 4, 16 << 20
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        grown = {}
        name, before = "", 0
        for line in process.stdout:
            if name:
                grown[name] = _status(process.pid)["VmHWM"] - before
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")
            name, before = line.strip(), _status(process.pid)["VmRSS"]
            process.stdin.write("go\n")
            process.stdin.flush()
    assert process.returncode == 0
    del grown["warm"], grown["warm dcp"], grown["warm beside"]
    assert len(grown) == 8
    assert grown["save dcp beside"] <= BESIDE
    assert grown["save dcp"] <= buffer + SLACK, "a slab, and no tensor"
    assert all(peak <= largest + buffer + SLACK for peak in grown.values()), grown
