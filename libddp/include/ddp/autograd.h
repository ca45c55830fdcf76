// Collectives that gradients flow through: the backward is the matching collective.
//
//   auto everyone = ddp::autograd::all_gather(features, group);   // loss may use the rows of all ranks
//
// Each rank's loss is taken as one term of their sum over ranks, as in torch.distributed.nn.functional. Called by all
// ranks, and all ranks run backward. Shapes, dtypes and errors as in collectives.h.
#pragma once

#include "ddp/collectives.h"

namespace ddp::autograd {

/// Out of place; sum or avg. Backward: all_reduce of the gradient with the same operation.
torch::Tensor all_reduce(const torch::Tensor& tensor, const ProcessGroup& group, ReduceOp op = ReduceOp::kSum);

/// The tensors of all ranks joined along dimension 0, {size * n, ...} from {n, ...}. Backward: reduce_scatter, sum.
torch::Tensor all_gather(const torch::Tensor& tensor, const ProcessGroup& group);

/// Part `rank` along dimension 0 of the sum or mean. Backward: all_gather (divided by the size for the mean).
torch::Tensor reduce_scatter(const torch::Tensor& tensor, const ProcessGroup& group, ReduceOp op = ReduceOp::kSum);

}  // namespace ddp::autograd
