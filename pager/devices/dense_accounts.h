// Accounts of the allocator of dense tensors (dense_allocator.cpp): what is counted, capped, logged.
//
// Note: accounts
// An account counts the blocks that were made since it was last reset, in all threads, but for those
// made while it is paused. Others are not its business when they are freed either. `limit` is a cap: an allocation that
// would pass it asks `ask`, which may make room elsewhere, and else raises torch.OutOfMemoryError.
// Blocks made by threads that are `guests` of an account are in `current`, and nowhere in its peak and
// log; what they make has a limit of its own, which others do not meet.
// Without an open account everything goes to glibc and nothing is counted.
//
// Note: births
// Counted blocks are numbered in the order in which they are made. A block's number, its birth, says
// which accounts count it, and tells it apart from later ones at its address. A log has the birth
// of the block with each change; `tell` is told, where a large one is made, which one that is.
//
// All of it is called under the allocator's mutex.

#pragma once

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace dense {

constexpr int kAccounts = 256;
constexpr int64_t kNoLimit = -1;
constexpr uint64_t kGuest = uint64_t{1} << 63; // in a birth: a guest has made it

struct Event {
  double seconds; // CLOCK_MONOTONIC, which Python calls perf_counter
  int64_t bytes; // from then on
  uint64_t birth; // of the block that was made or freed; 0 for small ones from before the log
};

constexpr uint64_t kOpen = ~uint64_t{0}; // the end of a span that goes on

// Births `first` … `end`, half-open, and the bytes of those blocks that live.
struct Span {
  uint64_t first;
  uint64_t end;
  int64_t bytes;
};

struct Account {
  bool open = false;
  bool logging = false;
  std::vector<Span> spans; // of what it counts, ascending
  int64_t current = 0;
  int64_t peak = 0;
  int64_t limit = kNoLimit;
  int64_t keep = 0;
  int64_t of_guests = 0; // bytes in `current`
  int64_t guest_limit = kNoLimit; // of `current`, where a guest wants more
  std::vector<pthread_t> guests;
  pthread_t asker{}; // the thread on which Python may be called
  bool asks = false; // when it is refused
  bool tells = false; // when a large block is made
  std::vector<Event> log;
};

inline double now() {
  timespec moment;
  clock_gettime(CLOCK_MONOTONIC, &moment);
  return static_cast<double>(moment.tv_sec) + 1e-9 * static_cast<double>(moment.tv_nsec);
}


inline bool is_guest_of(const Account& account) {
  return std::any_of(account.guests.begin(), account.guests.end(), [](pthread_t guest) {
    return pthread_equal(guest, pthread_self()) != 0;
  });
}

// The span that counts a block, or nullptr.
inline Span* span_of(Account& account, uint64_t birth) {
  birth &= ~kGuest;
  auto& spans = account.spans;
  auto after = std::upper_bound(spans.begin(), spans.end(), birth,
      [](uint64_t number, const Span& span) { return number < span.first; });
  return after != spans.begin() && birth < (after - 1)->end ? &*(after - 1) : nullptr;
}

inline bool counts(Account& account, uint64_t birth) {
  return account.open && span_of(account, birth) != nullptr;
}

inline void change(Account& account, int64_t nbytes, uint64_t birth) {
  Span* span = span_of(account, birth);
  if (span == nullptr) {
    return;
  }
  span->bytes += nbytes;
  if (span->bytes == 0 && span->end != kOpen) {
    account.spans.erase(account.spans.begin() + (span - account.spans.data()));
  }
  account.current += nbytes;
  if ((birth & kGuest) != 0) {
    account.of_guests += nbytes;
    return;
  }
  int64_t bytes = account.current - account.of_guests;
  account.peak = std::max(account.peak, bytes);
  if (account.logging) {
    account.log.push_back({now(), bytes, birth});
  }
}

// What a log says of its peak: the blocks that were there, the largest first (bytes, birth), and
// the birth of the one that was made last.
struct Peak {
  std::vector<std::pair<int64_t, uint64_t>> blocks;
  uint64_t last = 0;
};

inline Peak peak_of(const std::vector<Event>& log) {
  Peak peak;
  auto highest = std::max_element(
      log.begin(), log.end(), [](const Event& a, const Event& b) { return a.bytes < b.bytes; });
  std::unordered_map<uint64_t, int64_t> there;
  int64_t before = 0;
  for (auto event = log.begin(); event != log.end() && event <= highest; ++event) {
    if (event->bytes > before && event->birth != 0) {
      there.emplace(event->birth, event->bytes - before);
    } else {
      there.erase(event->birth);
    }
    before = event->bytes;
    peak.last = event->birth;
  }
  for (const auto& [birth, nbytes] : there) {
    peak.blocks.emplace_back(nbytes, birth);
  }
  std::sort(peak.blocks.rbegin(), peak.blocks.rend());
  return peak;
}

// All accounts, each with a number.
struct Accounts {
  Account items[kAccounts];
  int used = 0; // from here on none was ever open
  uint64_t births = 0;
  int64_t live_bytes = 0; // of all counted blocks

  template <typename Condition>
  int first(Condition condition) const { // -1: none
    for (int i = 0; i < used; ++i) {
      if (items[i].open && condition(items[i])) {
        return i;
      }
    }
    return -1;
  }

  int open() { // -1: too many are
    for (int i = 0; i < kAccounts; ++i) {
      if (!items[i].open) {
        items[i] = Account();
        items[i].open = true;
        items[i].spans = {{births + 1, kOpen, 0}};
        used = std::max(used, i + 1);
        return i;
      }
    }
    return -1;
  }

  uint64_t count(size_t nbytes, bool guest) {
    uint64_t birth = ++births | (guest ? kGuest : 0);
    live_bytes += static_cast<int64_t>(nbytes);
    for (int i = 0; i < used; ++i) {
      if (items[i].open) {
        change(items[i], static_cast<int64_t>(nbytes), birth);
      }
    }
    return birth;
  }

  void uncount(size_t nbytes, uint64_t birth) {
    live_bytes -= static_cast<int64_t>(nbytes);
    for (int i = 0; i < used; ++i) {
      if (items[i].open) {
        change(items[i], -static_cast<int64_t>(nbytes), birth);
      }
    }
  }

  bool has_guest() const { // this thread
    return first(is_guest_of) >= 0;
  }

  // The first account that nbytes more would bring above its limit, or -1.
  int over_limit(size_t nbytes) const {
    return first([nbytes](const Account& a) {
      return a.limit != kNoLimit &&
          a.current - a.of_guests + static_cast<int64_t>(nbytes) > a.limit;
    });
  }

  // The first account whose guest is this thread and that has no room for nbytes more, or -1.
  int over_guest_limit(size_t nbytes) const {
    return first([nbytes](const Account& a) {
      return a.guest_limit != kNoLimit && is_guest_of(a) &&
          a.current + static_cast<int64_t>(nbytes) > a.guest_limit;
    });
  }

  // The first account that is told of this thread's large blocks, or -1.
  int told() const {
    return first([](const Account& a) {
      return a.tells && pthread_equal(a.asker, pthread_self()) != 0;
    });
  }

  // Bytes of free runs that may stay mapped.
  int64_t spare() const {
    int64_t bytes = 0;
    for (int i = 0; i < used; ++i) {
      if (items[i].open) {
        bytes += std::max<int64_t>(0, items[i].keep - items[i].current);
      }
    }
    return bytes;
  }
};

} // namespace dense
