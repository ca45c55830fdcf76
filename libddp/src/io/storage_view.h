// Tensors over storage that came from a file.
#pragma once

#include <c10/core/Storage.h>
#include <torch/types.h>

#include <vector>

namespace ddp::io {

/// The tensor of these sizes and strides (in elements) that begins `offset` elements into `storage`. Throws
/// DataError when any of its elements would lie outside, for negative numbers and for those that
/// overflow.
torch::Tensor view_storage(const c10::Storage& storage, torch::ScalarType dtype, int64_t offset,
                           const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides);

}  // namespace ddp::io
