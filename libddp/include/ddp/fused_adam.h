// Adam and AdamW over ATen's fused kernels: one pass over the weights, on CPU and CUDA.
//
//   ddp::AdamW optim(model->parameters(), {.lr = 3e-4, .weight_decay = 0.01});
//   optim.step();
//   ddp::AdamW shared(model->parameters(), {.lr = 3e-4, .shard_over = group});   // once per host: fused_optimizer.h
//
// Drop-in for torch::optim: the same base class, parameter groups, state and checkpoints; the arithmetic is that of
// Python's `fused=True`.
#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <optional>
#include <tuple>
#include <vector>

#include "ddp/fused_optimizer.h"
#include "ddp/process_group.h"

namespace ddp {

/// Defaults are PyTorch's.
struct AdamOptions {
  double lr = 1e-3;
  std::tuple<double, double> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  bool amsgrad = false;
  /// Ascends instead of descending.
  bool maximize = false;
  /// Updates float32 copies of bfloat16 and float16 parameters, with float32 state, and rounds them into the
  /// parameters: small updates are not lost. 4 bytes per parameter, and 4 instead of 2 for each tensor of state. In
  /// checkpoints as 'master' beside the state; without it there they begin as the parameters.
  bool master_weights = false;
  /// The ranks of one host that share parameters, state and update (see fused_optimizer.h).
  std::optional<ProcessGroup> shard_over = std::nullopt;
};
struct AdamWOptions {
  double lr = 1e-3;
  std::tuple<double, double> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool amsgrad = false;
  // As AdamOptions'.
  bool maximize = false;
  bool master_weights = false;
  std::optional<ProcessGroup> shard_over = std::nullopt;
};

/// Adam with weight decay as an L2 term (Kingma and Ba, 2015).
class Adam : public torch::optim::Adam, public FusedOptimizer {
 public:
  /// With `shard_over` collective; throws MismatchError when the ranks' parameters differ in number, shape or dtype.
  explicit Adam(std::vector<torch::Tensor> parameters, AdamOptions options = {});
  explicit Adam(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamOptions options = {});

  /// One update of every parameter that has a gradient. Throws ConfigError for a sparse gradient and for a parameter
  /// that is a view with gaps. With `shard_over` collective: throws MismatchError when the ranks' gradients, options
  /// or step counts do not fit each other, and as the collectives do; ConfigError when a parameter was moved.
  torch::Tensor step(LossClosure closure = nullptr) override;
  /// Works on gradients that live in buckets, unlike torch::optim's.
  void zero_grad(bool set_to_none = true);
};

/// Adam with decoupled weight decay (Loshchilov and Hutter, 2019).
class AdamW : public torch::optim::AdamW, public FusedOptimizer {
 public:
  /// As Adam::Adam.
  explicit AdamW(std::vector<torch::Tensor> parameters, AdamWOptions options = {});
  explicit AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamWOptions options = {});

  /// As Adam::step.
  torch::Tensor step(LossClosure closure = nullptr) override;
  /// As Adam::zero_grad.
  void zero_grad(bool set_to_none = true);
};

}  // namespace ddp
