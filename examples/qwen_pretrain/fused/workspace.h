// Memory for what lives from a forward pass to its backward pass, or not even so long: kept from step to step.
//
//   at::Tensor scores = workspace->take({rows, columns}, at::kFloat);     // not initialised
//
// A buffer is free again when its last tensor is gone, wherever that is: when backward has used it, when the graph is
// dropped without a backward, when a function returns. So any number of forward passes may precede their backward passes.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <mutex>
#include <vector>

namespace qwen::fused {

class Workspace : public torch::CustomClassHolder {
 public:
  /// A contiguous CPU tensor, whose values are whatever was there. Thread-safe.
  at::Tensor take(at::IntArrayRef sizes, at::ScalarType type);

  /// Gives the memory of free buffers back: when shapes change, those of the old shape would stay for ever. Thread-safe.
  void trim();

  /// Bytes of all buffers, free or not. Thread-safe.
  int64_t bytes() const;

 private:
  mutable std::mutex mutex_;
  std::vector<c10::Storage> buffers_;
};

}  // namespace qwen::fused
