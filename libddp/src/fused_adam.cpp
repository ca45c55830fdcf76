#include "ddp/fused_adam.h"

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>

#include <map>
#include <utility>

#include "fused_step.h"

namespace ddp {
namespace {

using torch::Tensor;

// The lists that one call of a fused kernel takes: parameters of one device and dtype.
struct Lists {
  std::vector<Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs;
  std::vector<float> steps;

  std::vector<Tensor> step_tensors() const { return torch::tensor(steps).to(parameters.front().device()).unbind(); }
};

template <class State, class Slot>
State& state_of(Slot& slot, const Tensor& parameter, bool amsgrad) {
  if (slot == nullptr) {
    auto fresh = std::make_unique<State>();
    fresh->step(0);
    fresh->exp_avg(torch::zeros_like(parameter, torch::MemoryFormat::Preserve));
    fresh->exp_avg_sq(torch::zeros_like(parameter, torch::MemoryFormat::Preserve));
    slot = std::move(fresh);
  }
  auto& state = static_cast<State&>(*slot);
  if (amsgrad && !state.max_exp_avg_sq().defined()) {
    state.max_exp_avg_sq(torch::zeros_like(parameter, torch::MemoryFormat::Preserve));
  }
  return state;
}

template <class Options, class State, class States, class Kernel>
void fused_step(std::vector<torch::optim::OptimizerParamGroup>& groups, States& states, Kernel kernel) {
  torch::NoGradGuard no_grad;
  for (auto& group : groups) {
    const auto& options = static_cast<const Options&>(group.options());
    std::map<detail::Kind, Lists> kinds;
    for (auto& parameter : group.params()) {
      const Tensor& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      detail::require_dense(gradient, "Adam");
      auto& state = state_of<State>(states[parameter.unsafeGetTensorImpl()], parameter, options.amsgrad());
      state.step(state.step() + 1);
      Lists& lists = kinds[{parameter.device(), parameter.scalar_type()}];
      lists.parameters.push_back(parameter);
      lists.gradients.push_back(gradient);
      lists.exp_avgs.push_back(state.exp_avg());
      lists.exp_avg_sqs.push_back(state.exp_avg_sq());
      if (options.amsgrad()) lists.max_exp_avg_sqs.push_back(state.max_exp_avg_sq());
      lists.steps.push_back(static_cast<float>(state.step()));
    }
    for (auto& [kind, lists] : kinds) kernel(lists, lists.step_tensors(), options);
  }
}

template <class Kernel>
auto call_kernel(Kernel kernel) {
  return [kernel](Lists& lists, const std::vector<Tensor>& steps, const auto& options) {
    kernel(lists.parameters, lists.gradients, lists.exp_avgs, lists.exp_avg_sqs, lists.max_exp_avg_sqs, steps,
           options.lr(), std::get<0>(options.betas()), std::get<1>(options.betas()), options.weight_decay(),
           options.eps(), options.amsgrad(), /*maximize=*/false, /*grad_scale=*/std::nullopt,
           /*found_inf=*/std::nullopt);
  };
}

template <class To, class From>
To to_torch(const From& from) {
  return To(from.lr).betas(from.betas).eps(from.eps).weight_decay(from.weight_decay).amsgrad(from.amsgrad);
}

}  // namespace

Adam::Adam(std::vector<Tensor> parameters, AdamOptions options)
    : torch::optim::Adam(std::move(parameters), to_torch<torch::optim::AdamOptions>(options)) {}

Adam::Adam(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamOptions options)
    : torch::optim::Adam(groups, to_torch<torch::optim::AdamOptions>(options)) {}

Tensor Adam::step(LossClosure closure) {
  Tensor loss = detail::evaluate(closure);
  fused_step<torch::optim::AdamOptions, torch::optim::AdamParamState>(
      param_groups_, state_, call_kernel([](auto&&... args) { at::_fused_adam_(args...); }));
  return loss;
}

void Adam::zero_grad(bool set_to_none) { detail::forget_gradients(param_groups_, set_to_none); }

AdamW::AdamW(std::vector<Tensor> parameters, AdamWOptions options)
    : torch::optim::AdamW(std::move(parameters), to_torch<torch::optim::AdamWOptions>(options)) {}

AdamW::AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamWOptions options)
    : torch::optim::AdamW(groups, to_torch<torch::optim::AdamWOptions>(options)) {}

Tensor AdamW::step(LossClosure closure) {
  Tensor loss = detail::evaluate(closure);
  fused_step<torch::optim::AdamWOptions, torch::optim::AdamWParamState>(
      param_groups_, state_, call_kernel([](auto&&... args) { at::_fused_adamw_(args...); }));
  return loss;
}

void AdamW::zero_grad(bool set_to_none) { detail::forget_gradients(param_groups_, set_to_none); }

}  // namespace ddp
