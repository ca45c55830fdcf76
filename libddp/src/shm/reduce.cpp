#include "shm/reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// The loops are inlined into one function for each instruction set, which the compiler vectorises with what that function
// may use. The processor is asked once, at the first call.
#define DDP_INLINE [[gnu::always_inline]] static inline

namespace ddp::detail::shm {
namespace {

// A type as it lies in memory, and the type in which it is combined.
template <class T>
struct Number {
  using Wide = T;
  DDP_INLINE Wide load(const T* from) { return *from; }
  DDP_INLINE void store(T* to, Wide value) { *to = value; }
};

template <>
struct Number<c10::Half> {
  using Wide = float;
  DDP_INLINE float load(const c10::Half* from) { return *from; }
  DDP_INLINE void store(c10::Half* to, float value) { *to = value; }
};

// The conversions of c10::BFloat16, in a form that vectorises: to the nearest, ties to even.
template <>
struct Number<c10::BFloat16> {
  using Wide = float;
  DDP_INLINE float load(const c10::BFloat16* from) {
    return std::bit_cast<float>(static_cast<uint32_t>(from->x) << 16);
  }
  DDP_INLINE void store(c10::BFloat16* to, float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    to->x = static_cast<uint16_t>(value != value ? 0x7FC0 : rounded);
  }
};

// Signed integers wrap around, as tensors' do.
struct Sum {
  template <class T>
  DDP_INLINE T apply(T a, T b) {
    return a + b;
  }
};
struct Product {
  template <class T>
  DDP_INLINE T apply(T a, T b) {
    // uint16_t would be multiplied as int, which may overflow.
    if constexpr (std::is_integral_v<T> && sizeof(T) < 4) return static_cast<T>(static_cast<uint32_t>(a) * b);
    return a * b;
  }
};
struct Min {
  template <class T>
  DDP_INLINE T apply(T a, T b) {
    return b < a ? b : a;
  }
};
struct Max {
  template <class T>
  DDP_INLINE T apply(T a, T b) {
    return a < b ? b : a;
  }
};
struct BitAnd {
  template <class T>
  DDP_INLINE T apply(T a, T b) {
    return a & b;
  }
};
struct BitOr {
  template <class T>
  DDP_INLINE T apply(T a, T b) {
    return a | b;
  }
};
struct BitXor {
  template <class T>
  DDP_INLINE T apply(T a, T b) {
    return a ^ b;
  }
};

struct Job {
  std::span<const void* const> inputs;
  void* out;
  int64_t count;
};

// `out` is an input or none of it, so the iterations never depend on each other: that is what ivdep says.
template <class T, class F>
DDP_INLINE void reduce_two(const T* a, const T* b, T* out, int64_t count) {
  using N = Number<T>;
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) N::store(out + i, F::apply(N::load(b + i), N::load(a + i)));
}

template <class T, class F>
DDP_INLINE void reduce_many(const Job& job) {
  using N = Number<T>;
  constexpr int64_t kBlock = 1024;  // stays in the first cache while the inputs pass by
  typename N::Wide total[kBlock];
  const auto* const* inputs = reinterpret_cast<const T* const*>(job.inputs.data());
  for (int64_t begin = 0; begin < job.count; begin += kBlock) {
    const int64_t length = job.count - begin < kBlock ? job.count - begin : kBlock;
    for (int64_t i = 0; i < length; ++i) total[i] = N::load(inputs[0] + begin + i);
    for (size_t k = 1; k < job.inputs.size(); ++k) {
      const T* input = inputs[k] + begin;
      for (int64_t i = 0; i < length; ++i) total[i] = F::apply(N::load(input + i), total[i]);
    }
    T* out = static_cast<T*>(job.out) + begin;
    for (int64_t i = 0; i < length; ++i) N::store(out + i, total[i]);
  }
}

template <class T, class F>
DDP_INLINE void run(const Job& job) {
  if (job.inputs.size() == 2) {
    reduce_two<T, F>(static_cast<const T*>(job.inputs[0]), static_cast<const T*>(job.inputs[1]),
                     static_cast<T*>(job.out), job.count);
  } else {
    reduce_many<T, F>(job);
  }
}

template <class T>
DDP_INLINE void run_ordered(const Job& job, Op op) {
  if (op == Op::kMin) run<T, Min>(job);
  if (op == Op::kMax) run<T, Max>(job);
}

template <class T>
DDP_INLINE void run_arithmetic(const Job& job, Op op) {
  if (op == Op::kSum) run<T, Sum>(job);
  if (op == Op::kProduct) run<T, Product>(job);
}

template <class T>
DDP_INLINE void run_bitwise(const Job& job, Op op) {
  if (op == Op::kBitAnd) run<T, BitAnd>(job);
  if (op == Op::kBitOr) run<T, BitOr>(job);
  if (op == Op::kBitXor) run<T, BitXor>(job);
}

// Sums, products and bits of signed integers are those of unsigned ones.
template <class Signed>
DDP_INLINE void run_integer(const Job& job, Op op) {
  using Unsigned = std::make_unsigned_t<Signed>;
  run_ordered<Signed>(job, op);
  run_arithmetic<Unsigned>(job, op);
  run_bitwise<Unsigned>(job, op);
}

void run_any(const Job& job, c10::ScalarType dtype, Op op) {
  switch (dtype) {
    case c10::ScalarType::Float:
      run_ordered<float>(job, op);
      run_arithmetic<float>(job, op);
      break;
    case c10::ScalarType::Double:
      run_ordered<double>(job, op);
      run_arithmetic<double>(job, op);
      break;
    case c10::ScalarType::Half:
      run_ordered<c10::Half>(job, op);
      run_arithmetic<c10::Half>(job, op);
      break;
    case c10::ScalarType::BFloat16:
      run_ordered<c10::BFloat16>(job, op);
      run_arithmetic<c10::BFloat16>(job, op);
      break;
    case c10::ScalarType::Char:
      run_integer<int8_t>(job, op);
      break;
    case c10::ScalarType::Short:
      run_integer<int16_t>(job, op);
      break;
    case c10::ScalarType::Int:
      run_integer<int32_t>(job, op);
      break;
    case c10::ScalarType::Long:
      run_integer<int64_t>(job, op);
      break;
    case c10::ScalarType::Byte:
    case c10::ScalarType::Bool:
      run_ordered<uint8_t>(job, op);
      run_arithmetic<uint8_t>(job, op);
      run_bitwise<uint8_t>(job, op);
      break;
    default:
      break;
  }
}

// The sums of gradients, which is what communication on a CPU is about; the rest does with the plain instructions.
DDP_INLINE bool run_sum(const Job& job, c10::ScalarType dtype) {
  if (dtype == c10::ScalarType::Float) run<float, Sum>(job);
  if (dtype == c10::ScalarType::Double) run<double, Sum>(job);
  if (dtype == c10::ScalarType::BFloat16) run<c10::BFloat16, Sum>(job);
  return dtype == c10::ScalarType::Float || dtype == c10::ScalarType::Double || dtype == c10::ScalarType::BFloat16;
}

using SumKernel = bool (*)(const Job&, c10::ScalarType);

bool sum_plain(const Job& job, c10::ScalarType dtype) { return run_sum(job, dtype); }

#if defined(__x86_64__) && defined(__GNUC__)
[[gnu::target("avx2")]] bool sum_avx2(const Job& job, c10::ScalarType dtype) { return run_sum(job, dtype); }

[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl")]] bool sum_avx512(const Job& job, c10::ScalarType dtype) {
  return run_sum(job, dtype);
}
#endif

#if defined(__x86_64__) && defined(__GNUC__)
// Line by line, both; the compiler would make two loops of it.
[[gnu::target("avx2")]] void sum_and_scale_avx2(const float* a, const float* b, float* out, const float* from,
                                                float* to, float scale, int64_t lines) {
  const __m256 factor = _mm256_set1_ps(scale);
  for (int64_t i = 0; i < 16 * lines; i += 16) {
    const __m256 next0 = _mm256_mul_ps(_mm256_loadu_ps(from + i), factor);
    const __m256 next1 = _mm256_mul_ps(_mm256_loadu_ps(from + i + 8), factor);
    const __m256 sum0 = _mm256_add_ps(_mm256_loadu_ps(b + i), _mm256_loadu_ps(a + i));
    const __m256 sum1 = _mm256_add_ps(_mm256_loadu_ps(b + i + 8), _mm256_loadu_ps(a + i + 8));
    _mm256_storeu_ps(to + i, next0);
    _mm256_storeu_ps(to + i + 8, next1);
    _mm256_storeu_ps(out + i, sum0);
    _mm256_storeu_ps(out + i + 8, sum1);
  }
}

[[gnu::target("avx2")]] void scale_avx2(const float* from, float* to, int64_t count, float scale) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] * scale;
}
#endif

