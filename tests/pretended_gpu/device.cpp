// Memory, streams, events and random numbers of the pretended GPU, and what torch asks of a device.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

namespace pretended {
namespace {

c10::DeviceIndex num_devices() {
  static const char* said = std::getenv("PRETENDED_GPUS");
  return said ? static_cast<c10::DeviceIndex>(std::atoi(said)) : 1;
}

thread_local c10::DeviceIndex current = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> streams;

// A process that was forked from one with a GPU cannot use it.
void not_forked() {
  static const pid_t owner = getpid();
  TORCH_CHECK(owner == getpid(), "Cannot re-initialize CUDA in forked subprocess");
}

// ---- memory ----
std::atomic<int64_t> allocated{0}, peak{0}, limit{int64_t(1) << 33}, refused{0};

void reserve(int64_t bytes) {
  not_forked();
  const int64_t now = allocated += bytes;
  if (now > limit) {
    allocated -= bytes;
    refused += 1;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", bytes, " bytes (pretended GPU)");
  }
  int64_t before = peak;
  while (now > before && !peak.compare_exchange_weak(before, now)) {}
}

void give_back(void* context) {
  auto* held = static_cast<Held*>(context);
  allocated -= held->bytes;
  delete held;
}

void release(void* context) { delete static_cast<c10::Storage*>(context); }

c10::DataPtr holding(const c10::Storage& made, c10::Device device) {
  const auto bytes = static_cast<int64_t>(made.nbytes());
  reserve(bytes);
  auto held = std::make_unique<Held>();
  held->bytes = bytes;
  held->storage = made;
  return {const_cast<void*>(made.data()), held.release(), &give_back, device};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Storage made(c10::Storage::use_byte_size_t{}, bytes, c10::GetCPUAllocator(), false);
    std::memset(const_cast<void*>(made.data()), 0xff, bytes);  // used memory: NaN, or -1
    return holding(made, {c10::kCUDA, current});
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
} device_allocator;
REGISTER_ALLOCATOR(c10::kCUDA, &device_allocator)

std::mutex pins_lock;
std::map<const char*, size_t> pins;

struct PinnedAllocator final : c10::Allocator {
  static void unpin(void* data) {
    std::lock_guard<std::mutex> guard(pins_lock);
    pins.erase(static_cast<const char*>(data));
    std::free(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    not_forked();
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, bytes ? bytes : 1) == 0, "no memory");
    std::lock_guard<std::mutex> guard(pins_lock);
    pins[static_cast<const char*>(data)] = bytes;
    return {data, data, &unpin, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
} pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(pins_lock);
  auto after = pins.upper_bound(static_cast<const char*>(data));
  if (after == pins.begin()) return false;
  --after;
  return static_cast<const char*>(data) < after->first + after->second;
}

// ---- random numbers: a generator of the host behind each of the device ----
struct Numbers final : c10::GeneratorImpl {
  at::Generator inner;
  explicit Numbers(c10::Device device, uint64_t seed = c10::default_rng_seed_val)
      : GeneratorImpl(device, c10::DispatchKeySet(c10::DispatchKey::CUDA)), inner(at::detail::createCPUGenerator(seed)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "the pretended GPU has no offsets"); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Numbers* clone_impl() const override {
    auto* made = new Numbers(device());
    made->inner = inner.clone();
    return made;
  }
};

at::Generator& default_generator(c10::DeviceIndex index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (c10::DeviceIndex i = 0; i < num_devices(); ++i)
      made.push_back(at::make_generator<Numbers>(c10::Device(c10::kCUDA, i)));
    return made;
  }();
  return all.at(index < 0 ? current : index);
}

// ---- time: clocks of streams, of events and of the host ----
std::mutex time_lock;
std::map<Stream, Clock> known;
Clock host;
std::map<int64_t, std::pair<Clock, int>> events;  // by number: what was done, and how often it was asked for
std::atomic<int> sync_mode{0};

struct Pending {
  Stream stream;
  int64_t place;
  bool down;
  at::Tensor at_host;
  c10::Storage bytes;  // down: what will arrive; up: what was sent
};
std::vector<Pending> pending;

void merge(Clock& into, const Clock& other) {
  for (const auto& [stream, place] : other) into[stream] = std::max(into[stream], place);
}

size_t span(const at::Tensor& tensor) { return tensor.numel() == 0 ? 0 : (at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize())); }

c10::Storage bytes_of(const at::Tensor& tensor) {
  c10::Storage kept(c10::Storage::use_byte_size_t{}, span(tensor), c10::GetCPUAllocator(), false);
  std::memcpy(const_cast<void*>(kept.data()), tensor.data_ptr(), span(tensor));
  return kept;
}

