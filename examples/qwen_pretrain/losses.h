// The training loss of every optimizer step, from the first on, also across restarts.
#pragma once

#include <torch/types.h>

#include <vector>

#include "ddp/collectives.h"
#include "ddp/state.h"

namespace qwen {

/// Each step's loss is the mean over its micro-batches and all ranks. Gathered without waiting for the device, averaged
/// over ranks by one all_gather when asked. Tracked by the Checkpointer, so that a resumed run has the whole curve.
class Losses {
 public:
  /// Adds one micro-batch's share of the step's loss (its loss / number of micro-batches).
  void add(const torch::Tensor& share, bool completes_step);

  /// Averages what came since the last call over the ranks. Collective.
  void reduce(const ddp::ProcessGroup& group);

  /// The losses of all steps so far. Requires: `reduce` came after the last `add`.
  const std::vector<double>& values() const { return values_; }
  /// The newest of them, NaN where there is none.
  double last() const;
  /// The mean from step `begin` on, NaN where there is none.
  double mean_since(size_t begin) const;

  ddp::State state_dict() const;
  void load_state_dict(const ddp::State& state);

 private:
  std::vector<double> values_;
  std::vector<torch::Tensor> local_;  // this rank's, of steps that are not reduced yet
  torch::Tensor step_;                // the shares of the step that is under way
};

}  // namespace qwen
