#include "fused_step.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ddp/error.h"
#include "shared_memory_tensors.h"

namespace ddp::detail {

using torch::Tensor;

namespace {

int64_t version_of(const Tensor& tensor) { return tensor.unsafeGetTensorImpl()->version_counter().current_version(); }

void require_usable(const Tensor& parameter, const char* optimizer) {
  const auto refuse = [&](const char* why) { throw ConfigError(fmt::format("[ddp::{}] {}", optimizer, why)); };
  if (parameter.grad().layout() != torch::kStrided) {
    refuse("a gradient is sparse; use torch::optim::SGD for its parameters");
  }
  if (!parameter.is_non_overlapping_and_dense()) {
    refuse("a parameter is a view with gaps in memory, which the fused kernels would overwrite; give a contiguous one");
  }
}

// Without a call into the dispatcher where there is nothing to do.
Tensor in_dtype(const Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : tensor.to(dtype);
}

const Shard* find(const FusedImpl& impl, const Tensor& parameter) {
  return impl.sharded == nullptr ? nullptr : impl.sharded->find(parameter);
}

}  // namespace

Tensor evaluate(const torch::optim::Optimizer::LossClosure& closure) {
  if (closure == nullptr) return {};
  torch::AutoGradMode with_grad(true);
  return closure();
}

void forget_gradients(Groups& groups, bool set_to_none) {
  for (auto& group : groups) {
    for (auto& parameter : group.params()) {
      Tensor& gradient = parameter.mutable_grad();
      if (!gradient.defined()) continue;
      if (set_to_none) {
        gradient.reset();
      } else {
        torch::NoGradGuard no_grad;
        gradient.zero_();
      }
    }
  }
}

void begin_update(const char* optimizer, const Groups& groups, FusedImpl& impl,
                  const std::function<void(Fingerprint&)>& add) {
  bool changed = false;
  for (const auto& group : groups) {
    for (const auto& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      require_usable(parameter, optimizer);
      if (find(impl, parameter) == nullptr) require_own_memory(parameter, optimizer);
      if (impl.keeps_master(parameter)) {
        changed = changed || impl.masters[parameter.unsafeGetTensorImpl()].version != version_of(parameter);
      }
    }
  }
  if (impl.sharded == nullptr) return;
  Fingerprint fingerprint;
  add(fingerprint);
  impl.parameters_changed = impl.sharded->begin(fingerprint, changed);
}

void end_update(FusedImpl& impl) {
  if (impl.sharded != nullptr) impl.sharded->end();
}

Target::Target(FusedImpl& impl, const Tensor& parameter, size_t master_slot)
    : impl_(impl),
      parameter_(parameter),
      shard_(find(impl, parameter)),
      state_dtype_(impl.state_dtype(parameter)),
      master_(impl.keeps_master(parameter) ? &impl.masters[parameter.unsafeGetTensorImpl()] : nullptr),
      own_(shard_ == nullptr ? parameter : shard_->part),
      values_(master_ == nullptr ? own_ : take_master(master_slot)) {}

// A parameter may have been written to since: by a checkpoint, which has the master too, or by hand. Where it is no
// longer its master rounded, the parameter is right.
Tensor Target::take_master(size_t slot) {
  const bool fresh = !master_->values.defined();
  master_->values = hold(slot, master_->values);
  Tensor part = part_of_state(slot, master_->values);
  if (fresh) {
    part.copy_(own_);
  } else if (impl_.parameters_changed || master_->version != version_of(parameter_)) {
    part.copy_(torch::where(part.to(parameter_.scalar_type()) == own_, part, own_.to(torch::kFloat)));
  }
  return part;
}

Tensor Target::hold(size_t slot, const Tensor& value) const {
  if (shard_ != nullptr) return shard_->hold(slot, value);
  if (value.defined()) return laid_out_like(in_dtype(value, state_dtype_), parameter_);
  return torch::zeros_like(parameter_, parameter_.options().dtype(state_dtype_), torch::MemoryFormat::Preserve);
}

Tensor Target::part_of_state(size_t slot, const Tensor& whole) const {
  return shard_ == nullptr ? whole : shard_->state_parts[slot];
}

Tensor Target::gradient() const {
  const Tensor& whole = parameter_.grad();
  return in_dtype(shard_ == nullptr ? laid_out_like(whole, parameter_) : shard_->part_of(whole), state_dtype_);
}

void Target::finish() {
  if (master_ != nullptr) own_.copy_(values_);
  if (shard_ != nullptr) parameter_.unsafeGetTensorImpl()->bump_version();  // other ranks write to it too
  if (master_ != nullptr) master_->version = version_of(parameter_);
}

Tensor laid_out_like(const Tensor& tensor, const Tensor& like) {
  if (tensor.strides() == like.strides() || (tensor.is_contiguous() && like.is_contiguous())) return tensor;
  return torch::empty_like(like, tensor.options(), torch::MemoryFormat::Preserve).copy_(tensor);
}

void require_own_memory(const Tensor& parameter, const char* optimizer) {
  if (!is_shared_tensor(parameter)) return;
  throw ConfigError(fmt::format(
      "[ddp::{}] a parameter [{}] lies in memory that ranks share through the shard_over of another optimizer, and "
      "each of them would update it; give this optimizer shard_over once the other is gone, or give the parameter "
      "memory of its own: p.set_data(p.data().clone())",
      optimizer, fmt::join(parameter.sizes(), ", ")));
}

}  // namespace ddp::detail
