"""The disk tier's engine for host memory: ``preadv`` and ``pwritev`` on the calling thread."""

from collections.abc import Sequence

from . import file as disk_io
from .file import Bytes


class PosixEngine:
    """Implements :class:`~.io_engine.Engine` on ``fd``, which stays its owner's.

    ``direct``: whether ``fd`` has O_DIRECT on (``disk_io.enable_direct``).
    """

    name = "posix"
    takes_device = False

    def __init__(self, fd: int, *, direct: bool) -> None:
        self.direct = direct
        self._fd = fd
        self._unit = disk_io.ALIGNMENT if direct else 1

    def write(self, buffers: Sequence[Bytes], offset: int) -> None:
        disk_io.write_at(self._fd, buffers, offset, unit=self._unit)

    def read(self, buffers: Sequence[Bytes], offset: int) -> None:
        disk_io.read_at(self._fd, buffers, offset, unit=self._unit)

    def close(self) -> None:
        pass
