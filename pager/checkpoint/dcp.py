"""``tensorpager.dcp``: ``torch.distributed.checkpoint`` (DCP) of what is in pages.

::

    import torch.distributed.checkpoint as dcp
    dcp.save(state, storage_writer=tp.dcp.Writer("step-100"))
    dcp.load(state, storage_reader=tp.dcp.Reader("step-100"))
    future = dcp.async_save(state, storage_writer=tp.dcp.Writer("step-200"), process_group=group)

The files are those of DCP's own ``FileSystemWriter``, which reads what is written here, and is read
here: any number of ranks, with pages or without. What is different:

* A tensor is written, and read, a slab at a time: nobody ever has a whole one in memory.
* An asynchronous save copies nothing but pages that are about to be written before they have been
  saved (``frozen.py``). Training goes on meanwhile.
* Nothing in a file is run: metadata and values are read by unpicklers that know names of plain data
  only. Files are private (0600), and synchronised before the metadata names them.
* A save into a folder that has a checkpoint leaves that one whole until the new one is.
"""

from __future__ import annotations

import enum
import io
import os
import pickle
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..disk.file import transfer
from ..errors import PagerError
from ..tensor.tensor_bytes import Read, chunks
from .file import MappedFile, atomic_file, sync_folder
from .frozen import Frozen
from .torch_file import mapped_tensor, write_torch

__all__ = ["Reader", "Writer"]
_ALIGNMENT = 64  # of tensors' bytes in the file
_SUFFIX = ".distcp"


class Writer(FileSystemWriter):
    """A storage writer for ``dcp.save`` and ``dcp.async_save``: ``folder`` is made if it is not
    there. One file for each rank, ``__RANK_….distcp``, and ``.metadata``."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        self._frozen: Frozen | None = None

    # -- planning --------------------------------------------------------------------------------
    def stage(self, state_dict: Any) -> Any:
        """The state as it is now, for a save that goes on while it changes."""
        if self._frozen is not None:
            self._frozen.end()
            self._frozen = None
        self._frozen = Frozen(state_dict)
        return self._frozen.staged

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        Path(self.path).mkdir(parents=True, exist_ok=True)
        return plan

    # -- this rank's file ------------------------------------------------------------------------
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        frozen, self._frozen = self._frozen, None
        try:
            if frozen is not None:
                tensors: Any = (i for i in plan.items if i.type != WriteItemType.BYTE_IO)
                written: list[Any] = [planner.resolve_data(item) for item in tensors]
                frozen.limit(written)
            results = self._write(plan, planner, frozen.chunks if frozen is not None else chunks)
        finally:
            if frozen is not None:
                frozen.end()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write(self, plan: SavePlan, planner: SavePlanner, read: Read) -> list[WriteResult]:
        folder = Path(self.path)
        name = f"{plan.storage_data.prefix}{secrets.token_hex(8)}{_SUFFIX}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        results = []
        descriptor = os.open(folder / name, flags, 0o600)
        try:
            with os.fdopen(descriptor, "w+b", buffering=0) as file:
                end = 0
                for item in plan.items:
                    start = -(-end // _ALIGNMENT) * _ALIGNMENT
                    window = _Window(file, start)
                    data: Any = planner.resolve_data(item)
                    if item.type == WriteItemType.BYTE_IO:
                        window.write(data.getbuffer())
                    else:
                        write_torch(window, data.detach(), folder / name, read)
                    end = start + window.seek(0, os.SEEK_END)
                    info = _StorageInfo(name, start, end - start)
                    results.append(WriteResult(item.index, end - start, info))
                os.fsync(descriptor)
            sync_folder(folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(folder / name)
            raise
        return results

    # -- all ranks' ------------------------------------------------------------------------------
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The checkpoint is there: on one rank, when all have written."""
        metadata.version = "1.0.0"
        metadata.storage_data = {r.index: r.storage_data for some in results for r in some}
        metadata.storage_meta = self.storage_meta()
        folder = Path(self.path)
        with atomic_file(folder / ".metadata") as file:
            pickle.dump(metadata, file)
        known = {info.relative_path for info in metadata.storage_data.values()}
        for path in folder.glob(f"__*{_SUFFIX}"):  # of the checkpoint that was there before
            if path.name not in known:
                with suppress(OSError):
                    path.unlink()


