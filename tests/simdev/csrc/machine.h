// The simulated machine, without PyTorch: queues of work, events, and a check of what may happen at
// the same time.
//
// Work is queued on streams. A stream runs its work in order; work on different streams has no order
// but what events give it. The *schedule* decides when work runs: see Mode.
//
// The check of races does not depend on the schedule. Every piece of work carries a vector clock, made
// when it is queued: how much of each stream, and of the host, is certain to come before it. Two
// accesses to the same bytes, of which one writes, are a race where neither clock knows the other.
#pragma once
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace simdev {

constexpr int kStreams = 64;    // stream 0 is the default one; new ones are handed out in turn
constexpr int kHost = kStreams;  // the host's place in a clock; all host threads share it
using Clock = std::array<uint64_t, kStreams + 1>;

enum class Mode {
  kThreads,  // a thread per stream, with random delays
  kLazy,     // work runs when somebody waits for it, and no earlier
  kRandom,   // the same, and at every call some of the work that could run does, by a seed
};

struct Range {  // bytes [start, end)
  uintptr_t start, end;
  bool write;
};

// The moment when the first `tick` pieces of work of `stream` are complete.
struct Point {
  int stream = -1;  // -1: always in the past
  uint64_t tick = 0;
  Clock clock{};
};

// What the check knows of a running piece of work.
struct Work {
  int stream;
  uint64_t tick;
  Clock clock;
  const std::string* what;
};

class Machine {
 public:
  static Machine& get();

  // Waits for all work, and forgets streams, accesses and races.
  void schedule(Mode mode, uint64_t seed, int delay_us, double probability);

  int new_stream();
  // `ranges`: what `run` accesses; it may name more with `touch`. `progress`: other work may run
  // inside this call, so the caller holds no lock that such work needs.
  void enqueue(int stream, const std::string& what, std::vector<Range> ranges,
               std::function<void()> run, bool progress = true);
  Point record(int stream, std::function<void()> then = {});
  void wait(int stream, const Point& point);  // queued
  bool reached(const Point& point);        // asking makes progress: who polls sees an end
  bool passed(const Point& point);         // only looks, and the check learns nothing from it
  Point end_of(int stream);  // the moment when all that is queued there now is complete
  // Blocks the caller. `quiet`: the host does not count on it, so the check learns nothing from it.
  void synchronize(const Point& point, bool quiet = false);
  void synchronize_device();
  // Throws what failed in queued work, once.
  void rethrow();

  // An access of the running work, or else of the host.
  void touch(uintptr_t start, uintptr_t end, bool write);
  void host_access(uintptr_t start, uintptr_t end, bool write);
  void forget(uintptr_t start, uintptr_t end);  // these bytes are no more
  std::vector<std::string> take_races();

  std::atomic<bool> checking{true};
  std::atomic<uint64_t> executed{0};

 private:
  struct Task {
    const std::string* what;
    std::vector<Range> ranges;
    std::function<void()> run;
    Point after;  // runs once this is reached
    Clock clock;
  };
  struct Queue {
    std::deque<Task> tasks;
    uint64_t queued = 0, done = 0;
    bool busy = false;
    std::thread worker;
  };
  struct Access {
    int who = -1;  // a stream, kHost, or -1: nobody
    uint64_t tick = 0;
    const std::string* what = nullptr;
  };
  struct Segment {
    uintptr_t end;
    Access write;
    std::vector<Access> reads;  // the last one of each stream
  };
  using Lock = std::unique_lock<std::mutex>;

  uint64_t push(int stream, const std::string& what, std::vector<Range> ranges,
                std::function<void()> run, Point after);
  bool runnable(const Queue& queue) const;
  void run_next(int stream, Lock& lock);
  void run_until(int stream, uint64_t tick, Lock& lock);
  void run_some(Lock& lock);
  void worker(int stream);
  void check(const Range& range, const Work& work);
  void split(uintptr_t at);
  void conflict(const Access& before, const char* did, const Range& range, const Work& work);

  std::mutex mutex_;  // of all below; not held while work runs
  std::condition_variable changed_;
  std::array<Queue, kStreams> queues_;
  std::array<Clock, kStreams> clocks_{};
  Clock host_{};
  int next_stream_ = 1;
  Mode mode_ = Mode::kLazy;
  int delay_us_ = 0;
  double probability_ = 0;
  std::mt19937_64 chance_;
  std::exception_ptr error_;
  std::set<std::string> names_;
  std::map<uintptr_t, Segment> segments_;
  std::vector<std::string> races_;
};

}  // namespace simdev
