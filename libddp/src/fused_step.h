// What the fused optimizers share.
#pragma once

#include <torch/optim/optimizer.h>

#include <vector>

namespace ddp::detail {

/// Runs a closure with gradients on; an undefined tensor where there is none.
torch::Tensor evaluate(const torch::optim::Optimizer::LossClosure& closure);

/// Drops or clears the gradients, also those that are views into buckets.
void forget_gradients(std::vector<torch::optim::OptimizerParamGroup>& groups, bool set_to_none);

/// Orders tensors by what one call of a kernel takes: one device, one dtype, and a mark of the optimizer's own.
struct Kind {
  c10::Device device;
  at::ScalarType dtype;
  bool mark = false;

  friend bool operator<(const Kind& a, const Kind& b) {
    const auto key = [](const Kind& k) { return std::tuple(k.device.type(), k.device.index(), k.dtype, k.mark); };
    return key(a) < key(b);
  }
};

/// Throws ConfigError for a sparse gradient.
void require_dense(const torch::Tensor& gradient, const char* optimizer);

}  // namespace ddp::detail
