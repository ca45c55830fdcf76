#include "optimizer_layout.h"

#include <fmt/ranges.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>

#include "ddp/error.h"

namespace ddp::detail::layouts {
namespace {

// float32, as Python writes 'step', counts exactly to here.
constexpr int64_t kExactFloat = int64_t{1} << 24;
constexpr double kExactDouble = 9007199254740992.0;  // 2^53

double real(const State& value, std::string_view name) {
  if (value.is_double() || value.is_int()) return value.as_double();
  if (value.is_tensor() && value.as_tensor().numel() == 1 && !value.as_tensor().is_complex()) {
    return value.as_tensor().to(torch::kDouble).item<double>();  // a capturable lr, a step
  }
  fail(fmt::format("{} is a {}, expected a number", name, value.type_name()));
}

std::tuple<double, double> two_numbers(const State& value, std::string_view name) {
  if (!value.is_tuple() && !value.is_list()) fail(fmt::format("{} is a {}, expected a tuple", name, value.type_name()));
  const auto& items = value.is_tuple() ? value.as_tuple() : value.as_list();
  if (items.size() != 2) fail(fmt::format("{} has {} numbers, expected 2", name, items.size()));
  return {real(items[0], name), real(items[1], name)};
}

}  // namespace

void fail(const std::string& reason) { throw CheckpointError("does not fit the optimizer: " + reason); }

const State* find(const State& dict, std::string_view key) {
  const State* value = dict.find(key);
  return value && !value->is_null() ? value : nullptr;
}

bool flag(const State& value, std::string_view name) {
  if (!value.is_bool()) fail(fmt::format("{} is a {}, expected a bool", name, value.type_name()));
  return value.as_bool();
}

torch::Tensor shaped_like(const State& entry, std::string_view key, const torch::Tensor& param) {
  const State* value = find(entry, key);
  if (!value || !value->is_tensor()) fail(fmt::format("{} is {}", key, value ? "no tensor" : "missing"));
  if (value->as_tensor().sizes() != param.sizes()) {
    fail(fmt::format("{} is [{}], the parameter [{}]", key, fmt::join(value->as_tensor().sizes(), ", "),
                     fmt::join(param.sizes(), ", ")));
  }
  return value->as_tensor();
}

torch::Tensor copy_like(const torch::Tensor& value, const torch::Tensor& param, at::ScalarType dtype) {
  return torch::empty_like(param, param.options().dtype(dtype), torch::MemoryFormat::Preserve).copy_(value);
}

namespace {

template <class Options, class ParamState, bool kDecoupled>
class AdamLayout final : public Layout {
 public:
  State write_group(const OptimizerOptions& base) const override {
    const auto& options = static_cast<const Options&>(base);
    const auto [beta1, beta2] = options.betas();
    return State::dict({{"lr", options.lr()},
                        {"betas", State::tuple({beta1, beta2})},
                        {"eps", options.eps()},
                        {"weight_decay", options.weight_decay()},
                        {"amsgrad", options.amsgrad()},
                        {"maximize", false},
                        {"foreach", State()},
                        {"capturable", false},
                        {"differentiable", false},
                        {"fused", State()},
                        {"decoupled_weight_decay", kDecoupled}});
  }

  std::unique_ptr<OptimizerOptions> read_group(const State& group, const OptimizerOptions& mine,
                                               const LoadOptions& load, Remarks& remarks) const override {
    auto options = std::make_unique<Options>(static_cast<const Options&>(mine));
    Chooser choose(group, load, remarks);
    choose("lr", options->lr(), real);
    choose("betas", options->betas(), two_numbers);
    choose("eps", options->eps(), real);
    choose("weight_decay", options->weight_decay(), real);
    choose("amsgrad", options->amsgrad(), flag);
    if (const State* value = find(group, "decoupled_weight_decay");
        value && flag(*value, "decoupled_weight_decay") != kDecoupled) {
      remarks.push_back(kDecoupled ? "the file was written by Adam, this is AdamW"
                                   : "the file was written by AdamW, this is Adam");
    }
    return options;
  }

  void assign(OptimizerOptions& to, const OptimizerOptions& from) const override {
    static_cast<Options&>(to) = static_cast<const Options&>(from);
  }

  State write_entry(const OptimizerParamState& base) const override {
    const auto& state = static_cast<const ParamState&>(base);
    const auto dtype = state.step() <= kExactFloat ? torch::kFloat : torch::kDouble;
    State entry = State::dict({{"step", torch::full({}, static_cast<double>(state.step()), dtype)},
                               {"exp_avg", state.exp_avg()},
                               {"exp_avg_sq", state.exp_avg_sq()}});
    if (state.max_exp_avg_sq().defined()) entry.set("max_exp_avg_sq", state.max_exp_avg_sq());
    return entry;
  }

