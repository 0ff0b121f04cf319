// PyTorch's CPU allocator while a pager is open on the CPU: it counts, caps and reuses dense blocks.
//
//   a block of    at least LARGE bytes                  less
//   lies in       whole pages of our own ("runs")       glibc's heap, a header before it
//   its size      in a table, by address                in the header
//
// Note: runs
// Freed runs stay mapped and are merged with free neighbours, so the next step finds its memory
// where the last one left it, and faults in no page. What stays mapped is bounded: live and free
// bytes together are at most `keep` of an account; beyond that free runs go back to the system.
// Where no free run is long enough, the pages of several are moved to addresses that follow each
// other (mremap), which costs a tenth of what faulting in as many does. What is counted, and for
// whom, is in dense_accounts.h.
//
// Every block is freed by release(), whenever that is: blocks outlive pagers.

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/core/CPUAllocator.h>

#include "dense_accounts.h"

namespace {

using dense::Account;
using dense::kNoLimit;

constexpr size_t kAlignment = 64; // as PyTorch's own allocator has it
constexpr size_t kLarge = 64 << 10;
const size_t kPage = static_cast<size_t>(sysconf(_SC_PAGESIZE));
constexpr size_t kMostSeams = 512; // with more, pieces are too small to be worth a call each
constexpr int kOwn = MAP_PRIVATE | MAP_ANONYMOUS;

// In the kAlignment bytes before a small block. Small blocks never begin at a page, runs always do.
struct Header {
  uint64_t nbytes;
  uint64_t birth; // 0: not counted
};

struct Live {
  size_t length; // whole pages
  size_t nbytes; // as asked for
  uint64_t birth;
  double made; // dense::now
};

using Ask = int (*)(int account, int64_t missing, int64_t nbytes);
using Tell = void (*)(int account, uint64_t birth, int64_t nbytes);

// Never destroyed: tensors are freed until the very end of the process.
struct State {
  std::mutex mutex;
  dense::Accounts accounts;
  std::atomic<int> open{0}; // of them
  int64_t free_bytes = 0; // of runs that wait to be used again
  std::unordered_map<uintptr_t, Live> live;
  std::map<uintptr_t, size_t> free; // address → length
  std::set<std::pair<size_t, uintptr_t>> by_length; // the same
  std::set<uintptr_t> seams; // where a mapping may begin: mremap takes no more than one at a time
  int64_t mapped = 0, unmapped = 0; // bytes so far
  Ask ask = nullptr;
  Tell tell = nullptr;
};

State& state() {
  static State* only = new State;
  return *only;
}

// -- runs; all under the mutex ---------------------------------------------------------------------

void add_free(State& s, uintptr_t address, size_t length) {
  s.free_bytes += static_cast<int64_t>(length);
  auto next = s.free.lower_bound(address);
  if (next != s.free.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == address) {
      address = before->first;
      length += before->second;
      s.by_length.erase({before->second, before->first});
      s.free.erase(before);
    }
  }
  if (next != s.free.end() && address + length == next->first) {
    length += next->second;
    s.by_length.erase({next->second, next->first});
    s.free.erase(next);
  }
  s.free.emplace(address, length);
  s.by_length.emplace(length, address);
}

void remove_free(State& s, uintptr_t address, size_t length) {
  s.free.erase(address);
  s.by_length.erase({length, address});
  s.free_bytes -= static_cast<int64_t>(length);
}

void add_seams(State& s, uintptr_t address, size_t length) {
  s.seams.insert(address);
  s.seams.insert(address + length);
}

void cut_seams(State& s, uintptr_t address, size_t length) {
  s.seams.erase(s.seams.lower_bound(address), s.seams.upper_bound(address + length));
}

int unmap(State& s, uintptr_t address, size_t length) {
  if (munmap(reinterpret_cast<void*>(address), length) != 0) {
    return -1;
  }
  cut_seams(s, address, length);
  s.unmapped += static_cast<int64_t>(length);
  return 0;
}

// Give free runs back until at most `most` bytes are left, the longest first and no more of it than
// that takes.
void trim(State& s, int64_t most) {
  while (s.free_bytes > most && !s.by_length.empty()) {
    auto [length, address] = *s.by_length.rbegin();
    size_t excess = static_cast<size_t>(s.free_bytes - most);
    size_t cut = std::min(length, (excess + kPage - 1) / kPage * kPage);
    if (unmap(s, address + length - cut, cut) != 0) {
      return; // too many mappings to cut one in two: it stays
    }
    remove_free(s, address, length);
    if (cut < length) {
      add_free(s, address, length - cut);
    }
  }
}

