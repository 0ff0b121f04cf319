"""How the disk tier's file is read and written: the interface of its engines, and which one to use.

Two engines, one for each way to a disk:

===========  ===================================================================================
``posix``    ``preadv`` and ``pwritev`` on the tier's threads
``kvikio``   NVIDIA's KvikIO: moves device memory itself, over GPUDirect Storage where the
             machine has that (disk/kvikio.py)
===========  ===================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..errors import PagerError
from . import file as disk_io
from .kvikio import KvikioEngine, has_gds, why_not

ENGINES = ("auto", "kvikio", "posix")


class Engine(Protocol):
    """Moves bytes between memory and one open file. Nothing here knows of pages or checksums.

    ``write`` and ``read`` block, without the GIL while bytes move, and are called by several
    threads at once. What wraps an engine (tests put faults there) forwards the attributes.
    """

    @property
    def name(self) -> str:
        """``posix`` or ``kvikio``."""

    @property
    def direct(self) -> bool:
        """Whether the page cache is bypassed. Buffers, offsets and lengths are then multiples of
        ``disk_io.ALIGNMENT`` bytes; the tier sees to it."""

    @property
    def takes_device(self) -> bool:
        """Whether buffers may be in device memory too."""

    def write(self, buffers: Sequence[Any], offset: int) -> None:
        """Writes ``buffers`` one after another from byte ``offset`` on; all there on return.

        ``buffers``: C-contiguous uint8 arrays, or 1-D uint8 CUDA tensors where ``takes_device``;
        for the latter the caller has waited for the work that makes their bytes. Raises
        ``OSError``: the bytes at ``offset`` may then be anything. Once it has returned or raised,
        nothing uses the buffers any more.
        """

    def read(self, buffers: Sequence[Any], offset: int) -> None:
        """Fills ``buffers`` likewise; they hold anything after an ``OSError``."""

    def close(self) -> None:
        """Gives up what the engine has opened itself. Idempotent. Nothing is in flight."""


class PosixEngine:
    """An :class:`Engine` for host memory on ``fd``, which stays its owner's.

    ``direct``: whether ``fd`` has O_DIRECT on (``disk_io.enable_direct``).
    """

    name = "posix"
    takes_device = False

    def __init__(self, fd: int, *, direct: bool) -> None:
        self.direct = direct
        self._fd = fd
        self._unit = disk_io.ALIGNMENT if direct else 1

    def write(self, buffers: Sequence[disk_io.Bytes], offset: int) -> None:
        disk_io.transfer(os.pwritev, self._fd, buffers, offset, self._unit)

    def read(self, buffers: Sequence[disk_io.Bytes], offset: int) -> None:
        disk_io.transfer(os.preadv, self._fd, buffers, offset, self._unit)

    def close(self) -> None:
        pass


Wrap = Callable[[Engine], Engine]
"""Puts something around an engine."""


def check_name(io_engine: str) -> str:
    """``io_engine`` itself. Raises ValueError for one that there is not."""
    if io_engine not in ENGINES:
        raise ValueError(f"{io_engine=} is unknown; choose one of {', '.join(ENGINES)}")
    return io_engine


def make_engine(
    io_engine: str, fd: int, *, direct: bool, callers: int, task_bytes: int, on_cuda: bool
) -> PosixEngine | KvikioEngine:
    """An engine on the file of ``fd``, which stays the caller's.

    ``io_engine``: ``auto`` is ``kvikio`` where the pages' frames are in device memory (``on_cuda``)
    and GPUDirect Storage works; through host memory it is no faster than ``posix``.
    ``direct``: whether ``fd`` has O_DIRECT. ``callers``: how many threads will call at once.
    ``task_bytes``: the largest piece that one thread moves.

    Raises PagerError for ``kvikio`` where that cannot work.
    """
    straight = io_engine == "auto" and on_cuda and why_not() is None and has_gds()
    if straight or io_engine == "kvikio":
        try:
            return KvikioEngine(
                fd, direct=direct, callers=callers, task_bytes=task_bytes, takes_device=on_cuda
            )
        except PagerError:
            if io_engine == "kvikio":
                raise
    return PosixEngine(fd, direct=direct)
