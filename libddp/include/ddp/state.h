// A plain value tree: what a checkpoint can hold, in Python's types.
//
//   auto state = ddp::State::dict({{"epoch", 3}, {"betas", ddp::State::tuple({0.9, 0.999})}, {"weight", tensor}});
//   state.at("epoch").as_int();                       // DataError when it is missing or no int
//   state.set("loss", 0.5);
//   auto names = ddp::State(ddp::State::List{{"a", "b"}});
#pragma once

#include <torch/types.h>

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace ddp {

/// One value: None, bool, int, float, str, bytes, a tensor, or a list, tuple or dict of values. A dict keeps the order
/// in which its keys were set; keys are strings or ints. Copies copy the tree and share the tensors' storage.
class State {
 public:
  using Items = std::vector<State>;
  using Pairs = std::vector<std::pair<State, State>>;
  struct Bytes {
    std::string data;
  };
  struct List {
    Items items;
  };
  struct Tuple {
    Items items;
  };
  struct Dict {
    Pairs items;
  };

  State();  // None
  State(const State&);
  State(State&&) noexcept;
  State& operator=(const State&);
  State& operator=(State&&) noexcept;
  ~State();

  // One constructor per exact type, so that a pointer never becomes a bool.
  template <std::same_as<bool> T>
  State(T value) : value_(std::in_place_type<bool>, value) {}
  /// Any integer type. Throws DataError for an unsigned value beyond int64.
  template <std::integral T>
  requires(!std::same_as<T, bool>) State(T value)
      : value_(std::in_place_type<int64_t>, checked(value, std::in_range<int64_t>(value))) {}
  State(double value);
  State(const char* value);
  State(std::string value);
  State(std::string_view value);
  State(torch::Tensor value);
  State(Bytes value);
  State(List value);
  State(Tuple value);
  /// Requires: keys are strings or ints, each at most once. Throws DataError otherwise.
  State(Dict value);

  static State list(std::initializer_list<State> items);
  static State tuple(std::initializer_list<State> items);
  static State dict(std::initializer_list<std::pair<State, State>> items = {});

  bool is_null() const { return std::holds_alternative<std::monostate>(value_); }
  bool is_bool() const { return std::holds_alternative<bool>(value_); }
  bool is_int() const { return std::holds_alternative<int64_t>(value_); }
  bool is_double() const { return std::holds_alternative<double>(value_); }
  bool is_string() const { return std::holds_alternative<std::string>(value_); }
  bool is_bytes() const { return std::holds_alternative<Bytes>(value_); }
  bool is_tensor() const { return std::holds_alternative<torch::Tensor>(value_); }
  bool is_list() const { return std::holds_alternative<List>(value_); }
  bool is_tuple() const { return std::holds_alternative<Tuple>(value_); }
  bool is_dict() const { return std::holds_alternative<Dict>(value_); }

  /// Python's name of the type: "None", "bool", "int", "float", "str", "bytes", "tensor", "list", "tuple", "dict".
  std::string_view type_name() const;

  // Each throws DataError "expected an int, found a str" for another type.
  bool as_bool() const;
  int64_t as_int() const;
  double as_double() const;  ///< accepts an int too
  const std::string& as_string() const&;
  const std::string& as_bytes() const&;
  const torch::Tensor& as_tensor() const&;
  const Items& as_list() const&;
  const Items& as_tuple() const&;
  const Pairs& as_dict() const&;
  // Of a temporary by value, so that `for (auto& item : x.state_dict().as_dict())` is safe.
  std::string as_string() && { return as_string(); }
  std::string as_bytes() && { return as_bytes(); }
  torch::Tensor as_tensor() && { return as_tensor(); }
  Items as_list() && { return as_list(); }
  Items as_tuple() && { return as_tuple(); }
  Pairs as_dict() && { return as_dict(); }

  /// The value under a string key, nullptr where there is none. Throws DataError when this is no dict.
  const State* find(std::string_view key) const;
  /// As `find`; throws DataError with the key and the keys that exist.
  const State& at(std::string_view key) const;
  /// Replaces the value of `key` or appends it. Requires: `key` is a string or an int.
  void set(State key, State value);

  /// Equal types and values; tensors by dtype, shape and every element.
  friend bool operator==(const State& a, const State& b);

 private:
  static int64_t checked(auto value, bool in_range) {
    if (!in_range) throw_out_of_range();
    return static_cast<int64_t>(value);
  }
  [[noreturn]] static void throw_out_of_range();
  template <class T>
  const T& as(std::string_view wanted) const;

  std::variant<std::monostate, bool, int64_t, double, std::string, Bytes, torch::Tensor, List, Tuple, Dict> value_;
};

}  // namespace ddp
