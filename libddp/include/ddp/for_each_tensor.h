// Finding the tensors in what a module returns: the one customisation point of DistributedDataParallel.
//
//   struct Output { torch::Tensor logits, loss; };
//   template <class F>
//   void for_each_tensor(Output& out, F&& f) { f(out.logits), f(out.loss); }    // beside the type, found by ADL
//
// Known already: tensors, numbers and strings (which hold none), and pairs, tuples, arrays, vectors, lists, optionals,
// maps and pointers of what is known.
#pragma once

#include <torch/types.h>

#include <concepts>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

namespace ddp {
namespace detail {

struct AnyTensorVisitor {
  void operator()(torch::Tensor&) const {}
};

template <class T>
concept HasOwnVisit = requires(T& value, AnyTensorVisitor f) {
  for_each_tensor(value, f);
};

template <class T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};

template <class T>
concept PointerLike = requires(T& value) {
  *value;
  static_cast<bool>(value);
};

template <class T>
concept MapLike = requires {
  typename T::mapped_type;
};

template <class T>
concept RangeLike = requires(T& value) {
  std::begin(value);
  std::end(value);
};

template <class T>
inline constexpr bool kUnknown = false;

}  // namespace detail

/// Calls f(torch::Tensor&) for each tensor in `value`, in order. A type that is not known does not compile, with a
/// message that says how to make it known.
template <class T, class F>
void visit_tensors(T& value, F&& f) {
  if constexpr (std::is_same_v<T, torch::Tensor>) {
    f(value);
  } else if constexpr (detail::HasOwnVisit<T>) {
    for_each_tensor(value, f);
  } else if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_same_v<T, std::string> ||
                       std::is_same_v<T, std::monostate> || std::is_same_v<T, std::nullptr_t>) {
    // holds no tensor
  } else if constexpr (detail::MapLike<T>) {
    for (auto& entry : value) visit_tensors(entry.second, f);
  } else if constexpr (detail::RangeLike<T>) {
    for (auto& item : value) visit_tensors(item, f);
  } else if constexpr (detail::TupleLike<T>) {
    std::apply([&](auto&... items) { (visit_tensors(items, f), ...); }, value);
  } else if constexpr (detail::PointerLike<T>) {
    if (value) visit_tensors(*value, f);
  } else {
    static_assert(detail::kUnknown<T>,
                  "ddp: the module returns a type whose tensors are not known; write, beside the type, "
                  "template <class F> void for_each_tensor(Type& value, F&& f) { f(value.some_tensor); }");
  }
}

}  // namespace ddp
