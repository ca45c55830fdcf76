// An optimizer's update that the ranks of one host share: parameters and state once in memory, each rank updates its
// part.
//
//   auto sharded = ShardedUpdate::make("Adam", param_groups, group, /*slots=*/3, dtype_of);  // null where it cannot be
//   sharded->begin(fingerprint, false);                                              // all ranks are here and agree
//   for (...) { const Shard* shard = sharded->find(parameter); update(shard->part, shard->part_of(gradient), ...); }
//   sharded->end();                                                                   // all parts are written
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "ddp/process_group.h"
#include "fingerprint.h"

namespace ddp::detail {

/// One parameter on shared memory, and this rank's part of it: elements [begin, begin + count) in the order of memory.
struct Shard {
  torch::Tensor whole;  // the parameter's memory
  torch::Tensor part;   // flat; of 0 elements where another rank has it all
  int64_t begin = 0, count = 0;
  std::vector<torch::Tensor> state, state_parts;  // by slot: exp_avg, exp_avg_sq, ...

  /// This rank's part of a tensor of the parameter's shape.
  torch::Tensor part_of(const torch::Tensor& tensor) const;
  /// The shared tensor of `slot`. Where `value`, what the optimizer holds, is another one (it was loaded), its part
  /// is copied in; where it is undefined, zeros.
  const torch::Tensor& hold(size_t slot, const torch::Tensor& value) const;
};

class ShardedUpdate {
 public:
  /// Puts the parameters of `groups` on shared memory, with rank 0's values, and reserves `slots` tensors of state
  /// for each, of the dtype that `state_dtype` says. Null where `over` is none, alone, or no host's, and where no
  /// parameter can be shared. Collective. Throws MismatchError when the ranks' parameters differ.
  static std::unique_ptr<ShardedUpdate> make(const char* optimizer,
                                             const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                             const std::optional<ProcessGroup>& over, size_t slots,
                                             const std::function<at::ScalarType(const torch::Tensor&)>& state_dtype);

  /// Null for a parameter that is not shared. Throws ConfigError when it was moved since.
  const Shard* find(const torch::Tensor& parameter) const;

  /// Returns when all ranks have called it: whether `flag` is set on any. Throws MismatchError on all of them when
  /// their fingerprints differ.
  bool begin(const Fingerprint& fingerprint, bool flag);
  /// Returns when all ranks have called it.
  void end();

 private:
  ShardedUpdate(std::string optimizer, ProcessGroup group);

  const std::string optimizer_;
  const ProcessGroup group_;
  std::unordered_map<const c10::TensorImpl*, Shard> shards_;
  torch::Tensor agreed_;  // int64 [3], kept between steps
};

}  // namespace ddp::detail
