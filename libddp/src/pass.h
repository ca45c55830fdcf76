// Whether the ranks average the gradients of the same backward.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "ddp/collectives.h"
#include "signature.h"

namespace ddp::detail {

/// Tells the other ranks which backward this one is in. Collective.
class PassCheck {
 public:
  /// Sends; returns at once where the backend allows it. `value` is for the caller's own use.
  PassCheck(const Pass& pass, int64_t value, const ProcessGroup& group);

  /// Each rank's `value`, by rank. Throws MismatchError on all ranks when the passes differ, naming two that do: then a
  /// rank ran a forward that no backward followed, or dropped gradients that it had not averaged.
  std::vector<int64_t> finish();

 private:
  ProcessGroup group_;
  torch::Tensor mine_;
  std::vector<torch::Tensor> everyone_;
  Work work_;
};

}  // namespace ddp::detail
