// Streams, events, and stream capture with what CUDA forbids in it.
//
// Capture follows "CUDA Graphs: prohibited and unhandled operations" in CUDA's programming guide. A
// call that is refused makes the capture invalid, as CUDA does.
#include "fake.h"

#include <ctime>

static std::set<std::shared_ptr<Capture>> captures; // those that are not over
static thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

// The stream, or null for a default stream.
static Stream *named(cudaStream_t stream) {
  return stream == cudaStreamLegacy || stream == cudaStreamPerThread ? nullptr : (Stream *)stream;
}

static cudaError_t refuse(const std::shared_ptr<Capture> &capture, cudaError_t error) {
  capture->invalid = true;
  return fail(error);
}

cudaError_t may_be_unsafe() {
  std::lock_guard<std::recursive_mutex> held(lock);
  if (mode == cudaStreamCaptureModeRelaxed)
    return cudaSuccess;
  for (const auto &capture : captures) {
    const bool mine = capture->thread == std::this_thread::get_id() && capture->mode != cudaStreamCaptureModeRelaxed;
    const bool all = mode == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
    if (mine || all)
      return refuse(capture, cudaErrorStreamCaptureUnsupported);
  }
  return cudaSuccess;
}

// The legacy default stream waits for all blocking streams, so also for those that are captured.
static cudaError_t may_use_default() {
  for (const auto &capture : captures)
    for (const Stream *stream : capture->streams)
      if (stream->blocking && stream->device == current)
        return refuse(capture, cudaErrorStreamCaptureImplicit);
  return cudaSuccess;
}

