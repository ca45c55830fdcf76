// What can be saved and resumed: modules, optimizers, and objects that tell their state.
//
//   ddp::State weights = ddp::state_dict(*model);                // names and order as in Python
//   ddp::load_state_dict(*optim, ddp::state_dict(*other));       // Adam, AdamW, SGD in Python's layout
//   struct Meter { ddp::State state_dict() const; void load_state_dict(const ddp::State&); };
//   ddp::Stateful any = ddp::stateful(meter);                    // or a module, a wrapper, an optimizer
//
// Loading checks everything before it changes anything. Throws CheckpointError naming what does not fit.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ddp/state.h"

namespace ddp {

/// Rules for loading.
struct LoadOptions {
  /// Learning rate, betas, weight decay and so on come from the file, as in Python; false keeps those of the
  /// program. Either way a remark tells where they differ.
  bool optimizer_options_from_file = true;
};

/// What was noticed and is no error, a line each: "lr 0.1 of the file replaces 0.001".
using Remarks = std::vector<std::string>;

/// Parameters and buffers by name: a module's parameters, its buffers, then its children, as Python orders
/// them. The tensors are the module's own, not copies.
State state_dict(const torch::nn::Module& module);
/// Whether `load_state_dict` would work: names (all of them may begin with "module.") and shapes are equal.
Remarks check_state_dict(const torch::nn::Module& module, const State& state);
/// Copies the values in, into the dtype and onto the device of each parameter.
void load_state_dict(torch::nn::Module& module, const State& state);

/// {'state': {0: {'step', 'exp_avg', ...}, ...}, 'param_groups': [...]} as Python's optimizer of the same
/// name writes it; what C++ does not have (foreach, fused, ...) has Python's default. Parameters are numbered
/// through all groups. Throws ConfigError for another optimizer than Adam, AdamW, SGD and what derives from
/// them.
State state_dict(const torch::optim::Optimizer& optimizer);
Remarks check_state_dict(const torch::optim::Optimizer& optimizer, const State& state, const LoadOptions& options = {});
/// Reads files of Python and of older versions of it: a missing option keeps the program's value, 'step' may
/// be a number. State becomes tensors of each parameter's dtype, device and strides.
void load_state_dict(torch::optim::Optimizer& optimizer, const State& state, const LoadOptions& options = {});

/// A handle to something that is tracked. It refers to the object, which must outlive it; modules it keeps
/// alive.
class Stateful {
 public:
  class Impl {
   public:
    virtual ~Impl() = default;
    virtual State save() const = 0;
    virtual Remarks check(const State& state, const LoadOptions& options) const = 0;
    virtual void load(const State& state, const LoadOptions& options) = 0;
    virtual const torch::nn::Module* module() const { return nullptr; }
    virtual const torch::optim::Optimizer* optimizer() const { return nullptr; }
  };

  explicit Stateful(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

  State save() const { return impl_->save(); }
  /// Objects that tell their own state are not checked: their `load` may still throw.
  Remarks check(const State& state, const LoadOptions& options = {}) const { return impl_->check(state, options); }
  void load(const State& state, const LoadOptions& options = {}) const { impl_->load(state, options); }

  /// The module or optimizer behind it, nullptr for anything else.
  const torch::nn::Module* module() const { return impl_->module(); }
  const torch::optim::Optimizer* optimizer() const { return impl_->optimizer(); }

 private:
  std::shared_ptr<Impl> impl_;
};

/// Throws ConfigError for an empty pointer.
Stateful stateful(std::shared_ptr<torch::nn::Module> module);
/// Throws ConfigError for an optimizer whose layout is not known (see `state_dict`).
Stateful stateful(torch::optim::Optimizer& optimizer);

namespace detail {

template <class T>
concept TellsState = requires(T& object, const State& state) {
  { object.state_dict() } -> std::convertible_to<State>;
  object.load_state_dict(state);
};

template <class T>
concept WrapsModule = requires(T& object) {
  { object.shared_module() } -> std::convertible_to<std::shared_ptr<torch::nn::Module>>;
};

template <class T>
concept HoldsModule = requires(T& object) {
  { object.is_empty() } -> std::convertible_to<bool>;
  { object.ptr() } -> std::convertible_to<std::shared_ptr<torch::nn::Module>>;
};

template <class T>
class ObjectImpl final : public Stateful::Impl {
 public:
  explicit ObjectImpl(T& object) : object_(object) {}
  State save() const override { return object_.state_dict(); }
  Remarks check(const State&, const LoadOptions&) const override { return {}; }
  void load(const State& state, const LoadOptions&) override { object_.load_state_dict(state); }

 private:
  T& object_;
};

}  // namespace detail

/// From a wrapper such as DistributedDataParallel, a module holder, a shared pointer to a module, a module,
/// an optimizer, or an object with `State state_dict()` and `load_state_dict(const State&)`.
template <class T>
Stateful stateful(T& object) {
  if constexpr (detail::WrapsModule<T>) {
    return stateful(std::shared_ptr<torch::nn::Module>(object.shared_module()));
  } else if constexpr (detail::HoldsModule<T>) {
    return stateful(std::shared_ptr<torch::nn::Module>(object.is_empty() ? nullptr : object.ptr()));
  } else if constexpr (std::is_convertible_v<T&, std::shared_ptr<torch::nn::Module>>) {
    return stateful(std::shared_ptr<torch::nn::Module>(object));
  } else if constexpr (std::is_base_of_v<torch::nn::Module, T>) {
    return stateful(std::shared_ptr<torch::nn::Module>(std::shared_ptr<void>(), &object));
  } else if constexpr (detail::TellsState<T>) {
    return Stateful(std::make_shared<detail::ObjectImpl<T>>(object));
  } else {
    static_assert(std::is_base_of_v<torch::optim::Optimizer, T>,
                  "ddp: to be tracked, an object is a module, a wrapper of one or an optimizer, or it has "
                  "`ddp::State state_dict()` and `void load_state_dict(const ddp::State&)`");
    return stateful(static_cast<torch::optim::Optimizer&>(object));
  }
}

}  // namespace ddp