void settle(const Clock& done) {  // with the lock
  std::vector<Pending> left;
  bool whole = true;
  for (auto& one : pending) {
    auto found = done.find(one.stream);
    if (found == done.end() || found->second < one.place) {
      left.push_back(std::move(one));
    } else if (one.down) {
      std::memcpy(one.at_host.data_ptr(), one.bytes.data(), span(one.at_host));
    } else {
      whole &= std::memcmp(one.at_host.data_ptr(), one.bytes.data(), span(one.at_host)) == 0;
    }
  }
  pending.swap(left);
  TORCH_CHECK(whole, "pretended GPU: pinned memory was written to while it was being copied to the device");
}

void host_knows(const Clock& done) {
  merge(host, done);
  settle(host);
}

int64_t place_of(const Stream& stream) {
  auto& clock = known[stream];
  merge(clock, host);
  return ++clock[stream];
}

Clock clock_of(const Stream& stream) {
  auto clock = known[stream];
  merge(clock, host);
  return clock;
}

void need(const std::string& name, const Clock& mine, const Stream& other, int64_t place, const char* what) {
  if (other.first < 0) return;
  auto found = mine.find(other);
  TORCH_CHECK(found != mine.end() && found->second >= place, "pretended GPU: ", name, " does not wait for what another stream ",
              what, " (stream ", other.second, ", operation ", place, ")");
}

}  // namespace

bool on_gpu(const at::Tensor& tensor) { return tensor.defined() && tensor.device().is_cuda(); }
c10::DeviceIndex current_device() { return current; }
Stream current_stream() { return {current, streams[current]}; }
at::Generator host_generator(const at::Generator& given) { return static_cast<Numbers*>(given.unsafeGetGeneratorImpl())->inner; }
at::Generator host_generator(c10::DeviceIndex index) { return host_generator(default_generator(index)); }

Held* held_of(const c10::Storage& storage) {
  const auto& pointer = storage.data_ptr();
  return pointer.get_deleter() == &give_back ? static_cast<Held*>(pointer.get_context()) : nullptr;
}

c10::Storage to_device(const c10::Storage& made, c10::Device device) {
  return c10::Storage(c10::Storage::use_byte_size_t{}, made.nbytes(), holding(made, device), &device_allocator, true);
}

c10::Storage to_host(const c10::Storage& storage) {
  return c10::Storage(
      c10::Storage::use_byte_size_t{}, storage.nbytes(),
      c10::DataPtr(const_cast<void*>(storage.data()), new c10::Storage(storage), &release, c10::kCPU),
      c10::GetCPUAllocator(), true);
}

void launch(const std::string& name, const std::vector<Access>& accesses) {
  not_forked();
  std::lock_guard<std::mutex> guard(time_lock);
  const Stream stream = current_stream();
  const int64_t place = place_of(stream);
  const auto& mine = known[stream];
  for (const auto& [held, writes] : accesses) {
    need(name, mine, held->writer, held->written, "wrote");
    if (!writes) {
      held->reads[stream] = place;
      continue;
    }
    for (const auto& [other, when] : held->reads) need(name, mine, other, when, "reads");
    held->writer = stream;
    held->written = place;
    held->reads.clear();
  }
}

void may_wait(const std::string& name) {
  if (sync_mode == 1) TORCH_WARN("called a synchronizing CUDA operation: ", name);
  TORCH_CHECK(sync_mode != 2, "called a synchronizing CUDA operation: ", name);
}

void host_waits(const std::string& name) {
  may_wait(name);
  std::lock_guard<std::mutex> guard(time_lock);
  host_knows(clock_of(current_stream()));
}

void copy_down(const at::Tensor& to, const at::Tensor& from) {
  const bool later = to.strides() == from.strides() && to.scalar_type() == from.scalar_type() && is_pinned(to.data_ptr());
  if (!later) {
    to.copy_(from);  // page-able memory: the driver waits
    return;
  }
  std::lock_guard<std::mutex> guard(time_lock);
  const Stream stream = current_stream();
  pending.push_back({stream, known[stream][stream], true, to, bytes_of(from)});
  std::memset(to.data_ptr(), 0xff, span(to));
}

