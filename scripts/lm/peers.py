"""Other ways to train in less device memory, each as a ``Memory`` that ``bench_train.py`` measures.

They are as their authors recommend them for one device: optimizer steps on the CPU are fused ones,
host copies are page-locked on CUDA. What a peer needs is imported when the peer is made;
``UnavailableError`` says in one line why it cannot be had here.
"""

import importlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from .memory import PagedMemory, PlainMemory
from .options import Options


class UnavailableError(Exception):
    """A memory system that cannot be used here. The message says why."""


class OverlapMemory(PagedMemory):
    """Pages, and each parameter updated during the backward pass."""

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        return self._pager.optimizer(optimizer, overlap=True)


class SaveOnCpu(PlainMemory):
    """``torch.autograd.graph.save_on_cpu``: what autograd saves waits in host memory. On the CPU
    it is there already, so nothing moves and only the hooks' cost shows."""

    def __init__(self, device: str) -> None:
        super().__init__(device, measure=False)

    @contextmanager
    def iteration(self) -> Iterator[None]:
        pinned = self._device == "cuda"
        with super().iteration(), torch.autograd.graph.save_on_cpu(pin_memory=pinned):
            yield


class Checkpointed(PlainMemory):
    """``torch.utils.checkpoint`` around each block: what is inside one is computed again."""

    def __init__(self, device: str) -> None:
        super().__init__(device, measure=False)

    def place(self, model: nn.Module) -> None:
        super().place(model)
        for block in model.get_submodule("blocks").children():
            vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False)


class TorchaoOffload(PlainMemory):
    """torchao's ``CPUOffloadOptimizer``: gradients go to the host as they are made, AdamW steps
    there, and the new parameters come back."""

    def __init__(self, device: str, *, clip: float) -> None:
        super().__init__(device, measure=False)
        _need_cuda("torchao's CPUOffloadOptimizer", device)
        if clip > 0:
            raise UnavailableError("torchao's optimizer cannot clip gradients; add --clip 0")
        self._module = _import("torchao.optim")

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        offload, settings = self._module.CPUOffloadOptimizer, _settings(optimizer)
        offloaded: Optimizer = offload(
            _parameters(optimizer), torch.optim.AdamW, offload_gradients=True, **settings
        )
        return offloaded


class BitsandbytesPaged(PlainMemory):
    """bitsandbytes' paged AdamW with 32-bit states in CUDA's unified memory. The driver moves
    them out only when the device is full; ``torch.cuda``'s allocator does not count them."""

    def __init__(self, device: str) -> None:
        super().__init__(device, measure=False)
        _need_cuda("bitsandbytes' paged AdamW", device)
        self._module = _import("bitsandbytes")

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        paged: Optimizer = self._module.optim.PagedAdamW32bit(
            _parameters(optimizer), **_settings(optimizer)
        )
        return paged


class Fsdp2Offload(PlainMemory):
    """FSDP2 on one rank with ``CPUOffloadPolicy``: parameters, gradients and states are on the
    host, each block's parameters come to the device while it computes.

    The weights are initialised densely on the device, as in the other runs, so that they are the
    same ones, and sharded after that. Call ``close``: there is one process group per process.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device, measure=False)
        if not dist.is_available():
            raise UnavailableError("FSDP2 needs torch.distributed, which this PyTorch has not")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may have no address
        self._folder = tempfile.TemporaryDirectory(prefix="bench_train-")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            init_method=f"file://{self._folder.name}/store",
            rank=0,
            world_size=1,
        )

    def place(self, model: nn.Module) -> None:
        super().place(model)
        dense_init: Any = model.init_weights

        def init_weights(generator: torch.Generator) -> None:
            dense_init(generator)
            self._shard(model)

        vars(model)["init_weights"] = init_weights

    def _shard(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        mesh = dist.device_mesh.init_device_mesh(self._device, (1,))
        policy = CPUOffloadPolicy(pin_memory=self._device == "cuda")
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh, offload_policy=policy)
        fully_shard(model, mesh=mesh, offload_policy=policy)
        if self._device == "cuda":
            torch.cuda.empty_cache()  # of the dense weights

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        return torch.optim.AdamW(_parameters(optimizer), fused=True, **_settings(optimizer))

    def close(self) -> None:
        dist.destroy_process_group()
        self._folder.cleanup()


def make_peer(mode: str, options: Options) -> PlainMemory:
    """The peer called ``mode``, for a run with ``options``. Raises ``UnavailableError``."""
    if mode == "save_on_cpu":
        return SaveOnCpu(options.device)
    if mode == "checkpoint":
        return Checkpointed(options.device)
    if mode == "torchao":
        return TorchaoOffload(options.device, clip=options.clip)
    if mode == "bitsandbytes":
        return BitsandbytesPaged(options.device)
    assert mode == "fsdp2", mode
    return Fsdp2Offload(options.device)


def _need_cuda(what: str, device: str) -> None:
    if device != "cuda":
        raise UnavailableError(f"{what} needs --device cuda")


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # packages with native parts raise anything
        raise UnavailableError(
            f"{module} cannot be imported: {type(error).__name__}: {error}"
        ) from None


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """What every AdamW understands."""
    names = ("lr", "betas", "eps", "weight_decay")
    return {name: optimizer.defaults[name] for name in names}
