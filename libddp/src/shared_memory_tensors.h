// Tensors that all ranks of one host see in the same memory.
#pragma once

#include <torch/types.h>

#include <string>
#include <vector>

#include "ddp/process_group.h"

namespace ddp::detail {

/// What came of it: a tensor for each that was asked for, or why there are none. The same on all ranks.
struct SharedTensors {
  std::vector<torch::Tensor> tensors;
  std::string why_not;
};

/// Zeroed tensors with the dtypes, sizes and strides of `like`, each with a storage of its own; the memory lives as
/// long as one of them. It has no name, so nothing is left of it when the ranks end, and children made by fork do not
/// have it. The system gives pages when they are first touched, so tensors that are not used cost nothing.
/// Collective, with the same tensors on all ranks. Requires: group.backend() is "shm", and `like` is dense. Throws as
/// the collectives do.
SharedTensors make_shared_tensors(const std::vector<torch::Tensor>& like, const ProcessGroup& group);

/// Whether `tensor` is one of them, or a view of one.
bool is_shared_tensor(const torch::Tensor& tensor);

}  // namespace ddp::detail