void copy_up(const at::Tensor& to, const at::Tensor& from) {
  {
    std::lock_guard<std::mutex> guard(time_lock);
    const Stream stream = current_stream();
    const auto* begin = static_cast<const char*>(from.data_ptr());
    for (auto& one : pending) {  // what is to be sent may be on its way here
      const auto* other = static_cast<const char*>(one.at_host.data_ptr());
      if (!one.down || begin + span(from) <= other || other + span(one.at_host) <= begin) continue;
      need("copy_", known[stream], one.stream, one.place, "copies to this memory");
      std::memcpy(one.at_host.data_ptr(), one.bytes.data(), span(one.at_host));
    }
    if (is_pinned(from.data_ptr())) pending.push_back({stream, known[stream][stream], false, from, bytes_of(from)});
  }
  to.copy_(from);
}

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device was = getDevice();
    setDevice(device);
    return was;
  }
  c10::Device getDevice() const override { return {c10::kCUDA, current}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < num_devices(), "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Device whole(c10::Device device) const { return {c10::kCUDA, device.index() < 0 ? current : device.index()}; }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, whole(device), streams[whole(device).index()]);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> next{1};
    return c10::Stream(c10::Stream::UNSAFE, whole(device), next++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream was = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return was;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices(); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::mutex> guard(time_lock);
    if (*event == nullptr) *event = new Clock();
    *static_cast<Clock*>(*event) = clock_of({stream.device_index(), stream.id()});
  }
  void block(void* event, const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> guard(time_lock);
    if (event != nullptr) merge(known[{stream.device_index(), stream.id()}], *static_cast<Clock*>(event));
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Clock*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

Stream at_stream(int64_t device, int64_t stream) { return {static_cast<c10::DeviceIndex>(device), stream}; }

int64_t record_event(int64_t device, int64_t stream) {
  static int64_t next = 0;
  std::lock_guard<std::mutex> guard(time_lock);
  events[++next] = {clock_of(at_stream(device, stream)), 0};
  return next;
}

void wait_event(int64_t event, int64_t device, int64_t stream) {
  std::lock_guard<std::mutex> guard(time_lock);
  merge(known[at_stream(device, stream)], events.at(event).first);
}

void wait_stream(int64_t device, int64_t stream, int64_t other_device, int64_t other) {
  std::lock_guard<std::mutex> guard(time_lock);
  merge(known[at_stream(device, stream)], clock_of(at_stream(other_device, other)));
}

bool query_event(int64_t event) {  // never done when it is first asked for
  std::lock_guard<std::mutex> guard(time_lock);
  if (events.at(event).second++ == 0) return false;
  host_knows(events.at(event).first);
  return true;
}

void sync_event(int64_t event) {
  std::lock_guard<std::mutex> guard(time_lock);
  host_knows(events.at(event).first);
}

void sync_all() {
  std::lock_guard<std::mutex> guard(time_lock);
  for (const auto& [stream, clock] : std::map<Stream, Clock>(known)) host_knows(clock);
}

}  // namespace
}  // namespace pretended

namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  const Generator& getDefaultGenerator(DeviceIndex index) const override { return pretended::default_generator(index); }
  Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<pretended::Numbers>(Device(kCUDA, index < 0 ? pretended::current : index));
  }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool isPinnedPtr(const void* data) const override { return pretended::is_pinned(data); }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return pretended::current; }
  Allocator* getPinnedMemoryAllocator() const override { return &pretended::pinned_allocator; }
  int getNumGPUs() const override { return pretended::num_devices(); }
  DeviceIndex deviceCount() const override { return pretended::num_devices(); }
  void setCurrentDevice(DeviceIndex index) const override { pretended::current = index; }
  DeviceIndex getCurrentDevice() const override { return pretended::current; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(pretended::current, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return std::exchange(pretended::current, index); }
  void deviceSynchronize(DeviceIndex) const override { pretended::sync_all(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

namespace c10d {
struct PretendedTimer : Timer {
  explicit PretendedTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, PretendedTimer)
}  // namespace c10d

TORCH_LIBRARY(pretended_gpu, m) {
  using namespace pretended;
  m.def("set_device(int index) -> ()", [](int64_t index) { Guard().setDevice({c10::kCUDA, static_cast<c10::DeviceIndex>(index)}); });
  m.def("device() -> int", []() { return static_cast<int64_t>(current); });
  m.def("num_devices() -> int", []() { return static_cast<int64_t>(num_devices()); });
  m.def("set_stream(int which) -> ()", [](int64_t which) { streams[current] = which; });
  m.def("stream() -> int", []() { return streams[current]; });
  m.def("record_event(int device, int stream) -> int", &record_event);
  m.def("wait_event(int event, int device, int stream) -> ()", &wait_event);
  m.def("wait_stream(int device, int stream, int other_device, int other) -> ()", &wait_stream);
  m.def("query_event(int event) -> bool", &query_event);
  m.def("sync_event(int event) -> ()", &sync_event);
  m.def("forget_event(int event) -> ()", [](int64_t event) { std::lock_guard<std::mutex> guard(time_lock); events.erase(event); });
  m.def("sync_all() -> ()", &sync_all);
  m.def("count() -> ()", []() { not_forked(); });
  m.def("may_wait() -> ()", []() { may_wait("synchronize"); });
  m.def("sync_mode(int mode) -> ()", [](int64_t mode) { sync_mode = static_cast<int>(mode); });
  m.def("get_sync_mode() -> int", []() { return static_cast<int64_t>(sync_mode.load()); });
  m.def("memory() -> int[]", []() { return std::vector<int64_t>{allocated, peak, limit, refused}; });
  m.def("reset_peak() -> ()", []() { peak = allocated.load(); });
  m.def("set_limit(int bytes) -> ()", [](int64_t bytes) { limit = bytes; });
  m.def("default_generator(int index) -> Generator?", [](int64_t index) {
    return std::optional<at::Generator>(default_generator(static_cast<c10::DeviceIndex>(index)));
  });
}
