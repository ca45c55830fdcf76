// Names in a pickle, and what they make: bytes, storages, tensors.
#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>

#include "io/pickle_globals.h"
#include "io/storage_view.h"
#include "io/unpickler.h"
#include "io/utf8.h"

namespace ddp::io {
namespace {

// Kept in memory for each, in bytes.
constexpr size_t kTensorCost = 512, kStorageCost = 96;
constexpr size_t kMaxDimensions = 64;  // of a torch::Tensor
constexpr size_t kFlags = 2;           // conj, neg

// A name of the file's in a message: short, and without control characters.
std::string shown(std::string_view name) {
  constexpr size_t kShown = 100;
  std::string text;
  for (char c : name.substr(0, kShown)) {
    const auto byte = static_cast<unsigned char>(c);
    text += byte < 0x20 || byte > 0x7e ? fmt::format("\\x{:02x}", byte) : std::string(1, c);
  }
  return name.size() > kShown ? text + "..." : text;
}

}  // namespace

void Unpickler::global() {
  const std::string_view module = line(), name = line();
  const auto known = find_global(module, name);
  if (!known) {
    fail(
        fmt::format("the file asks for {}.{}, which is neither plain data nor a tensor; it is refused, "
                    "nothing was run",
                    shown(module), shown(name)));
  }
  push(Tag::kGlobal, static_cast<int64_t>(known->global), static_cast<uint32_t>(known->dtype));
}

void Unpickler::reduce() {
  const Value arguments = pop(), callee = pop();
  if (callee.tag != Tag::kGlobal || arguments.tag != Tag::kTuple) fail("a call of something that cannot be called");
  const std::vector<Value>& args = container(arguments);
  switch (static_cast<Global>(callee.number)) {
    case Global::kOrderedDict:
      require(args.empty(), "an OrderedDict is made empty");
      return push_container(Tag::kOrderedDict, {});
    case Global::kSet:
      require(args.size() == 1 && args[0].tag == Tag::kList, "a set is made of a list");
      return push(args[0]);
    case Global::kSize:
      require(args.size() == 1 && args[0].tag == Tag::kTuple, "a torch.Size is made of a tuple");
      return push(args[0]);
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
      return push(args[0]);
    default:
      fail("a call of something that cannot be called");
  }
}

void Unpickler::encode(const std::vector<Value>& args) {
  require(args.size() == 2 && args[0].tag == Tag::kString && args[1].tag == Tag::kString && text(args[1]) == "latin1",
          "bytes are encoded as latin1");
  auto bytes = utf8_to_latin1(text(args[0]));
  require(bytes.has_value(), "bytes are characters below 256");
  push_bytes(*std::move(bytes));
}

void Unpickler::persistent_id() {
  const Value id = pop();
  require(id.tag == Tag::kTuple && container(id).size() == 5, "a storage is named by five values");
  const std::vector<Value>& parts = container(id);
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
    fail(fmt::format("storage {} is to hold {} elements of {} bytes, its record has {} bytes", shown(key),
                     parts[4].number, item, bytes));
  }
  charge(kStorageCost);
  storages_.push_back({found->second, dtype, is_untyped});
  push(Tag::kStorage, static_cast<int64_t>(storages_.size() - 1));
}

// (storage, offset, sizes, strides, requires_grad, hooks[, dtype][, metadata])
void Unpickler::tensor(const std::vector<Value>& args, bool has_dtype) {
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
  charge(kTensorCost + 2 * sizeof(int64_t) * sizes.size());
  auto made = view_storage(source.storage, dtype, args[1].number, sizes, strides);
  if (args.size() > fixed) made = with_metadata(made, args[fixed]);
  tensors_.push_back(std::move(made));
  push(Tag::kTensor, static_cast<int64_t>(tensors_.size() - 1));
}

std::vector<int64_t> Unpickler::integers(const Value& tuple) {
  // Long tuples are refused before they are copied: one may be named by any number of tensors.
  require(container(tuple).size() <= kMaxDimensions, "a tensor has 64 dimensions at most");
  std::vector<int64_t> numbers;
  for (const Value& value : container(tuple)) {
    require(value.tag == Tag::kInt, "sizes and strides are ints");
    numbers.push_back(value.number);
  }
  return numbers;
}

torch::Tensor Unpickler::with_metadata(torch::Tensor tensor, const Value& metadata) {
  if (metadata.tag == Tag::kNone) return tensor;
  require(metadata.tag == Tag::kDict && container(metadata).size() <= 2 * kFlags,
          "a tensor's metadata is a small dict");
  const auto& items = container(metadata);
  for (size_t i = 0; i + 1 < items.size(); i += 2) {
    require(items[i].tag == Tag::kString && items[i + 1].tag == Tag::kBool, "conj and neg are bools");
    if (items[i + 1].number == 0) continue;
    if (text(items[i]) == "conj") {
      tensor = tensor.conj();
    } else if (text(items[i]) == "neg") {
      tensor = tensor._neg_view();
    } else {
      fail(fmt::format("tensor metadata \"{}\" is not known", shown(text(items[i]))));
    }
  }
  return tensor;
}

}  // namespace ddp::io
