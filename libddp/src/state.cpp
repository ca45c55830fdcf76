#include "ddp/state.h"

#include <fmt/format.h>

#include <algorithm>

#include "ddp/error.h"

namespace ddp {
namespace {

// How many keys an error message lists.
constexpr size_t kKeysShown = 20;

std::string key_text(const State& key) {
  return key.is_string() ? fmt::format("\"{}\"", key.as_string()) : std::to_string(key.as_int());
}

void check_key(const State& key) {
  if (key.is_string() || key.is_int()) return;
  throw DataError(fmt::format("[ddp::State] the key of a dict is a str or an int, found a {}", key.type_name()));
}

}  // namespace

State::State() = default;
State::State(const State&) = default;
State::State(State&&) noexcept = default;
State& State::operator=(const State&) = default;
State& State::operator=(State&&) noexcept = default;
State::~State() = default;

State::State(double value) : value_(value) {}
State::State(const char* value) : value_(std::string(value)) {}
State::State(std::string value) : value_(std::move(value)) {}
State::State(std::string_view value) : value_(std::string(value)) {}
State::State(torch::Tensor value) : value_(std::move(value)) {}
State::State(Bytes value) : value_(std::move(value)) {}
State::State(List value) : value_(std::move(value)) {}
State::State(Tuple value) : value_(std::move(value)) {}

State::State(Dict value) {
  std::vector<const State*> keys;
  keys.reserve(value.items.size());
  for (const auto& item : value.items) {
    check_key(item.first);
    keys.push_back(&item.first);
  }
  // Sorted, so that a file with a million keys is not compared pair by pair.
  auto less = [](const State* a, const State* b) {
    if (a->is_int() != b->is_int()) return a->is_int();
    return a->is_int() ? a->as_int() < b->as_int() : a->as_string() < b->as_string();
  };
  std::sort(keys.begin(), keys.end(), less);
  auto twin = std::adjacent_find(keys.begin(), keys.end(), [](const State* a, const State* b) { return *a == *b; });
  if (twin != keys.end()) throw DataError(fmt::format("[ddp::State] a dict has the key {} twice", key_text(**twin)));
  value_ = std::move(value);
}

State State::list(std::initializer_list<State> items) { return List{items}; }
State State::tuple(std::initializer_list<State> items) { return Tuple{items}; }
State State::dict(std::initializer_list<std::pair<State, State>> items) { return Dict{items}; }

std::string_view State::type_name() const {
  static constexpr std::string_view kNames[] = {"None",  "bool",   "int",  "float", "str",
                                                "bytes", "tensor", "list", "tuple", "dict"};
  return kNames[value_.index()];
}

void State::throw_out_of_range() { throw DataError("[ddp::State] an integer does not fit into int64"); }

template <class T>
const T& State::as(std::string_view wanted) const {
  if (const T* value = std::get_if<T>(&value_)) return *value;
  throw DataError(fmt::format("[ddp::State] expected {}, found {}{}", wanted,
                              is_null() ? "" : (is_int() ? "an " : "a "), type_name()));
}

bool State::as_bool() const { return as<bool>("a bool"); }
int64_t State::as_int() const { return as<int64_t>("an int"); }
double State::as_double() const { return is_int() ? static_cast<double>(as_int()) : as<double>("a float"); }
const std::string& State::as_string() const& { return as<std::string>("a str"); }
const std::string& State::as_bytes() const& { return as<Bytes>("bytes").data; }
const torch::Tensor& State::as_tensor() const& { return as<torch::Tensor>("a tensor"); }
const State::Items& State::as_list() const& { return as<List>("a list").items; }
const State::Items& State::as_tuple() const& { return as<Tuple>("a tuple").items; }
const State::Pairs& State::as_dict() const& { return as<Dict>("a dict").items; }

const State* State::find(std::string_view key) const {
  for (const auto& [k, value] : as_dict()) {
    if (k.is_string() && k.as_string() == key) return &value;
  }
  return nullptr;
}

const State& State::at(std::string_view key) const {
  if (const State* value = find(key)) return *value;
  std::string keys;
  const Pairs& items = as_dict();
  for (size_t i = 0; i < std::min(items.size(), kKeysShown); ++i) keys += (i ? ", " : "") + key_text(items[i].first);
  if (items.size() > kKeysShown) keys += fmt::format(" and {} more", items.size() - kKeysShown);
  throw DataError(
      fmt::format("[ddp::State] there is no key \"{}\"; the keys are: {}", key, keys.empty() ? "none" : keys));
}

void State::set(State key, State value) {
  check_key(key);
  as_dict();  // throws for another type
  for (auto& item : std::get<Dict>(value_).items) {
    if (item.first == key) {
      item.second = std::move(value);
      return;
    }
  }
  std::get<Dict>(value_).items.emplace_back(std::move(key), std::move(value));
}

bool operator==(const State& a, const State& b) {
  if (a.value_.index() != b.value_.index()) return false;
  if (a.is_tensor()) {
    const auto &x = a.as_tensor(), &y = b.as_tensor();
    if (x.defined() != y.defined()) return false;
    return !x.defined() || (x.scalar_type() == y.scalar_type() && x.device() == y.device() && x.equal(y));
  }
  if (a.is_list()) return a.as_list() == b.as_list();
  if (a.is_tuple()) return a.as_tuple() == b.as_tuple();
  if (a.is_dict()) return a.as_dict() == b.as_dict();
  if (a.is_bool()) return a.as_bool() == b.as_bool();
  if (a.is_int()) return a.as_int() == b.as_int();
  if (a.is_double()) return a.as_double() == b.as_double();
  if (a.is_string()) return a.as_string() == b.as_string();
  if (a.is_bytes()) return a.as_bytes() == b.as_bytes();
  return true;
}

}  // namespace ddp