void* map_pages(State& s, size_t length) {
  void* found = mmap(nullptr, length, PROT_READ | PROT_WRITE, kOwn, -1, 0);
  if (found == MAP_FAILED) {
    trim(s, 0);
    found = mmap(nullptr, length, PROT_READ | PROT_WRITE, kOwn, -1, 0);
    if (found == MAP_FAILED) {
      return nullptr;
    }
  }
  s.mapped += static_cast<int64_t>(length);
  add_seams(s, reinterpret_cast<uintptr_t>(found), length);
  return found;
}

// Move the pages of a range to `to`, which is mapped and was never used; how many bytes were moved:
// all, unless the system has no room for one more mapping. Nothing is mapped where they were.
// `hole`: nor is everything where they should have gone.
size_t move_pages(State& s, uintptr_t from, size_t length, uintptr_t to, bool& hole) {
  size_t moved = 0;
  while (moved < length) {
    uintptr_t start = from + moved;
    auto seam = s.seams.upper_bound(start);
    size_t part = seam == s.seams.end() ? length - moved : std::min(length - moved, *seam - start);
    void* target = reinterpret_cast<void*>(to + moved);
    if (mremap(reinterpret_cast<void*>(start), part, part, MREMAP_MAYMOVE | MREMAP_FIXED, target) ==
        MAP_FAILED) {
      int flags = kOwn | MAP_FIXED_NOREPLACE; // what was there may be gone, or not
      hole = mmap(target, part, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED &&
          errno != EEXIST;
      break;
    }
    cut_seams(s, start, part);
    add_seams(s, to + moved, part);
    moved += part;
  }
  return moved;
}

// Pages of free runs, the longest first, and new ones for what these lack. What is free afterwards
// may be more than it should be.
void* assemble(State& s, size_t length) {
  void* found = map_pages(s, length);
  uintptr_t to = reinterpret_cast<uintptr_t>(found);
  size_t moved = 0, last = 0;
  bool hole = false;
  for (size_t part = 0; found != nullptr && moved < length && last == part; moved += last) {
    if (s.by_length.empty() || s.seams.size() >= kMostSeams) {
      break;
    }
    auto [run, start] = *s.by_length.rbegin();
    part = std::min(run, length - moved);
    uintptr_t from = start + run - part;
    remove_free(s, start, run);
    last = move_pages(s, from, part, to + moved, hole);
    if (from > start) {
      add_free(s, start, from - start);
    }
    if (last < part) {
      add_free(s, from + last, part - last);
    }
  }
  s.mapped -= static_cast<int64_t>(moved);
  if (hole) {
    unmap(s, to, length);
    return nullptr;
  }
  return found;
}

// nbytes, counted already, in pages of their own; nullptr if the system has none.
void* take_run(State& s, size_t nbytes, uint64_t birth) {
  size_t length = (nbytes + kPage - 1) / kPage * kPage;
  uintptr_t address = 0;
  auto fit = s.by_length.lower_bound({length, 0});
  if (fit != s.by_length.end()) {
    auto [whole, start] = *fit;
    remove_free(s, start, whole);
    address = start;
    if (whole > length) {
      add_free(s, start + length, whole - length);
    }
  } else {
    address = reinterpret_cast<uintptr_t>(assemble(s, length));
    trim(s, s.accounts.spare());
  }
  if (address != 0) {
    s.live.emplace(address, Live{length, nbytes, birth, dense::now()});
  }
  return reinterpret_cast<void*>(address);
}

// -- blocks ----------------------------------------------------------------------------------------

[[noreturn]] void no_memory(size_t nbytes) {
  TORCH_CHECK(
      false,
      "the allocator of dense tensors: not enough memory: you tried to allocate ",
      nbytes,
      " bytes, and the system has none (Cannot allocate memory).");
}

Header header_at(const void* given) {
  Header header;
  std::memcpy(&header, given, sizeof header);
  return header;
}

void* take_small(size_t nbytes, uint64_t birth) {
  void* given = nullptr;
  if (posix_memalign(&given, kAlignment, nbytes + kAlignment) != 0) {
    return nullptr;
  }
  if ((reinterpret_cast<uintptr_t>(given) + kAlignment) % kPage == 0) {
    ::free(given); // it would look like a run
    if (posix_memalign(&given, kPage, nbytes + kAlignment) != 0) {
      return nullptr;
    }
  }
  char* data = static_cast<char*>(given) + kAlignment;
  Header header{nbytes, birth};
  std::memcpy(given, &header, sizeof header);
  return data;
}

// Room for nbytes in every account, which are charged; the birth. Raises where there is none.
uint64_t charge(State& s, size_t nbytes) {
  for (;;) {
    int account;
    int64_t missing, limit, current;
    uint64_t birth = 0;
    Ask ask = nullptr;
    Tell tell = nullptr;
    {
      std::lock_guard<std::mutex> guard(s.mutex);
      bool guest = s.accounts.has_guest();
      if (guest) {
        account = s.accounts.over_guest_limit(nbytes);
        TORCH_CHECK_WITH(
            OutOfMemoryError,
            account < 0,
            "dense tensors of a thread beside the training: ",
            nbytes,
            " bytes more do not fit beside ",
            account < 0 ? 0 : s.accounts.items[account].current,
            " bytes in the ",
            account < 0 ? 0 : s.accounts.items[account].guest_limit,
            " bytes that the training has for dense tensors. Pass a larger dense_reserve= to "
            "Pager.");
      }
      account = guest ? -1 : s.accounts.over_limit(nbytes);
      if (account < 0) {
        birth = s.accounts.count(nbytes, guest);
        account = nbytes >= kLarge ? s.accounts.told() : -1;
        if (account < 0) {
          return birth;
        }
        tell = s.tell;
      } else {
        const auto& a = s.accounts.items[account];
        limit = a.limit;
        current = a.current - a.of_guests;
        missing = current + static_cast<int64_t>(nbytes) - limit;
        if (a.asks && pthread_equal(a.asker, pthread_self())) {
          ask = s.ask;
        }
      }
    }
    if (birth != 0) { // without the mutex: Python may free tensors
      if (tell != nullptr) {
        tell(account, birth, static_cast<int64_t>(nbytes));
      }
      return birth;
    }
    if (ask == nullptr || ask(account, missing, static_cast<int64_t>(nbytes)) == 0) {
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          false,
          "dense tensors: ",
          nbytes,
          " bytes more do not fit beside ",
          current,
          " bytes in a reserve of ",
          limit,
          " bytes, which is what the budget has beside the pages in use. Raise device_budget, or "
          "make the batch smaller.");
    }
  }
}

