// A tensor's content as bytes: what travels, is compared or hashed whatever the dtype.
#pragma once

#include <torch/types.h>

namespace ddp::detail {

/// The elements in order, as uint8 of shape {nbytes}: a view where `tensor` is contiguous, otherwise a copy.
inline torch::Tensor bytes_of(const torch::Tensor& tensor) {
  torch::NoGradGuard no_grad;
  const torch::Tensor whole = tensor.detach().resolve_conj().resolve_neg().contiguous();
  // as_strided, not view: one element counts as contiguous with any stride, and view(dtype) insists on 1.
  return whole.as_strided({whole.numel()}, {1}).view(torch::kUInt8);
}

}  // namespace ddp::detail
