#include "ddp/fused_sgd.h"

#include <ATen/ops/_fused_sgd.h>

#include <map>
#include <utility>

#include "fused_step.h"

namespace ddp {
namespace {

using detail::Groups;
using detail::Target;
using torch::Tensor;
using ParamState = torch::optim::SGDParamState;

// Of the state that ranks share.
constexpr size_t kMomentum = 0, kMaster = 1;

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

const torch::optim::SGDOptions& options_of(const torch::optim::OptimizerParamGroup& group) {
  return static_cast<const torch::optim::SGDOptions&>(group.options());
}

// What ranks that share an update must agree on.
template <class States>
void add_to(detail::Fingerprint& made, const Groups& groups, const States& states, const FusedOptimizer& optimizer) {
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& options = options_of(groups[g]);
    for (const double value : {options.lr(), options.momentum(), options.dampening(), options.weight_decay()}) {
      made.add(value);
    }
    made.add(int64_t{options.nesterov()}), made.add(int64_t{optimizer.maximizes(g)});
    for (const auto& parameter : groups[g].params()) {
      const auto found = states.find(parameter.unsafeGetTensorImpl());
      const bool has_buffer =
          found != states.end() && static_cast<const ParamState&>(*found->second).momentum_buffer().defined();
      made.add(parameter.grad().defined() ? int64_t{has_buffer} : int64_t{-1});
    }
  }
}

}  // namespace

SGD::SGD(std::vector<Tensor> parameters, SGDOptions options)
    : SGD(Groups{torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(options)) {}

SGD::SGD(const Groups& groups, SGDOptions options)
    : torch::optim::SGD(groups, to_torch(options)), FusedOptimizer(options.maximize, options.master_weights) {
  impl().sharded = detail::ShardedUpdate::make("SGD", param_groups_, options.shard_over,
                                               options.master_weights ? kMaster + 1 : kMaster,
                                               [&](const Tensor& parameter) { return impl().state_dtype(parameter); });
}

Tensor SGD::step(LossClosure closure) {
  Tensor loss = detail::evaluate(closure);
  torch::NoGradGuard no_grad;
  detail::begin_update("SGD", param_groups_, impl(),
                       [&](detail::Fingerprint& made) { add_to(made, param_groups_, state_, *this); });
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    const auto& options = options_of(param_groups_[g]);
    const bool with_momentum = options.momentum() != 0;
    const auto call = [&](const Lists& lists, bool first) {
      at::_fused_sgd_(lists.parameters, lists.gradients, lists.momentum_buffers, options.weight_decay(),
                      options.momentum(), options.lr(), options.dampening(), options.nesterov(), maximizes(g),
                      /*is_first_step=*/first, /*grad_scale=*/std::nullopt, /*found_inf=*/std::nullopt);
    };
    std::map<detail::Kind, Lists> kinds;  // marked: those whose first step this is
    for (auto& parameter : param_groups_[g].params()) {
      if (!parameter.grad().defined()) continue;
      Target target(impl(), parameter, kMaster);
      bool first = false;
      Tensor buffer;
      if (with_momentum) {
        auto& slot = state_[parameter.unsafeGetTensorImpl()];
        if (slot == nullptr) slot = std::make_unique<ParamState>();
        auto& state = static_cast<ParamState&>(*slot);
        first = !state.momentum_buffer().defined();
        state.momentum_buffer(target.hold(kMomentum, state.momentum_buffer()));
        buffer = target.part_of_state(kMomentum, state.momentum_buffer());
      }
      Lists one;  // with a master at once, so that one float32 copy of a gradient lives at a time
      if (!target.is_empty()) {
        Lists& lists = target.has_master() ? one : kinds[{parameter.device(), parameter.scalar_type(), first}];
        lists.parameters.push_back(target.values());
        lists.gradients.push_back(target.gradient());
        if (with_momentum) lists.momentum_buffers.push_back(std::move(buffer));
        if (target.has_master()) call(one, first);
      }
      target.finish();
    }
    for (const auto& [kind, lists] : kinds) call(lists, kind.mark);
  }
  detail::end_update(impl());
  return loss;
}

void SGD::zero_grad(bool set_to_none) { detail::forget_gradients(param_groups_, set_to_none); }

}  // namespace ddp
