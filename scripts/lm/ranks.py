"""Several processes that train one model: who they are, how the model is divided, who has failed.

``torchrun`` starts each *rank* as a process of its own and tells it its number. Ranks meet in a
store, a small server that ``torchrun`` keeps, and then talk to each other in collectives. A rank
that is killed cannot say so: the others' collectives fail, or run into their time-out. So each rank
leaves a sign of life in the store twice a second, and the error with which it ends. Whoever finds a
collective broken looks there for the rank that is to blame.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .memory import Memory
from .options import Options, Place, UsageError, find_place

BEAT_SECONDS = 0.5
SILENT_SECONDS = 8.0  # without a sign of life; a busy machine is late by less


class Ranks:
    """All ranks as one of them sees them. For one process everything here does next to nothing."""

    def __init__(self, options: Options, place: Place) -> None:
        self.place = place
        self.parallel = options.parallel
        self.device = options.device
        self._store: Any = None
        self._stop = threading.Event()

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.place.rank == 0

    # -- meeting and parting ---------------------------------------------------------------------
    def meet(self, seconds: float) -> None:
        """Wait for all ranks, each of their collectives for so many ``seconds`` at most."""
        place = self.place
        if self.parallel is None:
            return
        if place.nodes == 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a name may have no address
        if self.device == "cuda":
            torch.cuda.set_device(place.local_rank)
        timeout = timedelta(seconds=seconds)
        try:
            store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
            prefix = f"train_lm {place.restarts}"
            self._store = dist.PrefixStore(prefix, store.clone())
            threading.Thread(target=self._beat, name="train_lm-beat", daemon=True).start()
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo",
                store=dist.PrefixStore(f"{prefix} group", store),
                rank=rank,
                world_size=size,
                timeout=timeout,
            )
        except RuntimeError as error:
            lost = self.lost()
            raise UsageError(f"the ranks did not meet: {lost or error}") from error

    def part(self) -> None:
        """At the end of a training that went well."""
        if self.parallel is not None:
            dist.barrier()
            self.ended("")
            dist.destroy_process_group()

    def _beat(self) -> None:
        store = dist.PrefixStore("beat", self._store.underlying_store.clone())
        with suppress(RuntimeError):  # who keeps the store is gone
            while not self._stop.wait(BEAT_SECONDS):
                store.add(str(self.place.rank), 1)

    def ended(self, why: str) -> None:
        """Leave the error that this rank ends with; empty where it is not to blame."""
        self._stop.set()
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(f"end {self.place.rank}", why)

    def lost(self) -> str | None:
        """Which rank has made a collective fail, and how it ended; ``None`` if all are well."""
        if self._store is None:
            return None
        others = [rank for rank in range(self.place.size) if rank != self.place.rank]
        try:
            return self._look_for(others)
        except RuntimeError:
            return "the store of the ranks, on the first node, does not answer any more"

    def _look_for(self, others: list[int]) -> str | None:
        beats = dist.PrefixStore("beat", self._store.underlying_store)
        before = {rank: beats.add(str(rank), 0) for rank in others}
        deadline = time.monotonic() + SILENT_SECONDS
        while others:
            for rank in list(others):
                if self._store.check([f"end {rank}"]):
                    why = self._store.get(f"end {rank}").decode()
                    if why:
                        return f"rank {rank}: {why}"
                    others.remove(rank)
                elif beats.add(str(rank), 0) != before[rank]:
                    others.remove(rank)
            if others and time.monotonic() > deadline:
                who = ", ".join(f"rank {rank}" for rank in others)
                verb = "does" if len(others) == 1 else "do"
                return f"{who} {verb} not answer any more: killed, or the machine is gone"
            time.sleep(0.05)
        return None

    # -- the model -------------------------------------------------------------------------------
    def divide(self, model: nn.Module, blocks: Sequence[nn.Module], memory: Memory) -> Any:
        """Give ``model``, on the meta device, its memory, and divide it among the ranks. What is to
        be called in its place."""
        if self.parallel in ("fsdp2", "hsdp"):
            from torch.distributed.fsdp import fully_shard

            shape = (self.place.nodes, self.place.local_size)
            shape = shape if self.parallel == "hsdp" else (self.place.size,)
            names = ("replicas", "shards")[-len(shape) :]
            mesh = dist.init_device_mesh(self.device, shape, mesh_dim_names=names)
            for block in blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        memory.place(model)
        if self.parallel == "ddp":
            devices = [self.place.local_rank] if self.device == "cuda" else None
            # All ranks initialise it alike.
            return nn.parallel.DistributedDataParallel(model, device_ids=devices, init_sync=False)
        return model

    def reducing(self, model: Any, last: bool) -> AbstractContextManager[None]:
        """Around the passes of one part of a step's batch. DDP reduces gradients after the ``last``
        one. FSDP2 reduces them after each, so that no rank has whole ones."""
        if self.parallel == "ddp" and not last:
            return model.no_sync()  # type: ignore[no-any-return]
        return nullcontext()

    # -- figures ---------------------------------------------------------------------------------
    def mean(self, value: float) -> float:
        """Over all ranks."""
        if self.parallel is None:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        return total.item() / self.place.size

    def most(self, value: int) -> int:
        """The largest of any rank."""
        if self.parallel is None:
            return value
        found = torch.tensor(value)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def all(self, value: Any) -> list[Any]:
        """What each rank has, by rank."""
        if self.parallel is None:
            return [value]
        found: list[Any] = [None] * self.place.size
        dist.all_gather_object(found, value)
        return found


@contextmanager
def ranks_of(options: Options) -> Iterator[Ranks]:
    """The ranks of this training, met. An error of this rank is left for the others to find; one of
    another rank becomes a ``LostRankError`` that names it."""
    ranks = Ranks(options, find_place() or Place())
    try:
        ranks.meet(options.timeout)
        yield ranks
        ranks.part()
    except BaseException as error:
        if ranks.parallel is None:
            raise
        if _is_own(error):
            ranks.ended(" ".join(str(error).split()) or type(error).__name__)
            raise
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's: it ends all ranks then
        try:
            why = ranks.lost()
        finally:
            signal.signal(signal.SIGTERM, before)
        ranks.ended("" if why or isinstance(error, SystemExit | KeyboardInterrupt) else str(error))
        if why is None:
            raise
        raise LostRankError(why) from error


class LostRankError(Exception):
    """Another rank has ended; the message says which, and why."""


def _is_own(error: BaseException) -> bool:
    """Whether it is surely no consequence of what other ranks did."""
    from tensorpager.pager.errors import PagerError

    return isinstance(error, UsageError | PagerError | OSError | MemoryError)
