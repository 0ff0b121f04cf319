"""train_lm.py on several ranks: the training that plain PyTorch does on as many, in pages; going on
from a file on other numbers of them; and which rank is to blame when one ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lm import ranks as ranks_module
from lm.options import Place, UsageError, find_place, parse_options
from lm.ranks import Ranks

from .. import programs

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_lm.py"
WORKER = Path(__file__).with_name("ranks_worker.py")
TINY = ("--preset=tiny", "--batch=4", "--seq=16", "--warmup=2", "--steps=4")
SAME = ("losses", "gradient_norms", "final_parameters_sha256")
FSDP2 = 7_500_000  # bytes that each of two ranks needs, in fp32
PATIENCE = 300.0  # seconds; a loaded machine is slow, and a test that hangs must end


def budgets(ranks: int, folder: Path, *, disk: bool = False, device: int = 5 << 20) -> list[str]:
    """Of a node with so many ranks; ``device``: bytes of each."""
    below = [f"--disk-budget={16 * ranks}MiB", f"--disk-path={folder}"]
    lower = below if disk else [f"--host-budget={12 * ranks}MiB"]
    return [f"--device-budget={device * ranks}", *lower, "--page-size=64KiB"]


def run(ranks: int, *runs: list[str], local: int | None = None) -> None:
    """One training after another; all must succeed."""
    done = programs.run(str(WORKER), str(ranks), str(local or ranks), json.dumps(runs))
    assert done.returncode == 0, done.stderr[-3000:]


def read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def compare(
    folder: Path, ranks: int, *common: str, need: int, local: int | None = None, **how: Any
) -> None:
    """Plain and in pages: the same figures and weights, every rank within its part, half or so of
    the ``need`` bytes of each."""
    plain, paged = folder / "plain.json", folder / "paged.json"
    shared, part = [*TINY, *common], need * 11 // 20
    run(
        ranks,
        [*shared, "--no-pager", f"--json={plain}"],
        [*shared, *budgets(local or ranks, folder, device=part, **how), f"--json={paged}"],
        local=local,
    )
    found, expected = read(paged), read(plain)
    for name in SAME:
        assert found[name] == expected[name], name
    assert len(found["losses"]) == 4
    assert found["losses"][-1] < found["losses"][0]
    assert all(norm > 0 for norm in found["gradient_norms"])
    assert len(found["ranks"]) == ranks
    for rank, part in enumerate(found["ranks"]):
        for tier, peak in part["peak_bytes"].items():
            assert peak <= part["budget_bytes"][tier], (rank, tier)
        assert part["stall_us"] > 0, rank
    pager = found["pager"]
    assert pager["faults"] > 0
    share = pager["budget_bytes"]["device"] / pager["needed_bytes"]
    assert 0.4 <= share <= (0.65 if ranks == 4 else 0.6)  # what is gathered is dense, 62 %


def test_two_ranks_train_one_model_as_fsdp2_does_without_us(tmp_path: Path) -> None:
    compare(tmp_path, 2, "--accumulate=2", "--clip=0.5", need=FSDP2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options", "need", "disk"),
    [
        (2, ["--parallel=ddp", "--accumulate=2"], 10_500_000, False),
        (2, ["--parallel=ddp", "--dtype=bf16"], 5_390_000, True),
        (2, ["--parallel=fsdp2", "--dtype=bf16", "--clip=0.5"], 3_760_000, True),
        (2, ["--parallel=fsdp2", "--dtype=amp"], FSDP2, False),
        (4, ["--parallel=fsdp2", "--batch=8", "--accumulate=2"], 6_700_000, True),
        (4, ["--parallel=ddp", "--dtype=bf16", "--clip=0.5"], 5_360_000, False),
    ],
)
def test_ranks_train_as_without_us(
    ranks: int, options: list[str], need: int, disk: bool, tmp_path: Path
) -> None:
    compare(tmp_path, ranks, *options, need=need, disk=disk)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options", "need", "disk"),
    [
        (2, ["--clip=0.5"], 10_500_000, False),
        (4, [], FSDP2, False),
        (4, ["--dtype=bf16", "--batch=8", "--accumulate=2", "--clip=0.5"], 3_760_000, True),
    ],
)
def test_shards_within_two_nodes_and_replicas_across(
    ranks: int, options: list[str], need: int, disk: bool, tmp_path: Path
) -> None:
    how = ["--parallel=hsdp", *options]
    compare(tmp_path, ranks, *how, need=need, local=ranks // 2, disk=disk)


@pytest.mark.slow
def test_a_file_goes_on_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """One step each on 4, 2, 1 and 3 ranks is the training, but for how sums are rounded."""
    small = [*TINY, "--batch=12", *budgets(4, tmp_path)]
    whole = tmp_path / "whole.json"
    run(2, [*small, f"--json={whole}"])
    resume: list[str] = []
    for step, ranks in enumerate((4, 2, 1, 3)):
        record, saved = tmp_path / f"{step}.json", tmp_path / f"{step}.pt"
        if ranks == 1:
            done = programs.run(str(SCRIPT), *small, f"--steps={step + 1}", *resume,
                                f"--save={saved}", f"--json={record}")  # fmt: skip
            assert done.returncode == 0, done.stderr
        else:
            run(ranks, [*small, f"--steps={step + 1}", *resume, f"--save={saved}",
                        f"--json={record}"])  # fmt: skip
        (loss,) = read(record)["losses"]
        assert loss == pytest.approx(read(whole)["losses"][step], rel=1e-4)
        assert read(record)["first_step"] == step
        resume = [f"--resume={saved}"]


@pytest.mark.slow
def test_as_many_ranks_go_on_bit_for_bit(tmp_path: Path) -> None:
    """In pages and without us, from one file."""
    names = ("whole", "first", "paged", "plain")
    whole, first, paged, plain = (tmp_path / f"{name}.json" for name in names)
    small, saved = [*TINY, *budgets(2, tmp_path)], tmp_path / "saved.pt"
    run(
        2,
        [*small, f"--json={whole}"],
        [*small, "--steps=2", f"--save={saved}", f"--json={first}"],
        [*small, f"--resume={saved}", f"--json={paged}"],
        [*TINY, "--no-pager", f"--resume={saved}", f"--json={plain}"],
    )
    for path in (paged, plain):
        assert read(first)["losses"] + read(path)["losses"] == read(whole)["losses"]
        assert read(path)["final_parameters_sha256"] == read(whole)["final_parameters_sha256"]


# -- what is refused -----------------------------------------------------------------------------
def launched(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, local: int) -> None:
    values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": local}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def test_under_torchrun_the_model_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_options(["--no-pager"]).parallel is None
    launched(monkeypatch, 1, 4, 2)
    assert find_place() == Place(1, 4, 0, 2)
    assert parse_options(["--no-pager"]).parallel == "fsdp2"
    assert parse_options(["--no-pager", "--parallel=hsdp"]).parallel == "hsdp"


@pytest.mark.parametrize(
    ("size", "local", "line", "words"),
    [
        (3, 3, "--no-pager --batch=4", "cannot be divided among 3 ranks"),
        (2, 2, "--no-pager --batch=4 --accumulate=4", "take a multiple of 8"),
        (2, 2, "--no-pager --parallel=hsdp", "there is one node; take fsdp2"),
        (2, 2, "--compare --device-budget=1GiB", "run it without torchrun"),
        (3, 2, "--no-pager", "which torchrun would not"),
    ],
)
def test_what_ranks_cannot_do(
    size: int, local: int, line: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, 0, size, local)
    with pytest.raises(UsageError, match=words):
        parse_options(line.split())


def test_nobody_trains_alone_without_knowing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="torchrun --nproc-per-node 2"):
        parse_options(["--no-pager", "--parallel=ddp"])
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(UsageError, match="srun has started 4 processes"):
        parse_options(["--no-pager"])


# -- who is to blame -----------------------------------------------------------------------------
def test_the_rank_that_ended_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the error that it left, or by what it left not; never one that only had to stop too."""
    monkeypatch.setattr(ranks_module, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(ranks_module, "BEAT_SECONDS", 0.01)
    options = parse_options(["--no-pager"])
    store = dist.HashStore()
    ranks = [Ranks(options, Place(rank, 3, rank, 3)) for rank in range(3)]
    assert ranks[0].lost() is None  # no store: one process
    for each in ranks:
        each._store = dist.PrefixStore("train_lm 0", store)
    beats = dist.PrefixStore("beat", store)
    ranks[1].ended("")
    assert "rank 2 does not answer" in (ranks[0].lost() or "")
    real = time.sleep
    monkeypatch.setattr(time, "sleep", lambda s: (beats.add("2", 1), real(s)))
    assert ranks[0].lost() is None
    ranks[2].ended("no room")
    assert ranks[0].lost() == "rank 2: no room"


def _torchrun(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _worker(parent: int, rank: int) -> int:
    """The PID of a rank that ``parent`` has started."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                status = (entry / "stat").read_text().rpartition(")")[2].split()
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if int(status[1]) == parent and f"RANK={rank}".encode() in environment:
                return int(entry.name)
    raise AssertionError(f"no rank {rank}")


@pytest.mark.slow
def test_each_rank_takes_its_part_of_the_budgets_as_the_kernel_counts(tmp_path: Path) -> None:
    """And a tenth, above what ranks take that train a model of no size without a pager."""
    device, host = 200 << 20, 80 << 20
    tiny = ["--preset=tiny", "--batch=4", "--seq=64", "--steps=2", "--no-pager"]
    paged = ["--preset=10m", "--batch=4", "--seq=64", "--steps=3", f"--device-budget={device}",
             f"--host-budget={host}", "--disk-budget=1GiB", f"--disk-path={tmp_path}"]  # fmt: skip
    done = programs.run(str(WORKER), "2", "2", json.dumps([tiny, paged]))
    assert done.returncode == 0, done.stderr[-3000:]
    before, peaks = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    for rank in ("0", "1"):
        assert before[rank] < peaks[rank] <= before[rank] + 1.1 * (device + host) / 2, rank


ORDER = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
from lm.forked import fork_ranks
seen, fork, store = [], os.fork, dist.TCPStore
os.fork = lambda: (seen.append("fork"), fork())[1]
dist.TCPStore = lambda *given, **named: (seen.append("store"), store(*given, **named))[1]
def body(rank):
    store("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False).add("met", 1)
children, met = fork_ranks(2, body)
print(seen, [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children],
      met.add("met", 0))
"""


def test_no_rank_is_forked_beside_the_thread_of_the_store() -> None:
    """It holds a lock of the C library while it looks up who connects. A child that is forked then
    waits for that lock for ever."""
    done = programs.run("-c", ORDER, str(SCRIPT.parent))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[0] == "['fork', 'fork', 'store'] [0, 0] 2"


FULL_DISK = """
import errno, json, os, sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
import kill_ranks, train_lm
from tests.pager.faulty_engine import break_disk
real = train_lm.open_memory
def full_on_rank_1(options, stack):
    memory, pager = real(options, stack)
    if os.environ["RANK"] == "1":
        break_disk(pager).fail("write", errno.ENOSPC)
    return memory, pager
train_lm.open_memory = full_on_rank_1
folder = Path(sys.argv[3])
ended = kill_ranks.start(2, "fsdp2", folder, [], (-1, ""))
print(json.dumps({rank: [code, (folder / f"rank-{rank}.log").read_text()]
                  for rank, (code, _) in ended.items()}))
"""


@pytest.mark.slow
def test_a_full_disk_on_one_rank_stops_all_with_its_error(tmp_path: Path) -> None:
    scripts = SCRIPT.parent
    done = programs.run("-c", FULL_DISK, str(scripts), str(scripts.parent), str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    ended = json.loads(done.stdout.splitlines()[-1])
    said = {
        rank: [line for line in log.splitlines() if line.startswith("train_lm: ")]
        for rank, (_, log) in ended.items()
    }
    assert [code for code, _ in ended.values()] != [0, 0]
    assert len(said["0"]) == len(said["1"]) == 1, ended
    assert said["1"][0].startswith("train_lm: rank 1: ")
    assert "No space left on device" in said["1"][0]
    assert said["0"][0].startswith("train_lm: rank 0: stopped, because rank 1: ")
    assert "No space left on device" in said["0"][0]
    assert {path.suffix for path in tmp_path.iterdir()} == {".log"}


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_is_named_by_the_other(killed: int, tmp_path: Path) -> None:
    saved = tmp_path / "saved.pt"
    often = [f"--save={saved}", "--save-every=1", "--steps=100000"]
    process = _torchrun(
        *("--standalone", "--nproc-per-node=2", str(SCRIPT), *TINY),
        *(*budgets(2, tmp_path, disk=True), *often),
    )
    _wait_for(saved, process)
    os.kill(_worker(process.pid, killed), signal.SIGKILL)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    (line,) = [line for line in output.splitlines() if line.startswith("train_lm: ")]
    assert f"rank {1 - killed}: stopped, because rank {killed} does not answer" in line
    assert {path.name for path in tmp_path.iterdir()} == {"saved.pt"}
    torch.load(saved, weights_only=True)  # whole


@pytest.mark.slow
def test_ranks_that_are_asked_to_stop_save_first(tmp_path: Path) -> None:
    """torchrun passes a signal on to ranks that may have it already; they count it once."""
    saved = tmp_path / "saved.pt"
    process = _torchrun(
        *("--standalone", "--nproc-per-node=2", str(SCRIPT), *TINY, "--steps=100000"),
        *(*budgets(2, tmp_path), f"--save={saved}", "--save-every=2"),
    )
    _wait_for(saved, process)
    step = torch.load(saved, weights_only=True)["step"]
    os.kill(_worker(process.pid, 1), signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE)
    assert output.count("and saved; the same command with --resume=") == 1
    assert torch.load(saved, weights_only=True)["step"] >= step


@pytest.mark.slow
def test_kills_in_one_phase_lose_nothing() -> None:
    """All phases, ranks and kinds: scripts/kill_ranks.py by itself."""
    kills = str(SCRIPT.with_name("kill_ranks.py"))
    done = programs.run(kills, "--kinds", "2:fsdp2", "--phases", "save")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 good" in done.stdout


@pytest.mark.slow
def test_ranks_that_are_started_again_go_on_from_the_file(tmp_path: Path) -> None:
    saved, record = tmp_path / "saved.pt", tmp_path / "run.json"
    common = [*TINY, "--steps=12"]
    plain = tmp_path / "plain.json"
    run(2, [*common, "--no-pager", f"--json={plain}"])
    process = _torchrun(
        *("--standalone", "--nproc-per-node=2", "--max-restarts=1", str(SCRIPT), *common),
        *(*budgets(2, tmp_path), f"--save={saved}", "--save-every=1", f"--json={record}"),
    )
    _wait_for(saved, process)
    os.kill(_worker(process.pid, 1), signal.SIGKILL)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output[-3000:]
    assert read(record)["first_step"] > 0
    assert read(record)["final_parameters_sha256"] == read(plain)["final_parameters_sha256"]


@pytest.mark.slow
def test_two_agents_are_two_nodes(tmp_path: Path) -> None:
    """The lines of docs/several-nodes.md, both on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plain, paged = tmp_path / "plain.json", tmp_path / "paged.json"
    hsdp = [*TINY, "--parallel=hsdp"]
    run(4, [*hsdp, "--no-pager", f"--json={plain}"], local=2)
    line = f"--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port}"
    agents = [
        _torchrun(
            *(*line.split(), "--rdzv-id=here", f"--node-rank={node}", str(SCRIPT), *hsdp),
            *(*budgets(2, tmp_path), f"--json={paged}"),
        )
        for node in range(2)
    ]
    said = [agent.communicate(timeout=PATIENCE)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert [read(paged)[name] for name in SAME] == [read(plain)[name] for name in SAME]
    assert sum("step 4/4" in text for text in said) == 1  # one rank prints
