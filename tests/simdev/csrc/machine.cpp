#include "machine.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "memory.h"

// Of Python, which is always there: work may need its lock, so nobody waits for work while holding it.
extern "C" {
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace simdev {

namespace {
thread_local const Work* t_work = nullptr;  // what the calling thread runs

void merge(Clock& into, const Clock& other) {
  for (size_t i = 0; i < into.size(); i++) into[i] = std::max(into[i], other[i]);
}

class WithoutGil {
 public:
  WithoutGil() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_) PyEval_RestoreThread(state_);
  }

 private:
  void* state_;
};
}  // namespace

Machine& Machine::get() {
  static Machine* machine = new Machine();  // never destroyed: its threads live as long as the process
  return *machine;
}

void Machine::schedule(Mode mode, uint64_t seed, int delay_us, double probability) {
  synchronize_device();
  Lock lock(mutex_);
  mode_ = mode;
  delay_us_ = delay_us;
  probability_ = probability;
  chance_.seed(seed);
  segments_.clear();
  races_.clear();
  next_stream_ = 1;
}

int Machine::new_stream() {
  Lock lock(mutex_);
  int stream = next_stream_;
  next_stream_ = stream + 1 < kStreams ? stream + 1 : 1;
  return stream;
}

// -- queues ----------------------------------------------------------------------------------------
uint64_t Machine::push(int stream, const std::string& what, std::vector<Range> ranges,
                       std::function<void()> run, Point after) {
  auto& queue = queues_[stream];
  auto& clock = clocks_[stream];
  merge(clock, host_);
  merge(clock, after.clock);
  clock[stream] = ++queue.queued;
  auto* name = &*names_.insert(what).first;
  queue.tasks.push_back({name, std::move(ranges), std::move(run), after, clock});
  if (mode_ == Mode::kThreads) {
    if (!queue.worker.joinable()) queue.worker = std::thread([this, stream] { worker(stream); });
    changed_.notify_all();
  }
  return queue.queued;
}

void Machine::enqueue(int stream, const std::string& what, std::vector<Range> ranges,
                      std::function<void()> run, bool progress) {
  Lock lock(mutex_);
  push(stream, what, std::move(ranges), std::move(run), {});
  if (progress) run_some(lock);
}

Point Machine::record(int stream, std::function<void()> then) {
  Lock lock(mutex_);
  Point point;
  point.stream = stream;
  point.tick = push(stream, "record", {}, std::move(then), {});
  point.clock = clocks_[stream];
  return point;
}

void Machine::wait(int stream, const Point& point) {
  if (point.stream < 0) return;
  Lock lock(mutex_);
  push(stream, "wait", {}, {}, point);
}

Point Machine::end_of(int stream) {
  Lock lock(mutex_);
  return {stream, queues_[stream].queued, clocks_[stream]};
}

bool Machine::reached(const Point& point) {
  if (point.stream < 0) return true;
  WithoutGil without;
  Lock lock(mutex_);
  auto& queue = queues_[point.stream];
  if (mode_ != Mode::kThreads && queue.done < point.tick) run_until(point.stream, queue.done + 1, lock);
  if (queue.done < point.tick) return false;
  merge(host_, point.clock);
  return true;
}

bool Machine::passed(const Point& point) {
  Lock lock(mutex_);
  return point.stream < 0 || queues_[point.stream].done >= point.tick;
}

void Machine::synchronize(const Point& point, bool quiet) {
  if (point.stream >= 0) {
    WithoutGil without;
    Lock lock(mutex_);
    run_until(point.stream, point.tick, lock);
    if (!quiet) merge(host_, point.clock);
  }
  rethrow();
}

void Machine::synchronize_device() {
  for (int stream = 0; stream < kStreams; stream++) synchronize(end_of(stream));
}

void Machine::rethrow() {
  std::exception_ptr error;
  {
    Lock lock(mutex_);
    std::swap(error, error_);
  }
  if (error) std::rethrow_exception(error);
}

bool Machine::runnable(const Queue& queue) const {
  if (queue.busy || queue.tasks.empty()) return false;
  auto& after = queue.tasks.front().after;
  return after.stream < 0 || queues_[after.stream].done >= after.tick;
}

void Machine::run_next(int stream, Lock& lock) {
  auto& queue = queues_[stream];
  auto task = std::make_optional(std::move(queue.tasks.front()));
  queue.tasks.pop_front();
  queue.busy = true;
  Work work{stream, queue.done + 1, task->clock, task->what};
  if (checking) {
    for (bool write : {false, true})  // what it reads, it reads before it writes
      for (auto& range : task->ranges)
        if (range.write == write) check(range, work);
  }
  if (task->run) {
    executed++;
    lock.unlock();
    auto* before = t_work;
    t_work = &work;
    std::exception_ptr error;
    try {
      for (auto& range : task->ranges) Memory::get().check_mapped(range.start, range.end, *task->what);
      task->run();
    } catch (...) {
      error = std::current_exception();
    }
    t_work = before;
    task.reset();  // what it holds goes before others can see that it is complete
    lock.lock();
    if (error && !error_) error_ = error;
  }
  queue.busy = false;
  queue.done++;
  changed_.notify_all();
}