template <class T>
void scale_as(const void* from, void* to, int64_t count, double scale) {
  using N = Number<T>;
  const auto factor = static_cast<typename N::Wide>(scale);
  const T* source = static_cast<const T*>(from);
  T* target = static_cast<T*>(to);
  for (int64_t i = 0; i < count; ++i) N::store(target + i, N::load(source + i) * factor);
}

struct Choice {
  SumKernel sum;  // false for a dtype that it does not know
  const char* name;
};

Choice choose() {
#if defined(__x86_64__) && defined(__GNUC__)
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return {sum_avx512, "avx512"};
  }
  if (__builtin_cpu_supports("avx2")) return {sum_avx2, "avx2"};
#endif
  return {sum_plain, "plain"};
}

const Choice& choice() {
  static const Choice choice = choose();
  return choice;
}

Op on_bool(Op op) {
  if (op == Op::kSum || op == Op::kMax) return Op::kBitOr;
  if (op == Op::kProduct || op == Op::kMin) return Op::kBitAnd;
  return op;
}

}  // namespace

const char* to_string(Op op) {
  constexpr const char* kNames[] = {"sum", "product", "min", "max", "bitwise and", "bitwise or", "bitwise xor"};
  return kNames[static_cast<size_t>(op)];
}

bool can_reduce(c10::ScalarType dtype, Op op) {
  switch (dtype) {
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
    case c10::ScalarType::Half:
    case c10::ScalarType::BFloat16:
      return op < Op::kBitAnd;
    case c10::ScalarType::Byte:
    case c10::ScalarType::Char:
    case c10::ScalarType::Short:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
    case c10::ScalarType::Bool:
      return true;
    default:
      return false;
  }
}

