// SGD over ATen's fused kernel.
//
//   ddp::SGD optim(model->parameters(), {.lr = 0.1, .momentum = 0.9});
//
// Drop-in for torch::optim::SGD; the arithmetic is that of Python's `fused=True`.
#pragma once

#include <torch/optim/sgd.h>

#include <vector>

namespace ddp {

/// Defaults are PyTorch's.
struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
};

/// Stochastic gradient descent with momentum (Sutskever et al., 2013, in PyTorch's form).
class SGD : public torch::optim::SGD {
 public:
  explicit SGD(std::vector<torch::Tensor> parameters, SGDOptions options = {});
  explicit SGD(const std::vector<torch::optim::OptimizerParamGroup>& groups, SGDOptions options = {});

  /// One update of every parameter that has a gradient. Throws ConfigError for a sparse gradient.
  torch::Tensor step(LossClosure closure = nullptr) override;
  /// Works on gradients that live in buckets, unlike torch::optim's.
  void zero_grad(bool set_to_none = true);
};

}  // namespace ddp
