// Arithmetic on rows of numbers, compiled once for each instruction set and chosen when the program runs.
//
//   const auto& kernels = qwen::fused::rows<float>();
//   kernels.swiglu(count, gate, up, y);                       // y = silu(gate) * up
//
// Nothing here knows torch: an inline function of its headers, compiled for AVX-512, could be the one that the linker
// keeps for the whole program. All arithmetic is in float32 whatever T is, and no sum depends on the number of threads.
#pragma once

#include <cstdint>
#include <vector>

namespace qwen::fused {

/// A bfloat16 by its bits, laid out as at::BFloat16.
struct Bits16 {
  uint16_t bits;
};

/// `T` is float or Bits16. Matrices are row-major; a `stride` is the distance of two rows, in elements. A kernel may
/// have its output where an input of the same type lies, where that is said.
template <class T>
struct RowKernels {
  /// y = x * inverse * weight with inverse = 1 / sqrt(mean(x^2) + eps), one for each row (Zhang and Sennrich, 2019).
  /// x * inverse is rounded to T first, as the plain model does.
  void (*rms_norm)(int64_t rows, int64_t size, float eps, const T* x, const T* weight, T* y, float* inverse);

  /// dx = the gradient through rms_norm, plus `residual` where it is not null; adds to `dweight`.
  void (*rms_norm_backward)(int64_t rows, int64_t size, const T* x, const T* weight, const float* inverse, const T* dy,
                            const T* residual, T* dx, float* dweight);

  /// y = silu(gate) * up with silu(x) = x / (1 + exp(-x)) (Shazeer, 2020).
  void (*swiglu)(int64_t count, const T* gate, const T* up, T* y);

  /// The gradients through swiglu, and its `y` once more. In place where dy is dup.
  void (*swiglu_backward)(int64_t count, const T* gate, const T* up, const T* dy, T* y, T* dgate, T* dup);

  /// Rotary positions (Su et al., 2021): element i of a head turns with element i + half by the angle whose `cosine`
  /// and `sine` are given as {seq, half}, and by its opposite when `direction` is -1. Row r is at position
  /// (first + r) % seq, and has `heads` heads of 2 * half elements. In place where x is y.
  void (*rotate)(int64_t rows, int64_t heads, int64_t half, int64_t first, int64_t seq, const float* cosine,
                 const float* sine, float direction, const T* x, int64_t x_stride, T* y, int64_t y_stride);
  void (*rotate_wide)(int64_t rows, int64_t heads, int64_t half, int64_t first, int64_t seq, const float* cosine,
                      const float* sine, float direction, const float* x, int64_t x_stride, T* y, int64_t y_stride);

  /// p = exp(scores - their maximum) over the first `seen + r` of the `width` columns of row r, 0 after them;
  /// `log_sum` = log(sum(exp(scores))), `inverse_sum` = 1 / sum(p). In place where scores is p.
  void (*causal_softmax)(int64_t rows, int64_t seen, int64_t width, const float* scores, T* p, float* log_sum,
                         float* inverse_sum);

  /// p = exp(scores - log_sum), dscores = scale * p * (dp - delta), over the same columns, 0 after them. In place where
  /// scores is p, or dp is dscores.
  void (*causal_softmax_backward)(int64_t rows, int64_t seen, int64_t width, float scale, const float* scores,
                                  const float* dp, const float* log_sum, const float* delta, T* p, T* dscores);

  /// sums = the sum of a * b over each row.
  void (*row_dot)(int64_t rows, int64_t size, const T* a, int64_t a_stride, const T* b, int64_t b_stride, float* sums);

  /// y = x * factors, one factor for each row; all 1 where `factors` is null.
  void (*scale_rows)(int64_t rows, int64_t size, const float* factors, const float* x, int64_t x_stride, T* y,
                     int64_t y_stride);

  /// Returns the sum over rows of log(sum(exp(logits))) - logits[target]. Where `gradient` is not null, it becomes
  /// scale * (softmax(logits) - one at target), and `logits` are lost. In place where gradient is logits. Rows whose
  /// target is `ignored` have loss and gradient 0.
  double (*cross_entropy)(int64_t rows, int64_t size, int64_t ignored, float scale, float* logits,
                          const int64_t* targets, T* gradient);
};

/// The kernels of one instruction set.
struct RowSet {
  const char* name;
  const RowKernels<float>* wide;
  const RowKernels<Bits16>* narrow;
};

/// Those that this CPU can run, the fastest first. There is always at least one.
const std::vector<RowSet>& row_sets();

/// The fastest. Thread-safe.
template <class T>
const RowKernels<T>& rows();
template <>
const RowKernels<float>& rows<float>();
template <>
const RowKernels<Bits16>& rows<Bits16>();

}  // namespace qwen::fused
