// The optimizers' part of stateful.h.
#include <fmt/format.h>

#include <map>
#include <set>
#include <utility>

#include "ddp/error.h"
#include "ddp/fused_optimizer.h"
#include "ddp/stateful.h"
#include "fused_step.h"
#include "optimizer_layout.h"

namespace ddp {
namespace {

using detail::layouts::Chooser;
using detail::layouts::copy_like;
using detail::layouts::fail;
using detail::layouts::find;
using detail::layouts::flag;
using detail::layouts::Layout;
using detail::layouts::layout_of;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

// All that is loaded, before anything is changed.
struct Plan {
  std::vector<std::unique_ptr<OptimizerOptions>> groups;
  std::vector<bool> maximize;  // by group
  std::vector<std::pair<torch::Tensor, std::unique_ptr<OptimizerParamState>>> entries;
  std::vector<std::pair<torch::Tensor, torch::Tensor>> masters;  // parameter, float32 copy
  Remarks remarks;
};

detail::FusedImpl* fused_impl(const torch::optim::Optimizer& optimizer) {
  const auto* fused = dynamic_cast<const FusedOptimizer*>(&optimizer);
  return fused == nullptr ? nullptr : &fused->impl();
}

bool maximizes(const torch::optim::Optimizer& optimizer, size_t group) {
  const auto* fused = dynamic_cast<const FusedOptimizer*>(&optimizer);
  return fused != nullptr && fused->maximizes(group);
}

// Whether a group shall maximise. torch::optim's has no such option, so only the fused ones can follow the file;
// where they may not, state of the other direction is of no use.
bool read_maximize(const torch::optim::Optimizer& optimizer, size_t group, const State& in_file,
                   const LoadOptions& load, Remarks& remarks) {
  bool maximize = maximizes(optimizer, group);
  const State* value = find(in_file, "maximize");
  const bool theirs = value ? flag(*value, "maximize") : maximize;
  if (theirs && !dynamic_cast<const FusedOptimizer*>(&optimizer)) {
    fail(
        fmt::format("param_groups[{}] maximizes, which torch::optim's C++ optimizers do not; use ddp::Adam, ddp::AdamW "
                    "or ddp::SGD",
                    group));
  }
  if (theirs != maximize && !load.optimizer_options_from_file) {
    fail(fmt::format("param_groups[{}] {} and the optimizer {}; make it with {{.maximize = {}}}", group,
                     theirs ? "maximizes" : "minimizes", maximize ? "maximizes" : "minimizes", theirs));
  }
  Chooser(in_file, load, remarks)("maximize", maximize, flag);
  return maximize;
}

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
  bool told = false;
  std::set<int64_t> seen;
  for (size_t g = 0; g < mine.size(); ++g) {
    const State& group = groups->as_list()[g];
    const auto numbers = parameter_numbers(group, mine[g].params().size(), g, seen);
    Remarks remarks;
    plan.groups.push_back(layout.read_group(group, mine[g].options(), load, remarks));
    plan.maximize.push_back(read_maximize(optimizer, g, group, load, remarks));
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
        if (find(*found->second, "master") == nullptr) {
          // none in the file
        } else if (const auto* fused = fused_impl(optimizer); fused != nullptr && fused->keeps_master(param)) {
          plan.masters.emplace_back(param, detail::layouts::shaped_like(*found->second, "master", param));
        } else if (!std::exchange(told, true)) {
          plan.remarks.emplace_back(
              "the float32 masters of the file are not used: the optimizer has no master_weights");
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
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& group = optimizer.param_groups()[g];
    State::List params;
    for (const auto& param : group.params()) {
      const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
      State entry = found == optimizer.state().end() ? State() : layout.write_entry(*found->second);
      if (const auto* fused = dynamic_cast<const FusedOptimizer*>(&optimizer)) {
        if (const auto master = fused->master(param); master.defined()) {
          if (entry.is_null()) entry = State::dict();
          entry.set("master", master);
        }
      }
      if (!entry.is_null()) entries.items.emplace_back(number, std::move(entry));
      params.items.push_back(number++);
    }
    State written = layout.write_group(group.options());
    written.set("maximize", maximizes(optimizer, g));
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
  auto* impl = fused_impl(optimizer);
  for (auto& [param, entry] : plan.entries) {
    layout.own(*entry, param, impl == nullptr ? param.scalar_type() : impl->state_dtype(param));
  }
  for (auto& [param, master] : plan.masters) master = copy_like(master, param, torch::kFloat);
  auto* fused = dynamic_cast<FusedOptimizer*>(&optimizer);
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    layout.assign(optimizer.param_groups()[g].options(), *plan.groups[g]);
    if (fused != nullptr) fused->set_maximize(g, plan.maximize[g]);
  }
  optimizer.state().clear();
  for (auto& [param, entry] : plan.entries) optimizer.state()[param.unsafeGetTensorImpl()] = std::move(entry);
  if (impl == nullptr) return;
  impl->masters.clear();  // the others begin anew as their parameters
  for (auto& [param, master] : plan.masters) impl->masters[param.unsafeGetTensorImpl()].values = std::move(master);
}

}  // namespace ddp
