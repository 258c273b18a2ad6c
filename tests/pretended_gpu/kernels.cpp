// The operations of the pretended GPU: those of the CPU, over the same bytes, with the rules of a device.
#include "device.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <torch/library.h>

#include <cstring>
#include <mutex>
#include <set>

namespace pretended {
namespace {

using Names = std::set<std::string>;

const Names WAITING{  // their result has a size, or is a number, that the host needs
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::unique_dim",
    "aten::_unique", "aten::_unique2", "aten::unique_consecutive", "aten::repeat_interleave", "aten::bincount"};
const Names MIXED{"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"};  // indices may lie on the host

at::Tensor over(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

// The host's tensors of one operation, and the way back.
struct Mirror {
  std::map<c10::StorageImpl*, c10::Storage> host_of, device_of;
  c10::Device device{c10::kCUDA, 0};

  at::Tensor down(const at::Tensor& tensor) {
    const auto& storage = tensor.storage();
    auto found = host_of.find(storage.unsafeGetStorageImpl());
    if (found == host_of.end()) {
      found = host_of.emplace(storage.unsafeGetStorageImpl(), to_host(storage)).first;
      device_of.emplace(found->second.unsafeGetStorageImpl(), storage);
    }
    return over(tensor, found->second, c10::DispatchKey::CPU);
  }

  at::Tensor up(const at::Tensor& tensor, std::vector<Access>& accesses) {
    const auto& storage = tensor.storage();
    auto found = device_of.find(storage.unsafeGetStorageImpl());
    if (found == device_of.end()) {
      found = device_of.emplace(storage.unsafeGetStorageImpl(), to_device(storage, device)).first;
      accesses.push_back({held_of(found->second), true});
    }
    return over(tensor, found->second, c10::DispatchKey::CUDA);
  }
};

// ---- graphs: what a stream is told while it is captured, to be done again ----
struct Kept {
  c10::OperatorHandle op;
  std::vector<c10::IValue> given, results;
};
std::mutex graph_lock;
Stream captured{-1, 0};
std::map<int64_t, std::vector<Kept>> graphs;
int64_t capturing = 0;

bool is_capturing() { return capturing != 0 && current_stream() == captured; }

void keep(const c10::OperatorHandle& op, std::vector<c10::IValue> given, std::vector<c10::IValue> results) {
  if (!is_capturing()) return;
  std::lock_guard<std::mutex> guard(graph_lock);
  graphs[capturing].push_back({op, std::move(given), std::move(results)});
}

void wait(const std::string& name) {
  TORCH_CHECK(!is_capturing(), "CUDA error: operation not permitted when stream is capturing (", name, ")");
  host_waits(name);
}

// What an operation has given another size or other memory.
void adopt(const at::Tensor& mine, const at::Tensor& done, c10::Device device) {
  auto host = done.storage();
  if (host.data() != mine.storage().data() || host.nbytes() != mine.storage().nbytes()) {
    auto made = to_device(host, device);
    auto* storage = mine.storage().unsafeGetStorageImpl();
    storage->set_nbytes(made.nbytes());
    storage->set_data_ptr_noswap(std::move(made.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
  }
  if (mine.sizes() != done.sizes() || mine.strides() != done.strides() || mine.storage_offset() != done.storage_offset())
    mine.unsafeGetTensorImpl()->set_sizes_and_strides(done.sizes(), done.strides(), done.storage_offset());
}

struct Call {
  Mirror mirror;
  std::string name;
  std::vector<Access> accesses;
  std::optional<c10::Device> seen;
  bool asks = false;  // for a size, through a mask

  at::Tensor look(const at::Tensor& tensor, bool writes) {
    if (!tensor.defined()) return tensor;
    if (!on_gpu(tensor)) {
      TORCH_CHECK(!tensor.device().is_cpu() || tensor.dim() == 0 || MIXED.count(name),
                  "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (", name, ")");
      return tensor;
    }
    TORCH_CHECK(!seen || *seen == tensor.device(), "Expected all tensors to be on the same device, but found ", *seen,
                " and ", tensor.device(), " (", name, ")");
    seen = tensor.device();
    accesses.push_back({held_of(tensor.storage()), writes});
    return mirror.down(tensor);
  }

  c10::IValue look(const c10::IValue& value, bool writes) {
    if (value.isTensor()) return look(value.toTensor(), writes);
    if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& one : list) one = look(one, writes);
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (std::optional<at::Tensor> one : value.toOptionalTensorList()) {
        asks |= one && one->defined() && (one->scalar_type() == at::kBool || one->scalar_type() == at::kByte);
        list.push_back(one ? std::optional<at::Tensor>(look(*one, writes)) : one);
      }
      return list;
    }
    return value;
  }

  c10::IValue back(const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined()) return mirror.up(value.toTensor(), accesses);
    if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& one : list) one = one.defined() ? mirror.up(one, accesses) : one;
      return list;
    }
    return value;
  }
};

