"""One file of what all ranks have: rank 0 writes it, the others send their shards.

::

    rank 0   | asks rank 1 for message 0 of tensor 5, waits, writes | … | stop, and how it went
    rank 1   |            reads its shard from pages, sends          | … |

Rank 0 asks for each message, so that it can stop at any time, and nobody waits for a message that
does not come. Where shards are rows (``Shard(0)``, FSDP2's default) they lie in the file one after
another, and rank 0 never has more of a tensor than a message; otherwise it has the whole tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import PagerError
from ..tensor.sharded import Piece, is_sharded, local_of, piece_of
from ..tensor.tensor_bytes import BUFFER_BYTES, Read, chunks
from .tree import tensors_of

_STOP = -1


class _Plan(NamedTuple):
    """What one rank is about to save. ``problem``: why it cannot."""

    path: str
    tensors: list[tuple[bool, tuple[int, ...], torch.dtype]]
    pieces: list[Piece | None]
    problem: str | None


def save_together(
    path: Path, content: Any, check: Callable[[], None], write: Callable[[Read], None]
) -> None:
    """Called by all ranks with the same ``path`` and alike ``content``; rank 0 writes.

    ``check``: raises what is wrong with the path or the content, on any rank. ``write``: writes the
    file, with the bytes that it is given. When this returns the file is there. What goes wrong on
    one rank is raised on all of them, and no file is written then.
    """
    if not dist.is_initialized():
        raise PagerError(
            f"{path}: sharded tensors are saved by all ranks together, and there is no process "
            "group (any more); save before destroy_process_group()"
        )
    group, tensors = _group(), list(tensors_of(content))
    problem = _agree(path, tensors, check, group)
    if isinstance(problem, BaseException):
        raise problem
    if dist.get_rank() != 0:
        _serve(tensors, group)
        return
    failure: BaseException | None = None
    try:
        write(_Gathered(tensors, problem, group).chunks)
    except BaseException as error:
        failure = error
        raise
    finally:
        _stop(group, failure)


def _group() -> Any:
    """All ranks, in a group that takes plain memory."""
    world = dist.group.WORLD
    if "gloo" in dist.get_backend_config(world):
        return world
    known = _gloo.get("world")
    if known is None or known[0] is not world:
        known = _gloo["world"] = world, dist.new_group(backend="gloo")
    return known[1]


_gloo: dict[str, tuple[Any, Any]] = {}


def _agree(
    path: Path, tensors: list[torch.Tensor], check: Callable[[], None], group: Any
) -> BaseException | list[_Plan]:
    """All ranks' plans, on rank 0; an error if a rank has a problem or they differ."""
    own: BaseException | None = None
    pieces: list[Piece | None] = []
    try:
        check()
        pieces = [piece_of(tensor) if is_sharded(tensor) else None for tensor in tensors]
    except Exception as error:
        own = error
    shapes = [(is_sharded(t), tuple(t.size()), t.dtype) for t in tensors]
    mine = _Plan(os.fspath(path), shapes, pieces, str(own) if own is not None else None)
    rank = dist.get_rank()
    plans: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, plans if rank == 0 else None, dst=0, group=group)
    said = [_difference(plans) if rank == 0 else None]
    dist.broadcast_object_list(said, src=0, group=group)
    if own is not None:
        return own
    return plans if said[0] is None else PagerError(said[0])


def _difference(plans: list[_Plan]) -> str | None:
    first = plans[0]
    for rank, plan in enumerate(plans):
        if plan.problem is not None:
            return f"rank {rank} cannot save: {plan.problem}"
        if plan.path != first.path:
            return (
                f"rank 0 saves {first.path!r} and rank {rank} {plan.path!r}, but sharded tensors "
                "go into one file that rank 0 writes; name the same path on all ranks"
            )
        if plan.tensors != first.tensors:
            return (
                f"{first.path}: rank {rank} saves other tensors than rank 0 (their number, order, "
                "shapes or dtypes), and one file holds what all have; save what is alike, or use "
                "torch.distributed.checkpoint"
            )
    return None


