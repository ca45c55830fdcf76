// SGD over ATen's fused kernel.
//
//   ddp::SGD optim(model->parameters(), {.lr = 0.1, .momentum = 0.9});
//
// Drop-in for torch::optim::SGD; the arithmetic is that of Python's `fused=True`.
#pragma once

#include <torch/optim/sgd.h>

#include <optional>
#include <vector>

#include "ddp/fused_optimizer.h"
#include "ddp/process_group.h"

namespace ddp {

/// Defaults are PyTorch's.
struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  /// Ascends instead of descending.
  bool maximize = false;
  /// Updates float32 copies of bfloat16 and float16 parameters, with float32 state, and rounds them into the
  /// parameters: small updates are not lost. 4 bytes per parameter, and 4 instead of 2 for each tensor of state. In
  /// checkpoints as 'master' beside the state; without it there they begin as the parameters.
  bool master_weights = false;
  /// The ranks of one host that share parameters, state and update (see fused_optimizer.h).
  std::optional<ProcessGroup> shard_over = std::nullopt;
};

/// Stochastic gradient descent with momentum (Sutskever et al., 2013, in PyTorch's form).
class SGD : public torch::optim::SGD, public FusedOptimizer {
 public:
  /// With `shard_over` collective; throws MismatchError when the ranks' parameters differ in number, shape or dtype.
  explicit SGD(std::vector<torch::Tensor> parameters, SGDOptions options = {});
  explicit SGD(const std::vector<torch::optim::OptimizerParamGroup>& groups, SGDOptions options = {});

  /// One update of every parameter that has a gradient. Throws as Adam::step.
  torch::Tensor step(LossClosure closure = nullptr) override;
  /// Works on gradients that live in buckets, unlike torch::optim's.
  void zero_grad(bool set_to_none = true);
};

}  // namespace ddp
