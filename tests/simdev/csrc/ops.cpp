// Ops on the simulated device: the CPU's kernels, as queued work, on the bytes behind the addresses.
//
// What an op returns is known when it is called, from its meta kernel. Where that cannot tell (there is
// none, random numbers are drawn, the size depends on data) the host waits. On any device it must for
// the last of these reasons; for the others the check of races does not count on it.
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>

#include "device.h"

namespace simdev {

namespace {
using at::IValue;
using at::Tensor;
using torch::jit::Stack;
constexpr size_t kStaged = 64 << 10;  // pageable bytes that a copy takes along when it is called

const at::ThreadLocalState& clean() {
  static auto* state = [] {
    at::AutoDispatchBelowADInplaceOrView below;
    return new at::ThreadLocalState();
  }();
  return *state;
}
const auto& g_clean = clean();  // of the thread that loads this

bool here(const Tensor& t) { return t.defined() && t.device().type() == kType; }

// The bytes from the first to the last element; of a device tensor, or of one in host memory.
Range range_of(const Tensor& t, bool write) {
  auto* data = static_cast<const char*>(t.storage().data());
  if (!t.numel() || !data) return {0, 0, write};
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); i++) last += (t.size(i) - 1) * t.stride(i);
  auto start = reinterpret_cast<uintptr_t>(data) + t.storage_offset() * t.itemsize();
  return {start, start + (last + 1) * t.itemsize(), write};
}

// A CPU tensor on the bytes of `t`. It keeps nothing alive: as for any queued kernel, the order of the
// stream does.
Tensor twin_of(const Tensor& t) {
  auto start = range_of(t, false).start;
  if (start && here(t)) start = reinterpret_cast<uintptr_t>(Memory::get().bytes_of(start));
  auto options = t.options().device(at::kCPU).requires_grad(false).pinned_memory(false);
  return at::for_blob(reinterpret_cast<void*>(start), t.sizes())
      .strides(t.strides())
      .target_device(at::kCPU)
      .options(options)
      .make_tensor();
}

void keep_wrapped(const Tensor& from, const Tensor& to) {  // a Python number that became a tensor
  if (from.unsafeGetTensorImpl()->is_wrapped_number())
    to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

Tensor meta_of(const Tensor& t) {
  auto options = t.options().device(at::kMeta).requires_grad(false).pinned_memory(false);
  Tensor meta = at::detail::empty_strided_meta(t.sizes(), t.strides(), options);
  meta.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
  keep_wrapped(t, meta);
  return meta;
}

Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  static const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(kType), keys, dtype);
}

// `value` with `f` of each tensor in it.
template <class F>
IValue each_tensor(const IValue& value, F&& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorList()) list.push_back(f(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& t : value.toOptionalTensorList())
      list.push_back(t ? std::optional<Tensor>(f(*t)) : std::nullopt);
    return list;
  }
  return value;
}

IValue elsewhere(const IValue& value, c10::DeviceType device) {
  if (value.isDevice() && value.toDevice().type() == kType) return c10::Device(device);
  if (value.isGenerator()) return cpu_generator(value.toGenerator());
  return value;
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  std::string name;
  std::vector<IValue> arguments;
  std::vector<Range> ranges;
  bool random = false, writes_host = false;

  Call(const c10::OperatorHandle& op, const Stack& stack)
      : op(op), schema(op.schema()), name(c10::toString(op.operator_name())) {
    auto n = static_cast<std::ptrdiff_t>(schema.arguments().size());
    arguments.assign(stack.end() - n, stack.end());
    random = op.hasTag(at::Tag::nondeterministic_seeded);
    for (size_t i = 0; i < arguments.size(); i++) {
      auto& argument = schema.arguments()[i];
      each_tensor(arguments[i], [&](const Tensor& t) {
        if (here(t)) add(t, writes(argument));
        writes_host |= t.defined() && !here(t) && writes(argument);
        return t;
      });
    }
  }

  void add(const Tensor& t, bool write) {
    auto range = range_of(t, write);
    if (range.start) ranges.push_back(range);
  }

  std::shared_ptr<Stack> on_cpu() const {
    auto stack = std::make_shared<Stack>();
    for (size_t i = 0; i < arguments.size(); i++) {
      bool written = writes(schema.arguments()[i]);
      stack->push_back(each_tensor(elsewhere(arguments[i], at::kCPU), [&](const Tensor& t) {
        if (here(t)) return twin_of(t);
        if (!t.defined() || written) return t;
        auto copy = t.detach().clone();  // a launch takes the value that there is now
        keep_wrapped(t, copy);
        return copy;
      }));
    }
    return stack;
  }

  // The argument that is returned in place `i`, whole or as a view; null for a new tensor.
  const IValue* source(size_t i) const {
    auto* alias = schema.returns()[i].alias_info();
    for (size_t k = 0; alias && k < arguments.size(); k++) {
      auto* theirs = schema.arguments()[k].alias_info();
      if (theirs && theirs->beforeSets() == alias->beforeSets()) return &arguments[k];
    }
    return nullptr;
  }

  std::function<void()> work(std::shared_ptr<Stack> stack) const {
    auto op = this->op;
    int threads = at::get_num_threads();
    return [op, threads, stack] {
      auto state = clean_state();
      if (at::get_num_threads() != threads) at::set_num_threads(threads);
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack.get());
    };
  }
};

