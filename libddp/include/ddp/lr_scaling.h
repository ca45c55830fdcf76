// The learning rate as a function of the batch size: linear, square root or none, and one's own rules.
//
//   double lr = ddp::lr::linear(3e-4, group);                    // times the world size
//   ddp::lr::BatchPlan plan{.micro_batch = 256, .accumulation = 2, .world_size = 2, .base_batch = 256};
//   double lr = ddp::lr::sqrt(0.1, plan);                        // 0.1 * sqrt(1024 / 256) = 0.2
//   ddp::log::info(group, ddp::lr::describe(ddp::lr::sqrt, 0.1, plan));
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

#include "ddp/place.h"

namespace ddp::lr {

/// Everything that enters a scaling rule, written out.
struct BatchPlan {
  int64_t micro_batch = 1;   ///< rows of one forward pass on one rank
  int64_t accumulation = 1;  ///< forward passes per optimizer step
  int64_t world_size = 1;
  int64_t base_batch = 1;  ///< the batch for which the base learning rate was found

  /// Rows per optimizer step over all ranks.
  int64_t effective() const { return micro_batch * accumulation * world_size; }
  /// effective() / base_batch. Throws ConfigError when one of the four is below 1.
  double factor() const;

  friend bool operator==(const BatchPlan&, const BatchPlan&) = default;
};

/// "256 rows x 2 accumulated x 2 ranks = 1024 rows per step".
std::string describe(const BatchPlan& plan);

/// A scaling rule: a name, and what `factor` times the batch makes of a learning rate. A type of one's own that has
/// these two works wherever a rule is asked for.
template <class P>
concept ScalingPolicy = requires(const P& policy, double factor) {
  { policy.name() } -> std::convertible_to<std::string_view>;
  { policy.multiplier(factor) } -> std::convertible_to<double>;
};

/// The learning rate for `plan`.
double scale(const ScalingPolicy auto& policy, double base_lr, const BatchPlan& plan) {
  return base_lr * policy.multiplier(plan.factor());
}

/// A rule from a name and a pure function.
class Rule {
 public:
  constexpr Rule(std::string_view name, double (*multiplier)(double factor)) : name_(name), multiplier_(multiplier) {}

  constexpr std::string_view name() const { return name_; }
  double multiplier(double factor) const { return multiplier_(factor); }

  double operator()(double base_lr, const BatchPlan& plan) const { return scale(*this, base_lr, plan); }
  /// The base learning rate was found for one rank with the same batch per rank.
  double operator()(double base_lr, const Place& place) const {
    return scale(*this, base_lr, BatchPlan{.world_size = place.size});
  }

 private:
  std::string_view name_;
  double (*multiplier_)(double);
};

namespace detail {
double multiply_linear(double factor);
double multiply_sqrt(double factor);
double multiply_none(double factor);
}  // namespace detail

/// Proportional to the batch: Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.1. Meant together with a
/// warm-up (section 2.2).
inline constexpr Rule linear("linear", detail::multiply_linear);
/// With the root of the batch, which keeps the variance of the update: Krizhevsky 2014, "One weird trick for
/// parallelizing convolutional neural networks", section 5. Usual for Adam.
inline constexpr Rule sqrt("sqrt", detail::multiply_sqrt);
/// The base learning rate as it is.
inline constexpr Rule none("none", detail::multiply_none);

/// The rule called "linear", "sqrt" or "none". Throws ConfigError for another name.
Rule rule(std::string_view name);

/// One line for the log: rule, batch and both learning rates.
std::string describe(std::string_view rule_name, double base_lr, double lr, const BatchPlan& plan);
std::string describe(const ScalingPolicy auto& policy, double base_lr, const BatchPlan& plan) {
  return describe(policy.name(), base_lr, scale(policy, base_lr, plan), plan);
}

}  // namespace ddp::lr
