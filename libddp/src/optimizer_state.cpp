// The optimizers' part of stateful.h: Python's layout of Adam, AdamW and SGD (torch/optim/*.py of 2.15).
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <set>

#include "ddp/error.h"
#include "ddp/stateful.h"

namespace ddp {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

// float32, as Python writes 'step', counts exactly to here.
constexpr int64_t kExactFloat = int64_t{1} << 24;
constexpr double kExactDouble = 9007199254740992.0;  // 2^53

[[noreturn]] void fail(const std::string& reason) { throw CheckpointError("does not fit the optimizer: " + reason); }

const State* find(const State& dict, std::string_view key) {
  const State* value = dict.find(key);
  return value && !value->is_null() ? value : nullptr;
}

double real(const State& value, std::string_view name) {
  if (value.is_double() || value.is_int()) return value.as_double();
  if (value.is_tensor() && value.as_tensor().numel() == 1 && !value.as_tensor().is_complex()) {
    return value.as_tensor().to(torch::kDouble).item<double>();  // a capturable lr, a step
  }
  fail(fmt::format("{} is a {}, expected a number", name, value.type_name()));
}

bool flag(const State& value, std::string_view name) {
  if (!value.is_bool()) fail(fmt::format("{} is a {}, expected a bool", name, value.type_name()));
  return value.as_bool();
}

std::tuple<double, double> two_numbers(const State& value, std::string_view name) {
  if (!value.is_tuple() && !value.is_list()) fail(fmt::format("{} is a {}, expected a tuple", name, value.type_name()));
  const auto& items = value.is_tuple() ? value.as_tuple() : value.as_list();
  if (items.size() != 2) fail(fmt::format("{} has {} numbers, expected 2", name, items.size()));
  return {real(items[0], name), real(items[1], name)};
}

std::string text(double value) { return fmt::format("{}", value); }
std::string text(bool value) { return value ? "true" : "false"; }
std::string text(const std::tuple<double, double>& value) {
  return fmt::format("({}, {})", std::get<0>(value), std::get<1>(value));
}

// Takes options from a group of the file, by the rule of LoadOptions, and remarks on those that differ.
class Chooser {
 public:
  Chooser(const State& group, const LoadOptions& options, Remarks& remarks)
      : group_(group), from_file_(options.optimizer_options_from_file), remarks_(remarks) {}

  template <class T, class Read>
  void operator()(std::string_view name, T& mine, Read read) {
    const State* value = find(group_, name);
    if (!value) return;
    const T theirs = read(*value, name);
    if (theirs == mine) return;
    remarks_.push_back(from_file_ ? fmt::format("{} {} of the file replaces {}", name, text(theirs), text(mine))
                                  : fmt::format("{} stays {}, the file has {}", name, text(mine), text(theirs)));
    if (from_file_) mine = theirs;
  }

 private:
  const State& group_;
  bool from_file_;
  Remarks& remarks_;
};

torch::Tensor shaped_like(const State& entry, std::string_view key, const torch::Tensor& param) {
  const State* value = find(entry, key);
  if (!value || !value->is_tensor()) fail(fmt::format("{} is {}", key, value ? "no tensor" : "missing"));
  if (value->as_tensor().sizes() != param.sizes()) {
    fail(fmt::format("{} is [{}], the parameter [{}]", key, fmt::join(value->as_tensor().sizes(), ", "),
                     fmt::join(param.sizes(), ", ")));
  }
  return value->as_tensor();
}

// A copy with the parameter's dtype, device and strides, as the optimizer would have made it.
torch::Tensor copy_like(const torch::Tensor& value, const torch::Tensor& param) {
  return torch::empty_like(param, torch::MemoryFormat::Preserve).copy_(value);
}

// One kind of optimizer: its groups and its state per parameter, to and from Python's dicts.
class Layout {
 public:
  virtual ~Layout() = default;
  virtual State write_group(const OptimizerOptions& options) const = 0;
  virtual std::unique_ptr<OptimizerOptions> read_group(const State& group, const OptimizerOptions& mine,
                                                       const LoadOptions& load, Remarks& remarks) const = 0;
  /// In place: others may hold a reference to a group's options.
  virtual void assign(OptimizerOptions& to, const OptimizerOptions& from) const = 0;
  /// None where Python has no entry.
  virtual State write_entry(const OptimizerParamState& state) const = 0;
  /// Refers to the tensors of `entry`; nothing where there is no state.
  virtual std::unique_ptr<OptimizerParamState> read_entry(const State& entry, const torch::Tensor& param,
                                                          const OptimizerOptions& options) const = 0;
  /// Replaces them by copies of its own.
  virtual void own(OptimizerParamState& state, const torch::Tensor& param) const = 0;
};

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

