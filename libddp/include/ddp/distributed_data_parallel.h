// A model replicated over the ranks of a group: the same weights at the start, averaged gradients after each backward.
//
//   ddp::DistributedDataParallel model(Net(1024), group);
//   auto guard = model.no_sync(!micro.last());             // the state at forward decides
//   (loss_of(model(batch)) / micro.count()).backward();    // averages while backward runs
//   ddp::clip_grad_norm(model, 1.0), optim.step(), model.zero_grad();
//
// Averaged gradients are, bit for bit, those of PyTorch's Python DDP. The engine is libtorch's own c10d::Reducer; on shared
// memory (backend shm) gradients are averaged where they lie when backward ends, without buckets, unless an option below
// needs the reducer.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "ddp/collectives.h"
#include "ddp/for_each_tensor.h"
#include "ddp/process_group.h"

namespace ddp {

/// Averages one flat bucket of gradients over the group; called for each bucket while backward runs. Returns the mean,
/// of the bucket's shape and dtype (it may be the bucket itself, changed in place).
using GradientHook = std::function<torch::Tensor(torch::Tensor bucket, const ProcessGroup& group)>;

/// How gradients travel: as they are, rounded to 16 bits on the wire, or by a function of one's own.
enum class Compression { kNone, kFloat16, kBFloat16 };

/// A bucket size that fits the connection, from a few all_reduces at construction. It may differ from run to run, and with
/// it, at three ranks and more over Gloo, the last bits of the sums.
inline constexpr double kAutoBucketCap = 0;

struct DistributedDataParallelOptions {
  double bucket_cap_mb = 25;            ///< gradients travel, or are summed, in buckets of about this size, in MiB
  double first_bucket_mb = 1;           ///< the first is small, so that communication starts early
  bool gradient_as_bucket_view = true;  ///< where there are buckets
  bool find_unused_parameters = false;  ///< look for parameters that the output does not depend on, each step
  bool static_graph = false;            ///< the same parameters are used, and as often, in each step
  bool broadcast_buffers = true;        ///< rank 0's buffers everywhere before the first forward of each window
  Compression compression = Compression::kNone;
  GradientHook hook = nullptr;  ///< excludes `compression`
};

namespace detail {

/// The part that does not depend on the module's type. One per wrapped model, shared by copies of the wrapper.
class Replica {
 public:
  Replica(std::shared_ptr<torch::nn::Module> module, ProcessGroup group, DistributedDataParallelOptions options);
  ~Replica();

  const ProcessGroup& group() const { return group_; }
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }

  /// Parameters that are trained, each once, with their names.
  const std::vector<std::pair<std::string, torch::Tensor>>& parameters() const { return parameters_; }

  void before_forward();
  void after_forward(const std::vector<torch::Tensor*>& outputs);

  bool sync() const { return sync_; }
  void set_sync(bool sync) { sync_ = sync; }
  void zero_grad();
  void reduce_gradients();
  bool gradients_pending() const;
  void require_synchronised(const char* who) const;

  // For ddp::join. A turn is one synchronised backward, of which the sum is divided by `divisor`.
  void begin_turn(int divisor, int buffers_from);
  void shadow();  // a turn without a batch
  void end_turns();
  void send_buffers(int from);
  int64_t averaged() const;  // synchronised backwards that are done

 private:
  struct Engine;
  bool has_gradients() const;

  std::shared_ptr<torch::nn::Module> module_;
  ProcessGroup group_;
  DistributedDataParallelOptions options_;
  std::vector<std::pair<std::string, torch::Tensor>> parameters_;
  bool sync_ = true;
  bool buffers_due_ = true;
  int buffers_from_ = 0;  // rank
  std::shared_ptr<Engine> engine_;
};

}  // namespace detail

/// While it lives, forward passes do not average gradients: they add up locally, until the next synchronised backward
/// averages the sum. Guards nest; each restores the state that it found, on exceptions too.
class [[nodiscard]] NoSync {
 public:
  NoSync(std::shared_ptr<detail::Replica> replica, bool enabled);
  NoSync(NoSync&& other) noexcept : replica_(std::move(other.replica_)), previous_(other.previous_) {}
  NoSync& operator=(NoSync&&) = delete;
  ~NoSync();

 private:
  std::shared_ptr<detail::Replica> replica_;
  bool previous_;
};

/// `M` is a module holder (TORCH_MODULE) or a shared pointer to a module. A handle: copies share the model.
template <class M>
class DistributedDataParallel {
 public:
  /// Moves `module` to group.device(), checks that all ranks built the same parameters (MismatchError names the first
  /// difference on every rank) and broadcasts rank 0's parameters and buffers. Collective.
  /// Throws ConfigError for a module with no trainable parameter, or options that exclude each other.
  DistributedDataParallel(M module, const ProcessGroup& group, DistributedDataParallelOptions options = {})
      : module_(std::move(module)),
        replica_(std::make_shared<detail::Replica>(pointer(module_), group, std::move(options))) {}

  /// The module's forward, any arguments. A synchronised forward (grad mode on, no `no_sync` guard) makes the backward
  /// of its output average the gradients. That backward throws, before an optimizer could step,
  ///   - Error naming each parameter that got no gradient, unless `find_unused_parameters`;
  ///   - Error when it is the second backward of one forward: its gradients could not be averaged;
  ///   - TimeoutError, PeerError or CommError when the group failed.
  template <class... Args>
  auto forward(Args&&... args) {
    replica_->before_forward();
    auto output = module_->forward(std::forward<Args>(args)...);
    std::vector<torch::Tensor*> tensors;
    visit_tensors(output, [&](torch::Tensor& tensor) { tensors.push_back(&tensor); });
    replica_->after_forward(tensors);
    return output;
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  const M& module() const { return module_; }
  std::shared_ptr<torch::nn::Module> shared_module() const { return replica_->module(); }
  auto* operator->() const { return pointer(module_).get(); }

  const ProcessGroup& group() const { return replica_->group(); }
  const std::shared_ptr<detail::Replica>& replica() const { return replica_; }

  NoSync no_sync(bool enabled = true) const { return NoSync(replica_, enabled); }

  /// Forgets all gradients. Use it instead of torch::optim's, which refuses gradients that live in buckets. Warns once
  /// when gradients of `no_sync` passes are dropped that were never averaged.
  void zero_grad() const { replica_->zero_grad(); }

  /// Averages the gradients as they are now, all at once, in place. Needed only after passes under `no_sync`.
  void reduce_gradients() const { replica_->reduce_gradients(); }

  /// True while gradients of `no_sync` passes wait for a synchronised backward or `reduce_gradients`.
  bool gradients_pending() const { return replica_->gradients_pending(); }

 private:
  template <class T>
  static std::shared_ptr<T> pointer(const std::shared_ptr<T>& module) {
    return module;
  }
  template <class T>
  static std::shared_ptr<T> pointer(const torch::nn::ModuleHolder<T>& module) {
    return module.ptr();
  }

  M module_;
  std::shared_ptr<detail::Replica> replica_;
};

}  // namespace ddp
