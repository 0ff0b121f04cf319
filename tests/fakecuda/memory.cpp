// Device memory, page-locked host memory, virtual memory, copies, memsets.
#include "fake.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

static Ranges allocated, page_locked, reserved, mapped; // page_locked: registered or allocated
static std::set<uintptr_t> host_allocated;
static size_t most_registered = SIZE_MAX; // bytes of one registration that succeeds

struct Handle { // physical memory of cuMemCreate
  size_t bytes;
  int device, uses;
  bool released;
};
static std::map<uintptr_t, Handle *> behind; // what is mapped where

static Ranges::iterator containing(Ranges &ranges, uintptr_t address) {
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin())
    return ranges.end();
  auto range = std::prev(after);
  return address < range->first + range->second.bytes ? range : ranges.end();
}

// Whether ranges that follow each other without a gap hold all bytes.
static bool covers(Ranges &ranges, uintptr_t address, size_t bytes) {
  const uintptr_t end = address + bytes;
  while (address < end) {
    auto range = containing(ranges, address);
    if (range == ranges.end())
      return false;
    address = range->first + range->second.bytes;
  }
  return true;
}

Place place_of(const void *pointer, size_t bytes, const char *who) {
  std::lock_guard<std::recursive_mutex> held(lock);
  const uintptr_t address = uintptr_t(pointer);
  for (Ranges *ranges : {&allocated, &mapped}) {
    auto range = containing(*ranges, address);
    if (range == ranges->end())
      continue;
    if (covers(*ranges, address, bytes))
      return {Place::device_memory, range->second.device};
    fprintf(stderr, "fake CUDA: %s: %zu bytes at %p pass the end of device memory\n", who, bytes, pointer);
    abort();
  }
  if (containing(reserved, address) != reserved.end()) {
    fprintf(stderr, "fake CUDA: %s: nothing is mapped at %p (%zu bytes)\n", who, pointer, bytes);
    abort();
  }
  return {covers(page_locked, address, bytes) ? Place::page_locked : Place::pageable, -1};
}

// FAKECUDA_FREE_COPIES: large copies cost nothing; small ones hold values that the host reads.
// FAKECUDA_ZEROS: nothing is ever written to device memory, so the host reads zeros everywhere, and
// two trainings agree. Page-locked memory is zero from the start; large copies into it are not made,
// so that it takes no memory.
static bool moves_bytes(size_t bytes, const Place &target) {
  static const bool free_of_charge = getenv("FAKECUDA_FREE_COPIES"), zeros = getenv("FAKECUDA_ZEROS");
  const bool large = bytes > 64 << 10;
  if (zeros)
    return target.kind == Place::pageable || (target.kind == Place::page_locked && !large);
  return !(free_of_charge && large);
}

