// Devices, contexts, attributes, errors, and how other libraries find the driver's functions.
#include "fake.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <string>
#include <tuple>

Counts counts;
std::recursive_mutex lock;
thread_local int current = 0;
thread_local bool has_context = false;
Device devices[DEVICES];
static thread_local cudaError_t last_error = cudaSuccess;
static std::set<std::string> not_written;

cudaError_t fail(cudaError_t error) {
  if (error != cudaSuccess)
    last_error = error;
  return error;
}
void forget(cudaError_t before) { last_error = before; }

void use(int device) {
  devices[device].in_use = has_context = true;
}

__attribute__((constructor)) static void read_settings() {
  if (const char *bytes = getenv("FAKECUDA_TOTAL_BYTES"))
    for (Device &device : devices)
      device.total_bytes = strtoull(bytes, nullptr, 0);
}

static CUcontext context_of(int device) { return CUcontext(uintptr_t(0x1000 + device)); }
static int device_of(CUcontext context) { return int(uintptr_t(context)) - 0x1000; }
static bool exists(int device) { return device >= 0 && device < DEVICES; }

// An H100's. Every attribute that is not named is 1.
static int attribute(int name) {
  switch (name) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return 0;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 132;
  case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
  case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 48 << 10;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return 227 << 10;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return 228 << 10;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
  case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1980000;
  case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 2619000;
  case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 5120;
  case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 50 << 20;
  case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return 32;
  case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: return 0;
  case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: return 0;
  case CU_DEVICE_ATTRIBUTE_INTEGRATED: return 0;
  case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS: return 0;
  }
  return 1;
}

extern "C" {
// -- for tests and benchmarks ---------------------------------------------------------------------
// What was counted so far, as JSON. Valid until the thread's next call.
const char *fakecuda_counts() {
  static thread_local std::string text;
  text = "{";
#define ADD(name) text += std::string(text.size() > 1 ? ", " : "") + "\"" #name "\": " + std::to_string(counts.name);
  FAKECUDA_COUNTS(ADD)
#undef ADD
  text += "}";
  return text.c_str();
}

// Names of the functions that were called and are not written, as JSON.
const char *fakecuda_called_but_not_written() {
  static thread_local std::string text;
  std::lock_guard<std::recursive_mutex> held(lock);
  text = "[";
  for (const std::string &name : not_written)
    text += (text.size() > 1 ? ", \"" : "\"") + name + "\"";
  text += "]";
  return text.c_str();
}

int fakecuda_not_written(const char *name) {
  std::lock_guard<std::recursive_mutex> held(lock);
  if (not_written.insert(name).second && getenv("FAKECUDA_VERBOSE"))
    fprintf(stderr, "fake CUDA: %s is not written; it succeeds and does nothing\n", name);
  return 0;
}

// -- runtime --------------------------------------------------------------------------------------
cudaError_t cudaGetDeviceCount(int *count) { *count = DEVICES; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (!exists(device))
    return fail(cudaErrorInvalidDevice);
  use(current = device);
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDA_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
  if (!exists(device))
    return fail(cudaErrorInvalidDevice);
  cudaDeviceProp &p = *properties;
  memset(&p, 0, sizeof p);
  snprintf(p.name, sizeof p.name, "NVIDIA H100 (fake)");
  p.uuid.bytes[0] = char(device + 1);
  p.pciBusID = 4 + device;
  p.totalGlobalMem = devices[device].total_bytes;
  p.major = 9;
  p.multiProcessorCount = 132;
  p.warpSize = 32;
  p.maxThreadsPerBlock = p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
  p.maxThreadsDim[2] = 64;
  p.maxGridSize[0] = 2147483647;
  p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.maxThreadsPerMultiProcessor = 2048;
  p.maxBlocksPerMultiProcessor = 32;
  p.regsPerBlock = p.regsPerMultiprocessor = 65536;
  p.sharedMemPerBlock = 48 << 10;
  p.sharedMemPerBlockOptin = 227 << 10;
  p.sharedMemPerMultiprocessor = 228 << 10;
  p.l2CacheSize = 50 << 20;
  p.memoryBusWidth = 5120;
  p.textureAlignment = 512;
  p.asyncEngineCount = 3;
  p.concurrentKernels = p.unifiedAddressing = p.canMapHostMemory = p.managedMemory = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp *properties, int device) {
  return cudaGetDeviceProperties(properties, device);
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr name, int device) {
  if (!exists(device))
    return fail(cudaErrorInvalidDevice);
  *value = attribute(int(name)); // both interfaces number them alike
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
  snprintf(text, length, "0000:00:%02x.0", 4 + device);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) { *can = 0; return cudaSuccess; }

static const struct { cudaError_t error; const char *name, *text; } ERRORS[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {cudaErrorSymbolNotFound, "cudaErrorSymbolNotFound", "named symbol not found"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not ended in the same stream as it began"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined",
     "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
};
const char *cudaGetErrorName(cudaError_t error) {
  for (const auto &known : ERRORS)
    if (known.error == error)
      return known.name;
  return "cudaErrorUnknown";
}
const char *cudaGetErrorString(cudaError_t error) {
  for (const auto &known : ERRORS)
    if (known.error == error)
      return known.text;
  return "an error that the fake CUDA does not name";
}
cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

// The newest version of a driver function; its name may come without the version's suffix.
static void *driver_function(const std::string &name) {
  for (const char *version : {"_v4", "_v3", "_v2", ""})
    if (void *found = dlsym(RTLD_DEFAULT, (name + version).c_str()))
      return found;
  return nullptr;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
  *function = driver_function(name);
  if (result)
    *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// -- driver ---------------------------------------------------------------------------------------
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = DEVICES; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) {
  *device = number;
  return exists(number) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetName(char *text, int length, CUdevice) {
  snprintf(text, length, "NVIDIA H100 (fake)");
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
  memset(uuid, 0, sizeof *uuid);
  uuid->bytes[0] = char(device + 1);
  return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
  *bytes = devices[device].total_bytes;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute name, CUdevice device) {
  *value = attribute(int(name));
  return exists(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = has_context ? context_of(current) : nullptr;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
  return context ? as_driver(cudaSetDevice(device_of(context))) : CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice *device) { *device = current; return CUDA_SUCCESS; }
static thread_local std::vector<std::pair<int, bool>> pushed;
CUresult cuCtxPushCurrent_v2(CUcontext context) {
  pushed.push_back({current, has_context});
  return cuCtxSetCurrent(context);
}
CUresult cuCtxPopCurrent_v2(CUcontext *context) {
  if (pushed.empty())
    return CUDA_ERROR_INVALID_CONTEXT;
  if (context)
    *context = context_of(current);
  std::tie(current, has_context) = pushed.back();
  pushed.pop_back();
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  if (!exists(device))
    return CUDA_ERROR_INVALID_DEVICE;
  devices[device].in_use = true;
  *context = context_of(device);
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0;
  *active = devices[device].in_use;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = cudaGetErrorString(cudaError_t(error));
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char **text) {
  *text = cudaGetErrorName(cudaError_t(error));
  return CUDA_SUCCESS;
}
CUresult cuGetProcAddress_v2(const char *name, void **function, int, cuuint64_t, CUdriverProcAddressQueryResult *result) {
  *function = driver_function(name);
  if (result)
    *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
}
