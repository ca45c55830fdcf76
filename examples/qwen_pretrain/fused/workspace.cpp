#include "workspace.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

namespace qwen::fused {

at::Tensor Workspace::take(at::IntArrayRef sizes, at::ScalarType type) {
  // A buffer first used in inference mode could not be saved for a backward pass later.
  const c10::InferenceMode normal(false);
  const auto bytes = static_cast<size_t>(c10::multiply_integers(sizes)) * c10::elementSize(type);
  const std::lock_guard lock(mutex_);
  // Nobody else can take a second reference to a storage whose only reference is in here.
  const auto found = std::ranges::find_if(
      buffers_, [&](const c10::Storage& buffer) { return buffer.use_count() == 1 && buffer.nbytes() == bytes; });
  if (found != buffers_.end()) return at::empty({0}, type).set_(*found, 0, sizes);
  auto tensor = at::empty(sizes, type);
  buffers_.push_back(tensor.storage());
  return tensor;
}

void Workspace::trim() {
  const std::lock_guard lock(mutex_);
  std::erase_if(buffers_, [](const c10::Storage& buffer) { return buffer.use_count() == 1; });
}

int64_t Workspace::bytes() const {
  const std::lock_guard lock(mutex_);
  int64_t total = 0;
  for (const auto& buffer : buffers_) total += static_cast<int64_t>(buffer.nbytes());
  return total;
}

}  // namespace qwen::fused