  std::unique_ptr<OptimizerParamState> read_entry(const State& entry, const torch::Tensor& param,
                                                  const OptimizerOptions& options) const override {
    if (entry.as_dict().empty()) return nullptr;
    auto state = std::make_unique<ParamState>();
    const State* step = find(entry, "step");
    if (!step) fail("step is missing");
    const double count = real(*step, "step");
    if (!(count >= 0 && count <= kExactDouble) || count != std::floor(count)) fail(fmt::format("step is {}", count));
    state->step(static_cast<int64_t>(count));
    state->exp_avg(shaped_like(entry, "exp_avg", param));
    state->exp_avg_sq(shaped_like(entry, "exp_avg_sq", param));
    if (static_cast<const Options&>(options).amsgrad() || find(entry, "max_exp_avg_sq")) {
      state->max_exp_avg_sq(shaped_like(entry, "max_exp_avg_sq", param));
    }
    return state;
  }

  void own(OptimizerParamState& base, const torch::Tensor& param, at::ScalarType dtype) const override {
    auto& state = static_cast<ParamState&>(base);
    state.exp_avg(copy_like(state.exp_avg(), param, dtype));
    state.exp_avg_sq(copy_like(state.exp_avg_sq(), param, dtype));
    if (state.max_exp_avg_sq().defined()) state.max_exp_avg_sq(copy_like(state.max_exp_avg_sq(), param, dtype));
  }
};

class SgdLayout final : public Layout {
  using Options = torch::optim::SGDOptions;
  using ParamState = torch::optim::SGDParamState;

 public:
  State write_group(const OptimizerOptions& base) const override {
    const auto& options = static_cast<const Options&>(base);
    return State::dict({{"lr", options.lr()},
                        {"momentum", options.momentum()},
                        {"dampening", options.dampening()},
                        {"weight_decay", options.weight_decay()},
                        {"nesterov", options.nesterov()},
                        {"maximize", false},
                        {"foreach", State()},
                        {"differentiable", false},
                        {"fused", State()}});
  }

  std::unique_ptr<OptimizerOptions> read_group(const State& group, const OptimizerOptions& mine,
                                               const LoadOptions& load, Remarks& remarks) const override {
    auto options = std::make_unique<Options>(static_cast<const Options&>(mine));
    Chooser choose(group, load, remarks);
    choose("lr", options->lr(), real);
    choose("momentum", options->momentum(), real);
    choose("dampening", options->dampening(), real);
    choose("weight_decay", options->weight_decay(), real);
    choose("nesterov", options->nesterov(), flag);
    return options;
  }

  void assign(OptimizerOptions& to, const OptimizerOptions& from) const override {
    static_cast<Options&>(to) = static_cast<const Options&>(from);
  }

  State write_entry(const OptimizerParamState& base) const override {
    const auto& state = static_cast<const ParamState&>(base);
    if (!state.momentum_buffer().defined()) return {};
    return State::dict({{"momentum_buffer", state.momentum_buffer()}});
  }

  std::unique_ptr<OptimizerParamState> read_entry(const State& entry, const torch::Tensor& param,
                                                  const OptimizerOptions&) const override {
    if (!find(entry, "momentum_buffer")) return nullptr;  // Python may say None
    auto state = std::make_unique<ParamState>();
    state->momentum_buffer(shaped_like(entry, "momentum_buffer", param));
    return state;
  }

  void own(OptimizerParamState& base, const torch::Tensor& param, at::ScalarType dtype) const override {
    auto& state = static_cast<ParamState&>(base);
    state.momentum_buffer(copy_like(state.momentum_buffer(), param, dtype));
  }
};

}  // namespace

const Layout& layout_of(const torch::optim::Optimizer& optimizer) {
  namespace optim = torch::optim;
  static const AdamLayout<optim::AdamWOptions, optim::AdamWParamState, true> adamw;
  static const AdamLayout<optim::AdamOptions, optim::AdamParamState, false> adam;
  static const SgdLayout sgd;
  if (dynamic_cast<const optim::AdamW*>(&optimizer)) return adamw;
  if (dynamic_cast<const optim::Adam*>(&optimizer)) return adam;
  if (dynamic_cast<const optim::SGD*>(&optimizer)) return sgd;
  throw ConfigError(
      "[ddp::state_dict] only Adam, AdamW and SGD have a known layout; give another optimizer the members "
      "`ddp::State state_dict()` and `void load_state_dict(const ddp::State&)`");
}

}  // namespace ddp::detail::layouts