// Operations that take no generator draw from the device's all the same, and leave the host's as it is.
struct Drawing {
  std::optional<at::Generator> here, there;
  at::Tensor before;

  Drawing(bool draws, c10::DeviceIndex device) {
    if (!draws) return;
    here = at::globalContext().defaultGenerator(c10::kCPU);
    there = host_generator(device);
    before = here->get_state();
    here->set_state(there->get_state());
  }
  ~Drawing() {
    if (!here) return;
    there->set_state(here->get_state());
    here->set_state(before);
  }
};

bool writes(const c10::Argument& argument) { return argument.alias_info() != nullptr && argument.alias_info()->isWrite(); }

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const auto first = stack->end() - static_cast<int64_t>(arguments.size());
  const std::vector<c10::IValue> given(first, stack->end());
  std::optional<c10::Device> asked;
  bool takes_generator = false;
  Call call;
  call.name = schema.operator_name().name;
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = *(first + static_cast<int64_t>(i));
    takes_generator |= arguments[i].type()->str().find("Generator") != std::string::npos;
    if (value.isDevice()) {
      asked = value.toDevice();
      value = c10::IValue(c10::Device(c10::kCPU));
    } else if (value.isGenerator()) {
      TORCH_CHECK(value.toGenerator().device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
      value = c10::IValue(host_generator(value.toGenerator()));
    } else if (value.isNone() && arguments[i].type()->str().find("Generator") != std::string::npos) {
      value = c10::IValue(host_generator(call.seen ? call.seen->index() : -1));
    } else if (arguments[i].name() == "pin_memory") {
      value = value.isBool() ? c10::IValue(false) : value;
    } else {
      value = call.look(value, writes(arguments[i]));
    }
  }
  const bool on = asked && asked->is_cuda() && asked->index() >= 0;
  call.mirror.device = on ? *asked : call.seen.value_or(c10::Device(c10::kCUDA, current_device()));
  const size_t num_read = call.accesses.size();
  {
    at::AutoDispatchBelowAutograd below;
    Drawing drawing(!takes_generator && op.hasTag(at::Tag::nondeterministic_seeded), call.mirror.device.index());
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  const auto& returns = schema.returns();
  const auto results = stack->end() - static_cast<int64_t>(returns.size());
  bool changes = false, numbers = false;
  for (size_t r = 0; r < returns.size(); ++r) {
    auto& value = *(results + static_cast<int64_t>(r));
    numbers |= !value.isTensor() && !value.isTensorList();
    if (!writes(returns[r])) {
      value = call.back(value);
      continue;
    }
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!writes(arguments[i]) || *arguments[i].alias_info() != *returns[r].alias_info()) continue;
      if (given[i].isTensor() && on_gpu(given[i].toTensor())) adopt(given[i].toTensor(), value.toTensor(), call.mirror.device);
      value = given[i];
      break;
    }
  }
  for (const auto& argument : arguments) changes |= writes(argument);
  const bool view = !changes && !numbers && call.accesses.size() == num_read && num_read > 0;
  if (!view && !is_capturing()) launch(call.name, call.accesses);  // a captured operation is not done yet
  if (WAITING.count(call.name) || (call.asks && call.name == "aten::index")) wait(call.name);
  keep(op, given, {results, stack->end()});
}

