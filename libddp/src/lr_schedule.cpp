#include "ddp/lr_schedule.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "ddp/error.h"
#include "ddp/log.h"

namespace ddp::lr {
namespace {

void require(bool holds, const std::string& curve, const char* what) {
  if (!holds) throw ConfigError(fmt::format("[ddp::lr] {}: {}", curve, what));
}

// How far `step` is on the way to `total`, 0 to 1.
double progress(int64_t step, int64_t total) {
  return static_cast<double>(std::min(step, total)) / static_cast<double>(total);
}

State plan_state(const BatchPlan& plan) {
  return State::dict({{"micro_batch", plan.micro_batch},
                      {"accumulation", plan.accumulation},
                      {"world_size", plan.world_size},
                      {"base_batch", plan.base_batch}});
}

BatchPlan plan_of(const State& state) {
  return {.micro_batch = state.at("micro_batch").as_int(),
          .accumulation = state.at("accumulation").as_int(),
          .world_size = state.at("world_size").as_int(),
          .base_batch = state.at("base_batch").as_int()};
}

}  // namespace

Curve::Curve(std::string name, std::function<double(int64_t)> factor)
    : name_(std::move(name)), factor_(std::move(factor)) {}

double Curve::operator()(int64_t step) const {
  require(step >= 0, name_, "steps are counted from 0, found a negative one");
  return factor_(step);
}

Curve operator*(const Curve& a, const Curve& b) {
  return {a.name_ + " * " + b.name_, [f = a.factor_, g = b.factor_](int64_t step) { return f(step) * g(step); }};
}

Curve constant() {
  return {"constant()", [](int64_t) { return 1.0; }};
}

Curve warmup(int64_t steps) {
  std::string name = fmt::format("warmup({})", steps);
  require(steps >= 0, name, "the number of steps is at least 0");
  if (steps == 0) return constant();
  return {std::move(name), [steps](int64_t step) { return step < steps ? progress(step + 1, steps) : 1.0; }};
}

Curve cosine(int64_t total, double min_factor) {
  std::string name = fmt::format("cosine({}, {})", total, min_factor);
  require(total >= 1, name, "the number of steps is at least 1");
  return {std::move(name), [total, min_factor](int64_t step) {
            if (step >= total) return min_factor;
            double wave = 0.5 * (1.0 + std::cos(std::numbers::pi * progress(step, total)));
            return min_factor + (1.0 - min_factor) * wave;
          }};
}

Curve linear_decay(int64_t total, double min_factor) {
  std::string name = fmt::format("linear_decay({}, {})", total, min_factor);
  require(total >= 1, name, "the number of steps is at least 1");
  return {std::move(name),
          [total, min_factor](int64_t step) { return 1.0 + (min_factor - 1.0) * progress(step, total); }};
}

Curve step_decay(int64_t every, double gamma) {
  std::string name = fmt::format("step_decay({}, {})", every, gamma);
  require(every >= 1, name, "the number of steps is at least 1");
  return {std::move(name), [every, gamma](int64_t step) { return std::pow(gamma, static_cast<double>(step / every)); }};
}

Schedule::Schedule(torch::optim::Optimizer& optimizer, Curve curve, Options options)
    : optimizer_(&optimizer), curve_(std::move(curve)), options_(std::move(options)) {
  for (auto& group : optimizer.param_groups()) base_lrs_.push_back(group.options().get_lr());
  apply();
}

void Schedule::step() {
  ++step_;
  apply();
}

double Schedule::lr() const { return base_lrs_.empty() ? 0.0 : base_lrs_[0] * curve_(step_); }

void Schedule::apply() {
  auto& groups = optimizer_->param_groups();
  if (groups.size() != base_lrs_.size()) {
    throw ConfigError(fmt::format(
        "[ddp::lr::Schedule] the optimizer had {} parameter groups and has {} now; make the schedule after the groups",
        base_lrs_.size(), groups.size()));
  }
  double factor = curve_(step_);
  for (size_t i = 0; i < groups.size(); ++i) groups[i].options().set_lr(base_lrs_[i] * factor);
}

State Schedule::state_dict() const {
  State::List base_lrs{{base_lrs_.begin(), base_lrs_.end()}};
  State state = State::dict({{"step", step_}, {"base_lrs", std::move(base_lrs)}, {"curve", curve_.name()}});
  if (options_.plan) state.set("plan", plan_state(*options_.plan));
  return state;
}

void Schedule::load_state_dict(const State& state) {
  const std::string& curve = state.at("curve").as_string();
  if (curve != curve_.name()) {
    if (!options_.allow_change) {
      throw DataError(
          fmt::format("[ddp::lr::Schedule] the checkpoint was written with the curve {}, this run has {}; use the same "
                      "curve, or set .allow_change = true to go on with this run's",
                      curve, curve_.name()));
    }
    log::info(options_.place, fmt::format("[ddp::lr::Schedule] the curve was {} and is {} now", curve, curve_.name()));
  }

  std::vector<double> base_lrs;
  for (const State& lr : state.at("base_lrs").as_list()) base_lrs.push_back(lr.as_double());
  if (base_lrs.size() != base_lrs_.size()) {
    throw DataError(fmt::format("[ddp::lr::Schedule] the checkpoint has {} parameter groups, the optimizer {}",
                                base_lrs.size(), base_lrs_.size()));
  }
  int64_t step = state.at("step").as_int();
  if (step < 0) throw DataError(fmt::format("[ddp::lr::Schedule] the checkpoint's step is {}", step));

  const State* plan = state.find("plan");
  if (plan && options_.plan && plan_of(*plan).effective() != options_.plan->effective()) {
    log::info(options_.place, fmt::format("[ddp::lr::Schedule] the batch was {} and is {} now",
                                          describe(plan_of(*plan)), describe(*options_.plan)));
  }
  if (base_lrs != base_lrs_) {
    log::info(options_.place, fmt::format("[ddp::lr::Schedule] the base learning rate was {:.6g} and is {:.6g} in this "
                                          "run; going on with {}",
                                          fmt::join(base_lrs, ", "), fmt::join(base_lrs_, ", "),
                                          options_.allow_change ? "this run's" : "the checkpoint's"));
    if (!options_.allow_change) base_lrs_ = std::move(base_lrs);
  }
  step_ = step;
  apply();
}

}  // namespace ddp::lr
