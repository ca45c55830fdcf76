// What the tensors of a call have to be, for the backends that are ours. A refusal is a MismatchError that names the rank.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <span>
#include <vector>

#include "shm/collectives.h"

namespace ddp::detail {

/// The operation on plain memory. The mean is a sum, of scaled values or divided afterwards.
shm::Op to_op(const char* operation, const c10d::ReduceOp& op);

class Checks {
 public:
  Checks(int rank, int size) : rank_(rank), size_(size) {}

  /// `buffer` is the memory of `tensor`.
  void reducible(const char* operation, const at::Tensor& tensor, const shm::Buffer& buffer,
                 const c10d::ReduceOp& op) const;
  void one_dtype(const char* operation, std::span<const shm::Buffer> buffers) const;
  void one_per_rank(const char* operation, const std::vector<at::Tensor>& tensors) const;

  /// `tensors`, one for each rank, of the size and dtype of `one`.
  const std::vector<at::Tensor>& like(const char* operation, const std::vector<at::Tensor>& tensors,
                                      const at::Tensor& one) const;
  /// `whole` as equal parts, one for each rank.
  std::vector<at::Tensor> parts_of(const char* operation, const at::Tensor& whole) const;

 private:
  int rank_, size_;
};

}  // namespace ddp::detail
