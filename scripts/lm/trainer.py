"""One training run: model, optimizer, schedule and the number of the next step."""

import hashlib
import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from tensorpager.pager.devices.cpu import warm_up
from tensorpager.pager.optim.optimizer import load_optimizer
from tensorpager.pager.tensor.sharded import is_sharded, local_of, part_of
from tensorpager.pager.tensor.tensor_bytes import chunks

from .data import Corpus
from .memory import Memory
from .model import meta_model
from .options import Options, Place, UsageError
from .random_states import random_states, seed_all, set_random_states
from .ranks import Ranks

FORMAT = "tensorpager train_lm 1"
FINAL_LR_SHARE = 0.1


def make_deterministic(seed: int) -> None:
    """Same seed, same machine, same thread count: the same bits."""
    torch.manual_seed(seed)
    warm_up()
    # Not "warn only": flash attention's backward is deterministic where errors are asked for. The
    # memory-efficient one has no deterministic backward; PyTorch takes its own products instead.
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    # Filling fresh memory with NaN is a debugging aid, and would be a write to every page.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class Trainer:
    """Takes steps. The same options give the same losses in every ``Memory``."""

    def __init__(
        self, options: Options, memory: Memory, corpus: Corpus, ranks: Ranks | None = None
    ) -> None:
        make_deterministic(options.seed)
        self.options = options
        self.memory = memory
        self.corpus = corpus
        self.ranks = Ranks(options, Place()) if ranks is None else ranks
        self.next_step = 0
        self.gradient_norm: float | None = None  # of the latest step, before it was clipped
        self.model = meta_model(
            options.preset, torch.bfloat16 if options.dtype == "bf16" else torch.float32
        )
        self._called = self.ranks.divide(self.model, list(self.model.blocks), memory)
        self.model.init_weights(torch.Generator(options.device).manual_seed(options.seed))
        # The for-loop implementation: what paged parameters take, so like is compared with like.
        adamw = torch.optim.AdamW(
            self.model.parameters(), lr=options.lr, betas=(0.9, 0.95), foreach=False
        )
        self.optimizer = memory.optimizer(adamw)
        self.schedule = LambdaLR(self.optimizer, self._lr_share)

    def _lr_share(self, step: int) -> float:
        """Warm-up, then a cosine. Independent of --steps, so that a run can be prolonged."""
        options = self.options
        if step < options.warmup:
            return (step + 1) / options.warmup
        progress = min(1.0, (step - options.warmup) / max(1, options.decay_steps - options.warmup))
        return FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * (1 + math.cos(math.pi * progress)) / 2

    def step(self) -> float:
        """Train on the next batch; its loss. Each rank takes its rows of each part of it."""
        options, ranks = self.options, self.ranks
        whole = self.corpus.batch(options.seed, self.next_step, options.batch, options.seq)
        shape = options.accumulate, ranks.place.size, -1, options.seq
        tokens, targets = (rows.view(shape)[:, ranks.place.rank] for rows in whole)
        losses: list[Tensor] = []
        norm: Any = None
        with self.memory.iteration():
            for part in range(options.accumulate):
                with ranks.reducing(self._called, last=part + 1 == options.accumulate):
                    with self._autocast():
                        loss = self._called(
                            tokens[part].to(options.device), targets[part].to(options.device)
                        )
                    losses.append(loss.detach())
                    (loss if options.accumulate == 1 else loss / options.accumulate).backward()
            if options.clip > 0:
                parameters = self.model.parameters()
                norm = clip_grad_norm_(parameters, options.clip, foreach=False).detach()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.schedule.step()
        self.next_step += 1
        if norm is not None:
            self.gradient_norm = float(norm.full_tensor() if is_sharded(norm) else norm)
        return ranks.mean(math.fsum(map(float, losses)) / options.accumulate)

    def _autocast(self) -> AbstractContextManager[None]:
        # No cache: it would keep a bf16 copy of every parameter until the forward pass ends.
        return torch.autocast(
            self.options.device,
            dtype=torch.bfloat16,
            enabled=self.options.dtype == "amp",
            cache_enabled=False,
        )

    def parameters_sha256(self) -> str:
        """Of all parameters' bytes in the order of their names, a slab at a time; of sharded ones,
        which all ranks call this for, a tensor at a time."""
        digest = hashlib.sha256()
        for _, parameter in sorted(self.model.named_parameters()):
            tensor: Any = parameter.detach()
            tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
            for chunk in chunks(tensor, row_major=True):
                digest.update(chunk)
        return digest.hexdigest()

    def checkpoint(self) -> dict[str, Any]:
        """Everything that the next step depends on. Tensors are the run's own, not copies."""
        return {
            "format": FORMAT,
            "identity": _identity(self.options, self.corpus),
            "step": self.next_step,
            "model": dict(self.model.named_parameters()),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "rng": self.ranks.all(random_states(self.options.device)),
        }

    @torch.no_grad()
    def restore(self, content: dict[str, Any]) -> str | None:
        """Continue from ``checkpoint()``, of this or any other ``Memory`` and number of ranks. The
        loader goes on where it was. What to tell the user: that random states are new ones, which
        they are on another number of ranks.

        Raises ``UsageError``, with nothing restored, if it was made by another training.
        """
        refuse_other_training(content, self.options, self.corpus)
        for name, parameter in self.model.named_parameters():
            saved = content["model"][name]
            sharded = is_sharded(parameter)
            local_of(parameter).copy_(part_of(saved, parameter) if sharded else saved)
        load_optimizer(self.optimizer, content["optimizer"])
        self.schedule.load_state_dict(content["schedule"])
        self.next_step = content["step"]
        place, states = self.ranks.place, content["rng"]
        states = [states] if isinstance(states, dict) else states  # of one process, before
        if len(states) == place.size:
            set_random_states(states[place.rank], self.options.device)
            return None
        seed_all(self.options.seed, place.rank, self.next_step)
        return (
            f"{self.options.resume} is of {len(states)} ranks and these are {place.size}: random "
            "numbers (dropout's, not the data's) begin anew, from seed, rank and step"
        )


def _identity(options: Options, corpus: Corpus) -> dict[str, Any]:
    """What must be equal for a resumed run to continue the same training."""
    names = ("preset", "dtype", "batch", "seq", "lr", "warmup", "decay_steps", "clip", "seed")
    return {**{name: getattr(options, name) for name in names}, "data": corpus.sha256}


def refuse_other_training(content: dict[str, Any], options: Options, corpus: Corpus) -> None:
    """``UsageError`` for a checkpoint that does not continue this training."""
    path = options.resume
    if content["format"] != FORMAT:
        raise UsageError(f"--resume={path} has format {content['format']!r}, not {FORMAT!r}")
    for name, mine in _identity(options, corpus).items():
        theirs = content["identity"].get(name)
        if theirs != mine:
            flag = name.replace("_", "-")
            raise UsageError(
                f"--resume={path} was made with --{flag} {theirs}, this run has {mine}; "
                "they must be equal"
            )
    if content["step"] >= options.steps:
        raise UsageError(
            f"--resume={path} is at step {content['step']} and --steps={options.steps} "
            f"counts from the start; nothing to do, take --steps above {content['step']}"
        )
