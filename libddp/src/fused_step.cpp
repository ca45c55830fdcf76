#include "fused_step.h"

#include <fmt/format.h>

#include "ddp/error.h"

namespace ddp::detail {

using torch::Tensor;

Tensor evaluate(const torch::optim::Optimizer::LossClosure& closure) {
  if (closure == nullptr) return {};
  torch::AutoGradMode with_grad(true);
  return closure();
}

void forget_gradients(std::vector<torch::optim::OptimizerParamGroup>& groups, bool set_to_none) {
  for (auto& group : groups) {
    for (auto& parameter : group.params()) {
      Tensor& gradient = parameter.mutable_grad();
      if (!gradient.defined()) continue;
      if (set_to_none) {
        gradient.reset();
      } else {
        torch::NoGradGuard no_grad;
        gradient.zero_();
      }
    }
  }
}

void require_dense(const Tensor& gradient, const char* optimizer) {
  if (gradient.layout() == torch::kStrided) return;
  throw ConfigError(fmt::format("[ddp::{}] a gradient is sparse; use torch::optim::SGD for its parameters", optimizer));
}

}  // namespace ddp::detail