bool returns_tensors(const c10::FunctionSchema& schema) {
  auto is_tensor = [](const c10::TypePtr& type) { return type->kind() == c10::TypeKind::TensorType; };
  for (auto& result : schema.returns()) {
    auto list = result.type()->cast<c10::ListType>();
    if (!is_tensor(result.type()) && !(list && is_tensor(list->getElementType()))) return false;
  }
  return true;
}

bool g_told(const std::string& name, bool tell) {  // ops that have no meta kernel
  static std::mutex mutex;
  static std::set<std::string> names;
  std::lock_guard<std::mutex> lock(mutex);
  if (tell) names.insert(name);
  return names.count(name) > 0;
}

// What the op's meta kernel returns, and the tensors that it writes get the sizes that it says.
std::optional<Stack> foretell(Call& call) {
  if (call.random || call.writes_host || !returns_tensors(call.schema) || g_told(call.name, false) ||
      call.op.hasTag(at::Tag::data_dependent_output))
    return std::nullopt;
  Stack metas;
  std::vector<std::pair<Tensor, Tensor>> written;
  for (size_t i = 0; i < call.arguments.size(); i++)
    metas.push_back(each_tensor(elsewhere(call.arguments[i], at::kMeta), [&](const Tensor& t) {
      if (!t.defined() || (!here(t) && !t.dim())) return t;
      auto meta = meta_of(t);
      if (writes(call.schema.arguments()[i])) written.emplace_back(t, meta);
      return meta;
    }));
  try {
    call.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &metas);
  } catch (const c10::NotImplementedError&) {
    g_told(call.name, true);
    return std::nullopt;
  } catch (const std::exception&) {  // a wrong argument, most of the time: the CPU's kernel will tell
    return std::nullopt;
  }
  for (auto& [device, meta] : written) {
    if (device.sizes() == meta.sizes()) continue;
    at::native::resize_(device, meta.sizes(), std::nullopt);
    device.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides(),
                                                        device.storage_offset());
    call.add(device, true);
  }
  return metas;
}

Tensor view_of(const Tensor& whole, const Tensor& meta) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW,
                                                       c10::Storage(whole.storage()), whole.key_set(),
                                                       c10::scalarTypeToTypeMeta(meta.scalar_type()));
  view.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides(), meta.storage_offset());
  return view;
}

std::vector<IValue> queue(Call& call, const Stack& metas) {
  counts.queued++;
  auto stack = call.on_cpu();
  std::vector<IValue> results;
  auto fresh = std::make_shared<std::vector<std::pair<size_t, IValue>>>();  // place, twins
  bool view = false;
  for (size_t i = 0; i < call.schema.returns().size(); i++) {
    auto* source = call.source(i);
    if (source && call.schema.returns()[i].alias_info()->isWrite()) {
      results.push_back(*source);
    } else if (source) {
      view = true;
      auto& whole = source->toTensor();
      results.push_back(each_tensor(metas[i], [&](const Tensor& t) { return view_of(whole, t); }));
    } else {
      results.push_back(each_tensor(metas[i], [&](const Tensor& t) {
        if (!t.defined()) return t;
        auto made = make(t.sizes(), t.strides(), t.scalar_type());
        call.add(made, true);
        return made;
      }));
      fresh->emplace_back(i, each_tensor(results.back(), [](const Tensor& t) {
                            return t.defined() ? twin_of(t) : t;
                          }));
    }
  }
  if (view) return results;
  auto run = [stack, fresh, work = call.work(stack), name = call.name] {
    work();
    auto state = clean_state();
    for (auto& [place, twins] : *fresh) {
      std::vector<Tensor> made;
      each_tensor((*stack)[place], [&](const Tensor& t) { return made.emplace_back(t); });
      size_t k = 0;
      each_tensor(twins, [&](const Tensor& twin) {
        auto& result = made.at(k++);
        if (!twin.defined() || !result.defined()) return twin;
        TORCH_CHECK(twin.sizes() == result.sizes(), "simdev: the meta kernel of ", name, " says ",
                    twin.sizes(), ", and the CPU's ", result.sizes());
        return twin.copy_(result);
      });
    }
  };
  Machine::get().enqueue(current_stream(), call.name, call.ranges, run);
  return results;
}

