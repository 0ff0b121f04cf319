// A CUDA runtime and driver over host memory, for the CUDA build of PyTorch where there is no GPU.
//
// Real: memory and its limits, virtual memory, page-locking, copies, memsets, devices, streams,
// events, what may not be done while a stream is captured, and the replay of captured copies.
// Not real: kernels, and cuBLAS. They are counted and do nothing, so values mean nothing.
//
// Everything that is queued is done at once. So a wait that is missing is not found here.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>
#undef cudaGetDeviceProperties // also a name of its own in the library

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

constexpr int DEVICES = 2;
constexpr size_t MIB = size_t(1) << 20;
constexpr size_t GRANULARITY = 2 * MIB; // of cudaMalloc and of virtual memory

// -- what is counted ------------------------------------------------------------------------------
#define FAKECUDA_COUNTS(X)                                                                         \
  X(launches) X(copies) X(batches) X(batched_copies) X(copied_bytes) X(pageable_copies)            \
  X(memsets) X(synchronizations)                                                                   \
  X(event_records) X(event_waits) X(event_creations) X(event_queries) X(stream_queries)            \
  X(mallocs) X(frees) X(host_mallocs) X(host_registrations) X(maps) X(unmaps) X(graph_launches)

struct Counts {
#define MEMBER(name) std::atomic<long> name{0};
  FAKECUDA_COUNTS(MEMBER)
#undef MEMBER
};
extern Counts counts;

// -- devices --------------------------------------------------------------------------------------
extern std::recursive_mutex lock; // of everything below
extern thread_local int current;  // device of the calling thread
extern thread_local bool has_context; // which the driver's functions need, and the runtime's make
struct Device {
  size_t total_bytes = size_t(80) << 30, used_bytes = 0;
  bool in_use = false; // has a primary context
};
extern Device devices[DEVICES];

void use(int device);                // by the calling thread
cudaError_t fail(cudaError_t error); // remembers it for cudaGetLastError
void forget(cudaError_t before);     // what `fail` remembered since
template <class Call> CUresult as_driver_of(const Call &call) {
  const cudaError_t before = cudaPeekAtLastError();
  const CUresult result = CUresult(int(call()));
  forget(before);
  return result;
}
// A call of the runtime, made as one of the driver's: their errors wait for nobody.
#define as_driver(...) as_driver_of([&] { return __VA_ARGS__; })

// -- memory ---------------------------------------------------------------------------------------
struct Range {
  size_t bytes;
  int device;
};
using Ranges = std::map<uintptr_t, Range>; // by first address
struct Place {
  enum Kind { pageable, page_locked, device_memory } kind;
  int device;
};
// Where `bytes` at `address` are. Ends the process where only a part of them, or addresses that are
// reserved and not mapped, are meant.
Place place_of(const void *address, size_t bytes, const char *who);

// -- streams, events, capture ---------------------------------------------------------------------
struct Stream;
using Clock = std::map<Stream *, long>; // how much of the work of each captured stream came before

struct Graph {
  std::vector<std::function<void()>> work; // in an order that respects all waits
};

struct Capture {
  Stream *origin;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  unsigned long long id;
  Graph *graph;
  std::set<Stream *> streams;
  bool invalid = false, over = false;
};

struct Stream {
  int device;
  bool blocking; // with the legacy default stream
  int priority;
  std::shared_ptr<Capture> capture;
  Clock clock; // while it is captured
};

struct Event {
  int device;
  bool timed;
  bool recorded = false;
  double milliseconds = 0; // when it was recorded
  std::shared_ptr<Capture> capture; // in which it was recorded last
  Clock clock;
};

// What every call that queues something asks first: whether it may.
cudaError_t may_queue(cudaStream_t stream);
// The host waits for a stream, or asks how far it is: refused where it is captured.
cudaError_t may_ask(cudaStream_t stream);
// A call that waits for the device or changes memory: refused during captures of this mode.
cudaError_t may_be_unsafe();
// Do it now, or add it to the graph if the stream is captured.
void queue(cudaStream_t stream, std::function<void()> work);
// One kernel.
cudaError_t launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream);

// Called by each function that is not written here: it succeeds and does nothing.
extern "C" int fakecuda_not_written(const char *name);
