// The machine behind `unpickle` (pickle.h): a stack, a memo and tables of what a pickle makes.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ddp/state.h"
#include "io/pickle.h"

namespace ddp::io {

/// Use: `Unpickler(data, load_storage, where).run()`, once.
class Unpickler {
 public:
  Unpickler(std::string_view data, const StorageLoader& load_storage, const std::string& where);
  State run();

 private:
  enum class Tag : uint8_t {
    kNone,
    kBool,
    kInt,
    kFloat,
    kString,
    kBytes,
    kTensor,
    kStorage,
    kList,
    kTuple,
    kDict,
    kOrderedDict,
    kGlobal
  };

  // 16 bytes, so that a hostile pickle gains little: what is larger lies in tables, and `number` says where.
  struct Value {
    Tag tag = Tag::kNone;
    uint32_t extra = 0;  // of a global: its dtype
    int64_t number = 0;  // a bool, an int, a float's bits, an index or a Global
  };

  struct Storage {
    c10::Storage storage;
    torch::ScalarType dtype;
    bool is_untyped;
  };

  [[noreturn]] void fail(const std::string& reason) const;
  void require(bool condition, const char* what) const;

  // Counts what is kept. Throws when it is more than the pickle's size justifies.
  void charge(size_t bytes);

  // --- input: pickle_reader.cpp, as far as the tree
  std::string_view take(size_t size);
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view line();

  // --- stack
  void push(Tag tag, int64_t number = 0, uint32_t extra = 0) { push(Value{tag, extra, number}); }
  void push(const Value& value);
  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  Value pop();
  const Value& top() const;
  std::vector<Value> pop_mark();
  void push_container(Tag tag, std::vector<Value> values);
  void push_tuple(size_t size);
  void push_bytes(std::string bytes);
  void add(std::vector<Value>& container, const std::vector<Value>& values);
  std::vector<Value>& container(const Value& value) { return containers_[static_cast<size_t>(value.number)]; }
  std::string_view text(const Value& value) const { return strings_[static_cast<size_t>(value.number)]; }
  std::vector<Value>& top_list();
  std::vector<Value>& top_dict();

  // --- opcodes
  Value execute();
  void step(char code);
  void mark();
  void memoize(uint32_t index);
  void recall(uint32_t index);
  void long_integer();
  void real();
  void unicode();

  // --- names and what they make: pickle_calls.cpp
  void global();
  void reduce();
  void encode(const std::vector<Value>& args);
  void persistent_id();
  void tensor(const std::vector<Value>& args, bool has_dtype);
  std::vector<int64_t> integers(const Value& tuple);
  torch::Tensor with_metadata(torch::Tensor tensor, const Value& metadata);

  // --- the tree
  State build(const Value& value, int depth);
  State::Items items(const Value& value, int depth);
  State dict(const Value& value, int depth);

  std::string_view data_;
  const StorageLoader& load_storage_;
  const std::string& where_;
  size_t budget_;  // bytes that may still be kept
  size_t position_ = 0;
  size_t opcode_at_ = 0;

  std::vector<Value> stack_;
  size_t highest_stack_ = 0;
  std::vector<size_t> marks_;
  size_t highest_marks_ = 0;
  std::unordered_map<uint32_t, Value> memo_;
  std::deque<std::vector<Value>> containers_;  // a deque: references to one stay while others are made
  std::vector<std::string_view> strings_;
  std::vector<std::string> bytes_;
  std::vector<torch::Tensor> tensors_;
  std::vector<Storage> storages_;
  std::unordered_map<std::string, c10::Storage> loaded_;
};

}  // namespace ddp::io
