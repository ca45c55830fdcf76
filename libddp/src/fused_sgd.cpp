#include "ddp/fused_sgd.h"

#include <ATen/ops/_fused_sgd.h>

#include <map>
#include <utility>

#include "fused_step.h"

namespace ddp {
namespace {

using torch::Tensor;

struct Lists {
  std::vector<Tensor> parameters, gradients, momentum_buffers;
};

torch::optim::SGDOptions to_torch(const SGDOptions& from) {
  return torch::optim::SGDOptions(from.lr)
      .momentum(from.momentum)
      .dampening(from.dampening)
      .weight_decay(from.weight_decay)
      .nesterov(from.nesterov);
}

}  // namespace

SGD::SGD(std::vector<Tensor> parameters, SGDOptions options)
    : torch::optim::SGD(std::move(parameters), to_torch(options)) {}

SGD::SGD(const std::vector<torch::optim::OptimizerParamGroup>& groups, SGDOptions options)
    : torch::optim::SGD(groups, to_torch(options)) {}

Tensor SGD::step(LossClosure closure) {
  Tensor loss = detail::evaluate(closure);
  torch::NoGradGuard no_grad;
  for (auto& group : param_groups_) {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(group.options());
    const bool with_momentum = options.momentum() != 0;
    std::map<detail::Kind, Lists> kinds;  // marked: those whose first step this is
    for (auto& parameter : group.params()) {
      const Tensor& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      detail::require_dense(gradient, "SGD");
      bool first = false;
      Tensor buffer;
      if (with_momentum) {
        auto& slot = state_[parameter.unsafeGetTensorImpl()];
        if (slot == nullptr) slot = std::make_unique<torch::optim::SGDParamState>();
        auto& state = static_cast<torch::optim::SGDParamState&>(*slot);
        first = !state.momentum_buffer().defined();
        if (first) state.momentum_buffer(torch::empty_like(gradient));
        buffer = state.momentum_buffer();
      }
      Lists& lists = kinds[{parameter.device(), parameter.scalar_type(), first}];
      lists.parameters.push_back(parameter);
      lists.gradients.push_back(gradient);
      if (with_momentum) lists.momentum_buffers.push_back(buffer);
    }
    for (auto& [kind, lists] : kinds) {
      at::_fused_sgd_(lists.parameters, lists.gradients, lists.momentum_buffers, options.weight_decay(),
                      options.momentum(), options.lr(), options.dampening(), options.nesterov(), /*maximize=*/false,
                      /*is_first_step=*/kind.mark, /*grad_scale=*/std::nullopt, /*found_inf=*/std::nullopt);
    }
  }
  return loss;
}

void SGD::zero_grad(bool set_to_none) { detail::forget_gradients(param_groups_, set_to_none); }

}  // namespace ddp
