// What the fused optimizers share: an update of each parameter that has a gradient, of the whole of it or of this
// rank's part, of itself or of its float32 master.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "sharded_update.h"

namespace ddp::detail {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

/// What a FusedOptimizer keeps.
struct FusedImpl {
  struct Master {
    torch::Tensor values;  // float32
    int64_t version = -1;  // of the parameter when its values were last those of the master
  };

  FusedImpl(bool maximize, bool master_weights) : maximize(maximize), master_weights(master_weights) {}

  bool keeps_master(const torch::Tensor& parameter) const {
    const auto dtype = parameter.scalar_type();
    return master_weights && (dtype == torch::kBFloat16 || dtype == torch::kHalf);
  }
  at::ScalarType state_dtype(const torch::Tensor& parameter) const {
    return keeps_master(parameter) ? torch::kFloat : parameter.scalar_type();
  }

  const bool maximize, master_weights;
  std::vector<bool> maximize_by_group;  // shorter than the groups: `maximize` for the rest
  std::unordered_map<const c10::TensorImpl*, Master> masters;
  std::unique_ptr<ShardedUpdate> sharded;  // null where each rank updates all
  bool parameters_changed = false;         // on some rank since the last step, where a master must hear of it
};

/// Runs a closure with gradients on; an undefined tensor where there is none.
torch::Tensor evaluate(const torch::optim::Optimizer::LossClosure& closure);

/// Drops or clears the gradients, also those that are views into buckets.
void forget_gradients(Groups& groups, bool set_to_none);

/// Before an update: throws ConfigError for gradients and parameters that the kernels cannot take, and lets ranks
/// that share the update meet; `add` adds to the fingerprint what they must agree on.
void begin_update(const char* optimizer, const Groups& groups, FusedImpl& impl,
                  const std::function<void(Fingerprint&)>& add);
/// After it.
void end_update(FusedImpl& impl);

/// Orders tensors by what one call of a kernel takes: one device, one dtype, and a mark of the optimizer's own.
struct Kind {
  c10::Device device;
  at::ScalarType dtype;
  bool mark = false;

  friend bool operator<(const Kind& a, const Kind& b) {
    const auto key = [](const Kind& k) { return std::tuple(k.device.type(), k.device.index(), k.dtype, k.mark); };
    return key(a) < key(b);
  }
};

/// One parameter in an update: what a kernel reads and writes for it.
class Target {
 public:
  /// `master_slot`: the master's among the tensors of state that ranks share.
  Target(FusedImpl& impl, const torch::Tensor& parameter, size_t master_slot);

  bool has_master() const { return master_ != nullptr; }
  /// Whether other ranks have all of it. Its state is held here too.
  bool is_empty() const { return shard_ != nullptr && shard_->count == 0; }

  /// Where the state of `slot` lies: in `value`, what the optimizer holds, or in other memory that takes its values;
  /// zeros where it is undefined.
  torch::Tensor hold(size_t slot, const torch::Tensor& value) const;
  /// What is updated of it.
  torch::Tensor part_of_state(size_t slot, const torch::Tensor& whole) const;
  torch::Tensor gradient() const;
  const torch::Tensor& values() const { return values_; }

  /// After the kernel, or before it where there is no master.
  void finish();

 private:
  torch::Tensor take_master(size_t slot);

  FusedImpl& impl_;
  const torch::Tensor& parameter_;
  const Shard* const shard_;
  const at::ScalarType state_dtype_;
  FusedImpl::Master* const master_;
  const torch::Tensor own_;  // of the parameter itself
  torch::Tensor values_;
};

/// `tensor` with the strides of `like`, of the same shape: itself, or a copy. The kernels read memory from its begin
/// to its end, whatever the strides say.
torch::Tensor laid_out_like(const torch::Tensor& tensor, const torch::Tensor& like);

/// Throws ConfigError where `parameter` lies in memory that ranks share through another optimizer: each of them would
/// update it in full.
void require_own_memory(const torch::Tensor& parameter, const char* optimizer);

}  // namespace ddp::detail
