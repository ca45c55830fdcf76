// RMSNorm of whole tensors, on all threads: the row kernels of rows.h with memory and gradients of the weight.
//
//   rms_norm(x, weight, eps, y, inverse);
//   at::Tensor dweight = rms_norm_backward(x, weight, inverse, dy, residual, dx, workspace);
#pragma once

#include "types.h"
#include "workspace.h"

namespace qwen::fused {

/// `x` and `y` are {rows, size}, contiguous, `inverse` float32 {rows}.
inline void rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, const at::Tensor& y,
                     const at::Tensor& inverse) {
  const int64_t size = x.size(1);
  with_type(x.scalar_type(), [&]<class T>() {
    for_parts(x.size(0), size, [&](int64_t begin, int64_t end) {
      const int64_t at = begin * size;
      rows<T>().rms_norm(end - begin, size, static_cast<float>(eps), data<T>(x) + at, data<T>(weight), data<T>(y) + at,
                         data<float>(inverse) + begin);
    });
  });
}

/// Fills `dx`, the gradient through the norm plus `residual` where that is defined, and returns the weight's.
inline at::Tensor rms_norm_backward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& inverse,
                                    const at::Tensor& dy, const at::Tensor& residual, const at::Tensor& dx,
                                    Workspace& workspace) {
  // Each block of rows sums by itself, so that the sum is the same on any number of threads.
  constexpr int64_t kBlock = 256;
  const int64_t count = x.size(0), size = x.size(1), blocks = (count + kBlock - 1) / kBlock;
  const auto sums = workspace.take({blocks, size}, at::kFloat);
  sums.zero_();
  with_type(x.scalar_type(), [&]<class T>() {
    for_parts(blocks, kBlock * size, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * kBlock, at = first * size;
        rows<T>().rms_norm_backward(std::min(kBlock, count - first), size, data<T>(x) + at, data<T>(weight),
                                    data<float>(inverse) + first, data<T>(dy) + at,
                                    residual.defined() ? data<T>(residual) + at : nullptr, data<T>(dx) + at,
                                    data<float>(sums) + block * size);
      }
    });
  });
  return sums.sum(0).to(weight.scalar_type());
}

}  // namespace qwen::fused
