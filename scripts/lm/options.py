"""The command line of ``train_lm.py``: what is allowed, and what a wrong value is told."""

import argparse
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from tensorpager.planner.sizes import parse_bytes

from .model import PRESETS

TIERS = ("device", "host", "disk")
DTYPES = ("fp32", "bf16", "amp")
PARALLEL = ("ddp", "fsdp2", "hsdp")
_RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class UsageError(Exception):
    """A wrong option or input. The message says what, where, and what to do: exit code 2."""


@dataclass(frozen=True)
class Place:
    """Where ``torchrun`` has put this process. ``restarts``: how often it has started all of them
    again."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    restarts: int = 0

    @property
    def nodes(self) -> int:
        return self.size // self.local_size


def find_place() -> Place | None:
    """From the environment; ``None`` without a launcher. Raises ``UsageError`` for one that is not
    torchrun: each of its processes would train the whole model by itself."""
    found = os.environ
    if "WORLD_SIZE" not in found:
        for name, launcher in (
            ("SLURM_STEP_NUM_TASKS", "srun"),
            ("OMPI_COMM_WORLD_SIZE", "mpirun"),
            ("PMI_SIZE", "mpiexec"),
        ):
            if found.get(name, "1") not in ("", "1"):
                raise UsageError(
                    f"{launcher} has started {found[name]} processes ({name}), which do not know "
                    "of each other; start one torchrun on each node instead, as "
                    "docs/several-nodes.md shows"
                )
        return None
    try:
        numbers = [int(found[name]) for name in _RANK_NAMES]
        place = Place(*numbers, restarts=int(found.get("TORCHELASTIC_RESTART_COUNT", "0")))
        sound = 0 <= place.rank < place.size and 0 <= place.local_rank < place.local_size
        if not sound or place.size % place.local_size:
            raise ValueError
    except (KeyError, ValueError):
        told = ", ".join(f"{name}={found.get(name)}" for name in _RANK_NAMES)
        raise UsageError(
            f"the environment says {told}, which torchrun would not; start with torchrun, as many "
            "processes on each node, or unset these"
        ) from None
    return place


@dataclass(frozen=True)
class Options:
    """One run. Budgets are still text: a share such as ``40%`` needs ``needed`` to be bytes."""

    preset: str
    dtype: str
    device: str
    steps: int
    batch: int
    accumulate: int
    seq: int
    lr: float
    warmup: int
    decay_steps: int
    clip: float
    seed: int
    data: Path | None
    pager: bool
    compare: bool
    demand: bool
    parallel: str | None
    timeout: float
    device_budget: str | None
    host_budget: str | None
    disk_budget: str | None
    disk_path: Path | None
    disk_write_limit: str | None
    page_size: str
    policy: str
    needed: int | None
    resume: Path | None
    save: Path | None
    save_every: int
    json: Path | None
    metrics: bool
    tensorboard: Path | None

    def budget_bytes(self, tier: str, needed: int | None) -> int:
        """Bytes of the tier's budget, 0 if not given. ``needed`` is what 100 % means."""
        return resolve_budget(getattr(self, f"{tier}_budget") or "0", f"--{tier}-budget", needed)