cudaError_t may_queue(cudaStream_t stream) {
  use(current);
  std::lock_guard<std::recursive_mutex> held(lock);
  const Stream *one = named(stream);
  if (!one)
    return may_use_default();
  return one->capture && one->capture->invalid ? fail(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}

void queue(cudaStream_t stream, std::function<void()> work) {
  std::unique_lock<std::recursive_mutex> held(lock);
  Stream *one = named(stream);
  if (one && one->capture) {
    one->capture->graph->work.push_back(std::move(work));
    one->clock[one]++;
    return;
  }
  held.unlock();
  work();
}

static double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

static void merge(Clock &into, const Clock &other) {
  for (const auto &[stream, number] : other)
    into[stream] = std::max(into[stream], number);
}

static void end(const std::shared_ptr<Capture> &capture) {
  for (Stream *stream : capture->streams) {
    stream->capture = nullptr;
    stream->clock.clear();
  }
  capture->over = true;
  captures.erase(capture);
}

// The capture that an event belongs to, if that goes on.
static std::shared_ptr<Capture> of(const Event &event) {
  return event.capture && !event.capture->over ? event.capture : nullptr;
}

static cudaError_t may_ask(cudaEvent_t event) {
  std::lock_guard<std::recursive_mutex> held(lock);
  if (auto capture = of(*(Event *)event))
    return refuse(capture, cudaErrorCapturedEvent);
  return may_be_unsafe();
}

cudaError_t may_ask(cudaStream_t stream) {
  std::lock_guard<std::recursive_mutex> held(lock);
  const Stream *one = named(stream);
  if (!one)
    return may_use_default();
  return one->capture ? refuse(one->capture, cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

extern "C" {
// -- streams --------------------------------------------------------------------------------------
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  use(current);
  *stream = (cudaStream_t) new Stream{current, !(flags & cudaStreamNonBlocking), priority, nullptr, {}};
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  std::lock_guard<std::recursive_mutex> held(lock);
  Stream *one = named(stream);
  if (!one)
    return fail(cudaErrorInvalidResourceHandle);
  if (one->capture) {
    one->capture->invalid = true;
    one->capture->streams.erase(one);
  }
  delete one;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  counts.synchronizations++;
  return may_ask(stream);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  counts.stream_queries++;
  return may_ask(stream);
}
cudaError_t cudaDeviceSynchronize() {
  std::lock_guard<std::recursive_mutex> held(lock);
  counts.synchronizations++;
  for (const auto &capture : captures)
    for (const Stream *stream : capture->streams)
      if (stream->device == current)
        return refuse(capture, cudaErrorStreamCaptureUnsupported);
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = named(stream) ? named(stream)->priority : 0;
  return cudaSuccess;
}
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device) {
  *device = named(stream) ? named(stream)->device : current;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  if (cudaError_t error = may_queue(stream))
    return error;
  queue(stream, [=] { function(data); });
  return cudaSuccess;
}

// -- events ---------------------------------------------------------------------------------------
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  counts.event_creations++;
  use(current);
  *event = (cudaEvent_t) new Event{current, !(flags & cudaEventDisableTiming)};
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete (Event *)event;
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  if (cudaError_t error = may_queue(stream))
    return error;
  std::lock_guard<std::recursive_mutex> held(lock);
  Event *one = (Event *)event;
  Stream *where = named(stream);
  if ((where ? where->device : current) != one->device)
    return fail(cudaErrorInvalidResourceHandle);
  counts.event_records++;
  one->recorded = true;
  one->milliseconds = now();
  one->capture = where ? where->capture : nullptr;
  one->clock = where && where->capture ? where->clock : Clock{};
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  if (cudaError_t error = may_queue(stream))
    return error;
  std::lock_guard<std::recursive_mutex> held(lock);
  counts.event_waits++;
  Event *one = (Event *)event;
  Stream *who = named(stream);
  const auto capture = of(*one);
  if (capture && !who)
    return refuse(capture, cudaErrorStreamCaptureImplicit);
  if (capture && who->capture && capture != who->capture) {
    who->capture->invalid = true;
    return refuse(capture, cudaErrorStreamCaptureMerge);
  }
  if (!capture && who && who->capture) { // what runs now can be no part of a graph
    const bool outside = one->recorded && !one->capture && !(flags & cudaEventWaitExternal);
    return outside ? refuse(who->capture, cudaErrorStreamCaptureIsolation) : cudaSuccess;
  }
  if (capture) { // the stream joins the capture, or waits inside it
    who->capture = capture;
    capture->streams.insert(who);
    merge(who->clock, one->clock);
  }
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  counts.event_queries++;
  return may_ask(event);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  counts.synchronizations++;
  return may_ask(event);
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t last) {
  const Event *a = (Event *)first, *b = (Event *)last;
  for (const Event *event : {a, b}) {
    if (event->capture)
      return fail(cudaErrorCapturedEvent);
    if (!event->timed || !event->recorded)
      return fail(cudaErrorInvalidResourceHandle);
  }
  *milliseconds = float(b->milliseconds - a->milliseconds);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime_v2(float *milliseconds, cudaEvent_t first, cudaEvent_t last) {
  return cudaEventElapsedTime(milliseconds, first, last);
}

// -- capture --------------------------------------------------------------------------------------
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *other) {
  std::swap(mode, *other);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode how) {
  std::lock_guard<std::recursive_mutex> held(lock);
  static unsigned long long last = 0;
  Stream *one = named(stream);
  if (!one)
    return fail(cudaErrorStreamCaptureUnsupported);
  if (one->capture)
    return fail(cudaErrorIllegalState);
  one->capture = std::make_shared<Capture>(
      Capture{one, how, std::this_thread::get_id(), ++last, new Graph, {one}});
  one->clock.clear();
  captures.insert(one->capture);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  std::lock_guard<std::recursive_mutex> held(lock);
  *graph = nullptr;
  Stream *one = named(stream);
  if (!one || !one->capture)
    return fail(cudaErrorIllegalState);
  const auto capture = one->capture; // lives on until the return
  if (capture->origin != one)
    return refuse(capture, cudaErrorStreamCaptureUnmatched);
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    return refuse(capture, cudaErrorStreamCaptureWrongThread);
  cudaError_t error = capture->invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
  for (Stream *other : capture->streams)
    if (!error && other->clock[other] > one->clock[other])
      error = cudaErrorStreamCaptureUnjoined;
  end(capture);
  if (error)
    delete capture->graph;
  else
    *graph = (cudaGraph_t)capture->graph;
  return fail(error);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
  std::lock_guard<std::recursive_mutex> held(lock);
  const Stream *one = named(stream);
  *status = cudaStreamCaptureStatusNone;
  if (!one)
    return may_use_default();
  if (one->capture)
    *status = one->capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **before, const cudaGraphEdgeData **edges,
                                     size_t *number) {
  if (cudaError_t error = cudaStreamIsCapturing(stream, status))
    return error;
  std::lock_guard<std::recursive_mutex> held(lock);
  if (*status == cudaStreamCaptureStatusActive) {
    if (id)
      *id = named(stream)->capture->id;
    if (graph)
      *graph = (cudaGraph_t)named(stream)->capture->graph;
  }
  if (before)
    *before = nullptr;
  if (edges)
    *edges = nullptr;
  if (number)
    *number = 0;
  return cudaSuccess;
}

// -- graphs ---------------------------------------------------------------------------------------
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *, size_t *number) {
  *number = ((Graph *)graph)->work.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long) {
  *made = (cudaGraphExec_t) new Graph(*(Graph *)graph);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(made, graph, flags);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  if (cudaError_t error = may_queue(stream))
    return error;
  counts.graph_launches++;
  const auto work = ((Graph *)graph)->work;
  queue(stream, [work] {
    for (const auto &one : work)
      one();
  });
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { delete (Graph *)graph; return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { delete (Graph *)graph; return cudaSuccess; }

// -- the driver's names for the same --------------------------------------------------------------
CUresult cuStreamCreate(CUstream *stream, unsigned flags) { return as_driver(cudaStreamCreateWithFlags(stream, flags)); }
CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
  return as_driver(cudaStreamCreateWithPriority(stream, flags, priority));
}
CUresult cuStreamDestroy_v2(CUstream stream) { return as_driver(cudaStreamDestroy(stream)); }
CUresult cuStreamSynchronize(CUstream stream) { return as_driver(cudaStreamSynchronize(stream)); }
CUresult cuStreamQuery(CUstream stream) { return as_driver(cudaStreamQuery(stream)); }
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  return as_driver(cudaStreamWaitEvent(stream, event, flags));
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  return as_driver(cudaStreamIsCapturing(stream, (cudaStreamCaptureStatus *)status));
}
CUresult cuEventCreate(CUevent *event, unsigned flags) { return as_driver(cudaEventCreateWithFlags(event, flags)); }
CUresult cuEventDestroy_v2(CUevent event) { return as_driver(cudaEventDestroy(event)); }
CUresult cuEventRecord(CUevent event, CUstream stream) { return as_driver(cudaEventRecord(event, stream)); }
CUresult cuEventQuery(CUevent event) { return as_driver(cudaEventQuery(event)); }
CUresult cuEventSynchronize(CUevent event) { return as_driver(cudaEventSynchronize(event)); }
CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent first, CUevent last) {
  return as_driver(cudaEventElapsedTime(milliseconds, first, last));
}
CUresult cuCtxSynchronize() { return as_driver(cudaDeviceSynchronize()); }
}
