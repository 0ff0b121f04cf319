"""One training run: model, optimizer, schedule and the number of the next step."""

import hashlib
import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from tensorpager.pager.devices.cpu import warm_up
from tensorpager.pager.optim.optimizer import load_optimizer
from tensorpager.pager.tensor.tensor_bytes import chunks

from .data import Corpus
from .memory import Memory
from .model import meta_model
from .options import Options, UsageError
from .random_states import random_states, set_random_states

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

    def __init__(self, options: Options, memory: Memory, corpus: Corpus) -> None:
        make_deterministic(options.seed)
        self.options = options
        self.memory = memory
        self.corpus = corpus
        self.next_step = 0
        self.model = meta_model(
            options.preset, torch.bfloat16 if options.dtype == "bf16" else torch.float32
        )
        memory.place(self.model)
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
        """Train on the next batch; its loss."""
        options = self.options
        tokens, targets = self.corpus.batch(
            options.seed, self.next_step, options.batch, options.seq
        )
        with self.memory.iteration():
            with self._autocast():
                loss = self.model(tokens.to(options.device), targets.to(options.device))
            loss.backward()
            if options.clip > 0:
                clip_grad_norm_(self.model.parameters(), options.clip, foreach=False)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.schedule.step()
        self.next_step += 1
        return float(loss.detach())

    def _autocast(self) -> AbstractContextManager[None]:
        # No cache: it would keep a bf16 copy of every parameter until the forward pass ends.
        return torch.autocast(
            self.options.device,
            dtype=torch.bfloat16,
            enabled=self.options.dtype == "amp",
            cache_enabled=False,
        )

    def parameters_sha256(self) -> str:
        """Of all parameters' bytes in the order of their names, a slab at a time."""
        digest = hashlib.sha256()
        for _, parameter in sorted(self.model.named_parameters()):
            for chunk in chunks(parameter, row_major=True):
                digest.update(chunk)
        return digest.hexdigest()

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a resumed run to continue the same training."""
        names = ("preset", "dtype", "batch", "seq", "lr", "warmup", "decay_steps", "clip", "seed")
        chosen = {name: getattr(self.options, name) for name in names}
        return {**chosen, "data": self.corpus.sha256}

    def checkpoint(self) -> dict[str, Any]:
        """Everything that the next step depends on. Tensors are the run's own, not copies."""
        return {
            "format": FORMAT,
            "identity": self._identity(),
            "step": self.next_step,
            "model": dict(self.model.named_parameters()),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "rng": random_states(self.options.device),
        }

    @torch.no_grad()
    def restore(self, content: dict[str, Any]) -> None:
        """Continue from ``checkpoint()``, of this or of any other ``Memory``.

        Raises ``UsageError``, with nothing restored, if it was made by another training.
        """
        self._refuse_other_training(content)
        for name, parameter in self.model.named_parameters():
            parameter.copy_(content["model"][name])
        load_optimizer(self.optimizer, content["optimizer"])
        self.schedule.load_state_dict(content["schedule"])
        set_random_states(content["rng"], self.options.device)
        self.next_step = content["step"]

    def _refuse_other_training(self, content: dict[str, Any]) -> None:
        path = self.options.resume
        if content["format"] != FORMAT:
            raise UsageError(f"--resume={path} has format {content['format']!r}, not {FORMAT!r}")
        for name, mine in self._identity().items():
            theirs = content["identity"].get(name)
            if theirs != mine:
                flag = name.replace("_", "-")
                raise UsageError(
                    f"--resume={path} was made with --{flag} {theirs}, this run has {mine}; "
                    "they must be equal"
                )
        if content["step"] >= self.options.steps:
            raise UsageError(
                f"--resume={path} is at step {content['step']} and --steps={self.options.steps} "
                f"counts from the start; nothing to do, take --steps above {content['step']}"
            )