  void own(OptimizerParamState& base, const torch::Tensor& param) const override {
    auto& state = static_cast<ParamState&>(base);
    state.exp_avg(copy_like(state.exp_avg(), param));
    state.exp_avg_sq(copy_like(state.exp_avg_sq(), param));
    if (state.max_exp_avg_sq().defined()) state.max_exp_avg_sq(copy_like(state.max_exp_avg_sq(), param));
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

  void own(OptimizerParamState& base, const torch::Tensor& param) const override {
    auto& state = static_cast<ParamState&>(base);
    state.momentum_buffer(copy_like(state.momentum_buffer(), param));
  }
};

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

// All that is loaded, before anything is changed.
struct Plan {
  std::vector<std::unique_ptr<OptimizerOptions>> groups;
  std::vector<std::pair<torch::Tensor, std::unique_ptr<OptimizerParamState>>> entries;
  Remarks remarks;
};

// The file's numbers of the parameters of one group, each seen for the first time.
std::vector<int64_t> parameter_numbers(const State& group, size_t expected, size_t number, std::set<int64_t>& seen) {
  const State* params = group.is_dict() ? find(group, "params") : nullptr;
  if (!params || !params->is_list()) fail(fmt::format("param_groups[{}] has no list 'params'", number));
  if (params->as_list().size() != expected) {
    fail(fmt::format("param_groups[{}] has {} parameters, here are {}", number, params->as_list().size(), expected));
  }
  std::vector<int64_t> numbers;
  for (const State& value : params->as_list()) {
    if (!value.is_int() || !seen.insert(value.as_int()).second) {
      fail(fmt::format("param_groups[{}]['params'] holds no distinct ints", number));
    }
    numbers.push_back(value.as_int());
  }
  return numbers;
}

Plan make_plan(const torch::optim::Optimizer& optimizer, const State& state, const LoadOptions& load) {
  const Layout& layout = layout_of(optimizer);
  const State* groups = state.is_dict() ? find(state, "param_groups") : nullptr;
  const State* entries = state.is_dict() ? find(state, "state") : nullptr;
  if (!groups || !groups->is_list() || !entries || !entries->is_dict()) {
    fail("expected a dict with 'state' (a dict) and 'param_groups' (a list)");
  }
  const auto& mine = optimizer.param_groups();
  if (groups->as_list().size() != mine.size()) {
    fail(fmt::format("{} param_groups, here are {}", groups->as_list().size(), mine.size()));
  }
  std::map<int64_t, const State*> by_number;
  for (const auto& [key, entry] : entries->as_dict()) {
    if (!key.is_int() || !entry.is_dict()) fail("'state' holds dicts by the number of their parameter");
    by_number.emplace(key.as_int(), &entry);
  }

  Plan plan;
  std::set<int64_t> seen;
  for (size_t g = 0; g < mine.size(); ++g) {
    const State& group = groups->as_list()[g];
    const auto numbers = parameter_numbers(group, mine[g].params().size(), g, seen);
    if (const State* value = find(group, "maximize"); value && flag(*value, "maximize")) {
      fail(fmt::format("param_groups[{}] maximizes, which C++ optimizers do not", g));
    }
    Remarks remarks;
    plan.groups.push_back(layout.read_group(group, mine[g].options(), load, remarks));
    for (const auto& remark : remarks) {
      plan.remarks.push_back(mine.size() == 1 ? remark : fmt::format("group {}: {}", g, remark));
    }
    for (size_t i = 0; i < numbers.size(); ++i) {
      const auto found = by_number.find(numbers[i]);
      if (found == by_number.end()) continue;
      try {
        const torch::Tensor& param = mine[g].params()[i];
        if (auto entry = layout.read_entry(*found->second, param, *plan.groups.back())) {
          plan.entries.emplace_back(param, std::move(entry));
        }
      } catch (const CheckpointError& error) {
        throw CheckpointError(fmt::format("state of parameter {}: {}", numbers[i], error.what()));
      }
      by_number.erase(found);
    }
  }
  if (!by_number.empty()) fail(fmt::format("'state' has an entry {} that no group names", by_number.begin()->first));
  return plan;
}

}  // namespace

State state_dict(const torch::optim::Optimizer& optimizer) {
  const Layout& layout = layout_of(optimizer);
  State::Dict entries;
  State::List groups;
  int64_t number = 0;
  for (const auto& group : optimizer.param_groups()) {
    State::List params;
    for (const auto& param : group.params()) {
      const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
      State entry = found == optimizer.state().end() ? State() : layout.write_entry(*found->second);
      if (!entry.is_null()) entries.items.emplace_back(number, std::move(entry));
      params.items.push_back(number++);
    }
    State written = layout.write_group(group.options());
    written.set("params", std::move(params));
    groups.items.push_back(std::move(written));
  }
  return State::dict({{"state", std::move(entries)}, {"param_groups", std::move(groups)}});
}

Remarks check_state_dict(const torch::optim::Optimizer& optimizer, const State& state, const LoadOptions& options) {
  return make_plan(optimizer, state, options).remarks;
}

void load_state_dict(torch::optim::Optimizer& optimizer, const State& state, const LoadOptions& options) {
  torch::NoGradGuard no_grad;
  Plan plan = make_plan(optimizer, state, options);
  const Layout& layout = layout_of(optimizer);
  for (auto& [param, entry] : plan.entries) layout.own(*entry, param);
  for (size_t g = 0; g < plan.groups.size(); ++g) layout.assign(optimizer.param_groups()[g].options(), *plan.groups[g]);
  optimizer.state().clear();
  for (auto& [param, entry] : plan.entries) optimizer.state()[param.unsafeGetTensorImpl()] = std::move(entry);
}

}  // namespace ddp
