"""The first square root of a process, which must not be taken by two threads at once.

torch hands square roots of CPU tensors to MKL's vector mathematics. In 4 of 100 fresh processes
whose first one was that of a first AdamW step, by two threads, the result differed in its last bits
from what the same step gives ever after; in 101 that had taken one by a single thread before, in
none. (torch 2.13, MKL, two cores; gradients were the same in all.) So few processes suggest that
this is the cause, and do not prove it; what that first call sets up was not found out.
"""

import torch


def take_first_root() -> None:
    """In one thread, so that a training should start with the bits that it would have later."""
    torch.ones(64, dtype=torch.float32, device="cpu").sqrt_()
