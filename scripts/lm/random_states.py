"""The states of all random number generators that a training may draw from."""

import random
from typing import Any

import numpy as np
import torch


def random_states(device: str) -> dict[str, Any]:
    """As tensors and plain values, which checkpoints hold."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if device == "cuda" else None,
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
    }


def seed_all(*numbers: int) -> None:
    """Begin all generators anew, from ``numbers`` alone."""
    first, second, third = np.random.SeedSequence(numbers).generate_state(3)
    torch.manual_seed(int(first))
    random.seed(int(second))
    np.random.seed(int(third))  # noqa: NPY002


def set_random_states(states: dict[str, Any], device: str) -> None:
    """Go on where ``random_states`` was called. Those that an older checkpoint lacks stay."""
    torch.set_rng_state(states["cpu"].clone())
    if device == "cuda" and states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"].clone())
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        name, keys, *rest = states["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
