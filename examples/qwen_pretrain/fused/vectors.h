// Vectors of QWEN_ROWS_WIDTH floats by the compilers' vector extension (GCC, Clang), for rows_impl.h alone.
//
//   for_vectors(count, [&](int64_t i, auto part) { store(y + i, part, exp(load(x + i, part))); });
//
// `part` is Full, or Tail at the end of a row: what lies beyond the row is neither read nor written, and reads as 0.
#pragma once

#include <cstdint>

namespace qwen::fused {
namespace {

#define QWEN_INLINE inline __attribute__((always_inline))
#define QWEN_LAMBDA __attribute__((always_inline))

constexpr int kWidth = QWEN_ROWS_WIDTH;
typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Halves __attribute__((vector_size(2 * kWidth)));

struct Full {};
struct Tail {
  int64_t count;  // less than kWidth
};
// Like Tail, but what lies beyond the row is memory of the same buffer: it is read, means nothing, and becomes 0.
struct Cut {
  int64_t count;
};

template <class F>
QWEN_INLINE void for_vectors(int64_t count, const F& f) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) f(i, Full{});
  if (i < count) f(i, Tail{count - i});
}

// For a row of `count` that has `width` elements of memory.
template <class F>
QWEN_INLINE void for_vectors_within(int64_t width, int64_t count, const F& f) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) f(i, Full{});
  if (i >= count) return;
  if (i + kWidth <= width) {
    f(i, Cut{count - i});
  } else {
    f(i, Tail{count - i});
  }
}

QWEN_INLINE Floats splat(float x) { return Floats{} + x; }

QWEN_INLINE Floats widen(Halves halves) { return (Floats)(__builtin_convertvector(halves, Words) << 16); }

// To the nearest bfloat16, ties to even; any NaN becomes the usual one.
QWEN_INLINE Words rounded_bits(Floats x) {
  const Words bits = (Words)x;
  const Words nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return x == x ? nearest : Words{} + 0x7fc0u;
}

// x as T holds it.
template <class T>
QWEN_INLINE Floats rounded(Floats x) {
  if constexpr (sizeof(T) == sizeof(float)) return x;
  return (Floats)(rounded_bits(x) << 16);
}

QWEN_INLINE Floats load(const float* p, Full) {
  Floats x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
QWEN_INLINE Floats load(const Bits16* p, Full) {
  Halves x;
  __builtin_memcpy(&x, p, sizeof x);
  return widen(x);
}
template <class T>
QWEN_INLINE Floats load(const T* p, Cut) {
  return load(p, Full{});
}
QWEN_INLINE Floats load(const float* p, Tail tail) {
  Floats x{};
  for (int64_t i = 0; i < tail.count; ++i) x[i] = p[i];
  return x;
}
QWEN_INLINE Floats load(const Bits16* p, Tail tail) {
  Halves x{};
  for (int64_t i = 0; i < tail.count; ++i) x[i] = p[i].bits;
  return widen(x);
}

// x with `filler` beyond the end of the row.
QWEN_INLINE Floats fill(Floats x, Full, float) { return x; }
QWEN_INLINE Floats fill(Floats x, Cut cut, float filler) {
  Ints lane;
  for (int i = 0; i < kWidth; ++i) lane[i] = i;
  return lane < static_cast<int32_t>(cut.count) ? x : splat(filler);
}
QWEN_INLINE Floats fill(Floats x, Tail tail, float filler) { return fill(x, Cut{tail.count}, filler); }

QWEN_INLINE void store(float* p, Full, Floats x) { __builtin_memcpy(p, &x, sizeof x); }
QWEN_INLINE void store(Bits16* p, Full, Floats x) {
  const Halves halves = __builtin_convertvector(rounded_bits(x), Halves);
  __builtin_memcpy(p, &halves, sizeof halves);
}
template <class T>
QWEN_INLINE void store(T* p, Cut cut, Floats x) {
  store(p, Full{}, fill(x, cut, 0));
}
QWEN_INLINE void store(float* p, Tail tail, Floats x) {
  for (int64_t i = 0; i < tail.count; ++i) p[i] = x[i];
}
QWEN_INLINE void store(Bits16* p, Tail tail, Floats x) {
  const Words bits = rounded_bits(x);
  for (int64_t i = 0; i < tail.count; ++i) p[i].bits = static_cast<uint16_t>(bits[i]);
}

QWEN_INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }

QWEN_INLINE float max_of(Floats x) {
  float largest = x[0];
  for (int i = 1; i < kWidth; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}
QWEN_INLINE float sum_of(Floats x) {
  float sum = 0;
  for (int i = 0; i < kWidth; ++i) sum += x[i];
  return sum;
}

// e^x to about one unit in the last place; below -87 it is e^-87 and above 88 e^88, NaN stays NaN.
// x = n ln 2 + r, |r| < 0.35; e^r by its series to r^7 / 7!, whose next term is below 2^-27.
QWEN_INLINE Floats exp(Floats x) {
  constexpr float kShift = 0x1.8p23f;  // a float this large has no fraction: adding it rounds
  constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;  // ln 2 = high + low; n * high is exact
  x = x < splat(-87) ? splat(-87) : x;
  x = x > splat(88) ? splat(88) : x;
  const Floats shifted = x * 0x1.715476p0f + kShift;
  const Floats n = shifted - kShift;
  const Floats r = (x - n * kLn2High) - n * kLn2Low;
  Floats series = r * (1.0f / 5040) + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  const Ints exponent = (Ints)shifted - (Ints)splat(kShift) + 127;
  return series * (Floats)(exponent << 23);
}

}  // namespace
}  // namespace qwen::fused
