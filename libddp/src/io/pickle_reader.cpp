#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/types.h>

#include <bit>
#include <cstring>
#include <deque>
#include <limits>
#include <unordered_map>

#include "ddp/error.h"
#include "io/pickle.h"
#include "io/pickle_globals.h"
#include "io/pickle_opcodes.h"
#include "io/storage_view.h"
#include "io/utf8.h"

namespace ddp::io {
namespace {

// Values that may be made beyond one per byte of the pickle: lists that a file names twice are copied.
constexpr size_t kSpareValues = 100'000;

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

class Unpickler {
 public:
  Unpickler(std::string_view data, const StorageLoader& load_storage, const std::string& where)
      : data_(data), load_storage_(load_storage), where_(where), budget_(data.size() + kSpareValues) {}

  State run() try {
    Value root = execute();
    if (position_ != data_.size()) fail("there are bytes after the end");
    return build(root, 0);
  } catch (const CheckpointError&) {
    throw;
  } catch (const std::exception& error) {  // of libtorch or State: this byte is where it came from
    fail(error.what());
  }

 private:
  [[noreturn]] void fail(const std::string& reason) const {
    throw CheckpointError(fmt::format("{}: byte {}: {}", where_, opcode_at_, reason));
  }

  // --- input

  std::string_view take(size_t size) {
    if (size > data_.size() - position_) fail("the pickle ends in the middle");
    std::string_view bytes = data_.substr(position_, size);
    position_ += size;
    return bytes;
  }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view line() {
    const size_t end = data_.find('\n', position_);
    if (end == std::string_view::npos) fail("the pickle ends in a name");
    std::string_view text = data_.substr(position_, end - position_);
    position_ = end + 1;
    return text;
  }

  // --- stack

  void push(Tag tag, int64_t number = 0, uint32_t extra = 0) { stack_.push_back({tag, extra, number}); }
  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  Value pop() {
    if (stack_.size() <= floor()) fail("an opcode finds no value to work on");
    Value value = stack_.back();
    stack_.pop_back();
    return value;
  }
  const Value& top() const {
    if (stack_.size() <= floor()) fail("an opcode finds no value to work on");
    return stack_.back();
  }
  std::vector<Value> pop_mark() {
    if (marks_.empty()) fail("an opcode finds no mark");
    const auto from = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<Value> values(from, stack_.end());
    stack_.erase(from, stack_.end());
    marks_.pop_back();
    return values;
  }
  void push_container(Tag tag, std::vector<Value> values) {
    containers_.push_back(std::move(values));
    push(tag, static_cast<int64_t>(containers_.size() - 1));
  }
  void push_tuple(size_t size) {
    std::vector<Value> values(size);
    while (size > 0) values[--size] = pop();
    push_container(Tag::kTuple, std::move(values));
  }
  std::vector<Value>& container(const Value& value) { return containers_[static_cast<size_t>(value.number)]; }
  std::string_view text(const Value& value) const { return strings_[static_cast<size_t>(value.number)]; }

  std::vector<Value>& top_list() {
    if (top().tag != Tag::kList) fail("only a list can be appended to");
    return container(top());
  }
  std::vector<Value>& top_dict() {
    if (top().tag != Tag::kDict && top().tag != Tag::kOrderedDict) fail("only a dict has items");
    return container(top());
  }

  // --- opcodes