void* take(size_t nbytes) {
  auto& s = state();
  void* data = nullptr;
  if (s.open.load(std::memory_order_acquire) == 0) {
    data = take_small(nbytes, 0);
  } else {
    uint64_t birth = charge(s, nbytes);
    if (nbytes >= kLarge) {
      std::lock_guard<std::mutex> guard(s.mutex);
      data = take_run(s, nbytes, birth);
    } else {
      data = take_small(nbytes, birth);
    }
    if (data == nullptr) {
      std::lock_guard<std::mutex> guard(s.mutex);
      s.accounts.uncount(nbytes, birth);
    }
  }
  if (data == nullptr) {
    no_memory(nbytes);
  }
  return data;
}

void release(void* data) {
  if (data == nullptr) {
    return;
  }
  c10::profiledCPUMemoryReporter().Delete(data);
  auto& s = state();
  if (reinterpret_cast<uintptr_t>(data) % kPage != 0) {
    void* given = static_cast<char*>(data) - kAlignment;
    Header header = header_at(given);
    if (header.birth != 0) {
      std::lock_guard<std::mutex> guard(s.mutex);
      s.accounts.uncount(header.nbytes, header.birth);
    }
    ::free(given);
    return;
  }
  std::lock_guard<std::mutex> guard(s.mutex);
  auto found = s.live.find(reinterpret_cast<uintptr_t>(data));
  auto block = found->second;
  s.live.erase(found);
  s.accounts.uncount(block.nbytes, block.birth);
  add_free(s, reinterpret_cast<uintptr_t>(data), block.length);
  trim(s, s.accounts.spare());
}

struct DenseAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nbytes == 0 ? nullptr : take(nbytes);
    c10::profiledCPUMemoryReporter().New(data, nbytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }
};

