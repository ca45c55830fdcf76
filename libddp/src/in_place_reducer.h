// Averages gradients where they lie, over shared memory, in place of c10d's reducer.
//
// The reducer copies every gradient into a bucket, so that sockets or NCCL get few large messages and work while backward
// goes on. On shared memory messages cost microseconds and nobody else does the work, so the copy is all that a bucket
// would bring: twelve bytes of memory traffic per four of gradient, more than the sum itself. The sums are still those of
// the reducer's buckets, in its layout and order, so the bits are PyTorch's.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ddp/distributed_data_parallel.h"
#include "signature.h"

namespace ddp::detail {

class InPlaceReducer {
 public:
  using Named = std::vector<std::pair<std::string, torch::Tensor>>;

  /// Whether it can serve: shared memory, dense gradients, all parameters used, no hook and no static graph.
  static bool can_serve(const ProcessGroup& group, const DistributedDataParallelOptions& options,
                        const std::vector<bool>& expect_sparse);

  InPlaceReducer(const Named& parameters, ProcessGroup group, const DistributedDataParallelOptions& options);
  ~InPlaceReducer();
  InPlaceReducer(const InPlaceReducer&) = delete;
  InPlaceReducer& operator=(const InPlaceReducer&) = delete;

  /// The begin of a synchronised backward.
  void begin();
  /// Its end: sums the gradients and divides by `divisor`, on all ranks or none. Returns which parameters got no gradient,
  /// "a.weight, b.weight (rank 1)" (the first on no rank), "" when all did; the same on all ranks. Throws MismatchError where
  /// ranks are in different passes.
  std::string average(const Pass& pass, int divisor);

 private:
  std::string parameters_without_gradient();
  void rebuild_layout();

  const Named parameters_;
  const ProcessGroup group_;
  const size_t first_cap_, cap_;  // bytes
  // A shared_ptr or an intrusive_ptr, by libtorch's version.
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<torch::Tensor>()));
  std::vector<std::pair<Accumulator, uintptr_t>> hooks_;
  std::vector<size_t> arrived_;  // parameters, in the order of their gradients in this backward
  torch::Tensor reached_;        // uint8, by parameter
  std::vector<std::vector<size_t>> buckets_;
  bool rebuilt_ = false;
};

}  // namespace ddp::detail
