// Adam and AdamW over ATen's fused kernels: one pass over the weights, on CPU and CUDA.
//
//   ddp::AdamW optim(model->parameters(), {.lr = 3e-4, .weight_decay = 0.01});
//   optim.step();
//
// Drop-in for torch::optim: the same base class, parameter groups, state and checkpoints; the arithmetic is that of
// Python's `fused=True`.
#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <tuple>
#include <vector>

namespace ddp {

/// Defaults are PyTorch's.
struct AdamOptions {
  double lr = 1e-3;
  std::tuple<double, double> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  bool amsgrad = false;
};
struct AdamWOptions {
  double lr = 1e-3;
  std::tuple<double, double> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool amsgrad = false;
};

/// Adam with weight decay as an L2 term (Kingma and Ba, 2015).
class Adam : public torch::optim::Adam {
 public:
  explicit Adam(std::vector<torch::Tensor> parameters, AdamOptions options = {});
  explicit Adam(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamOptions options = {});

  /// One update of every parameter that has a gradient. Throws ConfigError for a sparse gradient.
  torch::Tensor step(LossClosure closure = nullptr) override;
  /// Works on gradients that live in buckets, unlike torch::optim's.
  void zero_grad(bool set_to_none = true);
};

/// Adam with decoupled weight decay (Loshchilov and Hutter, 2019).
class AdamW : public torch::optim::AdamW {
 public:
  explicit AdamW(std::vector<torch::Tensor> parameters, AdamWOptions options = {});
  explicit AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamWOptions options = {});

  /// As Adam::step.
  torch::Tensor step(LossClosure closure = nullptr) override;
  /// As Adam::zero_grad.
  void zero_grad(bool set_to_none = true);
};

}  // namespace ddp
