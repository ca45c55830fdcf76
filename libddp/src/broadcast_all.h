// Many tensors in few messages.
#pragma once

#include <torch/types.h>

#include <string>
#include <utility>
#include <vector>

#include "ddp/process_group.h"

namespace ddp::detail {

/// Each tensor becomes rank `root`'s, whatever its dtype and strides. Small ones share a message. Does not count as a change
/// of the tensors for autograd, as PyTorch's buffer broadcast does not.
void broadcast_all(const std::vector<torch::Tensor>& tensors, const ProcessGroup& group, int root = 0);

/// The gradient of each parameter becomes the mean over ranks. A parameter without a gradient on this rank counts as
/// zero when another rank has one; without any it keeps none.
void average_all(const std::vector<std::pair<std::string, torch::Tensor>>& parameters, const ProcessGroup& group,
                 double message_mb);

}  // namespace ddp::detail
