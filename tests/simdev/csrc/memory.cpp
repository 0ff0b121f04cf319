#include "memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>

namespace simdev {

namespace {
constexpr size_t kPage = 4096;
constexpr size_t kAlign = 512;             // of blocks, as CUDA's allocator has it
constexpr size_t kSmall = 1 << 20;         // larger ones have segments of their own kind
constexpr size_t kSmallSegment = 2 << 20;
constexpr size_t kLarge = 10 << 20;        // larger ones have a segment of their size
constexpr size_t kLargeSegment = 20 << 20;

size_t rounded(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

struct sigaction g_before;

void stray_access(int number, siginfo_t* info, void* context) {
  auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  if (Memory::get().on_device(address)) {
    char text[96];
    int n = snprintf(text, sizeof text, "simdev: the host touched device address %#zx\n", address);
    if (write(STDERR_FILENO, text, n) < 0) _exit(3);
  }
  if (g_before.sa_flags & SA_SIGINFO) return g_before.sa_sigaction(number, info, context);
  if (g_before.sa_handler != SIG_DFL && g_before.sa_handler != SIG_IGN)
    return g_before.sa_handler(number);
  signal(number, SIG_DFL);  // the same instruction faults again, and ends the process
}
}  // namespace

Memory& Memory::get() {
  static Memory* memory = new Memory();
  return *memory;
}

Memory::Memory() {
  auto reserve = [] {
    void* p = mmap(nullptr, kSpace, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    return reinterpret_cast<uintptr_t>(p);
  };
  device_ = reserve();
  shadow_ = reserve();
  next_ = kSmallSegment;
  struct sigaction action {};
  action.sa_sigaction = stray_access;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &g_before);
}

uintptr_t Memory::map(size_t nbytes) {
  nbytes = rounded(nbytes, kPage);
  std::lock_guard<std::mutex> lock(mutex_);
  if (used_ + nbytes > total || next_ + nbytes + kPage > kSpace) return 0;
  auto start = device_ + next_;
  if (mprotect(bytes_of(start), nbytes, PROT_READ | PROT_WRITE)) return 0;
  next_ = rounded(next_ + nbytes + kPage, kSmallSegment);  // at least a page that nobody may use between
  used_ += nbytes;
  mapped_[start] = start + nbytes;
  return start;
}

void Memory::unmap(uintptr_t start) {
  uintptr_t end;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    end = mapped_.at(start);
    mapped_.erase(start);
    used_ -= end - start;
    madvise(bytes_of(start), end - start, MADV_DONTNEED);
    mprotect(bytes_of(start), end - start, PROT_NONE);
  }
  Machine::get().forget(start, end);
}

void Memory::check_mapped(uintptr_t start, uintptr_t end, const std::string& what) {
  if (start >= end || !on_device(start)) return;
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = mapped_.upper_bound(start);
  if (it != mapped_.begin() && std::prev(it)->second >= end) return;
  char text[64];
  snprintf(text, sizeof text, "simdev: illegal device address %#zx in ", start);
  throw std::runtime_error(text + what);
}

bool Memory::fill(uintptr_t start, size_t nbytes, int byte) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = mapped_.upper_bound(start);
  if (it == mapped_.begin() || std::prev(it)->second < start + nbytes) return false;
  std::memset(bytes_of(start), byte, nbytes);
  return true;
}

size_t Memory::used() {
  std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

bool Memory::lock_pages(uintptr_t start, size_t nbytes) {
  Machine::get().forget(start, start + nbytes);  // other memory was there before
  std::lock_guard<std::mutex> lock(mutex_);
  auto next = locked_ranges_.lower_bound(start);
  if (next != locked_ranges_.end() && next->first < start + nbytes) return false;
  if (next != locked_ranges_.begin() && std::prev(next)->second > start) return false;
  locked_ranges_[start] = start + nbytes;
  locked_ += nbytes;
  return true;
}

bool Memory::unlock_pages(uintptr_t start, bool checked) {
  uintptr_t end;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = locked_ranges_.find(start);
    if (it == locked_ranges_.end()) return false;
    end = it->second;
    locked_ranges_.erase(it);
    locked_ -= end - start;
  }
  if (checked) Machine::get().host_access(start, end, true);  // also before work that runs later
  return true;
}

bool Memory::page_locked(uintptr_t start, size_t nbytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = locked_ranges_.upper_bound(start);
  return it != locked_ranges_.begin() && std::prev(it)->second >= start + nbytes;
}

size_t Memory::locked() {
  std::lock_guard<std::mutex> lock(mutex_);
  return locked_;
}

// -- blocks ------------------------------------------------------------------------------------------
Blocks& Blocks::get() {
  static Blocks* blocks = new Blocks();
  return *blocks;
}

uintptr_t Blocks::allocate(size_t nbytes, int stream) {
  {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    collect();
    bool failing = fail_after_ >= 0 && fail_after_-- == 0;
    if (auto start = failing ? 0 : take(nbytes, stream, nbytes <= kSmall)) return start;
    stats_.retries++;
    if (failing) {
      stats_.failures++;
      return 0;
    }
  }
  empty();
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto start = take(nbytes, stream, nbytes <= kSmall);
  if (!start) stats_.failures++;
  return start;
}