void reduce(std::span<const void* const> inputs, void* out, int64_t count, c10::ScalarType dtype, Op op) {
  if (inputs.size() == 1) {
    if (inputs[0] != out) std::memcpy(out, inputs[0], count * c10::elementSize(dtype));
    return;
  }
  if (dtype == c10::ScalarType::Bool) op = on_bool(op);
  const Job job{inputs, out, count};
  if (op != Op::kSum || !choice().sum(job, dtype)) run_any(job, dtype, op);
}

void scale(const void* from, void* to, int64_t count, c10::ScalarType dtype, double scale) {
  if (scale == 1) {
    if (count > 0) std::memcpy(to, from, count * c10::elementSize(dtype));
    return;
  }
  switch (dtype) {
    case c10::ScalarType::Float:
#if defined(__x86_64__) && defined(__GNUC__)
      if (choice().sum != sum_plain) {
        return scale_avx2(static_cast<const float*>(from), static_cast<float*>(to), count, static_cast<float>(scale));
      }
#endif
      return scale_as<float>(from, to, count, scale);
    case c10::ScalarType::Double:
      return scale_as<double>(from, to, count, scale);
    case c10::ScalarType::Half:
      return scale_as<c10::Half>(from, to, count, scale);
    case c10::ScalarType::BFloat16:
      return scale_as<c10::BFloat16>(from, to, count, scale);
    default:
      return;
  }
}

void reduce_and_scale(std::span<const void* const, 2> inputs, void* out, int64_t count, c10::ScalarType dtype, Op op,
                      const Next& next) {
  int64_t done = 0;  // elements of both
#if defined(__x86_64__) && defined(__GNUC__)
  if (dtype == c10::ScalarType::Float && op == Op::kSum && choice().sum != sum_plain) {
    const int64_t lines = std::min(count, next.count) / 16;
    sum_and_scale_avx2(static_cast<const float*>(inputs[0]), static_cast<const float*>(inputs[1]),
                       static_cast<float*>(out), static_cast<const float*>(next.from), static_cast<float*>(next.to),
                       static_cast<float>(next.scale), lines);
    done = lines * 16;
  }
#endif
  const auto skip = static_cast<int64_t>(done * c10::elementSize(dtype));
  const auto rest = [&](const void* data) { return static_cast<const std::byte*>(data) + skip; };
  const void* const rests[] = {rest(inputs[0]), rest(inputs[1])};
  reduce(rests, static_cast<std::byte*>(out) + skip, count - done, dtype, op);
  scale(rest(next.from), static_cast<std::byte*>(next.to) + skip, next.count - done, dtype, next.scale);
}

const char* reduce_instructions() { return choice().name; }

}  // namespace ddp::detail::shm
