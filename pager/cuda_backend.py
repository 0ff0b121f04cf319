"""The device arena on a GPU: CUDA virtual memory, and the one owner of streams and events.

The address range of the whole budget is reserved once; physical memory is mapped to its front in
pieces of the driver's granularity (2 MiB), so that moving the border gives memory back to
PyTorch's allocator, or takes it, without copying anything.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .backend import Bytes, Copy
from .dense_meter import Timeline
from .dense_refusal import Peak
from .errors import PagerError

if TYPE_CHECKING:
    from .disk.registration import Registration


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise PagerError(
            "the CUDA backend needs NVIDIA's cuda-bindings; pip install cuda-bindings"
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


class _MappedRange:
    """Reserved device addresses of which the first pieces have memory behind them."""

    def __init__(self, device: torch.device, reserved_bytes: int) -> None:
        self._cuda = _driver()
        self._device_index = device.index or 0
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
            piece = self._pieces.pop()
            where = self.address + len(self._pieces) * self.granularity
            _checked(self._cuda.cuMemUnmap(where, self.granularity), "unmapping device memory")
            _checked(self._cuda.cuMemRelease(piece), "releasing device memory")

    def close(self) -> None:
        if self._base is not None:
            self._unmap_to(0)
            _checked(self._cuda.cuMemAddressFree(self._base, self.reserved_bytes), "freeing range")
            self._base = None


class CudaBackend:
    """Implements :class:`~.backend.Backend`; the stream order is that module's note."""

    host_addressable = False
    _registration: Registration | None = None

    def __init__(self, device: torch.device, reserved_bytes: int, committed_bytes: int) -> None:
        if not torch.cuda.is_available():
            raise PagerError(
                "device='cuda' but PyTorch sees no GPU; check the driver (nvidia-smi) and that "
                "this PyTorch is a CUDA build, or pass device='cpu'"
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        torch.cuda.init()
        torch.empty(1, device=self.device)  # makes the primary context current
        self._range = _MappedRange(self.device, reserved_bytes)
        try:
            self._range.commit(committed_bytes)
        except BaseException:
            self._range.close()
            raise
        self.granularity = self._range.granularity
        self.address = self._range.address
        storage = torch._C._construct_storage_from_data_pointer(
            self.address, self.device, self._range.reserved_bytes
        )
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.arena = empty.set_(storage, 0, (self._range.reserved_bytes,), (1,))
        self._out = torch.cuda.Stream(self.device)
        self._in = torch.cuda.Stream(self.device)
        self._carry_out = torch.cuda.Stream(self.device)
        self._carry_in = torch.cuda.Stream(self.device)
        self._compute = torch.cuda.current_stream(self.device)

    # -- the border ------------------------------------------------------------------------------
    def commit(self, nbytes: int) -> None:
        torch.cuda.synchronize(self.device)  # nothing may still use what is unmapped
        torch.cuda.empty_cache()  # nor may PyTorch's cache hold what is about to be mapped
        if self._registration is not None:
            self._registration.keep(nbytes)
        self._range.commit(nbytes)
        self._register()

    def register_frames(self, registration: Registration) -> None:
        self._registration = registration
        self._register()

    def _register(self) -> None:
        if self._registration is not None:
            mapped = self._range
            self._registration.cover(self.arena, mapped.committed_bytes, mapped.granularity)

    def frames_view(self, offset: int, nbytes: int) -> torch.Tensor:
        return self.arena[offset : offset + nbytes]

    # -- page-locked host memory -----------------------------------------------------------------
    def register_host(self, memory: Bytes) -> None:
        if memory.nbytes:
            code = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
            if int(code) != 0:
                raise PagerError(
                    f"page-locking {memory.nbytes} bytes of host memory failed ({code}); lower "
                    "host_budget, or raise the limit (ulimit -l)"
                )

    def unregister_host(self, memory: Bytes) -> None:
        if memory.nbytes:
            torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)

    # -- copies ----------------------------------------------------------------------------------
    def copy_out(self, copies: Sequence[Copy]) -> None:
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            for offset, host in copies:
                source = self.arena[offset : offset + len(host)]
                torch.from_numpy(host).copy_(source, non_blocking=True)

    def copy_in(self, copies: Sequence[Copy]) -> None:
        self._in.wait_stream(self._out)
        self._in.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._in):
            for offset, host in copies:
                target = self.arena[offset : offset + len(host)]
                target.copy_(torch.from_numpy(host), non_blocking=True)

    def note_compute(self) -> None:
        self._compute = torch.cuda.current_stream(self.device)

    def on_compute(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._compute)

    def mark(self) -> torch.cuda.Event:
        self._compute.wait_stream(self._out)  # copies of faults leave frames that look free
        event = torch.cuda.Event()
        event.record(self._compute)
        return event

    def wait(self, mark: Any) -> None:
        if mark is not None:
            mark.synchronize()

    def carry_out(self, copies: Sequence[Copy], mark: Any) -> None:
        self._carry(self._carry_out, copies, mark, to_device=False)

    def carry_in(self, copies: Sequence[Copy], mark: Any) -> None:
        self._carry(self._carry_in, copies, mark, to_device=True)

    def _carry(
        self, stream: torch.cuda.Stream, copies: Sequence[Copy], mark: Any, *, to_device: bool
    ) -> None:
        if mark is not None:
            stream.wait_event(mark)
        with torch.cuda.stream(stream):
            for offset, host in copies:
                frames, bytes_ = self.arena[offset : offset + len(host)], torch.from_numpy(host)
                if to_device:
                    frames.copy_(bytes_, non_blocking=True)
                else:
                    bytes_.copy_(frames, non_blocking=True)
        stream.synchronize()

    def slide(self, moves: Sequence[tuple[int, int, int]]) -> None:
        for source, target, nbytes in moves:
            step = min(nbytes, source - target)  # pieces that do not overlap themselves
            for start in range(0, nbytes, step):
                length = min(step, nbytes - start)
                piece = self.arena[source + start : source + start + length]
                self.arena[target + start : target + start + length].copy_(piece)

    def reuse_frames(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self._out)

    def use_frames(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self._in)

    def host_ready(self) -> None:
        self._out.synchronize()
        self._in.synchronize()

    # -- dense memory ----------------------------------------------------------------------------
    def limit_dense(self, nbytes: int | None, *, roomy: bool = False) -> None:
        total = torch.cuda.get_device_properties(self.device).total_memory
        share = 1.0 if nbytes is None else min(1.0, nbytes / total)
        torch.cuda.set_per_process_memory_fraction(share, self.device)

    def limit_guests(self, nbytes: int | None) -> None:
        pass  # its allocator does not know threads; the cap is one for all of them

    def add_guest(self) -> None:
        pass

    def cap_dense(self, nbytes: int | None) -> None:
        pass  # limit_dense is a cap already

    def count_anew(self) -> None:
        pass

    def dense_peak(self) -> int:
        return 0

    def refusal(self) -> str:
        return ""

    def meter_start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def meter_sample(self) -> None:
        pass  # the allocator keeps its peak

    def meter_stop(self) -> int:
        # What the allocator holds, not what tensors use: its cap counts that.
        return torch.cuda.max_memory_reserved(self.device)

    def meter_peak(self) -> Peak | None:
        return None

    def meter_level(self) -> int | None:
        return None  # of what it keeps cached, not of what this iteration takes

    def meter_timeline(self) -> Timeline:
        return np.empty(0), np.empty(0, np.int64)

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        if self._registration is not None:
            try:
                self._registration.keep(0)
            except PagerError as error:  # rule 4 of disk/registration.py
                text = f"{error}. The arena's memory is given back when the process ends"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
                return
        self.arena = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._range.close()
