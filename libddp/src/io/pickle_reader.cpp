#include <fmt/format.h>
#include <torch/types.h>

#include <bit>

#include "ddp/error.h"
#include "io/pickle.h"
#include "io/pickle_opcodes.h"
#include "io/unpickler.h"
#include "io/utf8.h"

namespace ddp::io {
namespace {

// What may be kept in memory: so much, and so much per byte of the pickle. A list of floats takes 10 per byte, one of
// small ints 44; the names and tensors of a checkpoint take 4.
constexpr size_t kSpareMemory = 16 << 20, kMemoryPerByte = 16;

// What is kept for each, in bytes; a vector that grows has its old and its new memory for a moment.
constexpr size_t kStackCost = 48, kMarkCost = 24, kMemoCost = 64, kContainerCost = 32, kItemCost = 48;
constexpr size_t kTextCost = 48, kBytesCost = 96;
constexpr size_t kNodeCost = sizeof(State);

}  // namespace

Unpickler::Unpickler(std::string_view data, const StorageLoader& load_storage, const std::string& where)
    : data_(data), load_storage_(load_storage), where_(where), budget_(kSpareMemory + kMemoryPerByte * data.size()) {}

State Unpickler::run() try {
  Value root = execute();
  if (position_ != data_.size()) fail("there are bytes after the end");
  return build(root, 0);
} catch (const CheckpointError&) {
  throw;
} catch (const std::exception& error) {  // of libtorch or State: this byte is where it came from
  fail(error.what());
}

void Unpickler::fail(const std::string& reason) const {
  throw CheckpointError(fmt::format("{}: byte {}: {}", where_, opcode_at_, reason));
}

void Unpickler::require(bool condition, const char* what) const {
  if (!condition) fail(fmt::format("malformed call: {}", what));
}

void Unpickler::charge(size_t bytes) {
  if (bytes > budget_) {
    fail(
        "the same values are repeated so often, or the file is so dense, that it would grow in memory without bound; "
        "nothing was loaded");
  }
  budget_ -= bytes;
}

// --- input

std::string_view Unpickler::take(size_t size) {
  if (size > data_.size() - position_) fail("the pickle ends in the middle");
  std::string_view bytes = data_.substr(position_, size);
  position_ += size;
  return bytes;
}

std::string_view Unpickler::line() {
  const size_t end = data_.find('\n', position_);
  if (end == std::string_view::npos) fail("the pickle ends in a name");
  std::string_view text = data_.substr(position_, end - position_);
  position_ = end + 1;
  return text;
}

// --- stack

void Unpickler::push(const Value& value) {
  if (stack_.size() == highest_stack_) {
    charge(kStackCost);
    ++highest_stack_;
  }
  stack_.push_back(value);
}

Unpickler::Value Unpickler::pop() {
  if (stack_.size() <= floor()) fail("an opcode finds no value to work on");
  Value value = stack_.back();
  stack_.pop_back();
  return value;
}

const Unpickler::Value& Unpickler::top() const {
  if (stack_.size() <= floor()) fail("an opcode finds no value to work on");
  return stack_.back();
}

std::vector<Unpickler::Value> Unpickler::pop_mark() {
  if (marks_.empty()) fail("an opcode finds no mark");
  const auto from = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
  std::vector<Value> values(from, stack_.end());
  stack_.erase(from, stack_.end());
  marks_.pop_back();
  return values;
}

void Unpickler::push_container(Tag tag, std::vector<Value> values) {
  charge(kContainerCost + kItemCost * values.size());
  containers_.push_back(std::move(values));
  push(tag, static_cast<int64_t>(containers_.size() - 1));
}

void Unpickler::push_tuple(size_t size) {
  std::vector<Value> values(size);
  while (size > 0) values[--size] = pop();
  push_container(Tag::kTuple, std::move(values));
}

void Unpickler::push_bytes(std::string bytes) {
  charge(kBytesCost + bytes.size());
  bytes_.push_back(std::move(bytes));
  push(Tag::kBytes, static_cast<int64_t>(bytes_.size() - 1));
}

void Unpickler::add(std::vector<Value>& container, const std::vector<Value>& values) {
  charge(kItemCost * values.size());
  container.insert(container.end(), values.begin(), values.end());
}

std::vector<Unpickler::Value>& Unpickler::top_list() {
  if (top().tag != Tag::kList) fail("only a list can be appended to");
  return container(top());
}

std::vector<Unpickler::Value>& Unpickler::top_dict() {
  if (top().tag != Tag::kDict && top().tag != Tag::kOrderedDict) fail("only a dict has items");
  return container(top());
}

// --- opcodes

Unpickler::Value Unpickler::execute() {
  while (true) {
    opcode_at_ = position_;
    const char code = take(1)[0];
    if (code == opcode::kStop) {
      if (stack_.size() != 1 || !marks_.empty()) fail("the pickle ends with unused values");
      return pop();
    }
    step(code);
  }
}

void Unpickler::step(char code) {
  // clang-format off
  switch (code) {
    case opcode::kProto:
      if (int version = number<uint8_t>(); version != 2) {
        fail(fmt::format("pickle protocol {}; only 2, which torch.save uses, is read", version));
      }
      return;
    case opcode::kMark: return mark();
    case opcode::kNone: return push(Tag::kNone);
    case opcode::kTrue: return push(Tag::kBool, 1);
    case opcode::kFalse: return push(Tag::kBool, 0);
    case opcode::kInt1: return push(Tag::kInt, number<uint8_t>());
    case opcode::kInt2: return push(Tag::kInt, number<uint16_t>());
    case opcode::kInt4: return push(Tag::kInt, number<int32_t>());
    case opcode::kLong1: return long_integer();
    case opcode::kFloat: return real();
    case opcode::kUnicode: return unicode();
    case opcode::kEmptyTuple: return push_tuple(0);
    case opcode::kTuple1: return push_tuple(1);
    case opcode::kTuple2: return push_tuple(2);
    case opcode::kTuple3: return push_tuple(3);
    case opcode::kTuple: return push_container(Tag::kTuple, pop_mark());
    case opcode::kEmptyList: return push_container(Tag::kList, {});
    case opcode::kEmptyDict: return push_container(Tag::kDict, {});
    case opcode::kAppend: {
      const Value value = pop();
      return add(top_list(), {value});
    }
    case opcode::kAppends: {
      const auto values = pop_mark();
      return add(top_list(), values);
    }
    case opcode::kSetItem: {
      const Value value = pop(), key = pop();
      return add(top_dict(), {key, value});
    }
    case opcode::kSetItems: {
      const auto values = pop_mark();
      if (values.size() % 2 != 0) fail("a key without a value");
      return add(top_dict(), values);
    }
    case opcode::kPut1: return memoize(number<uint8_t>());
    case opcode::kPut4: return memoize(number<uint32_t>());
    case opcode::kGet1: return recall(number<uint8_t>());
    case opcode::kGet4: return recall(number<uint32_t>());
    case opcode::kGlobal: return global();
    case opcode::kReduce: return reduce();
    case opcode::kPersistentId: return persistent_id();
    case opcode::kBuild:
      pop();  // attributes, such as a state dict's _metadata
      if (top().tag != Tag::kOrderedDict) fail("only an OrderedDict may have attributes");
      return;
    default:
      fail(fmt::format("opcode 0x{:02x} is none that torch.save writes for plain data",
                       static_cast<unsigned char>(code)));
  }
  // clang-format on
}

void Unpickler::mark() {
  if (marks_.size() == highest_marks_) {
    charge(kMarkCost);
    ++highest_marks_;
  }
  marks_.push_back(stack_.size());
}

void Unpickler::memoize(uint32_t index) {
  const Value value = top();
  const auto [entry, is_new] = memo_.insert_or_assign(index, value);
  if (is_new) charge(kMemoCost);
}

void Unpickler::recall(uint32_t index) {
  const auto found = memo_.find(index);
  if (found == memo_.end()) fail(fmt::format("memo {} was never set", index));
  push(found->second);
}

void Unpickler::long_integer() {
  const std::string_view bytes = take(number<uint8_t>());
  const bool negative = !bytes.empty() && (bytes.back() & '\x80');
  uint64_t value = negative ? ~uint64_t{0} : 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const auto byte = static_cast<unsigned char>(bytes[i]);
    if (i < sizeof value) {
      value &= ~(uint64_t{0xff} << (8 * i));
      value |= uint64_t{byte} << (8 * i);
    } else if (byte != (negative ? 0xff : 0)) {
      fail("an int of more than 64 bits");
    }
  }
  if ((static_cast<int64_t>(value) < 0) != negative) fail("an int of more than 64 bits");
  push(Tag::kInt, static_cast<int64_t>(value));
}