// -- forks: the child has the blocks, and no pager -------------------------------------------------

void before_fork() {
  state().mutex.lock();
}
void in_parent() {
  state().mutex.unlock();
}
void in_child() {
  auto& s = state();
  for (auto& account : s.accounts.items) {
    account.limit = account.guest_limit = kNoLimit;
    account.asks = account.tells = account.logging = false;
  }
  s.ask = nullptr;
  s.tell = nullptr;
  s.mutex.unlock();
}

} // namespace

// -- what Python calls (dense_allocator.py) --------------------------------------------------------
extern "C" {

// 1 if PyTorch's CPU tensors come from here now; 0 if somebody else has replaced the allocator.
int tp_dense_install() {
  static DenseAllocator* allocator = new DenseAllocator;
  if (c10::GetCPUAllocator() == allocator) {
    return 1;
  }
  if (c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator()) {
    return 0;
  }
  static int forks = pthread_atfork(before_fork, in_parent, in_child);
  c10::SetCPUAllocator(allocator, 100);
  return forks == 0 && c10::GetCPUAllocator() == allocator;
}

// A new account, or -1 if there are too many.
int tp_dense_open() {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  int account = s.accounts.open();
  if (account >= 0) {
    s.open.fetch_add(1);
  }
  return account;
}

void tp_dense_close(int account) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  if (s.accounts.items[account].open) {
    s.accounts.items[account] = Account();
    s.open.fetch_sub(1);
    trim(s, s.accounts.spare());
  }
}

// Count from 0 again, and log from now on, or not.
void tp_dense_reset(int account, int logging) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  auto& a = s.accounts.items[account];
  a.spans = {{s.accounts.births + 1, dense::kOpen, 0}};
  a.current = a.peak = a.of_guests = 0;
  a.logging = logging != 0;
  std::vector<dense::Event>().swap(a.log);
}

// Go on counting; the peak and the log begin anew with what is there now.
void tp_dense_restart(int account, int logging) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  auto& a = s.accounts.items[account];
  a.peak = a.current - a.of_guests;
  a.logging = logging != 0;
  std::vector<dense::Event>().swap(a.log);
  if (!a.logging || a.peak == 0) {
    return;
  }
  std::vector<std::pair<uint64_t, int64_t>> large;
  int64_t bytes = a.peak; // of the others, which have no birth here
  for (const auto& [address, block] : s.live) {
    if (dense::counts(a, block.birth) && (block.birth & dense::kGuest) == 0) {
      large.emplace_back(block.birth, static_cast<int64_t>(block.nbytes));
      bytes -= large.back().second;
    }
  }
  std::sort(large.begin(), large.end());
  double moment = dense::now();
  a.log.push_back({moment, bytes, 0});
  for (const auto& [birth, nbytes] : large) {
    bytes += nbytes;
    a.log.push_back({moment, bytes, birth});
  }
}

// What is made from now on does not count, until it is resumed.
void tp_dense_pause(int account) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  auto& spans = s.accounts.items[account].spans;
  if (spans.empty() || spans.back().end != dense::kOpen) {
    return;
  }
  spans.back().end = s.accounts.births + 1;
  if (spans.back().bytes == 0) {
    spans.pop_back();
  }
}

// Count what is made from now on too, and with a new peak.
void tp_dense_resume(int account) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  auto& a = s.accounts.items[account];
  if (a.spans.empty() || a.spans.back().end != dense::kOpen) {
    a.spans.push_back({s.accounts.births + 1, dense::kOpen, 0});
  }
  a.peak = a.current - a.of_guests;
}

int64_t tp_dense_current(int account) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  return s.accounts.items[account].current;
}

int64_t tp_dense_peak(int account) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  return s.accounts.items[account].peak;
}

// limit: -1 for none. keep: see the note on runs.
void tp_dense_limit(int account, int64_t limit, int64_t keep) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  s.accounts.items[account].limit = limit;
  s.accounts.items[account].keep = keep;
  trim(s, s.accounts.spare());
}

// No thread is a guest any more; those to come have this limit, -1 for none.
void tp_dense_guests(int account, int64_t limit) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  s.accounts.items[account].guests.clear();
  s.accounts.items[account].guest_limit = limit;
}

