// The arithmetic of the shared-memory backend: several inputs of one rank each, combined in a given order.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace ddp::detail::shm {

enum class Op : uint8_t { kSum, kProduct, kMin, kMax, kBitAnd, kBitOr, kBitXor };

const char* to_string(Op op);

/// Whether `reduce` knows `op` on `dtype`: the floating-point types without the bitwise operations, the integers of 8 to
/// 64 bits and bool with all. On bool the sum and the maximum are "or", the product and the minimum "and".
bool can_reduce(c10::ScalarType dtype, Op op);

/// out[i] = inputs[n-1][i] op (... (inputs[1][i] op inputs[0][i])) for i < count: in the order of `inputs`, so that the
/// bits do not depend on who computes them. float16 and bfloat16 are combined in float32 and rounded once. `out` may be
/// one of the inputs.
/// Requires: can_reduce(dtype, op), 1 <= inputs.size().
void reduce(std::span<const void* const> inputs, void* out, int64_t count, c10::ScalarType dtype, Op op);

/// to[i] = from[i] * scale for i < count, in the dtype: what a mean takes of each rank before the sum. A scale of 1 copies
/// any dtype; another needs a floating-point type.
void scale(const void* from, void* to, int64_t count, c10::ScalarType dtype, double scale);

/// `reduce` of two inputs, and `scale` of the next `count` elements, which overlap nothing of it. A sum of float32 does both
/// at once: each waits for another memory, the one for the peer's cache, the other for the next part of the tensor.
struct Next {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t count = 0;
  double scale = 1;
};
void reduce_and_scale(std::span<const void* const, 2> inputs, void* out, int64_t count, c10::ScalarType dtype, Op op,
                      const Next& next);

/// The instructions that sums of floating-point numbers use on this processor: "avx512", "avx2" or "plain".
const char* reduce_instructions();

}  // namespace ddp::detail::shm