void Unpickler::real() {  // big-endian
  uint64_t bits = 0;
  for (char byte : take(sizeof bits)) bits = (bits << 8) | static_cast<unsigned char>(byte);
  push(Tag::kFloat, static_cast<int64_t>(bits));
}

void Unpickler::unicode() {
  const std::string_view characters = take(number<uint32_t>());
  if (!is_utf8(characters)) fail("a str that is no UTF-8");
  charge(kTextCost);
  strings_.push_back(characters);
  push(Tag::kString, static_cast<int64_t>(strings_.size() - 1));
}

// --- the tree

State Unpickler::build(const Value& value, int depth) {
  if (depth > kMaxDepth) fail(fmt::format("nested deeper than {} levels", kMaxDepth));
  // clang-format off
  switch (value.tag) {
    case Tag::kNone: return {};
    case Tag::kBool: return value.number != 0;
    case Tag::kInt: return value.number;
    case Tag::kFloat: return std::bit_cast<double>(value.number);
    case Tag::kString:
      charge(text(value).size());
      return text(value);
    case Tag::kBytes:
      charge(bytes_[static_cast<size_t>(value.number)].size());
      return State::Bytes{bytes_[static_cast<size_t>(value.number)]};
    case Tag::kTensor: return tensors_[static_cast<size_t>(value.number)];
    case Tag::kList: return State::List{items(value, depth)};
    case Tag::kTuple: return State::Tuple{items(value, depth)};
    case Tag::kDict:
    case Tag::kOrderedDict: return dict(value, depth);
    case Tag::kStorage: fail("a storage without a tensor");
    case Tag::kGlobal: fail("a class, function or dtype as a value");
  }
  // clang-format on
  fail("a value of no known kind");
}

State::Items Unpickler::items(const Value& value, int depth) {
  State::Items items;
  charge(kNodeCost * container(value).size());
  items.reserve(container(value).size());
  for (const Value& item : container(value)) items.push_back(build(item, depth + 1));
  return items;
}

State Unpickler::dict(const Value& value, int depth) {
  const auto& flat = container(value);
  State::Dict dict;
  charge(kNodeCost * flat.size());
  dict.items.reserve(flat.size() / 2);
  for (size_t i = 0; i + 1 < flat.size(); i += 2) {
    if (flat[i].tag != Tag::kString && flat[i].tag != Tag::kInt) fail("a dict's key that is neither str nor int");
    dict.items.emplace_back(build(flat[i], depth + 1), build(flat[i + 1], depth + 1));
  }
  return dict;
}

State unpickle(std::string_view data, const StorageLoader& load_storage, const std::string& where) {
  return Unpickler(data, load_storage, where).run();
}

}  // namespace ddp::io
