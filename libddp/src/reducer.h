// The one place that constructs c10d::Reducer, whose constructor changes between libtorch versions, and the gradient
// hooks that it takes.
#pragma once

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ddp/distributed_data_parallel.h"

namespace ddp::detail {

/// A reducer over `parameters` as PyTorch's Python wrapper makes it: the same initial buckets, so the same bits.
std::shared_ptr<c10d::Reducer> make_reducer(const std::vector<std::pair<std::string, torch::Tensor>>& parameters,
                                            const std::vector<bool>& expect_sparse, const ProcessGroup& group,
                                            const DistributedDataParallelOptions& options);

/// What the sum of gradients is divided by in the backwards to come; 0: by the number of ranks.
void set_divisor(c10d::Reducer& reducer, int divisor);

/// The parameters that the backward which just ended left without a gradient, as "a.weight, b.weight"; "" when it reached
/// all. `names` are by the reducer's index.
std::string names_without_gradient(c10d::Reducer& reducer, const std::vector<std::string>& names);

}  // namespace ddp::detail
