#include "gemm.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>

#include <limits>
#include <utility>

// No header of libtorch declares what its libtorch_cpu exports of MKL; examples/CMakeLists.txt looked whether it does.
#ifdef QWEN_HAS_SGEMM
extern "C" void sgemm_(const char* transpose_a, const char* transpose_b, const int* m, const int* n, const int* k,
                       const float* alpha, const float* a, const int* lda, const float* b, const int* ldb,
                       const float* beta, float* c, const int* ldc);
#endif
#ifdef QWEN_HAS_BF16_GEMM
extern "C" void cblas_gemm_bf16bf16f32(int layout, int transpose_a, int transpose_b, int m, int n, int k, float alpha,
                                       const void* a, int lda, const void* b, int ldb, float beta, float* c, int ldc);
#endif

namespace qwen::fused {
namespace {

template <class T>
[[maybe_unused]] at::Tensor tensor_of(Matrix<const T> matrix, int64_t rows, int64_t columns, at::ScalarType type) {
  if (matrix.transposed) std::swap(rows, columns);
  const auto tensor = at::from_blob(const_cast<T*>(matrix.data), {rows, columns}, {matrix.stride, 1}, type);
  return matrix.transposed ? tensor.t() : tensor;
}

[[maybe_unused]] void multiply(int64_t m, int64_t n, float alpha, const at::Tensor& a, const at::Tensor& b, float beta,
                               Matrix<float> c) {
  auto out = at::from_blob(c.data, {m, n}, {c.stride, 1}, at::kFloat);
  if (beta == 0 && alpha == 1) {
    at::mm_out(out, a, b);
  } else {
    at::addmm_out(out, out, a, b, beta, alpha);
  }
}

[[maybe_unused]] int narrowed(int64_t x) {
  TORCH_CHECK(x <= std::numeric_limits<int>::max(), "[qwen::fused] a matrix with ", x, " rows or columns is too large");
  return static_cast<int>(x);
}

}  // namespace

template <>
void gemm<float>(int64_t m, int64_t n, int64_t k, float alpha, Matrix<const float> a, Matrix<const float> b, float beta,
                 Matrix<float> c) {
#ifdef QWEN_HAS_SGEMM
  // In Fortran's column-major order this is C^T = alpha B^T A^T + beta C^T.
  const int rows = narrowed(m), columns = narrowed(n), inner = narrowed(k);
  const int lda = narrowed(a.stride), ldb = narrowed(b.stride), ldc = narrowed(c.stride);
  sgemm_(b.transposed ? "T" : "N", a.transposed ? "T" : "N", &columns, &rows, &inner, &alpha, b.data, &ldb, a.data,
         &lda, &beta, c.data, &ldc);
#else
  multiply(m, n, alpha, tensor_of(a, m, k, at::kFloat), tensor_of(b, k, n, at::kFloat), beta, c);
#endif
}

template <>
void gemm<Bits16>(int64_t m, int64_t n, int64_t k, float alpha, Matrix<const Bits16> a, Matrix<const Bits16> b,
                  float beta, Matrix<float> c) {
#ifdef QWEN_HAS_BF16_GEMM
  constexpr int kRowMajor = 101, kPlain = 111, kTransposed = 112;  // of the CBLAS interface
  cblas_gemm_bf16bf16f32(kRowMajor, a.transposed ? kTransposed : kPlain, b.transposed ? kTransposed : kPlain,
                         narrowed(m), narrowed(n), narrowed(k), alpha, a.data, narrowed(a.stride), b.data,
                         narrowed(b.stride), beta, c.data, narrowed(c.stride));
#else
  // A product of bfloat16 tensors would round its result; float32 copies do not.
  const auto wide = [](Matrix<const Bits16> matrix, int64_t rows, int64_t columns) {
    return tensor_of(matrix, rows, columns, at::kBFloat16).to(at::kFloat);
  };
  multiply(m, n, alpha, wide(a, m, k), wide(b, k, n), beta, c);
#endif
}

}  // namespace qwen::fused