def resolve_budget(text: str, name: str, needed: int | None) -> int:
    """Bytes of ``text``, a byte count or a percentage of ``needed`` bytes."""
    if not text.strip().endswith("%"):
        try:
            return parse_bytes(text, name)
        except ValueError as error:
            raise UsageError(f"{error}, or a share such as '40%'") from None
    try:
        share = float(text.strip()[:-1]) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise UsageError(f"{name}={text!r} is not a percentage; write for example '40%'")
    if needed is None:
        raise UsageError(
            f"{name}={text!r} is a share of what the run needs, which is not known here; add "
            "--compare (measures it first) or --needed BYTES (a --no-pager run prints it)"
        )
    return int(share * needed)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the options)")


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train_lm.py",
        description="Train a byte-level GPT inside a memory budget, or without one (--no-pager).",
        epilog="Exit codes: 0 fine, 1 --compare found a difference or a rank was lost, 2 bad usage "
        "or budget. Ranks: torchrun --nproc-per-node 2 train_lm.py …; budgets are of a node and "
        "divided among its ranks, but for that of a GPU; hsdp shards within a node only.",
    )
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="tiny", help="model size (default %(default)s)")
    add("--dtype", choices=DTYPES, default="fp32", help="parameters fp32 or bf16; amp: autocast")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--steps", type=int, default=50, help="last step, counted from the start, also on --resume")
    add("--batch", type=int, help="sequences per step, of all ranks (default by preset)")
    add("--accumulate", type=int, default=1, metavar="N", help="take a step's batch in N parts")
    add("--seq", type=int, help="bytes per sequence (default by preset)")
    add("--lr", type=float, help="peak learning rate (default by preset)")
    add("--warmup", type=int, default=10, help="steps of linear warm-up (default %(default)s)")
    add("--decay-steps", type=int, default=1000, help="step where the cosine ends, at lr/10")
    add("--clip", type=float, default=1.0, help="largest gradient norm; 0: no clipping")
    add("--seed", type=int, default=0)
    add("--data", type=Path, help="file to learn (default: the Python standard library's source)")
    add("--parallel", choices=PARALLEL, help="how torchrun's ranks share the model (default fsdp2)")
    add("--timeout", type=float, default=600.0, metavar="S", help="that ranks wait for each other")
    add("--device-budget", metavar="SIZE", help="such as 20GiB, or 40%% of the need")
    add("--host-budget", metavar="SIZE", help="second tier (default none)")
    add("--disk-budget", metavar="SIZE", help="third tier (default none)")
    add("--disk-path", type=Path, help="folder of the disk tier's file")
    add(
        "--disk-write-limit",
        help="bytes a day that may be written to that file, such as 500GB: then the run saves and "
        "ends (with --save), or just ends",
    )
    add("--page-size", default="2MiB", metavar="SIZE", help="default %(default)s")
    add(
        "--policy", choices=("lp", "joint", "lru"), default="lp",
        help="joint: blocks may run again in backward; lru: page on demand only",
    )  # fmt: skip
    add("--needed", metavar="SIZE", help="what 100%% of a budget means")
    add("--no-pager", dest="pager", action="store_false", help="plain PyTorch; measures the need")
    add("--compare", action="store_true", help="plain, then paged, each in a process of its own")
    add("--demand", action="store_true", help="with --compare: on demand between them, too")
    add("--resume", type=Path, metavar="FILE", help="go on from a checkpoint")
    add("--save", type=Path, metavar="FILE", help="write a checkpoint at the end")
    add("--save-every", type=int, default=0, metavar="N", help="write it after every N steps too")
    add("--json", type=Path, metavar="FILE", help="write losses, times and peaks")
    add("--metrics", action="store_true", help="let 'tensorpager top' look on")
    add("--tensorboard", type=Path, metavar="DIR", help="write scalars for TensorBoard")
    return parser


def parse_options(arguments: list[str]) -> Options:
    """Checked options. Raises ``UsageError``; exits only for ``--help``."""
    values = vars(_build_parser().parse_args(arguments))
    preset = PRESETS[values["preset"]]
    for name in ("batch", "seq", "lr"):
        if values[name] is None:
            values[name] = getattr(preset, name)
    try:
        values["needed"] = None if values["needed"] is None else parse_bytes(values["needed"])
        parse_bytes(values["page_size"], "--page-size")
    except ValueError as error:
        raise UsageError(str(error)) from None
    place = find_place()
    if place is not None and values["parallel"] is None:
        values["parallel"] = "fsdp2"
    options = Options(**values)
    _check_numbers(options)
    _check_combination(options)
    _check_ranks(options, place)
    _check_paths(options)
    return options


def _check_numbers(options: Options) -> None:
    for name in ("steps", "batch", "accumulate", "seq", "decay_steps", "timeout"):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag}={getattr(options, name)} must be at least 1")
    for name in ("lr", "warmup", "clip", "seed", "save_every"):
        if not 0 <= getattr(options, name) < float("inf"):
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag}={getattr(options, name)} must be a number ≥ 0")
    context = PRESETS[options.preset].shape.context
    if options.seq > context:
        raise UsageError(
            f"--seq={options.seq} is longer than the {context} positions of preset "
            f"{options.preset}; take at most {context}"
        )