at::Tensor empty(const at::Tensor& made, std::optional<c10::Device> device) {
  const c10::Device place(c10::kCUDA, device && device->index() >= 0 ? device->index() : current_device());
  auto storage = to_device(made.storage(), place);
  std::memset(made.storage().mutable_data(), 0xff, made.storage().nbytes());  // used memory: NaN, or -1
  return over(made, std::move(storage), c10::DispatchKey::CUDA);
}

at::Tensor empty_like_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                             std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto options = at::TensorOptions().dtype(dtype).device(c10::kCPU);
  return empty(at::empty(C10_AS_INTARRAYREF_SLOW(size), options, format), device);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  auto options = at::TensorOptions().dtype(dtype).device(c10::kCPU);
  return empty(at::empty_strided(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), options), device);
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  const bool up = !on_gpu(from), down = !on_gpu(self);
  at::Tensor source = from.sizes() == self.sizes() ? from : from.expand_as(self);
  Mirror mirror;
  at::Tensor to = down ? self : mirror.down(self), what = up ? source : mirror.down(source);
  std::vector<Access> accesses;
  if (!up) accesses.push_back({held_of(from.storage()), false});
  if (!down) accesses.push_back({held_of(self.storage()), true});
  if ((up || down) && !non_blocking) wait("aten::copy_");
  if (!is_capturing()) launch("aten::copy_", accesses);
  {
    at::AutoDispatchBelowAutograd below;
    if (down && non_blocking) copy_down(to, what);
    else if (up && non_blocking) copy_up(to, what);
    else to.copy_(what);
  }
  if (down && !non_blocking) wait("aten::copy_");
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  keep(op, {self, from, non_blocking}, {self});
  return self;
}

at::Tensor& set_part(at::Tensor& self, at::Storage from, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(from));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

at::Tensor& set_all(at::Tensor& self, at::Storage from) {
  const c10::SymInt length = static_cast<int64_t>(from.nbytes() / self.itemsize());
  return set_part(self, std::move(from), 0, {length}, {1});
}

void nothing(at::Tensor&, c10::Stream) {}

void put(const c10::IValue& from, const c10::IValue& to) {
  if (from.isTensorList()) {
    auto one = from.toTensorVector(), other = to.toTensorVector();
    for (size_t i = 0; i < one.size(); ++i) put(one[i], other[i]);
  } else if (from.isTensor() && from.toTensor().defined() && from.toTensor().numel() > 0) {
    const auto &one = from.toTensor(), &other = to.toTensor();
    if (one.storage().data() != other.storage().data()) other.copy_(one);
  }
}

void begin_capture() {
  static int64_t next = 0;
  TORCH_CHECK(capturing == 0, "CUDA error: a capture is under way");
  TORCH_CHECK(current_stream().second != 0, "CUDA graphs must be captured on a non-default stream.");
  captured = current_stream();
  capturing = ++next;
}

void replay(int64_t which) {
  at::AutoDispatchBelowAutograd below;
  for (const auto& kept : graphs.at(which)) {
    torch::jit::Stack stack(kept.given);
    kept.op.callBoxed(&stack);
    const auto first = stack.size() - kept.results.size();
    for (size_t i = 0; i < kept.results.size(); ++i) put(stack[first + i], kept.results[i]);
  }
}

}  // namespace
}  // namespace pretended

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&pretended::run>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  using namespace pretended;
  m.impl("copy_", &copy);
  m.impl("empty.memory_format", &empty_like_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("set_.source_Storage", &set_all);
  m.impl("set_.source_Storage_storage_offset", &set_part);
  m.impl("record_stream", &nothing);
}

TORCH_LIBRARY_FRAGMENT(pretended_gpu, m) {
  using namespace pretended;
  m.def("begin_capture() -> ()", &begin_capture);
  m.def("end_capture() -> int", []() { return std::exchange(capturing, 0); });
  m.def("replay(int which) -> ()", &replay);
  m.def("forget_graph(int which) -> ()", [](int64_t which) { graphs.erase(which); });
  m.def("is_capturing() -> bool", []() { return is_capturing(); });
}
