// Products of matrices that lie inside others: C = alpha A B + beta C, with float32 accumulation and a float32 result.
//
//   gemm<float>(queries, keys, head_dim, scale, {q, stride}, transposed<float>({k, stride}), 0, {scores, keys});
//
// For the many small products of attention, where at::mm would cost as much as the product, and for bfloat16 products
// whose result must not be rounded. Everything else goes through at::mm.
#pragma once

#include <cstdint>

#include "rows.h"

namespace qwen::fused {

/// Row-major; `stride` is the distance of two rows, in elements.
template <class T>
struct Matrix {
  T* data;
  int64_t stride;
  bool transposed = false;
};

template <class T>
Matrix<const T> transposed(Matrix<const T> matrix) {
  return {matrix.data, matrix.stride, !matrix.transposed};
}

/// `c` is {m, n}, `a` {m, k} and `b` {k, n}, after the transposition that they ask for; `c` must ask for none. With
/// beta = 0, c need not hold numbers. MKL's kernels where libtorch exports them (QWEN_HAS_SGEMM, QWEN_HAS_BF16_GEMM),
/// otherwise at::mm. Thread-safe.
template <class T>
void gemm(int64_t m, int64_t n, int64_t k, float alpha, Matrix<const T> a, Matrix<const T> b, float beta,
          Matrix<float> c);
template <>
void gemm<float>(int64_t m, int64_t n, int64_t k, float alpha, Matrix<const float> a, Matrix<const float> b, float beta,
                 Matrix<float> c);
template <>
void gemm<Bits16>(int64_t m, int64_t n, int64_t k, float alpha, Matrix<const Bits16> a, Matrix<const Bits16> b,
                  float beta, Matrix<float> c);

}  // namespace qwen::fused
