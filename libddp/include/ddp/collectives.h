// Collectives as free functions. Each is called by all ranks of the group, in the same order.
//
//   ddp::all_reduce(t, group);                                    // in place, sum
//   auto work = ddp::all_reduce_async(t, group, ddp::ReduceOp::kAvg);
//   work.wait();                                                  // t holds the mean only after this
//   std::string plan = ddp::broadcast_object(text, group);        // rank 0's text everywhere
//
// Any strides are accepted: a non-contiguous tensor is copied in and back. In a world of one each is the identity.
// Throws MismatchError before communicating when the arguments cannot work, TimeoutError, PeerError or CommError when
// the group failed; after one of those three the group is unusable.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ddp/process_group.h"

namespace ddp {

/// How values of different ranks become one. The bitwise ones are for integers and bool; on bool, sum, max and bor are
/// "or", product, min and band are "and", and avg is refused. avg of integers is refused.
enum class ReduceOp { kSum, kAvg, kMin, kMax, kProduct, kBitAnd, kBitOr, kBitXor };

/// A collective on its way. The tensors it was given may be read or written only after `wait`.
class [[nodiscard]] Work {
 public:
  class Impl;
  Work();  // finished
  explicit Work(std::unique_ptr<Impl> impl);
  Work(Work&&) noexcept;
  Work& operator=(Work&&) noexcept;
  ~Work();  // does not wait: dropping a Work leaves its result undefined

  /// Returns when the result is there (on a GPU: when the current stream is ordered behind it). At most once does work.
  void wait();
  bool is_completed() const;

 private:
  std::unique_ptr<Impl> impl_;
};

/// `tensor` becomes the reduction over all ranks, the same bits on each. Shape and dtype are equal on all ranks.
void all_reduce(torch::Tensor tensor, const ProcessGroup& group, ReduceOp op = ReduceOp::kSum);
Work all_reduce_async(torch::Tensor tensor, const ProcessGroup& group, ReduceOp op = ReduceOp::kSum);

/// `tensor` becomes that of rank `root`.
void broadcast(torch::Tensor tensor, const ProcessGroup& group, int root = 0);
Work broadcast_async(torch::Tensor tensor, const ProcessGroup& group, int root = 0);

/// `tensor` on rank `root` becomes the reduction; elsewhere its content is undefined afterwards.
void reduce(torch::Tensor tensor, const ProcessGroup& group, int root = 0, ReduceOp op = ReduceOp::kSum);
Work reduce_async(torch::Tensor tensor, const ProcessGroup& group, int root = 0, ReduceOp op = ReduceOp::kSum);

/// The tensors of all ranks, by rank. Shape and dtype are equal on all ranks.
std::vector<torch::Tensor> all_gather(const torch::Tensor& tensor, const ProcessGroup& group);
Work all_gather_async(std::vector<torch::Tensor> outputs, const torch::Tensor& tensor, const ProcessGroup& group);

/// As `all_gather` on rank `root`, an empty vector elsewhere.
std::vector<torch::Tensor> gather(const torch::Tensor& tensor, const ProcessGroup& group, int root = 0);
Work gather_async(std::vector<torch::Tensor> outputs, const torch::Tensor& tensor, const ProcessGroup& group,
                  int root = 0);

/// `output` becomes inputs[rank] of rank `root`; `inputs` is empty on the other ranks.
void scatter(torch::Tensor output, const std::vector<torch::Tensor>& inputs, const ProcessGroup& group, int root = 0);
Work scatter_async(torch::Tensor output, const std::vector<torch::Tensor>& inputs, const ProcessGroup& group,
                   int root = 0);

/// Part `rank` of the reduction, cut along dimension 0. Requires: tensor.size(0) is a multiple of group.size().
torch::Tensor reduce_scatter(const torch::Tensor& tensor, const ProcessGroup& group, ReduceOp op = ReduceOp::kSum);
Work reduce_scatter_async(torch::Tensor output, const torch::Tensor& tensor, const ProcessGroup& group,
                          ReduceOp op = ReduceOp::kSum);

/// Part r of `tensor` along dimension 0 goes to rank r; the result holds the parts received, by rank.
/// Requires: tensor.size(0) is a multiple of group.size().
torch::Tensor all_to_all(const torch::Tensor& tensor, const ProcessGroup& group);
Work all_to_all_async(torch::Tensor output, const torch::Tensor& tensor, const ProcessGroup& group);

/// Returns when every rank has called it.
void barrier(const ProcessGroup& group);
Work barrier_async(const ProcessGroup& group);

/// The string (any bytes) of rank `root`, on every rank.
std::string broadcast_object(const std::string& bytes, const ProcessGroup& group, int root = 0);

/// The strings of all ranks, by rank; their lengths may differ.
std::vector<std::string> all_gather_object(const std::string& bytes, const ProcessGroup& group);

/// Agreement on a yes or no, for decisions that must not differ between ranks.
bool any(bool value, const ProcessGroup& group);
bool all(bool value, const ProcessGroup& group);

}  // namespace ddp
