#include "ddp/lr_scaling.h"

#include <fmt/format.h>

#include <cmath>

#include "ddp/error.h"

namespace ddp::lr {

double BatchPlan::factor() const {
  if (micro_batch < 1 || accumulation < 1 || world_size < 1 || base_batch < 1) {
    throw ConfigError(fmt::format(
        "[ddp::lr::BatchPlan] all sizes are at least 1, found micro_batch {}, accumulation {}, world_size {}, "
        "base_batch {}",
        micro_batch, accumulation, world_size, base_batch));
  }
  return static_cast<double>(effective()) / static_cast<double>(base_batch);
}

std::string describe(const BatchPlan& plan) {
  return fmt::format("{} rows x {} accumulated x {} rank{} = {} rows per step", plan.micro_batch, plan.accumulation,
                     plan.world_size, plan.world_size == 1 ? "" : "s", plan.effective());
}

namespace detail {
double multiply_linear(double factor) { return factor; }
double multiply_sqrt(double factor) { return std::sqrt(factor); }
double multiply_none(double) { return 1.0; }
}  // namespace detail

Rule rule(std::string_view name) {
  for (const Rule& known : {linear, sqrt, none}) {
    if (known.name() == name) return known;
  }
  throw ConfigError(
      fmt::format("[ddp::lr::rule] there is no scaling rule \"{}\"; the rules are linear, sqrt and none", name));
}

std::string describe(std::string_view rule_name, double base_lr, double lr, const BatchPlan& plan) {
  return fmt::format("learning rate {:.6g} ({} scaling of {:.6g} at batch {}): {}", lr, rule_name, base_lr,
                     plan.base_batch, describe(plan));
}

}  // namespace ddp::lr