class Reader(FileSystemReader):
    """A storage reader for ``dcp.load``: tensors are mapped, and copied into pages slab by slab.

    Raises ``PagerError`` for files that hold more than tensors and plain values, or are damaged;
    DCP puts all ranks' errors into its ``CheckpointException``.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        if not path.exists():
            raise PagerError(
                f"{path.parent} is no checkpoint of torch.distributed.checkpoint: it has no "
                "'.metadata', which is written last; name another folder, or an older checkpoint"
            )
        metadata = _read_metadata(path)
        metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            if info.transform_descriptors:
                raise PagerError(
                    f"{self.path}: {item.storage_index.fqn} is stored as "
                    f"{list(info.transform_descriptors)}, which is not read into pages; load it "
                    "with torch.distributed.checkpoint.FileSystemReader"
                )
            by_file.setdefault(info.relative_path, []).append((info.offset, info.length, item))
        for name, items in by_file.items():
            path = Path(self.path) / name
            if path.parent != Path(self.path):
                raise PagerError(f"{self.path}: its metadata names a file outside of it, {name!r}")
            mapped = MappedFile.open(path)
            with path.open("rb") as file:
                for start, length, item in sorted(items, key=lambda each: each[0]):
                    if item.type == LoadItemType.BYTE_IO:
                        planner.load_bytes(item, _plain_value(mapped, start, length))
                    else:
                        _load_tensor(_Window(file, start, length), mapped, item, planner)
                    mapped.drop()
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _load_tensor(window: Any, mapped: MappedFile, item: Any, planner: LoadPlanner) -> None:
    what = f"{mapped.what}, at byte {window.start}"
    try:
        with FakeTensorMode():
            hole = torch.load(window, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a broken file makes PyTorch's reader stumble over
        raise PagerError(f"{what}: a tensor cannot be read: {_line(error)}") from None
    if not isinstance(hole, torch.Tensor) or hole.layout is not torch.strided:
        raise PagerError(f"{what}: {type(hole).__name__} where a tensor was expected")
    source = mapped_tensor(hole, mapped, window.start)
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths)):
        source = source.narrow(dim, offset, length)
    target = planner.resolve_tensor(item).detach()
    if target.size() != source.size():
        raise PagerError(
            f"{what}: {item.storage_index.fqn} has size {tuple(source.size())} there, and "
            f"{tuple(target.size())} is wanted"
        )
    target.copy_(source)
    planner.commit_tensor(item, target)


def _plain_value(mapped: MappedFile, start: int, length: int) -> io.BytesIO:
    """Bytes of a value that is no tensor, which may be unpickled: it was, with nothing run."""
    content = mapped.bytes(start, length)
    try:
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise PagerError(
            f"{mapped.what}, at byte {start}: a value that is not plain data, or damaged: "
            f"{_line(error)}"
        ) from None
    return io.BytesIO(content)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


# -- metadata ------------------------------------------------------------------------------------
_PLAIN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}  # fmt: skip


class _Plain(pickle.Unpickler):
    """Knows the names that DCP's metadata has, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # so Python 3.11.2 writes them
            return _member
        known = name in _PLAIN.get(module, ())
        if module == "torch":
            known = name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
        if not known:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no plain data")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Any:
    """Of an enumeration."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError(f"it names {kind!r}.{name}, which is no plain data")
    return kind[name]


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            found = _Plain(file).load()
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise ValueError(f"it holds {type(found).__name__}")
        if found.storage_meta is None:
            raise ValueError("it is of an older version")
    except OSError:
        raise
    except Exception as error:
        raise PagerError(f"{path} is no metadata of a checkpoint: {_line(error)}") from None
    return found


class _Window(io.RawIOBase):
    """A file from byte ``start`` on, or ``length`` bytes of it, as a file of its own."""

    def __init__(self, file: Any, start: int, length: int | None = None) -> None:
        self.file, self.start, self.length = file, start, length
        self._at = 0

    def fileno(self) -> int:
        return int(self.file.fileno())

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return self.length is None

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def _size(self) -> int:
        size = os.fstat(self.fileno()).st_size - self.start
        return max(0, size if self.length is None else min(size, self.length))

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size()}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._size() - self._at)]
        count = os.preadv(self.fileno(), [view], self.start + self._at) if view else 0
        self._at += count
        return count

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        transfer(os.pwritev, self.fileno(), [view], self.start + self._at)
        self._at += len(view)
        return len(view)