uintptr_t Blocks::take(size_t requested, int stream, bool small) {
  auto nbytes = rounded(std::max<size_t>(requested, 1), kAlign);
  auto& idle = idle_[{stream, small}];
  auto found = idle.lower_bound({nbytes, 0});
  if (found == idle.end()) {
    auto size = small ? kSmallSegment : nbytes < kLarge ? kLargeSegment : rounded(nbytes, kSmallSegment);
    if (stats_.reserved.current + size > limit) return 0;
    auto segment = Memory::get().map(size);
    if (!segment) return 0;
    segments_[segment] = size;
    stats_.reserved.add(size);
    stats_.segments.add(1);
    blocks_[segment] = Block{size, 0, stream, segment};
    found = idle.insert({size, segment}).first;
  }
  auto start = found->second;
  auto& block = blocks_.at(start);
  bool whole = block.nbytes == segments_.at(block.segment);
  idle.erase(found);
  auto rest = block.nbytes - nbytes;
  if (small ? rest >= kAlign : rest > kSmall) {
    block.nbytes = nbytes;
    blocks_[start + nbytes] = Block{rest, 0, stream, block.segment};
    idle.insert({rest, start + nbytes});
    stats_.inactive_split.add(whole ? rest : -static_cast<int64_t>(nbytes));
  } else if (!whole) {
    stats_.inactive_split.add(-static_cast<int64_t>(block.nbytes));
  }
  block.used = true;
  block.requested = requested;
  stats_.allocated.add(block.nbytes);
  stats_.active.add(block.nbytes);
  stats_.requested.add(requested);
  stats_.allocations.add(1);
  return start;
}

void Blocks::free(uintptr_t start) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto& block = blocks_.at(start);
  stats_.allocated.add(-static_cast<int64_t>(block.nbytes));
  stats_.requested.add(-static_cast<int64_t>(block.requested));
  stats_.allocations.add(-1);
  std::vector<Point> points;
  for (int other : block.others)
    if (other != block.stream) points.push_back(Machine::get().record(other));
  block.others.clear();
  if (points.empty())
    retire(start);
  else
    held_.emplace_back(start, std::move(points));
}

void Blocks::use_on(uintptr_t start, int stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto it = blocks_.find(start);
  if (it != blocks_.end() && it->second.used) it->second.others.insert(stream);
}

void Blocks::retire(uintptr_t start) {
  auto it = blocks_.find(start);
  auto& block = it->second;
  auto n = block.nbytes;
  // What is read after it was freed is seen: another stream's access is a race with this, and floats
  // read there are NaN.
  auto poison = [start, n] {
    if (Memory::get().fill(start, n, 0xFF)) Machine::get().touch(start, start + n, true);
  };
  Machine::get().enqueue(block.stream, "free", {}, poison, false);
  stats_.active.add(-static_cast<int64_t>(n));
  block.used = false;
  auto& idle = idle_[{block.stream, small_segment(segments_.at(block.segment))}];
  int64_t split = n;
  auto join = [&](auto left, auto right) {
    left->second.nbytes += right->second.nbytes;
    blocks_.erase(right);
    return left;
  };
  auto next = std::next(it);
  if (next != blocks_.end() && next->second.segment == block.segment && !next->second.used) {
    idle.erase({next->second.nbytes, next->first});
    join(it, next);
  }
  if (it != blocks_.begin()) {
    auto before = std::prev(it);
    if (before->second.segment == it->second.segment && !before->second.used) {
      idle.erase({before->second.nbytes, before->first});
      it = join(before, it);
    }
  }
  if (it->second.nbytes == segments_.at(it->second.segment))
    split -= static_cast<int64_t>(it->second.nbytes);
  stats_.inactive_split.add(split);
  idle.insert({it->second.nbytes, it->first});
}

void Blocks::collect() {
  for (size_t i = 0; i < held_.size();) {
    auto [start, points] = held_[i];
    auto passed = [](const Point& point) { return Machine::get().passed(point); };
    if (std::all_of(points.begin(), points.end(), passed)) {
      for (auto& point : points) Machine::get().wait(blocks_.at(start).stream, point);
      held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(i));
      retire(start);
    } else {
      i++;
    }
  }
}

void Blocks::empty() {
  auto whole_segments = [this] {
    std::vector<uintptr_t> whole;
    for (auto& [key, idle] : idle_)
      for (auto& [nbytes, start] : idle)
        if (nbytes == segments_.at(blocks_.at(start).segment)) whole.push_back(start);
    return whole;
  };
  {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (held_.empty() && whole_segments().empty()) return;
  }
  Machine::get().synchronize_device();  // as giving memory back to the driver does
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  collect();
  auto whole = whole_segments();
  for (auto start : whole) {
    auto& block = blocks_.at(start);
    idle_[{block.stream, small_segment(block.nbytes)}].erase({block.nbytes, start});
    stats_.reserved.add(-static_cast<int64_t>(block.nbytes));
    stats_.segments.add(-1);
    segments_.erase(start);
    blocks_.erase(start);
    Memory::get().unmap(start);
  }
}

Blocks::Stats Blocks::stats() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return stats_;
}

void Blocks::reset_peaks() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (auto* stat : {&stats_.allocated, &stats_.reserved, &stats_.active, &stats_.requested,
                     &stats_.inactive_split, &stats_.segments, &stats_.allocations})
    stat->peak = stat->current;
}

}  // namespace simdev
