// A GPU that is none: tensors on "cuda" whose bytes lie in the host's memory. What the two sources share.
#pragma once

#define AT_PER_OPERATOR_HEADERS  // <ATen/ATen.h> has all operators, which take seconds to read
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/Storage.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace pretended {

using Stream = std::pair<c10::DeviceIndex, c10::StreamId>;
using Clock = std::map<Stream, int64_t>;  // what somebody knows to be done: of each stream, how many operations

// The bytes of one storage on the device, and which operations touched them last.
struct Held {
  int64_t bytes;
  c10::Storage storage;  // of the host
  Stream writer{-1, 0};
  int64_t written = 0;
  Clock reads;
};

Held* held_of(const c10::Storage& storage);  // nullptr: not of the device
c10::Storage to_device(const c10::Storage& made, c10::Device device);
c10::Storage to_host(const c10::Storage& storage);
bool on_gpu(const at::Tensor& tensor);

c10::DeviceIndex current_device();
Stream current_stream();
at::Generator host_generator(const at::Generator& given);
at::Generator host_generator(c10::DeviceIndex index);

// What runs beside what: every operation is at a place of its stream, and has to know of those it builds upon.
struct Access {
  Held* held;
  bool writes;
};
void launch(const std::string& name, const std::vector<Access>& accesses);
void host_waits(const std::string& name);  // for the current stream; an error where that is forbidden
void copy_down(const at::Tensor& to, const at::Tensor& from);  // later: `to` has its values once it was waited for
void copy_up(const at::Tensor& to, const at::Tensor& from);  // `from` must stay as it is until then

}  // namespace pretended
