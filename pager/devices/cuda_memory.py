"""Memory of an NVIDIA GPU, as CUDA alone has it: virtual memory, page-locked ranges, a cap, and
many copies in one call.

The address range of the whole budget is reserved once; physical memory is mapped to its front in
pieces of the driver's granularity (2 MiB), so that moving the border gives memory back to
PyTorch's allocator, or takes it, without copying anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from ..errors import PagerError
from .cpu import private_memory
from .device import Bytes, HostMemory, fill_by_torch


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise PagerError(
            "the arena on a GPU needs NVIDIA's cuda-bindings; pip install cuda-bindings"
        ) from error
    return driver


def _checked(result: Any, what: str) -> Any:
    code, *values = result
    if int(code) != 0:
        raise PagerError(
            f"{what} failed with {code.name}; lower device_budget, or free GPU memory that other "
            "processes hold (nvidia-smi lists them)"
        )
    return values[0] if len(values) == 1 else values


@cache
def has_batches() -> bool:
    """Whether many copies can be one call. Bindings of a newer CUDA than the driver's know a newer
    form of it, which this driver may lack."""
    try:
        cuda = _driver()
    except PagerError:
        return False
    code, version = cuda.cuDriverGetVersion()
    known = hasattr(cuda, "cuMemcpyBatchAsync") and int(code) == 0
    return known and version >= max(12080, cuda.CUDA_VERSION // 1000 * 1000)


class _MappedRange:
    """Reserved device addresses of which the first pieces have memory behind them."""

    def __init__(self, device: torch.device, reserved_bytes: int) -> None:
        self._cuda = _driver()
        self._device_index = device.index
        property_ = self._cuda.CUmemAllocationProp()
        property_.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        property_.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        property_.location.id = self._device_index
        if self._takes_rdma():
            property_.allocFlags.gpuDirectRDMACapable = 1  # GPUDirect Storage: drives write to it
        self._property = property_
        minimum = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(
            _checked(
                self._cuda.cuMemGetAllocationGranularity(property_, minimum), "asking granularity"
            )
        )
        self.reserved_bytes = -(-reserved_bytes // self.granularity) * self.granularity
        self._base = _checked(
            self._cuda.cuMemAddressReserve(self.reserved_bytes, 0, 0, 0), "reserving addresses"
        )
        self.address = int(self._base)
        self._pieces: list[Any] = []

    @property
    def committed_bytes(self) -> int:
        return len(self._pieces) * self.granularity

    def _takes_rdma(self) -> bool:
        ask = self._cuda.CUdevice_attribute
        attribute = ask.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        code, value = self._cuda.cuDeviceGetAttribute(attribute, self._device_index)
        return int(code) == 0 and bool(value)

    def commit(self, nbytes: int) -> None:
        """Map or unmap pieces until exactly ⌈nbytes / granularity⌉ are there. All or nothing."""
        wanted = -(-nbytes // self.granularity)
        before = len(self._pieces)
        try:
            while len(self._pieces) < wanted:
                self._map_one()
        except PagerError:
            self._unmap_to(before)
            raise
        self._unmap_to(wanted)

    def _map_one(self) -> None:
        size = self.granularity
        where = self.address + len(self._pieces) * size
        piece = _checked(
            self._cuda.cuMemCreate(size, self._property, 0), f"allocating {size} device bytes"
        )
        try:
            _checked(self._cuda.cuMemMap(where, size, 0, piece, 0), "mapping device memory")
        except PagerError:
            self._cuda.cuMemRelease(piece)
            raise
        self._pieces.append(piece)
        access = self._cuda.CUmemAccessDesc()
        access.location = self._property.location
        access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _checked(self._cuda.cuMemSetAccess(where, size, [access], 1), "opening device memory")

    def _unmap_to(self, count: int) -> None:
        while len(self._pieces) > count:
            where = self.address + (len(self._pieces) - 1) * self.granularity
            _checked(self._cuda.cuMemUnmap(where, self.granularity), "unmapping device memory")
            piece = self._pieces.pop()
            _checked(self._cuda.cuMemRelease(piece), "releasing device memory")

    def close(self) -> None:
        if self._base is not None:
            self._unmap_to(0)
            _checked(self._cuda.cuMemAddressFree(self._base, self.reserved_bytes), "freeing range")
            self._base = None


class _Batch(NamedTuple):
    """Copies, as ``call`` takes them before a stream."""

    call: Any
    given: tuple[Any, ...]


class CudaMemory:
    """Implements :class:`~.accelerator.Kit`."""

    name = "CUDA"
    can_unmap = caps_dense = knows_dense = takes_drives = True
    counted_bytes = 0  # the arena is none of PyTorch's allocator's memory

    def __init__(self, device: torch.device, reserved_bytes: int, committed_bytes: int) -> None:
        self._device = device
        self._cuda = _driver()
        torch.empty(1, device=device)  # CUDA starts
        self._context = _checked(
            self._cuda.cuDevicePrimaryCtxRetain(device.index), "taking the GPU's context"
        )
        self._cuda.cuDevicePrimaryCtxRelease(device.index)  # PyTorch keeps it to the end
        self.batches_copies = has_batches()
        self._handles: dict[int, int] = {}  # of streams that copies are queued on, by their ids
        self._range = _MappedRange(device, reserved_bytes)
        try:
            self._range.commit(committed_bytes)
        except BaseException:
            self._range.close()
            raise
        self.granularity, self.address = self._range.granularity, self._range.address
        self.reserved_bytes = self._range.reserved_bytes
        storage = torch._C._construct_storage_from_data_pointer(
            self.address, device, self.reserved_bytes
        )
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        self.arena = empty.set_(storage, 0, (self.reserved_bytes,), (1,))

    @staticmethod
    def lacking(device: torch.device) -> list[str]:
        if has_batches():
            return []
        return ["batched copies (driver and cuda-bindings of CUDA 12.8 or newer have them)"]

    # -- the border ------------------------------------------------------------------------------
    def commit(self, nbytes: int) -> None:
        self._range.commit(nbytes)

    def remake(self, nbytes: int, *, empty: bool) -> bool:
        raise NotImplementedError("the border moves")

    def fill(self, offset: int, memory: torch.UntypedStorage, start: int, nbytes: int) -> None:
        index = self._device.index
        if memory.device == self._device and torch._C._cuda_getDevice() == index:
            # What `copy_` comes to, without the tensors, which take five times as long as the call.
            stream = torch._C._cuda_getCurrentRawStream(index)
            source, target = memory.data_ptr() + start, self.address + offset
            if self._cuda.cuMemcpyAsync(target, source, nbytes, stream)[0] == 0:
                return
        fill_by_torch(self.arena, offset, memory, start, nbytes)

    # -- page-locked host memory -----------------------------------------------------------------
    def host_memory(self, nbytes: int) -> list[HostMemory]:
        """One range: PyTorch's own page-locked allocator rounds sizes up to powers of two."""
        if not nbytes:
            return []
        memory = private_memory(nbytes)
        try:
            self.register_host(memory.bytes)
        except BaseException:
            memory.give_back()
            raise

        def give_back(plain: HostMemory = memory) -> None:
            self.unregister_host(plain.bytes)
            plain.give_back()

        return [HostMemory(memory.bytes, give_back)]

    def register_host(self, memory: Bytes) -> None:
        """By the driver: an error of the runtime would be kept for the next one who asks, and
        PyTorch would raise it out of an op that has nothing to do with it."""
        if not memory.nbytes:
            return
        cuda = self._cuda
        flags = cuda.CU_MEMHOSTREGISTER_PORTABLE | cuda.CU_MEMHOSTREGISTER_DEVICEMAP
        (code,) = self._here(cuda.cuMemHostRegister, memory.ctypes.data, memory.nbytes, flags)
        if int(code) != 0:
            raise PagerError(
                f"page-locking {memory.nbytes} bytes of host memory failed with {code.name}; lower "
                "host_budget, or raise the limit (ulimit -l)"
            )

    def unregister_host(self, memory: Bytes) -> None:
        if memory.nbytes:
            self._here(self._cuda.cuMemHostUnregister, memory.ctypes.data)

    def _here(self, call: Any, *given: Any) -> Any:
        """A call of the driver for this device, in any thread and whatever device is current there.
        (PyTorch's own calls see to that themselves.)"""
        if int(self._cuda.cuCtxGetCurrent()[1]) == int(self._context):
            return call(*given)
        _checked(self._cuda.cuCtxPushCurrent(self._context), "entering the GPU's context")
        try:
            return call(*given)
        finally:
            self._cuda.cuCtxPopCurrent()

    def batch(self, copies: Sequence[tuple[int, int, int]]) -> _Batch:
        cuda = self._cuda
        if len(copies) == 1:
            source, target, nbytes = copies[0]
            return _Batch(cuda.cuMemcpyAsync, (target, source, nbytes))
        how = cuda.CUmemcpyAttributes()
        how.srcAccessOrder = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        how.flags = cuda.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
        sources = [cuda.CUdeviceptr(source) for source, _, _ in copies]
        targets = [cuda.CUdeviceptr(target) for _, target, _ in copies]
        sizes = [nbytes for _, _, nbytes in copies]
        given = (targets, sources, sizes, len(copies), [how], [0], 1)
        return _Batch(cuda.cuMemcpyBatchAsync, given)

    def copy_batch(self, batch: _Batch, stream: torch.Stream) -> None:
        handle = self._handles.get(stream.stream_id)
        if handle is None:
            handle = self._handles[stream.stream_id] = torch.cuda.Stream(
                stream_id=stream.stream_id,
                device_index=stream.device_index,
                device_type=stream.device_type,
            ).cuda_stream
        (code,) = self._here(batch.call, *batch.given, handle)
        if code != 0:
            raise PagerError(f"queueing a copy failed with {code.name}")

    # -- dense memory ----------------------------------------------------------------------------
    def limit_dense(self, nbytes: int | None) -> None:
        total = torch.cuda.get_device_properties(self._device).total_memory
        share = 1.0 if nbytes is None else min(1.0, nbytes / total)
        torch.cuda.set_per_process_memory_fraction(share, self._device)

    def close(self) -> None:
        self.arena = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._range.close()
