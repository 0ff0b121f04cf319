// PyTorch's PrivateUse1 on the simulated machine: streams and events, allocators, random numbers; and
// what Python asks of the machine.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <memory>

namespace simdev {

Counts counts;

namespace {
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using When = std::chrono::steady_clock::time_point;

thread_local int t_stream = 0;
Stream stream_of(int id) { return Stream(Stream::UNSAFE, Device(kType, 0), id); }
int id_of(const Stream& stream) { return static_cast<int>(stream.id()); }
uintptr_t number(const void* p) { return reinterpret_cast<uintptr_t>(p); }

// -- streams and events --------------------------------------------------------------------------------
struct Event {
  Point point;
  std::shared_ptr<When> when;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Event* event(void* e) { return static_cast<Event*>(e); }
  c10::DeviceType type() const override { return kType; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(kType, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const override { return stream_of(t_stream); }
  Stream getDefaultStream(Device) const override { return stream_of(0); }
  Stream getNewStream(Device, int) const override { return stream_of(Machine::get().new_stream()); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    auto before = stream_of(t_stream);
    t_stream = id_of(stream);
    return before;
  }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete event(e); }
  void record(void** e, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*e) *e = new Event();
    auto when = std::make_shared<When>();
    event(*e)->when = when;
    event(*e)->point =
        Machine::get().record(id_of(stream), [when] { *when = std::chrono::steady_clock::now(); });
  }
  void block(void* e, const Stream& stream) const override {
    if (e) Machine::get().wait(id_of(stream), event(e)->point);
  }
  bool queryEvent(void* e) const override { return !e || Machine::get().reached(event(e)->point); }
  void synchronizeEvent(void* e) const override {
    if (e) synchronize(event(e)->point);
  }
  bool queryStream(const Stream& stream) const override {
    return Machine::get().reached(Machine::get().end_of(id_of(stream)));
  }
  void synchronizeStream(const Stream& stream) const override {
    synchronize(Machine::get().end_of(id_of(stream)));
  }
  void synchronizeDevice(const DeviceIndex) const override {
    counts.waits++;
    Machine::get().synchronize_device();
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& stream) const override {
    Blocks::get().use_on(number(p.get()), id_of(stream));
  }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    TORCH_CHECK(Machine::get().reached(event(a)->point) && Machine::get().reached(event(b)->point),
                "simdev: elapsed time between events of which one is not reached");
    return std::chrono::duration<double, std::milli>(*event(b)->when - *event(a)->when).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -- device memory -------------------------------------------------------------------------------------
void free_block(void* p) {
  if (p) Blocks::get().free(number(p));
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    uintptr_t start = 0;
    if (nbytes) {
      start = Blocks::get().allocate(nbytes, t_stream);
      TORCH_CHECK_WITH(OutOfMemoryError, start, "simdev is out of memory: tried to allocate ", nbytes,
                       " bytes; ", Blocks::get().stats().reserved.current, " are reserved");
    }
    auto* p = reinterpret_cast<void*>(start);
    return {p, p, &free_block, Device(kType, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t n) const override {
    auto a = number(to), b = number(from);
    auto *target = Memory::get().bytes_of(a), *source = Memory::get().bytes_of(b);
    Machine::get().enqueue(t_stream, "copy", {{b, b + n, false}, {a, a + n, true}},
                           [=] { std::memcpy(target, source, n); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { Blocks::get().empty(); }
  void recordStream(const c10::DataPtr& p, Stream stream) override {
    Blocks::get().use_on(number(p.get()), id_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
    auto stats = Blocks::get().stats();
    c10::CachingDeviceAllocator::DeviceStats result;
    auto set = [](auto& to, const Blocks::Stat& from) {
      to[0].current = from.current;
      to[0].peak = from.peak;
    };
    set(result.allocated_bytes, stats.allocated);
    set(result.reserved_bytes, stats.reserved);
    set(result.active_bytes, stats.active);
    set(result.requested_bytes, stats.requested);
    set(result.inactive_split_bytes, stats.inactive_split);
    set(result.segment, stats.segments);
    set(result.allocation, stats.allocations);
    result.num_alloc_retries = stats.retries;
    result.num_ooms = stats.failures;
    return result;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override { Blocks::get().reset_peaks(); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) override {
    auto& memory = Memory::get();
    return {memory.total - memory.used(), memory.total};
  }
};
Allocator g_allocator;
REGISTER_ALLOCATOR(kType, &g_allocator);

// -- page-locked host memory of PyTorch's own ------------------------------------------------------------
struct Pinned {
  uintptr_t start;
  size_t nbytes;
  std::set<int> streams;  // with copies queued; it is given back when they have come so far
  std::vector<Point> points;
};
std::mutex g_pinned_mutex;
std::map<uintptr_t, Pinned*> g_pinned;
std::vector<Pinned*> g_leaving;

void collect_pinned() {  // the mutex is held
  std::erase_if(g_leaving, [](Pinned* block) {
    auto& points = block->points;
    auto passed = [](const Point& point) { return Machine::get().passed(point); };
    if (!std::all_of(points.begin(), points.end(), passed)) return false;
    Memory::get().unlock_pages(block->start, false);
    munmap(reinterpret_cast<void*>(block->start), block->nbytes);
    delete block;
    return true;
  });
}

void free_pinned(void* context) {
  auto* block = static_cast<Pinned*>(context);
  std::lock_guard<std::mutex> lock(g_pinned_mutex);
  g_pinned.erase(block->start);
  for (int stream : block->streams) block->points.push_back(Machine::get().end_of(stream));
  g_leaving.push_back(block);
  collect_pinned();
}

struct HostAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (!nbytes) return {nullptr, nullptr, &c10::detail::deleteNothing, Device(c10::kCPU)};
    size_t power = 4096;  // as CUDA's does
    while (power < nbytes) power *= 2;
    void* p = mmap(nullptr, power, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(p != MAP_FAILED, "simdev: no host memory for ", power, " bytes");
    std::lock_guard<std::mutex> lock(g_pinned_mutex);
    collect_pinned();
    Memory::get().lock_pages(number(p), power);
    auto* block = g_pinned[number(p)] = new Pinned{number(p), power, {}, {}};
    return {p, block, &free_pinned, Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool record_event(void* p, void*, Stream stream) override {
    use_pinned(number(p), id_of(stream));
    return true;
  }
  void empty_cache() override {
    std::lock_guard<std::mutex> lock(g_pinned_mutex);
    collect_pinned();
  }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
HostAllocator g_host_allocator;
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &g_host_allocator);

// -- random numbers: the CPU's, drawn when an op is called ---------------------------------------------
struct Generator final : c10::GeneratorImpl {
  at::Generator cpu;
  explicit Generator(at::Generator cpu)
      : c10::GeneratorImpl(Device(kType, 0), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  void set_state(const c10::TensorImpl& state) override {
    cpu.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(cpu.clone()); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* p) const override { return Memory::get().page_locked(number(p), 1); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &g_host_allocator; }
  Device getDeviceFromPtr(void*) const override { return Device(kType, 0); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    static auto* one =
        new at::Generator(at::make_generator<Generator>(at::detail::getDefaultCPUGenerator()));
    return *one;
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::make_generator<Generator>(at::detail::createCPUGenerator());
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto data = g_allocator.allocate(nbytes);
    auto keep = std::min(nbytes, storage.nbytes());
    if (keep) g_allocator.copy_data(data.get(), storage.data(), keep);
    storage.set_data_ptr(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
};
const bool g_hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);
}  // namespace

int current_stream() { return t_stream; }

void synchronize(const Point& point) {
  counts.waits++;
  Machine::get().synchronize(point);
}

void use_pinned(uintptr_t start, int stream) {
  std::lock_guard<std::mutex> lock(g_pinned_mutex);
  auto it = g_pinned.upper_bound(start);
  if (it == g_pinned.begin()) return;
  auto* block = std::prev(it)->second;
  if (start < block->start + block->nbytes) block->streams.insert(stream);
}

at::Generator cpu_generator(const at::Generator& generator) {
  auto* ours = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  return ours ? ours->cpu : generator;
}

}  // namespace simdev

// -- for Python ------------------------------------------------------------------------------------------
using namespace simdev;
extern "C" {
// What was thrown last by queued work is given back as text by these two; null: nothing.
const char* simdev_schedule(int mode, uint64_t seed, int delay_us, double probability) {
  thread_local std::string text;
  try {
    Machine::get().schedule(static_cast<Mode>(mode), seed, delay_us, probability);
    return nullptr;
  } catch (const std::exception& error) {
    return (text = error.what()).c_str();
  }
}
const char* simdev_races() {  // one a line
  thread_local std::string text;
  text.clear();
  try {
    for (auto& race : Machine::get().take_races()) text += race + "\n";
  } catch (const std::exception& error) {
    text += std::string("failed: ") + error.what() + "\n";
  }
  return text.c_str();
}
void simdev_check(bool yes) { Machine::get().checking = yes; }
bool simdev_lock_pages(uintptr_t start, size_t nbytes) { return Memory::get().lock_pages(start, nbytes); }
bool simdev_unlock_pages(uintptr_t start) { return Memory::get().unlock_pages(start, true); }
size_t simdev_page_locked() { return Memory::get().locked(); }
void simdev_touch(uintptr_t start, size_t nbytes, bool write) {
  auto& memory = Memory::get();
  if (auto device = memory.address_of(start)) start = device;
  if (memory.on_device(start) || memory.page_locked(start, nbytes))
    Machine::get().touch(start, start + nbytes, write);
}
uintptr_t simdev_bytes_of(uintptr_t p) { return number(Memory::get().bytes_of(p)); }
void simdev_limit(size_t nbytes) { Blocks::get().limit = nbytes; }
void simdev_fail_allocation(int64_t after) { Blocks::get().fail(after); }
void simdev_fail_copy(int64_t after) { counts.copies_to_fail = after; }
void simdev_total(size_t nbytes) { Memory::get().total = nbytes; }
void simdev_counts(int64_t* into) {
  int64_t values[] = {counts.queued, counts.waited, counts.waits, counts.pageable,
                      static_cast<int64_t>(Machine::get().executed)};
  std::copy(std::begin(values), std::end(values), into);
}
// `run(number)` is queued on the current stream. It names what it accesses by simdev_touch.
void simdev_enqueue(const char* what, int (*run)(int64_t), int64_t number) {
  std::string name = what;
  Machine::get().enqueue(current_stream(), name, {}, [=] {
    auto clean = clean_state();
    if (run(number)) throw std::runtime_error("simdev: " + name + " failed; its error was printed");
  });
}
}
