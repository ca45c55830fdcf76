// Python's layout of Adam, AdamW and SGD (torch/optim/*.py of 2.15): their groups and their state per parameter.
#pragma once

#include <fmt/format.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <string_view>
#include <tuple>

#include "ddp/stateful.h"

namespace ddp::detail::layouts {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

/// Throws CheckpointError "does not fit the optimizer: ...".
[[noreturn]] void fail(const std::string& reason);

/// The value of a key, null where there is none or it is None.
const State* find(const State& dict, std::string_view key);

/// Throws CheckpointError for another type.
bool flag(const State& value, std::string_view name);

inline std::string text(double value) { return fmt::format("{}", value); }
inline std::string text(bool value) { return value ? "true" : "false"; }
inline std::string text(const std::tuple<double, double>& value) {
  return fmt::format("({}, {})", std::get<0>(value), std::get<1>(value));
}

/// Takes options from a group of the file, by the rule of LoadOptions, and remarks on those that differ.
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

/// The tensor of a key. Throws CheckpointError where it is missing or of another shape than the parameter.
torch::Tensor shaped_like(const State& entry, std::string_view key, const torch::Tensor& param);

/// A copy with the parameter's device and strides, as the optimizer would have made it.
torch::Tensor copy_like(const torch::Tensor& value, const torch::Tensor& param, at::ScalarType dtype);

/// One kind of optimizer: its groups and its state per parameter, to and from Python's dicts.
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
  virtual void own(OptimizerParamState& state, const torch::Tensor& param, at::ScalarType dtype) const = 0;
};

/// Throws ConfigError for another optimizer.
const Layout& layout_of(const torch::optim::Optimizer& optimizer);

}  // namespace ddp::detail::layouts