static void *map_anywhere(size_t bytes, int access) {
  return mmap(nullptr, bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

static cudaError_t copy(void *to, const void *from, size_t bytes, cudaStream_t stream,
                        std::atomic<long> &count = counts.copies) {
  if (cudaError_t error = may_queue(stream))
    return error;
  if (!bytes)
    return cudaSuccess;
  const Place target = place_of(to, bytes, "a copy's target"), source = place_of(from, bytes, "a copy's source");
  count++;
  counts.copied_bytes += long(bytes);
  if (target.kind == Place::pageable || source.kind == Place::pageable)
    counts.pageable_copies++;
  queue(stream, [=] {
    if (moves_bytes(bytes, target))
      memmove(to, from, bytes);
  });
  return cudaSuccess;
}

static cudaError_t set(void *to, int value, size_t element, size_t number, cudaStream_t stream) {
  if (cudaError_t error = may_queue(stream))
    return error;
  const size_t bytes = element * number;
  if (!bytes)
    return cudaSuccess;
  const Place target = place_of(to, bytes, "a memset");
  counts.memsets++;
  queue(stream, [=] {
    if (moves_bytes(bytes, target))
      for (size_t i = 0; i < bytes; i += element)
        memcpy(static_cast<char *>(to) + i, &value, element);
  });
  return cudaSuccess;
}

extern "C" {
// -- for tests ------------------------------------------------------------------------------------
void fakecuda_most_registered(size_t bytes) { most_registered = bytes; }

// -- runtime --------------------------------------------------------------------------------------
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  std::lock_guard<std::recursive_mutex> held(lock);
  *total = devices[current].total_bytes;
  *free_bytes = *total - devices[current].used_bytes;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void **memory, size_t bytes) {
  if (cudaError_t error = may_be_unsafe())
    return error;
  std::lock_guard<std::recursive_mutex> held(lock);
  counts.mallocs++;
  use(current);
  bytes = (bytes + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
  if (devices[current].used_bytes + bytes > devices[current].total_bytes)
    return fail(cudaErrorMemoryAllocation);
  *memory = map_anywhere(bytes, PROT_READ | PROT_WRITE);
  if (*memory == MAP_FAILED)
    return fail(cudaErrorMemoryAllocation);
  allocated[uintptr_t(*memory)] = {bytes, current};
  devices[current].used_bytes += bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void *memory) {
  use(current);
  if (!memory)
    return cudaSuccess;
  if (cudaError_t error = may_be_unsafe())
    return error;
  std::lock_guard<std::recursive_mutex> held(lock);
  counts.frees++;
  counts.synchronizations++; // it waits for the device
  auto range = allocated.find(uintptr_t(memory));
  if (range == allocated.end())
    return fail(cudaErrorInvalidValue);
  munmap(memory, range->second.bytes);
  devices[range->second.device].used_bytes -= range->second.bytes;
  allocated.erase(range);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned) {
  if (cudaError_t error = may_be_unsafe())
    return error;
  std::lock_guard<std::recursive_mutex> held(lock);
  counts.host_mallocs++;
  *memory = map_anywhere(bytes, PROT_READ | PROT_WRITE);
  if (*memory == MAP_FAILED)
    return fail(cudaErrorMemoryAllocation);
  page_locked[uintptr_t(*memory)] = {bytes, -1};
  host_allocated.insert(uintptr_t(*memory));
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void **memory, size_t bytes) { return cudaHostAlloc(memory, bytes, 0); }
cudaError_t cudaFreeHost(void *memory) {
  std::lock_guard<std::recursive_mutex> held(lock);
  if (!host_allocated.erase(uintptr_t(memory)))
    return memory ? fail(cudaErrorInvalidValue) : cudaSuccess;
  auto range = page_locked.find(uintptr_t(memory));
  munmap(memory, range->second.bytes);
  page_locked.erase(range);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned) {
  std::lock_guard<std::recursive_mutex> held(lock);
  use(current);
  if (!bytes || !memory)
    return fail(cudaErrorInvalidValue);
  if (bytes > most_registered)
    return fail(cudaErrorMemoryAllocation);
  const uintptr_t first = uintptr_t(memory);
  auto after = page_locked.lower_bound(first);
  if (containing(page_locked, first) != page_locked.end() || (after != page_locked.end() && after->first < first + bytes))
    return fail(cudaErrorHostMemoryAlreadyRegistered);
  page_locked[first] = {bytes, -1};
  counts.host_registrations++;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *memory) {
  std::lock_guard<std::recursive_mutex> held(lock);
  if (host_allocated.count(uintptr_t(memory)) || !page_locked.erase(uintptr_t(memory)))
    return fail(cudaErrorHostMemoryNotRegistered);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void **device_pointer, void *memory, unsigned) {
  *device_pointer = memory;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *found, const void *pointer) {
  memset(found, 0, sizeof *found);
  const Place place = place_of(pointer, 1, "cudaPointerGetAttributes");
  found->device = place.device < 0 ? current : place.device;
  if (place.kind != Place::pageable)
    found->devicePointer = const_cast<void *>(pointer);
  if (place.kind != Place::device_memory)
    found->hostPointer = const_cast<void *>(pointer);
  found->type = place.kind == Place::device_memory ? cudaMemoryTypeDevice
                : place.kind == Place::page_locked ? cudaMemoryTypeHost
                                                   : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return fail(copy(to, from, bytes, stream));
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
  if (cudaError_t error = may_be_unsafe())
    return error;
  counts.synchronizations++;
  return fail(copy(to, from, bytes, nullptr));
}
cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t stream) {
  return fail(copy(to, from, bytes, stream));
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
  if (cudaError_t error = may_queue(stream))
    return error;
  if (!width || !height)
    return cudaSuccess;
  const Place target = place_of(to, (height - 1) * to_pitch + width, "a copy's target");
  const Place source = place_of(from, (height - 1) * from_pitch + width, "a copy's source");
  counts.copies++;
  counts.copied_bytes += long(width * height);
  counts.pageable_copies += target.kind == Place::pageable || source.kind == Place::pageable;
  queue(stream, [=] {
    if (moves_bytes(width * height, target))
      for (size_t row = 0; row < height; row++)
        memmove(static_cast<char *>(to) + row * to_pitch, static_cast<const char *>(from) + row * from_pitch, width);
  });
  return cudaSuccess;
}
cudaError_t cudaMemcpyBatchAsync(void *const *to, const void *const *from, const size_t *bytes, size_t number,
                                 cudaMemcpyAttributes *how, size_t *first, size_t kinds, cudaStream_t stream) {
  bool good = stream && stream != cudaStreamLegacy && number && kinds && kinds <= number && first[0] == 0;
  for (size_t i = 0; good && i < kinds; i++)
    good = how[i].srcAccessOrder >= cudaMemcpySrcAccessOrderStream && how[i].srcAccessOrder <= cudaMemcpySrcAccessOrderAny;
  if (!good)
    return fail(cudaErrorInvalidValue);
  if (cudaError_t error = may_ask(stream)) // no graph can hold it
    return error;
  counts.batches++;
  for (size_t i = 0; i < number; i++)
    if (cudaError_t error = copy(to[i], from[i], bytes[i], stream, counts.batched_copies))
      return fail(error);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
  return fail(set(to, value, 1, bytes, stream));
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) { return fail(set(to, value, 1, bytes, nullptr)); }

// -- driver: page-locking -------------------------------------------------------------------------
CUresult cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags) {
  return has_context ? as_driver(cudaHostRegister(memory, bytes, flags)) : CUDA_ERROR_INVALID_CONTEXT;
}
CUresult cuMemHostUnregister(void *memory) {
  return has_context ? as_driver(cudaHostUnregister(memory)) : CUDA_ERROR_INVALID_CONTEXT;
}
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device_pointer, void *memory, unsigned) {
  *device_pointer = CUdeviceptr(memory);
  if (!has_context)
    return CUDA_ERROR_INVALID_CONTEXT;
  return place_of(memory, 1, "cuMemHostGetDevicePointer").kind == Place::page_locked ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// -- driver: copies -------------------------------------------------------------------------------
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return as_driver(copy((void *)to, (void *)from, bytes, stream));
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
  return as_driver(copy((void *)to, from, bytes, stream));
}
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return as_driver(copy(to, (void *)from, bytes, stream));
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return as_driver(copy((void *)to, (void *)from, bytes, stream));
}
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t number, CUmemcpyAttributes *how,
                               size_t *first, size_t kinds, CUstream stream) {
  if (!has_context)
    return CUDA_ERROR_INVALID_CONTEXT;
  return as_driver(cudaMemcpyBatchAsync((void **)to, (const void **)from, bytes, number, (cudaMemcpyAttributes *)how,
                                        first, kinds, stream));
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t number, CUstream stream) {
  return as_driver(set((void *)to, value, 1, number, stream));
}
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t number, CUstream stream) {
  return as_driver(set((void *)to, int(value), 4, number, stream));
}
CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr to, cuuint32_t value, unsigned) {
  return as_driver(set((void *)to, int(value), 4, 1, stream));
}
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { return as_driver(cudaMemGetInfo(free_bytes, total)); }
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute name, CUdeviceptr pointer) {
  const Place place = place_of((void *)pointer, 1, "cuPointerGetAttribute");
  switch (name) {
  case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr *>(value) = pointer; break;
  case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    *static_cast<unsigned *>(value) = place.kind == Place::device_memory ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    break;
  case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int *>(value) = place.device; break;
  default: *static_cast<int *>(value) = 0;
  }
  return place.kind == Place::pageable ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// -- driver: virtual memory -----------------------------------------------------------------------
CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *what, CUmemAllocationGranularity_flags) {
  if (what->type != CU_MEM_ALLOCATION_TYPE_PINNED || what->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
    return CUDA_ERROR_INVALID_VALUE;
  *bytes = GRANULARITY;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t, CUdeviceptr, unsigned long long flags) {
  std::lock_guard<std::recursive_mutex> held(lock);
  if (!bytes || bytes % GRANULARITY || flags)
    return CUDA_ERROR_INVALID_VALUE;
  char *found = static_cast<char *>(map_anywhere(bytes + GRANULARITY, PROT_NONE));
  if (found == MAP_FAILED)
    return CUDA_ERROR_OUT_OF_MEMORY;
  const uintptr_t aligned = (uintptr_t(found) + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
  if (aligned > uintptr_t(found)) // give back what is before and behind
    munmap(found, aligned - uintptr_t(found));
  if (const size_t rest = uintptr_t(found) + GRANULARITY - aligned)
    munmap((void *)(aligned + bytes), rest);
  reserved[aligned] = {bytes, -1};
  *address = aligned;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  std::lock_guard<std::recursive_mutex> held(lock);
  auto range = reserved.find(address);
  if (range == reserved.end() || range->second.bytes != bytes)
    return CUDA_ERROR_INVALID_VALUE;
  auto first = mapped.lower_bound(address);
  if (first != mapped.end() && first->first < address + bytes)
    return CUDA_ERROR_INVALID_VALUE; // something is still mapped in it
  munmap((void *)address, bytes);
  reserved.erase(range);
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *what,
                     unsigned long long flags) {
  std::lock_guard<std::recursive_mutex> held(lock);
  const int device = what->location.id;
  if (!bytes || bytes % GRANULARITY || flags || what->type != CU_MEM_ALLOCATION_TYPE_PINNED || device < 0 || device >= DEVICES)
    return CUDA_ERROR_INVALID_VALUE;
  if (devices[device].used_bytes + bytes > devices[device].total_bytes)
    return CUDA_ERROR_OUT_OF_MEMORY;
  devices[device].used_bytes += bytes;
  *handle = CUmemGenericAllocationHandle(new Handle{bytes, device, 0, false});
  return CUDA_SUCCESS;
}
static void let_go(Handle *handle) {
  if (handle->uses || !handle->released)
    return;
  devices[handle->device].used_bytes -= handle->bytes;
  delete handle;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle number) {
  std::lock_guard<std::recursive_mutex> held(lock);
  Handle *handle = (Handle *)number;
  handle->released = true; // the memory goes when nothing is mapped to it any more
  let_go(handle);
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle number, unsigned long long) {
  std::lock_guard<std::recursive_mutex> held(lock);
  Handle *handle = (Handle *)number;
  auto next = mapped.lower_bound(address);
  const bool taken = containing(mapped, address) != mapped.end() || (next != mapped.end() && next->first < address + bytes);
  if (offset || bytes != handle->bytes || !covers(reserved, address, bytes) || taken)
    return CUDA_ERROR_INVALID_VALUE;
  counts.maps++;
  mapped[address] = {bytes, handle->device};
  behind[address] = handle;
  handle->uses++;
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *who, size_t number) {
  std::lock_guard<std::recursive_mutex> held(lock);
  if (number != 1 || who->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE || !covers(mapped, address, bytes))
    return CUDA_ERROR_INVALID_VALUE;
  if (who->location.id != containing(mapped, address)->second.device)
    return CUDA_ERROR_INVALID_DEVICE; // peers are not connected
  return mprotect((void *)address, bytes, PROT_READ | PROT_WRITE) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  std::lock_guard<std::recursive_mutex> held(lock);
  for (auto piece = mapped.find(address); bytes; piece = mapped.find(address)) {
    if (piece == mapped.end() || piece->second.bytes > bytes)
      return CUDA_ERROR_INVALID_VALUE;
    const size_t size = piece->second.bytes;
    Handle *handle = behind[address];
    mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    mapped.erase(piece);
    behind.erase(address);
    counts.unmaps++;
    handle->uses--;
    let_go(handle);
    address += size;
    bytes -= size;
  }
  return CUDA_SUCCESS;
}
}