// `lock` is held, and released while work runs.
void Machine::run_until(int stream, uint64_t tick, Lock& lock) {
  auto& queue = queues_[stream];
  while (queue.done < tick) {
    if (mode_ == Mode::kThreads || queue.busy) {
      changed_.wait(lock);
    } else if (runnable(queue)) {
      run_next(stream, lock);
    } else {
      auto after = queue.tasks.front().after;
      run_until(after.stream, after.tick, lock);
    }
  }
}

void Machine::run_some(Lock& lock) {
  if (mode_ != Mode::kRandom) return;
  while (std::uniform_real_distribution<>()(chance_) < probability_) {
    int stream = std::uniform_int_distribution<>(0, kStreams - 1)(chance_);
    for (int i = 0; i < kStreams; i++)  // the next one that can run
      if (runnable(queues_[(stream + i) % kStreams])) {
        run_next((stream + i) % kStreams, lock);
        break;
      }
  }
}

void Machine::worker(int stream) {
  auto& queue = queues_[stream];
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return mode_ == Mode::kThreads && runnable(queue); });
    if (std::uniform_real_distribution<>()(chance_) < probability_) {
      auto us = std::uniform_int_distribution<>(0, delay_us_)(chance_);
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(us));
      lock.lock();
    }
    run_next(stream, lock);
  }
}

// -- races -------------------------------------------------------------------------------------------
void Machine::touch(uintptr_t start, uintptr_t end, bool write) {
  if (!checking || start >= end) return;
  if (!t_work) return host_access(start, end, write);
  Lock lock(mutex_);
  check({start, end, write}, *t_work);
}

void Machine::host_access(uintptr_t start, uintptr_t end, bool write) {
  if (!checking || start >= end) return;
  static const std::string what = "code";
  Lock lock(mutex_);
  check({start, end, write}, {kHost, ++host_[kHost], host_, &what});
}

void Machine::split(uintptr_t at) {
  auto it = segments_.upper_bound(at);
  if (it == segments_.begin()) return;
  --it;
  if (it->first == at || it->second.end <= at) return;
  auto right = it->second;
  it->second.end = at;
  segments_.emplace(at, std::move(right));
}

void Machine::conflict(const Access& before, const char* did, const Range& range, const Work& work) {
  if (before.who < 0 || before.who == work.stream || work.clock[before.who] >= before.tick) return;
  auto name = [](int who) {
    return who == kHost ? std::string("the host") : "stream " + std::to_string(who);
  };
  auto place = Memory::get().on_device(range.start) ? "device" : "host";
  auto text = *work.what + " on " + name(work.stream) + (range.write ? " writes " : " reads ") + place +
      " memory that " + *before.what + " on " + name(before.who) + " " + did +
      ", and neither waits for the other";
  if (races_.empty() || races_.back() != text) races_.push_back(text);
}

// The mutex is held.
void Machine::check(const Range& range, const Work& work) {
  if (range.start >= range.end) return;
  split(range.start);
  split(range.end);
  Access here{work.stream, work.tick, work.what};
  auto at = range.start;
  auto it = segments_.lower_bound(at);
  while (at < range.end) {
    if (it == segments_.end() || it->first > at) {  // bytes that nobody has accessed
      auto end = it == segments_.end() ? range.end : std::min(range.end, it->first);
      it = segments_.emplace_hint(it, at, Segment{end, {}, {}});
    }
    auto& segment = it->second;
    conflict(segment.write, "writes", range, work);
    if (range.write) {
      for (auto& read : segment.reads) conflict(read, "reads", range, work);
    } else {
      auto same = std::find_if(segment.reads.begin(), segment.reads.end(),
                               [&](const Access& read) { return read.who == here.who; });
      if (same == segment.reads.end())
        segment.reads.push_back(here);
      else
        *same = here;
    }
    at = segment.end;
    ++it;
  }
  if (range.write) {
    segments_.erase(segments_.lower_bound(range.start), it);
    segments_.emplace_hint(it, range.start, Segment{range.end, here, {}});
  }
}

void Machine::forget(uintptr_t start, uintptr_t end) {
  Lock lock(mutex_);
  split(start);
  split(end);
  segments_.erase(segments_.lower_bound(start), segments_.lower_bound(end));
}

std::vector<std::string> Machine::take_races() {
  synchronize_device();
  Lock lock(mutex_);
  std::vector<std::string> result;
  std::swap(result, races_);
  return result;
}

}  // namespace simdev
