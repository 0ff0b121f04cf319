"""Check every address that an interpreted Triton kernel touches.

The interpreter turns each load and store into one call with an array of addresses and a mask.
Wrapped, those calls tell whether every byte of every unmasked access lies in memory that the
kernel may touch.
"""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch


class AddressError(AssertionError):
    """A kernel touched memory that it was not given."""


def _byte_ranges(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """Half-open address ranges [n, 2] of contiguous tensors, sorted, touching ones merged."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.nbytes)
    merged: list[list[int]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([start, end])
    return np.array(merged, dtype=np.uint64).reshape(-1, 2)


def _check(verb: str, ranges: np.ndarray, pointers, mask) -> None:
    addresses = np.asarray(pointers.data, dtype=np.uint64)
    addresses = addresses[np.broadcast_to(np.asarray(mask.data, dtype=bool), addresses.shape)]
    width = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
    range_after = np.searchsorted(ranges[:, 0], addresses, side="right")
    ends = np.concatenate([np.zeros(1, np.uint64), ranges[:, 1]])
    outside = addresses + width > ends[range_after]
    if outside.any():
        raise AddressError(
            f"{verb} {outside.sum()} of {addresses.size} addresses that are not the kernel's, "
            f"first {int(addresses[outside][0]):#x}; it has "
            + ", ".join(f"[{start:#x}, {end:#x})" for start, end in ranges.tolist())
        )


@contextlib.contextmanager
def checked_addresses(
    reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Raise AddressError when a kernel run inside reads or writes anything else.

    reads, writes : contiguous CPU tensors (views count as their own bytes). What is in `writes`
        may not be read, unless it is in `reads` too.

    Atomic operations are refused: they would go unchecked.
    """
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    readable, writable = _byte_ranges(reads), _byte_ranges(writes)
    load, store = Builder.create_masked_load, Builder.create_masked_store

    def checked_load(self, pointers, mask, *rest, **named):
        _check("read", readable, pointers, mask)
        return load(self, pointers, mask, *rest, **named)

    def checked_store(self, pointers, value, mask, *rest, **named):
        _check("wrote", writable, pointers, mask)
        return store(self, pointers, value, mask, *rest, **named)

    def refused(self, *_args, **_named):
        raise AddressError("atomic operation: the address checker does not cover it")

    with contextlib.ExitStack() as patches:
        for name, replacement in {
            "create_masked_load": checked_load,
            "create_masked_store": checked_store,
            "create_atomic_rmw": refused,
            "create_atomic_cas": refused,
        }.items():
            patches.callback(setattr, Builder, name, getattr(Builder, name))
            setattr(Builder, name, replacement)
        try:
            yield
        except Exception as error:  # the interpreter wraps what a kernel raises, once per call
            cause: BaseException | None = error
            while cause and not isinstance(cause, AddressError):
                cause = cause.__cause__
            if cause:
                raise cause from None
            raise
