#include "ddp/stateful.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <unordered_map>

#include "ddp/error.h"

namespace ddp {
namespace {

constexpr std::string_view kWrapperPrefix = "module.";  // of Python's DistributedDataParallel.state_dict()
constexpr size_t kNamesShown = 20;

std::string text(torch::IntArrayRef sizes) { return fmt::format("[{}]", fmt::join(sizes.begin(), sizes.end(), ", ")); }

std::string list(const std::vector<std::string>& names) {
  const auto shown = std::min(names.size(), kNamesShown);
  std::string text = fmt::format("{}", fmt::join(names.begin(), names.begin() + static_cast<long>(shown), ", "));
  if (shown < names.size()) text += fmt::format(" and {} more", names.size() - shown);
  return text;
}

void collect(const torch::nn::Module& module, const std::string& prefix, State::Dict& into) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    into.items.emplace_back(prefix + item.key(), item.value().detach());
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    into.items.emplace_back(prefix + item.key(), item.value().detach());
  }
  for (const auto& child : module.named_children()) collect(*child.value(), prefix + child.key() + ".", into);
}

struct Pair {
  std::string name;
  torch::Tensor mine, theirs;
};

// The module's tensors beside those of `state`, all of which fit. Throws CheckpointError that lists all that
// do not.
std::vector<Pair> match(const torch::nn::Module& module, const State& state) {
  if (!state.is_dict()) throw CheckpointError(fmt::format("a module's state is a dict, found {}", state.type_name()));
  const State own = state_dict(module);
  const auto has_prefix = [](const auto& item) {
    return item.first.is_string() && item.first.as_string().starts_with(kWrapperPrefix);
  };
  const auto all_prefixed = [&](const State::Pairs& items) {
    return !items.empty() && std::all_of(items.begin(), items.end(), has_prefix);
  };
  const bool strip = all_prefixed(state.as_dict()) && !all_prefixed(own.as_dict());

  std::unordered_map<std::string, torch::Tensor> theirs;
  std::vector<std::string> missing, unexpected, shapes;
  for (const auto& [key, value] : state.as_dict()) {
    const std::string name = key.is_string() ? key.as_string() : std::to_string(key.as_int());
    if (value.is_tensor()) {
      theirs.emplace(strip ? name.substr(kWrapperPrefix.size()) : name, value.as_tensor());
    } else {
      unexpected.push_back(fmt::format("{} (a {})", name, value.type_name()));
    }
  }
  std::vector<Pair> pairs;
  for (const auto& [key, value] : own.as_dict()) {
    const std::string& name = key.as_string();
    const auto found = theirs.find(name);
    if (found == theirs.end()) {
      missing.push_back(name);
      continue;
    }
    if (found->second.sizes() != value.as_tensor().sizes()) {
      shapes.push_back(
          fmt::format("{} {} instead of {}", name, text(found->second.sizes()), text(value.as_tensor().sizes())));
    }
    pairs.push_back({name, value.as_tensor(), found->second});
    theirs.erase(found);
  }
  for (const auto& item : state.as_dict()) {  // in the file's order
    if (!item.first.is_string()) continue;
    const std::string name = strip ? item.first.as_string().substr(kWrapperPrefix.size()) : item.first.as_string();
    if (theirs.contains(name)) unexpected.push_back(name);
  }

  std::string problems;
  auto add = [&](const char* what, const std::vector<std::string>& names) {
    if (!names.empty()) problems += fmt::format("{}{}: {}", problems.empty() ? "" : "; ", what, list(names));
  };
  add("missing", missing);
  add("unexpected", unexpected);
  add("other shapes", shapes);
  if (!problems.empty()) throw CheckpointError("does not fit the module: " + problems);
  return pairs;
}

class ModuleImpl final : public Stateful::Impl {
 public:
  explicit ModuleImpl(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {
    if (!module_) throw ConfigError("[ddp::stateful] the module is an empty pointer");
  }
  State save() const override { return state_dict(*module_); }
  Remarks check(const State& state, const LoadOptions&) const override { return check_state_dict(*module_, state); }
  void load(const State& state, const LoadOptions&) override { load_state_dict(*module_, state); }
  const torch::nn::Module* module() const override { return module_.get(); }

 private:
  std::shared_ptr<torch::nn::Module> module_;
};

class OptimizerImpl final : public Stateful::Impl {
 public:
  explicit OptimizerImpl(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {
    state_dict(optimizer_);  // throws where the type is not known: at once, not at the first save
  }
  State save() const override { return state_dict(optimizer_); }
  Remarks check(const State& state, const LoadOptions& options) const override {
    return check_state_dict(optimizer_, state, options);
  }
  void load(const State& state, const LoadOptions& options) override { load_state_dict(optimizer_, state, options); }
  const torch::optim::Optimizer* optimizer() const override { return &optimizer_; }

 private:
  torch::optim::Optimizer& optimizer_;
};

}  // namespace

State state_dict(const torch::nn::Module& module) {
  State::Dict dict;
  collect(module, "", dict);
  return dict;
}

Remarks check_state_dict(const torch::nn::Module& module, const State& state) {
  std::vector<std::string> converted;
  for (const Pair& pair : match(module, state)) {
    if (pair.mine.scalar_type() == pair.theirs.scalar_type()) continue;
    converted.push_back(fmt::format("{} ({} to {})", pair.name, c10::toString(pair.theirs.scalar_type()),
                                    c10::toString(pair.mine.scalar_type())));
  }
  if (converted.empty()) return {};
  return {"the dtype of the file is converted: " + list(converted)};
}

void load_state_dict(torch::nn::Module& module, const State& state) {
  torch::NoGradGuard no_grad;
  for (Pair& pair : match(module, state)) pair.mine.copy_(pair.theirs);
}

Stateful stateful(std::shared_ptr<torch::nn::Module> module) {
  return Stateful(std::make_shared<ModuleImpl>(std::move(module)));
}
Stateful stateful(torch::optim::Optimizer& optimizer) { return Stateful(std::make_shared<OptimizerImpl>(optimizer)); }

}  // namespace ddp
