// Whether the ranks wrap the same model in the same way.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <string>
#include <utility>
#include <vector>

#include "ddp/distributed_data_parallel.h"

namespace ddp::detail {

/// Throws MismatchError on all ranks, naming the first difference: number, order, name, shape or dtype of what is
/// trained and of the buffers, then options that decide which messages are sent. Collective.
void require_same_model(const std::vector<std::pair<std::string, torch::Tensor>>& parameters,
                        const torch::nn::Module& module, const DistributedDataParallelOptions& options,
                        const ProcessGroup& group);

}  // namespace ddp::detail
