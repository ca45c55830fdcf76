#include "io/storage_view.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/types.h>

#include "ddp/error.h"

namespace ddp::io {
namespace {

constexpr size_t kMaxDimensions = 64;
constexpr int64_t kWidestElement = 16;  // complex128: no copy's size in bytes may overflow

bool fits(int64_t offset, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, uint64_t available) {
  if (offset < 0 || sizes.size() != strides.size() || sizes.size() > kMaxDimensions) return false;
  int64_t last = offset, elements = 1, bytes = 0;
  bool overflow = false;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] < 0 || strides[i] < 0) return false;
    int64_t reach = 0;
    overflow |= __builtin_mul_overflow(elements, sizes[i], &elements);
    overflow |= __builtin_mul_overflow(sizes[i] > 0 ? sizes[i] - 1 : 0, strides[i], &reach);
    overflow |= __builtin_add_overflow(last, reach, &last);
  }
  overflow |= __builtin_mul_overflow(elements, kWidestElement, &bytes);
  if (overflow) return false;
  // A view of no elements reads nothing; PyTorch writes such views with offsets past the end.
  return elements == 0 || static_cast<uint64_t>(last) < available;
}

}  // namespace

torch::Tensor view_storage(const c10::Storage& storage, torch::ScalarType dtype, int64_t offset,
                           const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  const uint64_t available = storage.nbytes() / c10::elementSize(dtype);
  if (!fits(offset, sizes, strides, available)) {
    throw DataError(
        fmt::format("a tensor of sizes [{}], strides [{}] at offset {} does not fit its storage of {} elements",
                    fmt::join(sizes, ", "), fmt::join(strides, ", "), offset, available));
  }
  return torch::empty({0}, torch::dtype(dtype)).set_(storage, offset, sizes, strides);
}

}  // namespace ddp::io
