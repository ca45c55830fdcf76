#include "ddp/fused_optimizer.h"

#include "fused_step.h"

namespace ddp {

FusedOptimizer::FusedOptimizer(bool maximize, bool master_weights)
    : impl_(std::make_unique<detail::FusedImpl>(maximize, master_weights)) {}
FusedOptimizer::~FusedOptimizer() = default;
FusedOptimizer::FusedOptimizer(FusedOptimizer&&) noexcept = default;
FusedOptimizer& FusedOptimizer::operator=(FusedOptimizer&&) noexcept = default;

bool FusedOptimizer::maximizes(size_t group) const {
  const auto& by_group = impl_->maximize_by_group;
  return group < by_group.size() ? by_group[group] : impl_->maximize;
}

void FusedOptimizer::set_maximize(size_t group, bool value) {
  auto& by_group = impl_->maximize_by_group;
  if (group >= by_group.size()) by_group.resize(group + 1, impl_->maximize);
  by_group[group] = value;
}

bool FusedOptimizer::is_sharded() const { return impl_->sharded != nullptr; }

torch::Tensor FusedOptimizer::master(const torch::Tensor& parameter) const {
  const auto found = impl_->masters.find(parameter.unsafeGetTensorImpl());
  return found == impl_->masters.end() ? torch::Tensor() : found->second.values;
}

}  // namespace ddp
