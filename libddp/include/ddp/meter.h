// Averages and throughput, gathered without waiting for the device and reduced over ranks when read.
//
//   ddp::Meter loss_meter;
//   loss_meter.update(loss, tokens);                       // each step: no host sync
//   double mean = loss_meter.compute(group);               // now and then: one all-reduce, the same value on each rank
//   loss_meter.reset();
#pragma once

#include <torch/types.h>

#include <chrono>
#include <cstdint>

#include "ddp/process_group.h"

namespace ddp {

/// The weighted mean of what all ranks put in: sum of weight * value over sum of weights, in double. Not thread-safe.
class Meter {
 public:
  /// Adds a one-element tensor of any device and floating or integer type; its graph is not kept. Throws ConfigError
  /// for another number of elements or a negative weight.
  void update(const torch::Tensor& value, double weight = 1);
  void update(double value, double weight = 1);

  /// Collective, one all-reduce; waits for the device. NaN when no rank has put anything in.
  double compute(const ProcessGroup& group) const;
  /// This rank's own mean; waits for the device.
  double local() const;

  void reset();

 private:
  torch::Tensor device_sum_;  // of what came as tensors: double, on their device
  double host_sum_ = 0;       // of what came as doubles
  double weight_ = 0;
};

/// Items per second since construction or `reset`, by a monotonic clock. Not thread-safe.
class Throughput {
 public:
  Throughput();

  /// `items` more were done on this rank.
  void add(int64_t items) { items_ += items; }

  /// This rank's rate, 0 before any time has passed.
  double per_second() const;
  /// The sum of all ranks' rates. Collective.
  double per_second(const ProcessGroup& group) const;
  int64_t items() const { return items_; }

  void reset();

 private:
  std::chrono::steady_clock::time_point start_;
  int64_t items_ = 0;
};

}  // namespace ddp
