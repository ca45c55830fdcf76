// Models so small that their gradients can be worked out by hand, and numbers that are exact on both sides of a golden file.
#pragma once

#include <torch/torch.h>

namespace ddp::test {

/// One weight, set to `weight`, no bias.
inline torch::nn::Linear one_weight(double weight) {
  torch::nn::Linear linear(torch::nn::LinearOptions(1, 1).bias(false));
  torch::NoGradGuard no_grad;
  linear->weight.fill_(weight);
  return linear;
}

/// A batch of one row of one number.
inline torch::Tensor input(double value) { return torch::full({1, 1}, value, torch::kFloat); }

/// Multiples of 1/64, as in make_ddp_golden.py and make_join_golden.py.
inline torch::Tensor pattern(int64_t n, int64_t salt) {
  const auto i = torch::arange(n, torch::kInt64);
  return ((i * 37 + salt * 101).remainder(127) - 63).to(torch::kFloat) / 64;
}

}  // namespace ddp::test
