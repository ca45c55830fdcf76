// Tensors as the backends can carry them.
#pragma once

#include <torch/types.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "call.h"
#include "ddp/collectives.h"

namespace ddp::detail {

/// A tensor that is reduced: contiguous, of a dtype that every backend knows, and the operation on it.
struct Wire {
  torch::Tensor tensor;
  ReduceOp op;

  c10d::ReduceOp c10d_op() const;
};

/// Shares memory with `tensor` where it can. Throws MismatchError where `op` is not defined.
Wire to_wire(const Call& call, const torch::Tensor& tensor, ReduceOp op);

/// The result for `like`: what came back in `wire`, after `op` of `size` ranks.
torch::Tensor from_wire(const torch::Tensor& wire, const torch::Tensor& like, ReduceOp op, int size);

/// Writes a result, unless it is there already.
void store_result(const torch::Tensor& value, torch::Tensor& tensor);

/// Tensors that only travel do so whatever their dtype: as they are where the backend can compare dtypes over ranks
/// (shm), as bytes where it would refuse some. The content of `tensor`, a view where it is contiguous:
torch::Tensor carried(const torch::Tensor& tensor, const ProcessGroup& group);
/// Room for the same.
torch::Tensor room_for(const torch::Tensor& tensor, const ProcessGroup& group);
/// Unpacks what came.
void unpack(const torch::Tensor& carried, torch::Tensor tensor);

}  // namespace ddp::detail
