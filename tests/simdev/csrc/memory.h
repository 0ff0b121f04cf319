// Memory of the simulated machine, without PyTorch.
//
// A device address has no memory behind it: its bytes lie in a second range, at the same distance from
// the start, that only queued work uses. A host that follows a device address gets a segmentation
// fault, and the process says which address it was.
#pragma once
#include <array>
#include <cstddef>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "machine.h"

namespace simdev {

class Memory {
 public:
  static Memory& get();

  bool on_device(uintptr_t p) const { return p >= device_ && p < device_ + kSpace; }
  char* bytes_of(uintptr_t p) const { return reinterpret_cast<char*>(p - device_ + shadow_); }
  uintptr_t address_of(uintptr_t bytes) const {  // 0: these are no bytes of the device
    return bytes >= shadow_ && bytes < shadow_ + kSpace ? bytes - shadow_ + device_ : 0;
  }

  uintptr_t map(size_t nbytes);  // 0: the device is full
  void unmap(uintptr_t start);
  void check_mapped(uintptr_t start, uintptr_t end, const std::string& what);  // throws
  bool fill(uintptr_t start, size_t nbytes, int byte);  // false: it is not mapped any more
  size_t used();
  size_t total = size_t(8) << 30;

  // Host memory that copies use without blocking.
  bool lock_pages(uintptr_t start, size_t nbytes);  // false: some of it is already
  bool unlock_pages(uintptr_t start, bool checked);  // checked: work that still uses it is a race
  bool page_locked(uintptr_t start, size_t nbytes);
  size_t locked();

 private:
  Memory();
  static constexpr size_t kSpace = size_t(1) << 40;  // addresses; none is used twice
  uintptr_t device_, shadow_;
  std::mutex mutex_;
  size_t next_ = 0, used_ = 0, locked_ = 0;
  std::map<uintptr_t, uintptr_t> mapped_, locked_ranges_;  // start to end
};

// Memory for tensors, as CUDA's allocator has it: segments are kept and cut into blocks. A freed block
// is used again at once on the stream that it was made for, since work there comes in order; other
// streams that were named for it hold it back until they have come as far as they were.
class Blocks {
 public:
  static Blocks& get();

  uintptr_t allocate(size_t nbytes, int stream);  // 0: there is no room
  void free(uintptr_t start);
  void use_on(uintptr_t start, int stream);
  void empty();  // gives back segments that nothing uses

  struct Stat {
    int64_t current = 0, peak = 0;
    void add(int64_t n) {
      current += n;
      peak = std::max(peak, current);
    }
  };
  struct Stats {
    Stat allocated, reserved, active, requested, inactive_split, segments, allocations;
    int64_t retries = 0, failures = 0;
  };
  Stats stats();
  void reset_peaks();
  void fail(int64_t after) { fail_after_ = after; }  // the allocation after this many has no room
  size_t limit = SIZE_MAX;                            // of reserved bytes

 private:
  struct Block {
    size_t nbytes, requested = 0;
    int stream;
    uintptr_t segment;
    bool used = false;
    std::set<int> others;
  };
  using Idle = std::set<std::pair<size_t, uintptr_t>>;  // bytes, start
  uintptr_t take(size_t nbytes, int stream, bool small);
  void retire(uintptr_t start);
  void collect();
  static bool small_segment(size_t nbytes) { return nbytes <= (2 << 20); }

  std::recursive_mutex mutex_;
  std::map<uintptr_t, Block> blocks_;       // all, in order of their addresses
  std::map<uintptr_t, size_t> segments_;    // start to bytes
  std::map<std::pair<int, bool>, Idle> idle_;  // by stream, and whether the segment is for small ones
  std::vector<std::pair<uintptr_t, std::vector<Point>>> held_;
  Stats stats_;
  int64_t fail_after_ = -1;
};

}  // namespace simdev
