// Kernels that CUDA has and the CPU has not: the cell of an LSTM, and batch norm over several ranks.
#include "device.h"

#include <torch/library.h>

namespace {

using Maybe = std::optional<at::Tensor>;
using Two = std::tuple<at::Tensor, at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Four = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

bool is(const Maybe& tensor) { return tensor.has_value() && tensor->defined(); }

Three lstm_cell(const at::Tensor& from_input, const at::Tensor& from_hidden, const at::Tensor& cell, const Maybe& bias_input,
                const Maybe& bias_hidden) {
  auto gates = from_input + from_hidden;
  if (is(bias_input)) gates = gates + *bias_input + *bias_hidden;
  auto four = gates.chunk(4, 1);
  auto in = four[0].sigmoid(), forget = four[1].sigmoid(), now = four[2].tanh(), out = four[3].sigmoid();
  auto next = forget * cell + in * now;
  return {out * next.tanh(), next, at::cat({in, forget, now, out}, 1)};
}

Three lstm_cell_backward(const Maybe& grad_hidden, const Maybe& grad_cell, const at::Tensor& cell, const at::Tensor& next,
                         const at::Tensor& workspace, bool has_bias) {
  auto four = workspace.chunk(4, 1);
  const auto &in = four[0], &forget = four[1], &now = four[2], &out = four[3];
  auto of_hidden = is(grad_hidden) ? *grad_hidden : at::zeros_like(next);
  auto of_cell = is(grad_cell) ? *grad_cell : at::zeros_like(next);
  auto squashed = next.tanh();
  auto carried = of_cell + of_hidden * out * (1 - squashed * squashed);
  auto grads = at::cat({carried * now * in * (1 - in), carried * cell * forget * (1 - forget), carried * in * (1 - now * now),
                        of_hidden * squashed * out * (1 - out)}, 1);
  return {grads, carried * forget, has_bias ? grads.sum(0) : at::Tensor()};
}

std::vector<int64_t> all_but_channels(const at::Tensor& input) {
  std::vector<int64_t> dims{0};
  for (int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  return dims;
}

at::Tensor channels(const at::Tensor& numbers, const at::Tensor& input) {
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = -1;
  return numbers.reshape(shape);
}

Two stats(const at::Tensor& input, double eps) {
  auto dims = all_but_channels(input);
  auto numbers = input.scalar_type() == at::kDouble ? input : input.to(at::kFloat);
  return {numbers.mean(dims), (numbers.var(dims, false) + eps).rsqrt()};
}

Two gather(const at::Tensor&, const at::Tensor& means, const at::Tensor& inverses, const Maybe& running_mean,
           const Maybe& running_var, double momentum, double eps, const at::Tensor& counts) {
  auto weights = counts.reshape({-1, 1}), number = counts.sum();
  auto mean = (means * weights).sum(0) / number;
  auto spread = inverses.pow(-2) - eps + (means - mean).square();
  auto var = (spread * weights).sum(0) / number;
  if (is(running_mean)) running_mean->mul_(1 - momentum).add_(mean * momentum);
  if (is(running_var)) running_var->mul_(1 - momentum).add_(var * (number / (number - 1)) * momentum);
  return {mean, (var + eps).rsqrt()};
}

at::Tensor normalised(const at::Tensor& input, const Maybe& weight, const Maybe& bias, const at::Tensor& mean,
                      const at::Tensor& inverse, double) {
  auto out = (input - channels(mean, input)) * channels(inverse, input);
  if (is(weight)) out = out * channels(*weight, input);
  if (is(bias)) out = out + channels(*bias, input);
  return out.to(input.scalar_type());
}

Four reduced(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& inverse, const Maybe&, bool,
             bool, bool) {
  auto dims = all_but_channels(input);
  auto sum = grad.to(mean.scalar_type()).sum(dims), moved = (grad * (input - channels(mean, input))).sum(dims);
  return {sum, moved, moved * inverse, sum.clone()};
}

at::Tensor backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& inverse,
                    const Maybe& weight, const at::Tensor& sum, const at::Tensor& moved, const at::Tensor& counts) {
  auto number = counts.sum();
  auto centred = (input - channels(mean, input)) * channels(inverse.square() * moved / number, input);
  auto out = (grad - channels(sum / number, input) - centred) * channels(inverse, input);
  if (is(weight)) out = out * channels(*weight, input);
  return out.to(input.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("batch_norm_stats", &stats);
  m.impl("batch_norm_gather_stats_with_counts", &gather);
  m.impl("batch_norm_elemt", &normalised);
  m.impl("batch_norm_backward_reduce", &reduced);
  m.impl("batch_norm_backward_elemt", &backward);
}
