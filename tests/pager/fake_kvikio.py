"""KvikIO and cuFile on a machine that seems to have GPUDirect Storage, on plain memory.

``Cufile`` does real file I/O and keeps a log of what happened in which order: ``map``, ``unmap``,
``register``, ``deregister``, ``read``, ``write``, each with the byte of the arena where it began.
It knows what is registered and mapped, and fails a test that breaks a rule of registration.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tensorpager.pager.disk import kvikio as kvikio_engine

PIECE = 512 << 10  # of device memory, mapped at once


class Cufile:
    """``most``: pieces that can be registered, as if BAR1 were full then."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.base = 0
        self.mapped: set[int] = set()
        self.registered: set[int] = set()
        self.most = 1 << 30
        self.compat = False
        self.tries = 0
        self.keeps: set[int] = set()  # pieces that it does not give back
        self.settings: dict[str, Any] = {
            "num_threads": 1,
            "bounce_buffer_size": 16 << 20,
            "auto_direct_io_read": False,
            "auto_direct_io_write": True,
        }
        self.properties: dict[str, Any] = {
            "is_gds_available": True,
            "max_pinned_memory_size": 32 << 20,  # KiB
        }

    # -- device memory ---------------------------------------------------------------------------
    def map(self, piece: int) -> None:
        assert piece not in self.mapped
        self.mapped.add(piece)
        self.log.append(("map", piece))

    def unmap(self, piece: int) -> None:
        assert piece not in self.registered, "unmapped while a drive may write to it"
        self.mapped.remove(piece)
        self.log.append(("unmap", piece))

    def _piece_of(self, buf: Any) -> int:
        return (_address(buf) - self.base) // PIECE

    # -- kvikio.buffer ---------------------------------------------------------------------------
    def memory_register(self, buf: Any) -> None:
        piece = self._piece_of(buf)
        assert piece in self.mapped, "registered before it was mapped"
        assert piece not in self.registered
        self.tries += 1
        if len(self.registered) >= self.most:
            raise RuntimeError("KvikIO failure at: /kvikio/buffer.cpp:25: cuFile error: BAR1 full")
        self.registered.add(piece)
        self.log.append(("register", piece))

    def memory_deregister(self, buf: Any) -> None:
        piece = self._piece_of(buf)
        if piece in self.keeps:
            raise RuntimeError("KvikIO failure at: /kvikio/buffer.cpp:36: cuFile error: busy")
        self.registered.remove(piece)
        self.log.append(("deregister", piece))

    # -- kvikio.CuFile ---------------------------------------------------------------------------
    def moved(self, verb: str, buf: Any) -> None:
        self.log.append((verb, self._piece_of(buf)))

    def pieces(self, what: str) -> list[int]:
        return [piece for happened, piece in self.log if happened == what]


def _address(buf: Any) -> int:
    return int(buf.ctypes.data if isinstance(buf, np.ndarray) else buf.data_ptr())


class _Future:
    def __init__(self, moved: int) -> None:
        self._moved = moved

    def get(self) -> int:
        return self._moved


def _file_class(cufile: Cufile) -> type:
    class CuFile:
        """Opens a second time, as the real one does; moves the bytes in the call."""

        def __init__(self, path: str, flags: str) -> None:
            assert flags == "r+"
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

        def fileno(self) -> int:
            return self._fd

        def is_direct_io_supported(self) -> bool:
            return True

        def pwrite(self, buf: Any, size: int, offset: int, task_size: int) -> _Future:
            cufile.moved("write", buf)
            return self._moved(os.pwrite, buf, size, offset)

        def pread(self, buf: Any, size: int, offset: int, task_size: int) -> _Future:
            cufile.moved("read", buf)

            def read(fd: int, view: Any, offset: int) -> int:
                return os.preadv(fd, [view], offset)

            return self._moved(read, buf, size, offset)

        def _moved(
            self, call: Callable[[int, Any, int], int], buf: Any, size: int, offset: int
        ) -> _Future:
            array = buf if isinstance(buf, np.ndarray) else buf.numpy()
            assert array.nbytes == size
            return _Future(call(self._fd, memoryview(array), offset))

        def close(self) -> None:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    return CuFile


def install(patch: pytest.MonkeyPatch) -> Cufile:
    """From now on ``import kvikio`` finds the stand-in, and there seems to be a driver."""
    cufile = Cufile()
    modules = {name: ModuleType(name) for name in ("kvikio", "kvikio.defaults")}
    modules["kvikio.buffer"] = ModuleType("kvikio.buffer")
    modules["kvikio.cufile_driver"] = ModuleType("kvikio.cufile_driver")

    def change(*given: Any) -> None:
        cufile.settings.update(given[0] if len(given) == 1 else {given[0]: given[1]})

    contents: dict[str, dict[str, Any]] = {
        "kvikio": {"CuFile": _file_class(cufile), "defaults": modules["kvikio.defaults"]},
        "kvikio.defaults": {
            "get": lambda name: cufile.settings[name],
            "set": change,
            "is_compat_mode_preferred": lambda: cufile.compat,
        },
        "kvikio.buffer": {
            "memory_register": cufile.memory_register,
            "memory_deregister": cufile.memory_deregister,
        },
        "kvikio.cufile_driver": {"get": lambda name: cufile.properties[name]},
    }
    for name, module in modules.items():
        vars(module).update(contents[name])
        patch.setitem(sys.modules, name, module)
    patch.setattr(kvikio_engine, "_LIBRARY", "libc.so.6")
    patch.setattr(kvikio_engine, "_used", kvikio_engine._used)  # back at the end: no thread is lost
    return cufile