# -- rank 0 --------------------------------------------------------------------------------------
class _Gathered:
    """Reads tensors of all ranks."""

    def __init__(self, tensors: list[torch.Tensor], plans: list[_Plan], group: Any) -> None:
        self._index = {id(tensor): index for index, tensor in enumerate(tensors)}
        self._plans = plans
        self._group = group

    def chunks(self, tensor: torch.Tensor, *, row_major: bool = False) -> Iterator[memoryview]:
        """Those of a sharded one in the order of its indices."""
        if not is_sharded(tensor):
            yield from chunks(tensor, row_major=row_major)
            return
        sources = self._sources(tensor)
        if all(piece.shape[1:] == tuple(tensor.size()[1:]) for piece in sources):
            for piece, rank in sources.items():
                yield from self._bytes(tensor, rank, piece)
            return
        whole = torch.empty(tensor.size(), dtype=tensor.dtype)
        for piece, rank in sources.items():
            target, start = whole, 0
            for dim, (offset, length) in enumerate(zip(piece.offset, piece.shape)):
                target = target.narrow(dim, offset, length)
            for chunk in self._bytes(tensor, rank, piece):
                values = torch.frombuffer(chunk, dtype=tensor.dtype)
                put(target, start, values)
                start += values.numel()
        yield from chunks(whole)

    def _sources(self, tensor: torch.Tensor) -> dict[Piece, int]:
        """The pieces that make up ``tensor``, from first to last, and who has each."""
        index = self._index[id(tensor)]
        holders: dict[Piece, int] = {}
        for rank, plan in enumerate(self._plans):
            piece = plan.pieces[index]
            if piece is not None and piece.numel:
                holders.setdefault(piece, rank)
        if sum(piece.numel for piece in holders) != tensor.numel():
            raise PagerError(
                f"the shards of a tensor of shape {tuple(tensor.size())} do not make it up; save "
                "it with torch.distributed.checkpoint"
            )
        return dict(sorted(holders.items()))

    def _bytes(self, tensor: torch.Tensor, rank: int, piece: Piece) -> Iterator[memoryview]:
        if rank == 0:
            yield from chunks(local_of(tensor), row_major=True)
            return
        left = piece.numel * tensor.element_size()
        buffer = torch.empty(min(left, BUFFER_BYTES), dtype=torch.uint8)
        number, failed = 0, torch.empty(1, dtype=torch.int64)
        while left:
            ask = torch.tensor([self._index[id(tensor)], number])
            dist.send(ask, rank, group=self._group)
            dist.recv(failed, rank, group=self._group)
            if failed.item():
                raise PagerError(
                    f"rank {rank} could not read its part of a tensor of shape "
                    f"{tuple(tensor.size())}: its own error says why. Nothing was saved, an older "
                    "file is as it was"
                )
            message = buffer[: min(left, BUFFER_BYTES)]
            dist.recv(message, rank, group=self._group)
            yield memoryview(message.numpy())
            left -= message.numel()
            number += 1


def put(target: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Elements ``start …`` of ``target``, in the order of its indices, become ``values``."""
    if target.is_contiguous():
        target.view(-1)[start : start + values.numel()] = values
        return
    row = target[0].numel()
    while values.numel():
        index, inside = divmod(start, row)
        if inside or values.numel() < row:
            count = min(values.numel(), row - inside)
            put(target[index], inside, values[:count])
        else:
            rows = values.numel() // row
            count = rows * row
            target[index : index + rows] = values[:count].view(rows, *target.size()[1:])
        start, values = start + count, values[count:]


def _stop(group: Any, failure: BaseException | None) -> None:
    for rank in range(1, dist.get_world_size()):
        dist.send(torch.tensor([_STOP, 0]), rank, group=group)
    said = None
    if failure is not None:
        said = isinstance(failure, OSError), f"rank 0 could not save: {failure}"
    dist.broadcast_object_list([said], src=0, group=group)


# -- the others ----------------------------------------------------------------------------------
def _serve(tensors: list[torch.Tensor], group: Any) -> None:
    """Send what rank 0 asks for until it says that it is done; raise what went wrong."""
    problem: Exception | None = None
    messages: Generator[torch.Tensor, None, None] | None = None
    asked = torch.empty(2, dtype=torch.int64)
    while True:
        dist.recv(asked, 0, group=group)
        index, number = asked.tolist()
        if index == _STOP:
            break
        message = None
        try:
            if number == 0:
                messages = _messages(local_of(tensors[index]))
            assert messages is not None
            message = next(messages)
        except Exception as error:
            problem = error
        dist.send(torch.tensor([int(message is None)]), 0, group=group)
        if message is not None:
            dist.send(message, 0, group=group)
    if messages is not None:
        messages.close()
    said: list[Any] = [None]
    dist.broadcast_object_list(said, src=0, group=group)
    if problem is not None:
        raise problem
    if said[0] is not None:
        on_file, text = said[0]
        raise OSError(text) if on_file else PagerError(text)


def _messages(tensor: torch.Tensor) -> Generator[torch.Tensor, None, None]:
    """The bytes of ``tensor``, uint8, all but the last of ``BUFFER_BYTES``; each is valid until the
    next one is asked for."""
    buffer = torch.empty(
        min(tensor.numel() * tensor.element_size(), BUFFER_BYTES), dtype=torch.uint8
    )
    used = 0
    for chunk in chunks(tensor, row_major=True):
        rest = torch.frombuffer(chunk, dtype=torch.uint8)
        while len(rest):
            count = min(len(rest), len(buffer) - used)
            buffer[used : used + count] = rest[:count]
            rest, used = rest[count:], used + count
            if used == len(buffer):
                yield buffer
                used = 0
    if used:
        yield buffer[:used]