std::vector<IValue> wait_for(Call& call) {
  counts.waited++;
  auto& machine = Machine::get();
  auto stack = call.on_cpu();
  machine.enqueue(current_stream(), call.name, call.ranges, call.work(stack));
  bool quiet = !call.op.hasTag(at::Tag::data_dependent_output) &&
      !call.op.hasTag(at::Tag::dynamic_output_shape) && !call.writes_host;
  machine.synchronize(machine.end_of(current_stream()), quiet);
  std::vector<IValue> results;
  for (size_t i = 0; i < call.schema.returns().size(); i++) {
    auto* source = call.source(i);
    if (source && call.schema.returns()[i].alias_info()->isWrite()) {
      results.push_back(*source);
      continue;
    }
    results.push_back(each_tensor((*stack)[i], [&](const Tensor& t) {
      if (!t.defined()) return t;
      TORCH_CHECK(!source, "simdev: ", call.name, " returns a view, and has no meta kernel");
      auto made = make(t.sizes(), t.strides(), t.scalar_type());
      auto range = range_of(made, true);
      if (range.start)
        machine.enqueue(current_stream(), call.name, {range}, [from = t, to = twin_of(made)] {
          auto state = clean_state();
          to.copy_(from);
        });
      return made;
    }));
  }
  return results;
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op, *stack);
  auto metas = foretell(call);
  auto results = metas ? queue(call, *metas) : wait_for(call);
  stack->resize(stack->size() - call.arguments.size());
  for (auto& result : results) stack->push_back(std::move(result));
}

// -- copies ----------------------------------------------------------------------------------------------
// As CUDA's driver has them: with page-locked host memory queued work, and with other host memory the
// call takes the bytes along, if they are few, and else returns when the copy is done.
Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  if (!target.numel()) return target;
  if (counts.copies_to_fail >= 0 && counts.copies_to_fail-- == 0)
    throw std::runtime_error("simdev: this copy was told to fail");
  auto& machine = Machine::get();
  auto source = self.expand(target.sizes());
  std::vector<Range> ranges;
  bool pageable = false;
  auto add = [&](const Tensor& t, bool write) {
    auto range = range_of(t, write);
    if (!here(t)) {
      if (!Memory::get().page_locked(range.start, range.end - range.start)) {
        pageable = true;
        return;
      }
      use_pinned(range.start, current_stream());
    }
    ranges.push_back(range);
  };
  add(source, false);
  add(target, true);
  counts.pageable += pageable;
  bool staged = pageable && !here(source) && source.nbytes() <= kStaged;
  auto from = staged ? source.detach().clone() : twin_of(source);
  auto what = !here(source) ? "copy to the device" : here(target) ? "copy" : "copy to the host";
  machine.enqueue(current_stream(), what, ranges, [from, to = twin_of(target)] {
    auto state = clean_state();
    to.copy_(from);
  });
  auto end = machine.end_of(current_stream());
  bool across = !here(source) || !here(target);
  if (across && !staged && (!non_blocking || (pageable && !here(target))))
    synchronize(end);
  else if (pageable && !staged)
    machine.synchronize(end, true);
  return target;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  at::native::resize_(target, self.sizes(), std::nullopt);
  return copy_from(self, target, false);
}
at::Scalar local_scalar(const Tensor& self) {
  auto value = std::make_shared<at::Scalar>();
  Machine::get().enqueue(current_stream(), "item", {range_of(self, false)}, [value, twin = twin_of(self)] {
    *value = at::native::_local_scalar_dense_cpu(twin);
  });
  synchronize(Machine::get().end_of(current_stream()));
  return *value;
}

// -- what a device has to have itself ----------------------------------------------------------------------
Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  static const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(sizes, c10::GetAllocator(kType), keys, c10::dtype_or_default(dtype),
                                   format);
}
Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return make(sizes, strides, c10::dtype_or_default(dtype));
}
Tensor& set_view(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes,
                 at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  auto dense = c10::contiguous_strides(sizes);
  impl->set_sizes_and_strides(sizes, strides.size() == sizes.size() ? strides : dense, offset);
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage storage) {
  auto n = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_view(self, std::move(storage), 0, {n}, {1});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_view(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
void record_stream(Tensor& self, c10::Stream stream) {
  Blocks::get().use_on(reinterpret_cast<uintptr_t>(self.storage().data()), static_cast<int>(stream.id()));
}
int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                   std::optional<double>, bool) {
  return 0;  // the formula in ops
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_view);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("_fused_sdp_choice", sdp_choice);
}

// Where the CPU has a kernel and PyTorch also a formula for all devices, the CPU's, for its bits.
const bool g_as_cpu = [] {
  using c10::DispatchKey;
  auto& dispatcher = c10::Dispatcher::singleton();
  static torch::Library library(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) || !op || !op->hasKernelForDispatchKey(DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(DispatchKey::PrivateUse1))
      continue;
    if (op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
        op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional))
      library.impl(c10::toString(name).substr(6).c_str(),
                   torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  return true;
}();
}  // namespace

at::ThreadLocalStateGuard clean_state() { return at::ThreadLocalStateGuard(clean()); }

}  // namespace simdev
