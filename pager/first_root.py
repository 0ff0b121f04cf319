"""The first square root of a process, which must not be taken by two threads at once.

torch hands square roots of CPU tensors to MKL's vector mathematics. In 4 of 100 fresh processes
whose first one was that of a first AdamW step, by two threads, the result differed in its last bits
from what the same step gives ever after; in 120 that had taken one by a single thread before, in
none. (torch 2.13, MKL, two cores; gradients were the same in all.) What that first call sets up is
MKL's own.
"""

import torch


def take_first_root() -> None:
    """In one thread, so that training in this process starts with the bits it would have later."""
    torch.ones(64, dtype=torch.float32, device="cpu").sqrt_()
