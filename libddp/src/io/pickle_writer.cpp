#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <map>
#include <unordered_map>

#include "ddp/error.h"
#include "io/dtypes.h"
#include "io/pickle.h"
#include "io/pickle_opcodes.h"
#include "io/utf8.h"

namespace ddp::io {
namespace {

// Longer strings are hardly ever written twice.
constexpr size_t kMemoizedString = 256;

// Where in the tree the writer is; turned into text only when something is wrong there.
struct Place {
  const Place* parent = nullptr;
  const State* key = nullptr;  // of a dict
  size_t index = 0;            // of a list or tuple
  int depth = 0;

  std::string text() const {
    if (!parent) return "the state";
    if (!key) return fmt::format("{}[{}]", parent->text(), index);
    if (key->is_int()) return fmt::format("{}[{}]", parent->text(), key->as_int());
    return fmt::format("{}[\"{}\"]", parent->text(), key->as_string());
  }
};

[[noreturn]] void fail(const Place& place, const std::string& reason) {
  throw CheckpointError(fmt::format("{}: {}", place.text(), reason));
}

class Pickler {
 public:
  explicit Pickler(const std::vector<std::string>& ordered) : ordered_(ordered) {}

  Pickled run(const State& state) {
    op(opcode::kProto);
    op('\x02');
    value(state, {});
    op(opcode::kStop);
    return std::move(out_);
  }

 private:
  void op(char code) { out_.data.push_back(code); }

  template <class T>
  void raw(T number) {
    char bytes[sizeof number];
    std::memcpy(bytes, &number, sizeof number);
    out_.data.append(bytes, sizeof number);
  }

  void value(const State& state, const Place& place) {
    if (place.depth > kMaxDepth) fail(place, fmt::format("nested deeper than {} levels", kMaxDepth));
    if (state.is_null()) return op(opcode::kNone);
    if (state.is_bool()) return op(state.as_bool() ? opcode::kTrue : opcode::kFalse);
    if (state.is_int()) return integer(state.as_int());
    if (state.is_double()) return real(state.as_double());
    if (state.is_string()) return string(state.as_string(), place);
    if (state.is_bytes()) return bytes(state.as_bytes(), place);
    if (state.is_tensor()) return tensor(state.as_tensor(), place);
    if (state.is_list()) return list(state.as_list(), place);
    if (state.is_tuple()) return tuple(state.as_tuple(), place);
    dict(state.as_dict(), place);
  }

  void integer(int64_t number) {
    if (number >= 0 && number <= 0xff) {
      op(opcode::kInt1);
      raw(static_cast<uint8_t>(number));
    } else if (number >= 0 && number <= 0xffff) {
      op(opcode::kInt2);
      raw(static_cast<uint16_t>(number));
    } else if (std::in_range<int32_t>(number)) {
      op(opcode::kInt4);
      raw(static_cast<int32_t>(number));
    } else {
      op(opcode::kLong1);
      op(sizeof number);
      raw(number);
    }
  }

  void real(double number) {  // big-endian
    auto bits = std::bit_cast<uint64_t>(number);
    op(opcode::kFloat);
    for (int shift = 56; shift >= 0; shift -= 8) op(static_cast<char>(bits >> shift));
  }

  void string(std::string_view text, const Place& place) {
    if (text.size() > std::numeric_limits<uint32_t>::max()) fail(place, "a str of more than 4 GiB");
    if (!is_utf8(text)) fail(place, "a str that is no UTF-8; use State::Bytes");
    if (text.size() > kMemoizedString) return unicode(text);
    memoized(fmt::format("X{}", text), [&] { unicode(text); });
  }
  void unicode(std::string_view text) {
    op(opcode::kUnicode);
    raw(static_cast<uint32_t>(text.size()));
    out_.data += text;
  }

  void global(std::string_view module, std::string_view name) {
    const std::string code = fmt::format("c{}\n{}\n", module, name);
    memoized(code, [&] { out_.data += code; });
  }

  // `key` begins with the opcode, so that a string is never taken for a global.
  template <class Write>
  void memoized(std::string key, Write write) {
    auto [entry, is_new] = memo_.emplace(std::move(key), static_cast<uint32_t>(memo_.size()));
    const uint32_t number = entry->second;
    if (is_new) write();
    const bool is_short = number <= 0xff;
    op(is_new ? (is_short ? opcode::kPut1 : opcode::kPut4) : (is_short ? opcode::kGet1 : opcode::kGet4));
    is_short ? raw(static_cast<uint8_t>(number)) : raw(number);
  }