// The calling thread is a guest.
void tp_dense_guest(int account) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  if (!dense::is_guest_of(s.accounts.items[account])) {
    s.accounts.items[account].guests.push_back(pthread_self());
  }
}

// Events of the log since the reset, at most `most`: when, bytes from then on, and the birth of the
// block that was made or freed. How many there are.
int64_t tp_dense_events(
    int account, double* seconds, int64_t* bytes, int64_t* births, int64_t most) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  const auto& log = s.accounts.items[account].log;
  int64_t events = static_cast<int64_t>(log.size());
  for (int64_t i = 0; i < std::min(events, most); ++i) {
    seconds[i] = log[i].seconds;
    bytes[i] = log[i].bytes;
    births[i] = static_cast<int64_t>(log[i].birth);
  }
  return events;
}

// Of the block at `address`, made since the library was loaded; 0 for none that is counted.
int64_t tp_dense_birth(uint64_t address) {
  if (address % kPage != 0) {
    auto given = reinterpret_cast<const char*>(address) - kAlignment; // in the same page
    return address % kAlignment != 0 ? 0 : static_cast<int64_t>(header_at(given).birth);
  }
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  auto found = s.live.find(address);
  return found == s.live.end() ? 0 : static_cast<int64_t>(found->second.birth);
}

// live: bytes of counted blocks; free: of runs kept for use; mapped, unmapped: so far.
void tp_dense_totals(int64_t* live, int64_t* free, int64_t* mapped, int64_t* unmapped) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  *live = s.accounts.live_bytes;
  *free = s.free_bytes;
  *mapped = s.mapped;
  *unmapped = s.unmapped;
}

// Addresses and sizes of the largest live blocks of an account that are at least LARGE; how many.
int tp_dense_largest(int account, uint64_t* addresses, int64_t* sizes, int most) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  std::vector<std::pair<int64_t, uint64_t>> blocks;
  for (const auto& [address, block] : s.live) {
    if (dense::counts(s.accounts.items[account], block.birth)) {
      blocks.emplace_back(-static_cast<int64_t>(block.nbytes), address);
    }
  }
  std::sort(blocks.begin(), blocks.end());
  int found = std::min<int>(most, static_cast<int>(blocks.size()));
  for (int i = 0; i < found; ++i) {
    sizes[i] = -blocks[i].first;
    addresses[i] = blocks[i].second;
  }
  return found;
}

// Counted blocks of at least kLarge that live, `most` of them: when each was made, its bytes, and its
// birth. How many there are.
int64_t tp_dense_living(
    int account, double* seconds, int64_t* bytes, int64_t* births, int64_t most) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  auto& a = s.accounts.items[account];
  int64_t found = 0;
  for (const auto& [address, block] : s.live) {
    if (!dense::counts(a, block.birth) || (block.birth & dense::kGuest) != 0) {
      continue;
    }
    if (found < most) {
      seconds[found] = block.made;
      bytes[found] = static_cast<int64_t>(block.nbytes);
      births[found] = static_cast<int64_t>(block.birth);
    }
    ++found;
  }
  return found;
}

// The blocks that were there at the peak of an account's log, the largest first: births, sizes, and
// addresses of those that still live and are at least LARGE, else 0. How many; `last` is the birth
// of the one that was made last.
int tp_dense_at_peak(
    int account, uint64_t* births, int64_t* sizes, uint64_t* addresses, int most, uint64_t* last) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  auto peak = dense::peak_of(s.accounts.items[account].log);
  *last = peak.last;
  int found = std::min<int>(most, static_cast<int>(peak.blocks.size()));
  for (int i = 0; i < found; ++i) {
    sizes[i] = peak.blocks[i].first;
    births[i] = peak.blocks[i].second;
    addresses[i] = 0;
  }
  for (const auto& [address, block] : s.live) {
    auto place = std::find(births, births + found, block.birth);
    if (place != births + found) {
      addresses[place - births] = address;
    }
  }
  return found;
}

// Who is called, and from which thread alone (the caller's): others may hold what it waits for.
void tp_dense_callbacks(Ask ask, Tell tell) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  s.ask = ask;
  s.tell = tell;
}

void tp_dense_calls(int account, int asks, int tells) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  s.accounts.items[account].asks = asks != 0;
  s.accounts.items[account].tells = tells != 0;
  s.accounts.items[account].asker = pthread_self();
}

} // extern "C"
