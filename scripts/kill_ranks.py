#!/usr/bin/env python3
"""Kill one of several ranks in each phase of a step: the others must end, and say who is to blame.

    kill_ranks.py --json kills.json
    kill_ranks.py --kinds 2:ddp --phases save

A kill is good if every other rank ends with code 1 and one line that names the killed one, no file
is left but the checkpoint, which is whole, and all ranks that go on from it end with the weights of
the training that nobody interrupted. Ranks are forked here, as torchrun would start them.
"""

import argparse
import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch._dynamo
import torch.distributed.fsdp
import train_lm
from lm.checkpoint import load_checkpoint
from lm.forked import fork_ranks
from lm.model import Block
from lm.report import run_facts, write_json
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tensorpager.pager.checkpoint import together, torch_file

KINDS = ("2:ddp", "2:fsdp2", "4:fsdp2", "4:hsdp")  # ranks, and how they share the model
PHASES = ("forward", "backward", "step", "save")
TRAINING = ("--preset=tiny", "--batch=4", "--seq=16", "--warmup=2", "--steps=4", "--policy=lru")
SECONDS = 300.0  # for one training
LAST_SECONDS = 10.0  # for its last words

Ended = dict[int, tuple[int, float]]  # by rank: exit code, and when


def start(
    ranks: int, parallel: str, folder: Path, given: list[str], kill: tuple[int, str]
) -> Ended:
    """Train with so many ranks. ``kill``: a rank, and the phase that it does not survive."""
    local = ranks // 2 if parallel == "hsdp" else ranks

    def body(rank: int) -> int:
        log = os.open(folder / f"rank-{rank}.log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable()  # says where it was if it takes too long
        if rank == kill[0]:
            die_in(kill[1], parallel, rank, local, folder / "saved.pt")
        budget = [f"--device-budget={5 * local}MiB", f"--disk-budget={16 * local}MiB"]
        paging = [*budget, f"--disk-path={folder}", "--page-size=64KiB"]
        return train_lm.main([*TRAINING, f"--parallel={parallel}", *paging, *given])

    children, _store = fork_ranks(ranks, body, local)
    ended: Ended = {}
    deadline, late = time.monotonic() + SECONDS, False
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ended[children.pop(pid)] = os.waitstatus_to_exitcode(status), time.monotonic()
        elif time.monotonic() > deadline:
            for child in children:
                os.kill(child, signal.SIGKILL if late else signal.SIGABRT)
            deadline, late = time.monotonic() + LAST_SECONDS, True
        else:
            time.sleep(0.02)
    return ended


def die_in(phase: str, parallel: str, rank: int, local: int, saved: Path) -> None:
    """This process is killed when the phase comes for the first time after a file was saved."""

    def die(*_: object) -> None:
        if saved.exists():
            os.kill(os.getpid(), signal.SIGKILL)

    def before(owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)
        setattr(owner, name, lambda *given, **named: (die(), real(*given, **named))[1])

    if phase == "forward":
        before(Block, "forward")
    elif phase == "backward":
        forward = Block.forward

        def watched(self: Block, x: torch.Tensor) -> torch.Tensor:
            result = forward(self, x)
            result.register_hook(die)
            return result

        Block.forward = watched  # type: ignore[method-assign]
    elif phase == "step":
        register_optimizer_step_pre_hook(die)
    elif rank == 0:
        before(torch_file, "_set_sums")  # all bytes are written, and the file has no name yet
    elif parallel == "ddp" or (parallel == "hsdp" and rank >= local):  # it has nothing to send
        before(train_lm, "save_checkpoint")
    else:
        before(together, "_messages")  # the first rank waits for this one's shards


def run(
    ranks: int, parallel: str, killed: int, phase: str, whole: dict[str, Any]
) -> dict[str, Any]:
    """One kill. ``faults``: what was not as it must be. ``whole``: what nobody interrupted."""
    with tempfile.TemporaryDirectory(prefix="kill_ranks-") as name:
        folder = Path(name)
        saved, record = folder / "saved.pt", folder / "run.json"
        ended = start(
            ranks, parallel, folder, [f"--save={saved}", "--save-every=1"], (killed, phase)
        )
        faults = []
        when = ended[killed][1]
        if ended[killed][0] != -signal.SIGKILL:
            faults.append(f"rank {killed} was not killed: {ended[killed][0]}")
        for rank, (code, _) in ended.items():
            log = (folder / f"rank-{rank}.log").read_text()
            (folder / f"rank-{rank}.log").unlink()
            said = [line for line in log.splitlines() if line.startswith("train_lm: rank")]
            wanted = f"train_lm: rank {rank}: stopped, because rank {killed} does not answer"
            if rank != killed and (code != 1 or len(said) != 1 or not said[0].startswith(wanted)):
                faults.append(f"rank {rank} ended with {code}: {said or log[-300:]}")
        if sorted(os.listdir(folder)) != ["saved.pt"]:
            faults.append(f"left: {sorted(os.listdir(folder))}")
        else:
            step = load_checkpoint(saved)["step"]
            given = [f"--resume={saved}", f"--json={record}"]
            codes = {rank: code for rank, (code, _) in
                     start(ranks, parallel, folder, given, (-1, "")).items()}  # fmt: skip
            if not record.exists():
                said = [(folder / f"rank-{rank}.log").read_text()[-3000:] for rank in codes]
                faults.append(f"the ranks that went on from step {step} ended with {codes}: {said}")
            else:
                faults += differences(json.loads(record.read_text()), whole, step)
    seconds = max(at for _, at in ended.values()) - when
    return {"ranks": ranks, "parallel": parallel, "killed": killed, "phase": phase,
            "seconds_until_all_ended": round(seconds, 1), "faults": faults}  # fmt: skip


def differences(again: dict[str, Any], whole: dict[str, Any], step: int) -> list[str]:
    """Where a training that went on from ``step`` left the one that nobody interrupted, if it did:
    the gradient's norm comes before the weights that it changes, these before the next loss."""
    if again["final_parameters_sha256"] == whole["final_parameters_sha256"]:
        return []
    said = [f"the ranks that went on from step {step} have other weights"]
    for what in ("losses", "gradient_norms"):
        pairs = enumerate(zip(again[what], whole[what][step:]), step)
        at = next((f"at step {n}: {one}, not {other}" for n, (one, other) in pairs if one != other),
                  "nowhere")  # fmt: skip
        said.append(f"{what} differ first {at}")
    return said


def uninterrupted(ranks: int, parallel: str) -> dict[str, Any]:
    """What the training records that nobody interrupts."""
    with tempfile.TemporaryDirectory(prefix="kill_ranks-") as name:
        start(ranks, parallel, Path(name), [f"--json={name}/run.json"], (-1, ""))
        found: dict[str, Any] = json.loads(Path(name, "run.json").read_text())
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kills = []
    for kind in options.kinds:
        count, parallel = kind.split(":")
        whole = uninterrupted(int(count), parallel)
        for phase in options.phases:
            for killed in range(int(count)):
                kill = run(int(count), parallel, killed, phase, whole)
                kills.append(kill)
                told = "; ".join(kill["faults"]) or "good"
                print(f"{kind:8} rank {killed} killed in {phase:9} all ended after "
                      f"{kill['seconds_until_all_ended']:5.1f} s  {told}", flush=True)  # fmt: skip
                if options.json is not None:  # what was found is kept, whatever comes after
                    write_json(options.json, {"kills": kills, "facts": run_facts("cpu")})
    good = sum(not kill["faults"] for kill in kills)
    print(f"{good} of {len(kills)} good")
    return 0 if good == len(kills) else 1


if __name__ == "__main__":
    sys.exit(main())
