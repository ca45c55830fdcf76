#include "backend/checks.h"

#include <fmt/format.h>

#include "backend/plain.h"
#include "shm/reduce.h"

namespace ddp::detail {

using at::Tensor;

shm::Op to_op(const char* operation, const c10d::ReduceOp& op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::AVG:
      return shm::Op::kSum;
    case c10d::ReduceOp::PRODUCT:
      return shm::Op::kProduct;
    case c10d::ReduceOp::MIN:
      return shm::Op::kMin;
    case c10d::ReduceOp::MAX:
      return shm::Op::kMax;
    case c10d::ReduceOp::BAND:
      return shm::Op::kBitAnd;
    case c10d::ReduceOp::BOR:
      return shm::Op::kBitOr;
    case c10d::ReduceOp::BXOR:
      return shm::Op::kBitXor;
    default:
      refuse(operation, "backends shm and shm+gloo know sum, avg, min, max, product and the bitwise operations");
  }
}

void Checks::reducible(const char* operation, const Tensor& tensor, const shm::Buffer& buffer,
                       const c10d::ReduceOp& op) const {
  const bool mean = op == c10d::ReduceOp::AVG;
  const bool complex_fits = !tensor.is_complex() || c10d::isComplexViewAsRealAllowed(op);  // seen as pairs of reals
  if (complex_fits && shm::can_reduce(buffer.dtype, to_op(operation, op)) &&
      !(mean && c10::isIntegralType(buffer.dtype, true))) {
    return;
  }
  refuse(operation, fmt::format("rank {}: {} of {} is not defined; convert the tensor", rank_,
                                mean ? "avg" : to_string(to_op(operation, op)), c10::toString(tensor.scalar_type())));
}

void Checks::one_dtype(const char* operation, std::span<const shm::Buffer> buffers) const {
  for (const shm::Buffer& buffer : buffers) {
    if (buffer.dtype == buffers[0].dtype) continue;
    refuse(operation, fmt::format("rank {}: the tensors are of {} and {}; give those of one dtype", rank_,
                                  c10::toString(buffers[0].dtype), c10::toString(buffer.dtype)));
  }
}

void Checks::one_per_rank(const char* operation, const std::vector<Tensor>& tensors) const {
  if (std::ssize(tensors) == size_) return;
  refuse(operation, fmt::format("rank {}: {} tensors were given; give {}, one per rank", rank_, tensors.size(), size_));
}

const std::vector<Tensor>& Checks::like(const char* operation, const std::vector<Tensor>& tensors,
                                        const Tensor& one) const {
  one_per_rank(operation, tensors);
  for (const Tensor& tensor : tensors) {
    if (tensor.numel() == one.numel() && tensor.scalar_type() == one.scalar_type()) continue;
    refuse(operation,
           fmt::format("rank {}: tensors differ: {} of {} and {} of {}; give equal ones", rank_, tensor.numel(),
                       c10::toString(tensor.scalar_type()), one.numel(), c10::toString(one.scalar_type())));
  }
  return tensors;
}

std::vector<Tensor> Checks::parts_of(const char* operation, const Tensor& whole) const {
  if (whole.is_contiguous() && whole.numel() % size_ == 0) return whole.view({size_, -1}).unbind(0);
  refuse(operation, fmt::format("rank {}: a tensor of {} elements cannot be seen as {} equal parts; give a contiguous "
                                "one of a multiple of {}",
                                rank_, whole.numel(), size_, size_));
}

}  // namespace ddp::detail
