// What device.cpp and ops.cpp share.
#pragma once
#include <ATen/ThreadLocalState.h>
#include <ATen/core/Generator.h>

#include <atomic>

#include "machine.h"
#include "memory.h"

namespace simdev {

constexpr auto kType = c10::DeviceType::PrivateUse1;

struct Counts {
  std::atomic<int64_t> queued{0};    // ops
  std::atomic<int64_t> waited{0};    // ops for which the host had to wait
  std::atomic<int64_t> waits{0};     // of the host, for other reasons
  std::atomic<int64_t> pageable{0};  // copies from or to host memory that is not page-locked
  std::atomic<int64_t> copies_to_fail{-1};  // the copy after this many fails
};
extern Counts counts;

int current_stream();
void synchronize(const Point& point);
void use_pinned(uintptr_t start, int stream);
at::Generator cpu_generator(const at::Generator& generator);
// Queued work runs in any thread; it finds no modes, hooks or autograd of that thread.
at::ThreadLocalStateGuard clean_state();

}  // namespace simdev
