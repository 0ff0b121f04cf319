"""Bytes to train on, and which of them step number n sees."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

STDLIB_BYTES = 2_000_000


@dataclass(frozen=True)
class Corpus:
    """Training text. ``sha256`` tells two corpora apart in checkpoints and reports."""

    data: np.ndarray  # uint8 (bytes,)
    sha256: str

    def batch(self, seed: int, step: int, batch: int, seq: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of one step, int64 (batch, seq) on the CPU.

        A pure function of its arguments: a resumed run needs no reader state, only the step.
        """
        rng = np.random.default_rng([seed, step])
        starts = rng.integers(0, len(self.data) - seq, size=batch)
        windows = np.stack([self.data[start : start + seq + 1] for start in starts])
        tokens = torch.from_numpy(windows.astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def load_corpus(path: Path | None, seq: int) -> Corpus:
    """``path``'s bytes, or by default the Python standard library's own source.

    Raises ``ValueError`` for a file too short to hold one sequence and ``OSError`` for one that
    cannot be read.
    """
    text = path.read_bytes() if path is not None else _stdlib_source(STDLIB_BYTES)
    if len(text) < seq + 1:
        raise ValueError(
            f"{path or 'the standard library'} holds {len(text)} bytes, fewer than the {seq + 1} "
            "of one sequence; take a longer file (--data) or a smaller --seq"
        )
    return Corpus(np.frombuffer(text, dtype=np.uint8), hashlib.sha256(text).hexdigest())


def _stdlib_source(limit: int) -> bytes:
    """The first ``limit`` bytes of the standard library's .py files in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "dist-packages"} & set(path.relative_to(root).parts):
            continue
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= limit:
            break
    return b"".join(parts)[:limit]
