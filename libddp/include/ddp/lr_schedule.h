// Learning-rate curves: pure functions of the optimizer step that multiply, and `Schedule`, which applies one.
//
//   ddp::lr::Schedule schedule(optim, ddp::lr::warmup(100) * ddp::lr::cosine(10'000));
//   optim.step(), schedule.step();
//   checkpoints.track("lr", schedule);          // refuses a file that was written with another curve
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ddp/lr_scaling.h"
#include "ddp/place.h"
#include "ddp/state.h"

namespace torch::optim {
class Optimizer;
}

namespace ddp::lr {

/// A factor for the learning rate at each optimizer step, counted from 0, with the text that tells it from others.
class Curve {
 public:
  /// One's own curve. `name` holds all its parameters, e.g. "inverse_sqrt(4000)": it is what a resume compares.
  Curve(std::string name, std::function<double(int64_t step)> factor);

  /// Throws ConfigError for a negative step.
  double operator()(int64_t step) const;
  const std::string& name() const { return name_; }

  /// The product of two curves.
  friend Curve operator*(const Curve& a, const Curve& b);

 private:
  std::string name_;
  std::function<double(int64_t)> factor_;
};

/// Always 1.
Curve constant();
/// (step + 1) / steps, then 1: PyTorch's LinearLR(start_factor = 1/steps, total_iters = steps - 1). The first step is
/// never taken with learning rate 0. Requires: steps >= 0; 0 is `constant`.
Curve warmup(int64_t steps);
/// From 1 at step 0 along half a cosine to `min_factor` at step `total`, then `min_factor`: PyTorch's
/// CosineAnnealingLR(T_max = total) with eta_min = min_factor * lr, in closed form and clamped past the end (Loshchilov
/// and Hutter 2016, "SGDR", equation 5). Requires: total >= 1.
Curve cosine(int64_t total, double min_factor = 0);
/// From 1 at step 0 in a straight line to `min_factor` at step `total`, then `min_factor`: PyTorch's
/// LinearLR(1, min_factor, total). Requires: total >= 1.
Curve linear_decay(int64_t total, double min_factor = 0);
/// Times `gamma` after every `every` steps: PyTorch's StepLR. Requires: every >= 1.
Curve step_decay(int64_t every, double gamma = 0.1);

/// How a `Schedule` meets a checkpoint that does not agree with it.
struct ScheduleOptions {
  /// The program's curve and base learning rates replace those of the checkpoint; otherwise another curve is refused
  /// and the checkpoint's base learning rates are kept.
  bool allow_change = false;
  /// Stored with the state, so that a resume with another effective batch is reported.
  std::optional<BatchPlan> plan = std::nullopt;
  /// Whose log lines are written: rank 0's.
  Place place = {};
};

/// Sets the learning rate of each parameter group to base * curve(step), the base being the group's learning rate at
/// construction. Counts optimizer steps: call `step` after each. The optimizer must outlive it. Not thread-safe.
class Schedule {
 public:
  using Options = ScheduleOptions;

  /// Applies step 0 at once.
  Schedule(torch::optim::Optimizer& optimizer, Curve curve, Options options = {});

  void step();

  /// Steps taken: the learning rates in force are those of curve(last_step()).
  int64_t last_step() const { return step_; }
  /// The first group's learning rate in force.
  double lr() const;
  const Curve& curve() const { return curve_; }

  /// Step, base learning rates, the curve's name, and the plan where one was given.
  State state_dict() const;
  /// Goes on at the saved step. Throws DataError that names both curves when they differ (see `allow_change`), or when
  /// the number of parameter groups does. Logs other base learning rates and another effective batch.
  void load_state_dict(const State& state);

 private:
  void apply();

  torch::optim::Optimizer* optimizer_;
  Curve curve_;
  Options options_;
  std::vector<double> base_lrs_;
  int64_t step_ = 0;
};

}  // namespace ddp::lr
