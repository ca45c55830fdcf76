#include "ddp/fused_adam.h"

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>

#include <map>
#include <utility>

#include "fused_step.h"

namespace ddp {
namespace {

using detail::FusedImpl;
using detail::Groups;
using detail::Target;
using torch::Tensor;

// Of the state that ranks share.
constexpr size_t kExpAvg = 0, kExpAvgSq = 1, kMaxExpAvgSq = 2, kMaster = 3;

// The lists that one call of a fused kernel takes: parameters of one device and dtype.
struct Lists {
  std::vector<Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs;
  std::vector<float> steps;

  std::vector<Tensor> step_tensors() const { return torch::tensor(steps).to(parameters.front().device()).unbind(); }
};

// One step of Adam or AdamW. States: by parameter, as torch::optim keeps them.
template <class Options, class State, class States>
class Step {
 public:
  Step(Groups& groups, States& states, const FusedOptimizer& optimizer)
      : groups_(groups), states_(states), optimizer_(optimizer), impl_(optimizer.impl()) {}

  template <class Kernel>
  void run(const char* name, Kernel kernel) {
    torch::NoGradGuard no_grad;
    detail::begin_update(name, groups_, impl_, [&](detail::Fingerprint& made) { add_to(made); });
    for (size_t g = 0; g < groups_.size(); ++g) {
      const auto& options = static_cast<const Options&>(groups_[g].options());
      const auto call = [&](const Lists& lists) {
        kernel(lists.parameters, lists.gradients, lists.exp_avgs, lists.exp_avg_sqs, lists.max_exp_avg_sqs,
               lists.step_tensors(), options.lr(), std::get<0>(options.betas()), std::get<1>(options.betas()),
               options.weight_decay(), options.eps(), options.amsgrad(), optimizer_.maximizes(g),
               /*grad_scale=*/std::nullopt, /*found_inf=*/std::nullopt);
      };
      std::map<detail::Kind, Lists> kinds;
      for (auto& parameter : groups_[g].params()) {
        if (!parameter.grad().defined()) continue;
        Target target(impl_, parameter, kMaster);
        auto& state = state_of(parameter, target, options.amsgrad());
        state.step(state.step() + 1);
        Lists one;  // with a master at once, so that one float32 copy of a gradient lives at a time
        if (!target.is_empty()) {
          Lists& lists = target.has_master() ? one : kinds[{parameter.device(), parameter.scalar_type()}];
          add(target, state, options.amsgrad(), lists);
          if (target.has_master()) call(one);
        }
        target.finish();
      }
      for (const auto& [kind, lists] : kinds) call(lists);
    }
    detail::end_update(impl_);
  }

 private:
  void add_to(detail::Fingerprint& made) const {
    for (size_t g = 0; g < groups_.size(); ++g) {
      const auto& options = static_cast<const Options&>(groups_[g].options());
      for (const double value : {options.lr(), std::get<0>(options.betas()), std::get<1>(options.betas()),
                                 options.weight_decay(), options.eps()}) {
        made.add(value);
      }
      made.add(int64_t{options.amsgrad()}), made.add(int64_t{optimizer_.maximizes(g)});
      for (const auto& parameter : groups_[g].params()) {
        const auto found = states_.find(parameter.unsafeGetTensorImpl());
        const int64_t steps = found == states_.end() ? 0 : static_cast<const State&>(*found->second).step();
        made.add(parameter.grad().defined() ? steps : int64_t{-1});
      }
    }
  }

  State& state_of(const Tensor& parameter, const Target& target, bool amsgrad) {
    auto& slot = states_[parameter.unsafeGetTensorImpl()];
    if (slot == nullptr) {
      auto fresh = std::make_unique<State>();
      fresh->step(0);
      slot = std::move(fresh);
    }
    auto& state = static_cast<State&>(*slot);
    state.exp_avg(target.hold(kExpAvg, state.exp_avg()));
    state.exp_avg_sq(target.hold(kExpAvgSq, state.exp_avg_sq()));
    if (amsgrad) state.max_exp_avg_sq(target.hold(kMaxExpAvgSq, state.max_exp_avg_sq()));
    return state;
  }

  static void add(const Target& target, const State& state, bool amsgrad, Lists& lists) {
    lists.parameters.push_back(target.values());
    lists.gradients.push_back(target.gradient());
    lists.exp_avgs.push_back(target.part_of_state(kExpAvg, state.exp_avg()));
    lists.exp_avg_sqs.push_back(target.part_of_state(kExpAvgSq, state.exp_avg_sq()));
    if (amsgrad) lists.max_exp_avg_sqs.push_back(target.part_of_state(kMaxExpAvgSq, state.max_exp_avg_sq()));
    lists.steps.push_back(static_cast<float>(state.step()));
  }

  Groups& groups_;
  States& states_;
  const FusedOptimizer& optimizer_;
  FusedImpl& impl_;
};

template <class To, class From>
To to_torch(const From& from) {
  return To(from.lr).betas(from.betas).eps(from.eps).weight_decay(from.weight_decay).amsgrad(from.amsgrad);
}

template <class Options>
std::unique_ptr<detail::ShardedUpdate> share(const char* name, const Groups& groups, const FusedImpl& impl,
                                             const Options& options) {
  return detail::ShardedUpdate::make(name, groups, options.shard_over, options.master_weights ? kMaster + 1 : kMaster,
                                     [&](const Tensor& parameter) { return impl.state_dtype(parameter); });
}

}  // namespace

Adam::Adam(std::vector<Tensor> parameters, AdamOptions options)
    : Adam(Groups{torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(options)) {}

Adam::Adam(const Groups& groups, AdamOptions options)
    : torch::optim::Adam(groups, to_torch<torch::optim::AdamOptions>(options)),
      FusedOptimizer(options.maximize, options.master_weights) {
  impl().sharded = share("Adam", param_groups_, impl(), options);
}

Tensor Adam::step(LossClosure closure) {
  Tensor loss = detail::evaluate(closure);
  Step<torch::optim::AdamOptions, torch::optim::AdamParamState, decltype(state_)>(param_groups_, state_, *this)
      .run("Adam", [](auto&&... args) { at::_fused_adam_(args...); });
  return loss;
}

void Adam::zero_grad(bool set_to_none) { detail::forget_gradients(param_groups_, set_to_none); }

AdamW::AdamW(std::vector<Tensor> parameters, AdamWOptions options)
    : AdamW(Groups{torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(options)) {}

AdamW::AdamW(const Groups& groups, AdamWOptions options)
    : torch::optim::AdamW(groups, to_torch<torch::optim::AdamWOptions>(options)),
      FusedOptimizer(options.maximize, options.master_weights) {
  impl().sharded = share("AdamW", param_groups_, impl(), options);
}

Tensor AdamW::step(LossClosure closure) {
  Tensor loss = detail::evaluate(closure);
  Step<torch::optim::AdamWOptions, torch::optim::AdamWParamState, decltype(state_)>(param_groups_, state_, *this)
      .run("AdamW", [](auto&&... args) { at::_fused_adamw_(args...); });
  return loss;
}

void AdamW::zero_grad(bool set_to_none) { detail::forget_gradients(param_groups_, set_to_none); }

}  // namespace ddp
