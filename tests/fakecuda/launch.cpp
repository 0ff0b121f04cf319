// Kernels and cuBLAS: what CUDA checks of a launch is checked, then nothing runs.
#include "fake.h"

#include <cstdlib>
#include <cstring>

cudaError_t launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  if (cudaError_t error = may_queue(stream))
    return error;
  int device = current;
  cudaStreamGetDevice(stream, &device);
  if (device != current)
    return fail(cudaErrorInvalidResourceHandle); // another device's stream
  const size_t threads = size_t(block.x) * block.y * block.z;
  const bool some = grid.x && grid.y && grid.z && threads;
  if (!some || threads > 1024 || block.z > 64 || grid.y > 65535 || grid.z > 65535 || shared_bytes > 227 << 10)
    return fail(cudaErrorInvalidConfiguration);
  counts.launches++;
  queue(stream, [] {});
  return cudaSuccess;
}

// A matrix product of cuBLAS on the stream of its handle.
struct Blas {
  cudaStream_t stream = nullptr;
};
static int multiply(cudaStream_t stream) { return launch(1, 1, 0, stream) == cudaSuccess ? 0 : 13; }

extern "C" {
// -- what nvcc makes of <<<>>> --------------------------------------------------------------------
void **__cudaRegisterFatBinary(void *) {
  static void *handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
void __cudaRegisterFunction(void **, const char *, char *, const char *, int, uint3 *, uint3 *, dim3 *, dim3 *, int *) {}
void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
static thread_local struct { dim3 grid, block; size_t shared_bytes; void *stream; } configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  configuration = {grid, block, shared_bytes, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared_bytes = configuration.shared_bytes;
  *static_cast<void **>(stream) = configuration.stream;
  return cudaSuccess;
}
char __cudaInitModule(void **) { return 1; }
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void *, dim3 grid, dim3 block, void **, size_t shared_bytes, cudaStream_t stream) {
  return launch(grid, block, shared_bytes, stream);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3 grid, dim3 block, void **, size_t shared_bytes, cudaStream_t stream) {
  return launch(grid, block, shared_bytes, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *, void **) {
  return launch(how->gridDim, how->blockDim, how->dynamicSmemBytes, how->stream);
}

// -- what is asked of kernels ---------------------------------------------------------------------
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *found, const void *) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->ptxVersion = found->binaryVersion = 90;
  found->maxDynamicSharedSizeBytes = 227 << 10;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void **address, const void *) {
  static char memory[1 << 20]; // as large as any variable that PyTorch has on the device
  *address = memory;
  return cudaSuccess;
}
cudaError_t cudaGetSymbolSize(size_t *bytes, const void *) {
  *bytes = 4096;
  return cudaSuccess;
}

// -- driver ---------------------------------------------------------------------------------------
CUresult cuModuleLoadData(CUmodule *module, const void *) {
  *module = (CUmodule)1;
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule, const char *) {
  *function = (CUfunction)1;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute name, CUfunction) {
  *value = name == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : name == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction, int, size_t) {
  *blocks = 2;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction, const CUlaunchConfig *) {
  *clusters = 2;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared_bytes, CUstream stream, void **, void **) {
  return as_driver(launch({gx, gy, gz}, {bx, by, bz}, shared_bytes, stream));
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction, void **, void **) {
  return as_driver(launch({how->gridDimX, how->gridDimY, how->gridDimZ},
                          {how->blockDimX, how->blockDimY, how->blockDimZ}, how->sharedMemBytes, how->hStream));
}

// -- cuBLAS (its types are enough as pointers and numbers) ----------------------------------------
int cublasCreate_v2(Blas **handle) { *handle = new Blas; return 0; }
int cublasDestroy_v2(Blas *handle) { delete handle; return 0; }
int cublasSetStream_v2(Blas *handle, cudaStream_t stream) { handle->stream = stream; return 0; }
int cublasSetWorkspace_v2(void *, void *, size_t) { return 0; }
int cublasSetMathMode(void *, int) { return 0; }
int cublasSetPointerMode_v2(void *, int) { return 0; }
int cublasGetMathMode(void *, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *, int *mode) { *mode = 0; return 0; }
#define ON_ITS_STREAM(name) int name(Blas *handle) { return multiply(handle->stream); }
ON_ITS_STREAM(cublasGemmEx)
ON_ITS_STREAM(cublasGemmStridedBatchedEx)
ON_ITS_STREAM(cublasSgemmEx)
ON_ITS_STREAM(cublasSgemm_v2)
ON_ITS_STREAM(cublasSgemmStridedBatched)
ON_ITS_STREAM(cublasDgemm_v2)
ON_ITS_STREAM(cublasDgemmStridedBatched)
ON_ITS_STREAM(cublasSgemv_v2)
ON_ITS_STREAM(cublasDgemv_v2)
ON_ITS_STREAM(cublasSdot_v2)
ON_ITS_STREAM(cublasDdot_v2)
ON_ITS_STREAM(cublasDotEx)

size_t cublasLtGetVersion() { return 130100; }
int cublasLtMatmulDescCreate(void **made, int, int) { *made = calloc(1, 64); return 0; }
int cublasLtMatmulDescDestroy(void *made) { free(made); return 0; }
int cublasLtMatmulPreferenceCreate(void **made) { *made = calloc(1, 64); return 0; }
int cublasLtMatmulPreferenceDestroy(void *made) { free(made); return 0; }
int cublasLtMatrixLayoutCreate(void **made, int, uint64_t, uint64_t, int64_t) { *made = calloc(1, 64); return 0; }
int cublasLtMatrixLayoutDestroy(void *made) { free(made); return 0; }
int cublasLtMatmulDescSetAttribute(void *, int, const void *, size_t) { return 0; }
int cublasLtMatmulPreferenceSetAttribute(void *, int, const void *, size_t) { return 0; }
int cublasLtMatrixLayoutSetAttribute(void *, int, const void *, size_t) { return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int, void *result, int *number) {
  memset(result, 0, 96); // one algorithm that needs no workspace
  *number = 1;
  return 0;
}
int cublasLtMatmul(void *, void *, const void *, const void *, void *, const void *, void *, const void *, const void *,
                   void *, void *, void *, const void *, void *, size_t, cudaStream_t stream) {
  return multiply(stream);
}

// -- cuDNN ----------------------------------------------------------------------------------------
// The real one cannot work here. Too old for PyTorch's attention, it is not asked.
size_t cudnnGetVersion() { return 8000; }
}