  // Protocol 2 has no bytes: Python writes them as text, one character each, and a call that undoes it.
  void bytes(std::string_view data, const Place& place) {
    const std::string text = latin1_to_utf8(data);
    if (text.size() > std::numeric_limits<uint32_t>::max()) fail(place, "more than 4 GiB of bytes; use a uint8 tensor");
    global("_codecs", "encode");
    unicode(text);
    string("latin1", place);
    op(opcode::kTuple2);
    op(opcode::kReduce);
  }

  void list(const State::Items& items, const Place& place) {
    op(opcode::kEmptyList);
    if (items.empty()) return;
    op(opcode::kMark);
    members(items, place);
    op(opcode::kAppends);
  }

  void tuple(const State::Items& items, const Place& place) {
    static constexpr char kShort[] = {opcode::kEmptyTuple, opcode::kTuple1, opcode::kTuple2, opcode::kTuple3};
    const bool is_short = items.size() < std::size(kShort);
    if (!is_short) op(opcode::kMark);
    members(items, place);
    op(is_short ? kShort[items.size()] : opcode::kTuple);
  }

  void members(const State::Items& items, const Place& place) {
    for (size_t i = 0; i < items.size(); ++i) {
      value(items[i], {.parent = &place, .index = i, .depth = place.depth + 1});
    }
  }

  void dict(const State::Pairs& items, const Place& place) {
    const bool is_ordered = place.depth == 1 && place.key && place.key->is_string() &&
                            std::find(ordered_.begin(), ordered_.end(), place.key->as_string()) != ordered_.end();
    if (is_ordered) {
      ordered_dict();
    } else {
      op(opcode::kEmptyDict);
    }
    if (items.empty()) return;
    op(opcode::kMark);
    for (const auto& [key, item] : items) {
      const Place inside{.parent = &place, .key = &key, .depth = place.depth + 1};
      value(key, inside);
      value(item, inside);
    }
    op(opcode::kSetItems);
  }

  void ordered_dict() {
    global("collections", "OrderedDict");
    op(opcode::kEmptyTuple);
    op(opcode::kReduce);
  }

  void tensor(torch::Tensor tensor, const Place& place) {
    if (!tensor.defined()) fail(place, "an undefined tensor");
    if (tensor.layout() != torch::kStrided || tensor.is_meta() || !tensor.has_storage()) {
      fail(place, "a tensor without plain storage (sparse, meta or of another backend) cannot be written");
    }
    const auto dtype = dtype_name(tensor.scalar_type());
    if (!dtype) fail(place, fmt::format("tensors of dtype {} cannot be written", c10::toString(tensor.scalar_type())));
    tensor = tensor.resolve_conj().resolve_neg();

    global("torch._utils", dtype->has_storage_class ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
    op(opcode::kMark);
    storage(tensor, *dtype, place);
    integer(tensor.storage_offset());
    numbers(tensor.sizes());
    numbers(tensor.strides());
    op(opcode::kFalse);  // requires no gradient
    ordered_dict();      // no hooks
    if (!dtype->has_storage_class) global("torch", dtype->name);
    op(opcode::kTuple);
    op(opcode::kReduce);
  }

  // The persistent id ('storage', class, key, device, elements). Tensors of different dtypes over one storage
  // get a record each, since torch.load gives a record one dtype.
  void storage(const torch::Tensor& tensor, const DtypeName& dtype, const Place& place) {
    const uint64_t item = c10::elementSize(dtype.dtype);
    const uint64_t elements = tensor.storage().nbytes() / item;
    auto [entry, is_new] =
        storages_.emplace(std::pair(tensor.storage().unsafeGetStorageImpl(), dtype.dtype), out_.storages.size());
    if (is_new) out_.storages.push_back({tensor.storage(), elements * item});
    op(opcode::kMark);
    string("storage", place);
    dtype.has_storage_class ? global("torch", dtype.name) : global("torch.storage", "UntypedStorage");
    unicode(std::to_string(entry->second));
    string("cpu", place);
    integer(static_cast<int64_t>(dtype.has_storage_class ? elements : elements * item));
    op(opcode::kTuple);
    op(opcode::kPersistentId);
  }

  void numbers(torch::IntArrayRef values) {
    op(opcode::kMark);
    for (int64_t number : values) integer(number);
    op(opcode::kTuple);
  }

  const std::vector<std::string>& ordered_;
  Pickled out_;
  std::unordered_map<std::string, uint32_t> memo_;
  std::map<std::pair<c10::StorageImpl*, torch::ScalarType>, size_t> storages_;
};

}  // namespace

Pickled pickle(const State& state, const std::vector<std::string>& ordered) { return Pickler(ordered).run(state); }

}  // namespace ddp::io