def _check_combination(options: Options) -> None:
    budgets = [tier for tier in TIERS if getattr(options, f"{tier}_budget") is not None]
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device=cuda, but PyTorch sees no CUDA device here; use --device cpu")
    if not options.pager and (options.compare or budgets):
        other = "--compare" if options.compare else f"--{budgets[0]}-budget"
        raise UsageError(f"--no-pager and {other} exclude each other; drop one")
    if options.pager and options.device_budget is None:
        raise UsageError("--device-budget is missing; give one (such as 1GiB), or --no-pager")
    if options.metrics and not options.pager:
        raise UsageError("--no-pager and --metrics exclude each other: it is the pager's metrics")
    if options.disk_budget is not None and options.disk_path is None:
        raise UsageError("--disk-budget needs --disk-path, the folder that the file goes to")
    if options.demand and not options.compare:
        raise UsageError("--demand is a run of --compare; add that, or take --policy lru")
    if options.save_every and options.save is None:
        raise UsageError("--save-every needs --save, the file that is written")
    if options.compare and options.save is not None:
        raise UsageError("--compare writes no checkpoint; drop --save")
    for tier in budgets:
        # A dry run: with --compare the need is measured later, so any value stands in for it.
        options.budget_bytes(tier, 1 if options.compare else options.needed)


def _check_ranks(options: Options, place: Place | None) -> None:
    if place is None:
        if options.parallel is not None:
            raise UsageError(
                f"--parallel={options.parallel} needs several processes, and this is one; start "
                "them with torchrun --nproc-per-node 2 scripts/train_lm.py …"
            )
        place = Place()
    elif options.compare:
        raise UsageError("--compare starts its own two processes; run it without torchrun")
    if options.parallel == "hsdp" and place.nodes == 1:
        raise UsageError(
            "--parallel=hsdp shards within a node and replicates across nodes, and there is one "
            "node; take fsdp2"
        )
    if options.device == "cuda" and place.local_size > torch.cuda.device_count():
        raise UsageError(
            f"--device=cuda: {place.local_size} ranks on a node with {torch.cuda.device_count()} "
            "GPUs; give torchrun as many processes as there are GPUs"
        )
    parts = place.size * options.accumulate
    if options.batch % parts:
        raise UsageError(
            f"--batch={options.batch} sequences cannot be divided among {place.size} ranks, "
            f"--accumulate={options.accumulate} times; take a multiple of {parts}"
        )


def _check_paths(options: Options) -> None:
    """Refuse before training what would fail after it."""
    for flag, path in (("--save", options.save), ("--json", options.json)):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{flag}={path}: there is no folder {path.absolute().parent}")
        if path is not None and path.is_dir():
            raise UsageError(f"{flag}={path} is a folder; name a file in it")
    folder = options.tensorboard
    if folder is not None and folder.exists() and not folder.is_dir():
        raise UsageError(f"--tensorboard={folder} is a file; name a folder")
    if options.disk_path is not None and not options.disk_path.is_dir():
        raise UsageError(f"--disk-path={options.disk_path} is not a folder; make it first")


def plain_arguments(options: Options, json: Path) -> list[str]:
    """The command line of the run that ``options`` compares with."""
    no_budgets = dict.fromkeys(f"{tier}_budget" for tier in TIERS)
    return _arguments(options, "plain", json, pager=False, metrics=False, **no_budgets)


def paged_arguments(
    options: Options, json: Path, needed: int, *, demand: bool = False
) -> list[str]:
    """The command line of the paged run, whose budgets may be shares of ``needed`` bytes."""
    policy = "lru" if demand else options.policy
    return _arguments(options, "demand" if demand else "paged", json, needed=needed, policy=policy)


def _arguments(options: Options, run: str, json: Path, **changes: Any) -> list[str]:
    """A command line for ``options`` with ``changes``."""
    if options.tensorboard is not None:  # it shows the folders of one folder as runs to compare
        changes["tensorboard"] = options.tensorboard / run
    values = asdict(replace(options, compare=False, demand=False, json=json, **changes))
    flags = [] if values.pop("pager") else ["--no-pager"]
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if value is not None and value is not False:
            flags.append(flag if value is True else f"{flag}={value}")
    return flags
