// What ddp::Adam, ddp::AdamW and ddp::SGD have beside torch::optim's: they can maximise, keep float32 masters of 16-bit
// parameters, and let the ranks of one host share the work and the memory of the update.
//
//   ddp::DistributedDataParallel model(Net(1024), group);
//   ddp::AdamW optim(model->parameters(), {.lr = 3e-4, .shard_over = group});   // collective, where a group is given
//   optim.step();                                                               // each rank updates its part
//
// `shard_over` is for ranks that share a host (group.backend() is "shm"). Parameters and optimizer state then lie
// once per host, in memory that all ranks see; each rank updates its part of them, so memory and memory traffic of
// the update are divided by the number of ranks. Results are those without it, bit for bit: gradients are averaged in
// full on each rank as before, so clipping, accumulation, schedules and checkpoints stay as they are. On another
// backend or in a world of one the option changes nothing; rank 0 logs which it was.
//
// What to know with `shard_over`:
// - Construction and `step` are collective. At construction every parameter takes rank 0's values.
// - A write to a parameter on one rank is seen by all. Writing the same values on all ranks (load_state_dict, a
//   checkpoint) is right; `p.mul_(0.5)` on all ranks would halve it once per rank: do it on one, between barriers.
// - All ranks must have gradients for the same parameters, and the same options and step counts: checked in each step,
//   before anything is changed.
// - Move or convert the model before, not after; `step` refuses parameters that lie elsewhere by then.
// - A child made by fork does not have this memory: it must not touch the parameters.
// - Left on each rank, and updated there in full: parameters that share storage with another tensor, and those added
//   later by add_param_group.
// - After PeerError or TimeoutError from `step`, parameters may be between two steps: go on from a checkpoint.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <memory>

namespace ddp {

namespace detail {
struct FusedImpl;
}

/// The part of the fused optimizers that is not torch::optim's. Not thread-safe.
class FusedOptimizer {
 public:
  virtual ~FusedOptimizer();

  /// Whether parameter group `group` is maximised: `maximize` of the options, or what a checkpoint said since.
  bool maximizes(size_t group = 0) const;
  /// For one group, as Python's param_groups[group]['maximize'] = value.
  void set_maximize(size_t group, bool value);

  /// Whether ranks share the update: `shard_over` was given and could be followed. The same on all ranks.
  bool is_sharded() const;

  /// With `master_weights` the float32 master of a bfloat16 or float16 parameter, from its first update or a loaded
  /// checkpoint on. Undefined otherwise.
  torch::Tensor master(const torch::Tensor& parameter) const;

  /// For the library's own sources.
  detail::FusedImpl& impl() const { return *impl_; }

 protected:
  FusedOptimizer(bool maximize, bool master_weights);
  FusedOptimizer(FusedOptimizer&&) noexcept;
  FusedOptimizer& operator=(FusedOptimizer&&) noexcept;

 private:
  std::unique_ptr<detail::FusedImpl> impl_;
};

}  // namespace ddp