  Value execute() {
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

  void step(char code) {
    // clang-format off
    switch (code) {
      case opcode::kProto:
        if (int version = number<uint8_t>(); version != 2) {
          fail(fmt::format("pickle protocol {}; only 2, which torch.save uses, is read", version));
        }
        return;
      case opcode::kMark: return marks_.push_back(stack_.size());
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
        return top_list().push_back(value);
      }
      case opcode::kAppends: {
        const auto values = pop_mark();
        auto& list = top_list();
        list.insert(list.end(), values.begin(), values.end());
        return;
      }
      case opcode::kSetItem: {
        const Value value = pop(), key = pop();
        auto& dict = top_dict();
        dict.push_back(key), dict.push_back(value);
        return;
      }
      case opcode::kSetItems: {
        const auto values = pop_mark();
        if (values.size() % 2 != 0) fail("a key without a value");
        auto& dict = top_dict();
        dict.insert(dict.end(), values.begin(), values.end());
        return;
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

  void memoize(uint32_t index) { memo_[index] = top(); }
  void recall(uint32_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) fail(fmt::format("memo {} was never set", index));
    stack_.push_back(found->second);
  }

  void long_integer() {
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

  void real() {  // big-endian
    uint64_t bits = 0;
    for (char byte : take(sizeof bits)) bits = (bits << 8) | static_cast<unsigned char>(byte);
    push(Tag::kFloat, static_cast<int64_t>(bits));
  }

  void unicode() {
    const std::string_view characters = take(number<uint32_t>());
    if (!is_utf8(characters)) fail("a str that is no UTF-8");
    strings_.push_back(characters);
    push(Tag::kString, static_cast<int64_t>(strings_.size() - 1));
  }

  // --- names and what they make

  void global() {
    const std::string_view module = line(), name = line();
    const auto known = find_global(module, name);
    if (!known) {
      fail(
          fmt::format("the file asks for {}.{}, which is neither plain data nor a tensor; it is refused, "
                      "nothing was run",
                      module, name));
    }
    push(Tag::kGlobal, static_cast<int64_t>(known->global), static_cast<uint32_t>(known->dtype));
  }

  void reduce() {
    const Value arguments = pop(), callee = pop();
    if (callee.tag != Tag::kGlobal || arguments.tag != Tag::kTuple) fail("a call of something that cannot be called");
    const std::vector<Value> args = container(arguments);
    switch (static_cast<Global>(callee.number)) {
      case Global::kOrderedDict:
        require(args.empty(), "an OrderedDict is made empty");
        return push_container(Tag::kOrderedDict, {});
      case Global::kSet:
        require(args.size() == 1 && args[0].tag == Tag::kList, "a set is made of a list");
        return stack_.push_back(args[0]);
      case Global::kSize:
        require(args.size() == 1 && args[0].tag == Tag::kTuple, "a torch.Size is made of a tuple");
        return stack_.push_back(args[0]);
      case Global::kBytes:
        require(args.empty(), "bytes are made empty");
        return push_bytes("");
      case Global::kEncode:
        return encode(args);
      case Global::kTensorV2:
        return tensor(args, /*has_dtype=*/false);
      case Global::kTensorV3:
        return tensor(args, /*has_dtype=*/true);
      case Global::kParameter:
        require(args.size() == 3 && args[0].tag == Tag::kTensor, "a parameter is made of a tensor");
        return stack_.push_back(args[0]);
      default:
        fail("a call of something that cannot be called");
    }
  }

  void require(bool condition, const char* what) const {
    if (!condition) fail(fmt::format("malformed call: {}", what));
  }

  void push_bytes(std::string bytes) {
    bytes_.push_back(std::move(bytes));
    push(Tag::kBytes, static_cast<int64_t>(bytes_.size() - 1));
  }

  void encode(const std::vector<Value>& args) {
    require(args.size() == 2 && args[0].tag == Tag::kString && args[1].tag == Tag::kString && text(args[1]) == "latin1",
            "bytes are encoded as latin1");
    auto bytes = utf8_to_latin1(text(args[0]));
    require(bytes.has_value(), "bytes are characters below 256");
    push_bytes(*std::move(bytes));
  }

  void persistent_id() {
    const Value id = pop();
    require(id.tag == Tag::kTuple && container(id).size() == 5, "a storage is named by five values");
    const std::vector<Value> parts = container(id);
    require(parts[0].tag == Tag::kString && text(parts[0]) == "storage", "only storages are outside the pickle");
    require(parts[1].tag == Tag::kGlobal && parts[2].tag == Tag::kString && parts[4].tag == Tag::kInt,
            "a storage has a class, a name and a size");
    const auto storage_class = static_cast<Global>(parts[1].number);
    const bool is_untyped = storage_class == Global::kUntypedStorage;
    require(is_untyped || storage_class == Global::kStorageClass, "a storage has a class");
    const auto dtype = static_cast<torch::ScalarType>(parts[1].extra);

    const std::string key(text(parts[2]));
    auto found = loaded_.find(key);
    if (found == loaded_.end()) found = loaded_.emplace(key, load_storage_(key)).first;
    const uint64_t bytes = found->second.nbytes(), item = is_untyped ? 1 : c10::elementSize(dtype);
    if (parts[4].number < 0 || static_cast<uint64_t>(parts[4].number) > bytes / item) {
      fail(fmt::format("storage {} is to hold {} elements of {} bytes, its record has {} bytes", key, parts[4].number,
                       item, bytes));
    }
    storages_.push_back({found->second, dtype, is_untyped});
    push(Tag::kStorage, static_cast<int64_t>(storages_.size() - 1));
  }

  // (storage, offset, sizes, strides, requires_grad, hooks[, dtype][, metadata])
  void tensor(const std::vector<Value>& args, bool has_dtype) {
    const size_t fixed = has_dtype ? 7 : 6;
    require((args.size() == fixed || args.size() == fixed + 1) && args[0].tag == Tag::kStorage &&
                args[1].tag == Tag::kInt && args[2].tag == Tag::kTuple && args[3].tag == Tag::kTuple,
            "a tensor is made of a storage, an offset, sizes and strides");
    const Storage& source = storages_[static_cast<size_t>(args[0].number)];
    auto dtype = source.dtype;
    if (has_dtype) {
      require(args[6].tag == Tag::kGlobal && static_cast<Global>(args[6].number) == Global::kDtype, "a dtype by name");
      dtype = static_cast<torch::ScalarType>(args[6].extra);
    }
    require(has_dtype == source.is_untyped, "a dtype stands in one place");

    const auto sizes = integers(args[2]), strides = integers(args[3]);
    auto made = view_storage(source.storage, dtype, args[1].number, sizes, strides);
    if (args.size() > fixed) made = with_metadata(made, args[fixed]);
    tensors_.push_back(std::move(made));
    push(Tag::kTensor, static_cast<int64_t>(tensors_.size() - 1));
  }

  std::vector<int64_t> integers(const Value& tuple) {
    std::vector<int64_t> numbers;
    for (const Value& value : container(tuple)) {
      require(value.tag == Tag::kInt, "sizes and strides are ints");
      numbers.push_back(value.number);
    }
    return numbers;
  }

  torch::Tensor with_metadata(torch::Tensor tensor, const Value& metadata) {
    if (metadata.tag == Tag::kNone) return tensor;
    require(metadata.tag == Tag::kDict, "a tensor's metadata is a dict");
    const auto& items = container(metadata);
    for (size_t i = 0; i + 1 < items.size(); i += 2) {
      require(items[i].tag == Tag::kString && items[i + 1].tag == Tag::kBool, "conj and neg are bools");
      if (items[i + 1].number == 0) continue;
      if (text(items[i]) == "conj") {
        tensor = tensor.conj();
      } else if (text(items[i]) == "neg") {
        tensor = tensor._neg_view();
      } else {
        fail(fmt::format("tensor metadata \"{}\" is not known", text(items[i])));
      }
    }
    return tensor;
  }

  // --- the tree

  State build(const Value& value, int depth) {
    if (depth > kMaxDepth) fail(fmt::format("nested deeper than {} levels", kMaxDepth));
    if (budget_ == 0) fail("the same lists are repeated so often that the file would grow in memory without bound");
    --budget_;
    // clang-format off
    switch (value.tag) {
      case Tag::kNone: return {};
      case Tag::kBool: return value.number != 0;
      case Tag::kInt: return value.number;
      case Tag::kFloat: return std::bit_cast<double>(value.number);
      case Tag::kString: return text(value);
      case Tag::kBytes: return State::Bytes{bytes_[static_cast<size_t>(value.number)]};
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

  State::Items items(const Value& value, int depth) {
    State::Items items;
    for (const Value& item : container(value)) items.push_back(build(item, depth + 1));
    return items;
  }

  State dict(const Value& value, int depth) {
    const auto& flat = container(value);
    State::Dict dict;
    for (size_t i = 0; i + 1 < flat.size(); i += 2) {
      if (flat[i].tag != Tag::kString && flat[i].tag != Tag::kInt) fail("a dict's key that is neither str nor int");
      dict.items.emplace_back(build(flat[i], depth + 1), build(flat[i + 1], depth + 1));
    }
    return dict;
  }

  std::string_view data_;
  const StorageLoader& load_storage_;
  const std::string& where_;
  size_t budget_;
  size_t position_ = 0;
  size_t opcode_at_ = 0;

  std::vector<Value> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint32_t, Value> memo_;
  std::deque<std::vector<Value>> containers_;
  std::vector<std::string_view> strings_;
  std::vector<std::string> bytes_;
  std::vector<torch::Tensor> tensors_;
  std::vector<Storage> storages_;
  std::unordered_map<std::string, c10::Storage> loaded_;
};

}  // namespace

State unpickle(std::string_view data, const StorageLoader& load_storage, const std::string& where) {
  return Unpickler(data, load_storage, where).run();
}

}  // namespace ddp::io
