// From tensors to pointers: the two types that the fused kernels compute with.
//
//   with_type(x.scalar_type(), [&]<class T>() { rows<T>().swiglu(x.numel(), data<T>(gate), data<T>(up), data<T>(y)); });
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <type_traits>

#include "rows.h"

namespace qwen::fused {

/// Whether the kernels compute with it.
inline bool is_supported(at::ScalarType type) { return type == at::kFloat || type == at::kBFloat16; }

/// Calls f<float>() or f<Bits16>(). Requires: is_supported(type).
template <class F>
decltype(auto) with_type(at::ScalarType type, F&& f) {
  if (type == at::kFloat) return f.template operator()<float>();
  TORCH_CHECK(type == at::kBFloat16, "[qwen::fused] expected float32 or bfloat16, found ", type);
  return f.template operator()<Bits16>();
}

/// The elements of a contiguous tensor. Checks the type.
template <class T>
T* data(const at::Tensor& tensor) {
  if constexpr (std::is_same_v<T, Bits16>) {
    static_assert(sizeof(Bits16) == sizeof(at::BFloat16));
    return reinterpret_cast<Bits16*>(tensor.data_ptr<at::BFloat16>());
  } else {
    return tensor.data_ptr<T>();
  }
}

/// f(begin, end) for parts of [0, count), on all threads when there is enough to do; `each` is the cost of one, in
/// elements.
template <class F>
void for_parts(int64_t count, int64_t each, const F& f) {
  constexpr int64_t kElements = 1 << 15;  // what is worth a thread
  at::parallel_for(0, count, std::max<int64_t>(1, kElements / std::max<int64_t>(1, each)), f);
}

}  // namespace qwen::fused
