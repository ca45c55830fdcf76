#include "io/safetensors_header.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "ddp/error.h"
#include "io/utf8.h"

namespace ddp::io {
namespace {

using nlohmann::json;
using torch::ScalarType;

constexpr std::string_view kMetadata = "__metadata__";
constexpr size_t kMaxDimensions = 64;          // of a torch::Tensor
constexpr size_t kLongestString = 1 << 20;     // a parser holds a few copies of it
constexpr size_t kLongestWord = 64;            // a number, true, false, null
constexpr uint64_t kSpareMemory = 8ull << 20;  // for descriptions of tensors, beyond the file's size

// What a description costs in memory, tensor and parser included, rounded up; see SafetensorsHandler::charge.
constexpr uint64_t kPerTensor = 1024, kPerDimension = 48, kPerText = 128, kCopies = 4;

// In the order of alignment that the format's own enumeration has (tensor.rs, Dtype); the numbers leave out what
// torch lacks.
constexpr SafetensorsDtype kDtypes[] = {
    {ScalarType::Bool, "BOOL", 0},
    {ScalarType::Byte, "U8", 1},
    {ScalarType::Char, "I8", 2},
    {ScalarType::Float8_e5m2, "F8_E5M2", 3},
    {ScalarType::Float8_e4m3fn, "F8_E4M3", 4},
    {ScalarType::Float8_e8m0fnu, "F8_E8M0", 5},
    {ScalarType::Float8_e4m3fnuz, "F8_E4M3FNUZ", 6},
    {ScalarType::Float8_e5m2fnuz, "F8_E5M2FNUZ", 7},
    {ScalarType::Short, "I16", 8},
    {ScalarType::UInt16, "U16", 9},
    {ScalarType::Half, "F16", 10},
    {ScalarType::BFloat16, "BF16", 11},
    {ScalarType::Int, "I32", 12},
    {ScalarType::UInt32, "U32", 13},
    {ScalarType::Float, "F32", 14},
    {ScalarType::ComplexFloat, "C64", 15},
    {ScalarType::Double, "F64", 16},
    {ScalarType::Long, "I64", 17},
    {ScalarType::UInt64, "U64", 18},
};

std::optional<SafetensorsDtype> dtype_named(std::string_view name) {
  for (const SafetensorsDtype& entry : kDtypes) {
    if (entry.name == name) return entry;
  }
  return std::nullopt;
}

// Text of the file in a message: short, whatever it is.
std::string shown(std::string_view text) {
  constexpr size_t kShown = 60;
  const std::string quoted = json(std::string(text)).dump(-1, ' ', true, json::error_handler_t::replace);
  return quoted.size() <= kShown + 2 ? quoted : quoted.substr(0, kShown) + "...\"";
}

[[noreturn]] void fail(const std::string& where, const std::string& reason) {
  throw CheckpointError(fmt::format("{}: {}", where, reason));
}

// Takes the events of nlohmann's parser. Anything but the format's own grammar is refused where it begins.
class SafetensorsHandler {
 public:
  SafetensorsHandler(const std::string& where, uint64_t budget) : where_(where), budget_(budget) {}

  SafetensorsHeader take() { return std::move(header_); }

  bool null() { return refuse("null"); }
  bool boolean(bool) { return refuse("true or false"); }
  bool number_integer(json::number_integer_t number) { return refuse(std::to_string(number)); }
  bool number_float(json::number_float_t, const std::string& text) { return refuse(text); }
  bool binary(json::binary_t&) { return refuse("binary data"); }

  bool number_unsigned(json::number_unsigned_t number) {
    if (at_ == At::kShape) {
      if (entry().sizes.size() == kMaxDimensions) fail_here(fmt::format("has more than {} dimensions", kMaxDimensions));
      if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        fail_here(fmt::format("has the size {}", number));
      }
      charge(kPerDimension);
      entry().sizes.push_back(static_cast<int64_t>(number));
      return true;
    }
    if (at_ == At::kOffsets && offsets_ < 2) {
      (offsets_++ == 0 ? entry().begin : entry().end) = number;
      return true;
    }
    return refuse(std::to_string(number));
  }

  bool string(std::string& text) {
    if (at_ == At::kMetadata) {
      charge(kPerText + kCopies * (key_.size() + text.size()));
      if (!header_.metadata.emplace(key_, text).second) fail_here(fmt::format("has the key {} twice", shown(key_)));
      return true;
    }
    if (at_ != At::kEntry || key_ != "dtype") return refuse(shown(text));
    const auto dtype = dtype_named(text);
    if (!dtype) {
      std::vector<std::string_view> names;
      for (const SafetensorsDtype& known : kDtypes) names.push_back(known.name);
      fail_here(fmt::format("has the dtype {}; known are {}", shown(text), fmt::join(names, ", ")));
    }
    entry().dtype = dtype->dtype;
    return true;
  }

  bool key(std::string& key) {
    key_ = key;
    if (at_ == At::kEntry) {
      const unsigned bit = key == "dtype" ? kDtype : key == "shape" ? kShape : key == "data_offsets" ? kOffsets : 0;
      if (bit == 0) fail_here(fmt::format("has the field {}; dtype, shape and data_offsets are known", shown(key)));
      if (fields_ & bit) fail_here(fmt::format("has the field {} twice", key));
      fields_ |= bit;
    }
    return true;
  }

  bool start_object(std::size_t) {
    if (at_ == At::kStart) {
      at_ = At::kTop;
    } else if (at_ != At::kTop) {
      return refuse("an object");
    } else if (key_ == kMetadata) {
      if (std::exchange(has_metadata_, true)) fail(where_, "the header has __metadata__ twice");
      at_ = At::kMetadata;
    } else {
      charge(kPerTensor + kCopies * key_.size());
      header_.entries.push_back({.name = key_});
      at_ = At::kEntry;
      fields_ = 0;
      offsets_ = 0;
    }
    return true;
  }

  bool end_object() {
    if (at_ == At::kEntry && fields_ != (kDtype | kShape | kOffsets)) {
      fail_here("lacks one of dtype, shape and data_offsets");
    }
    at_ = At::kTop;
    return true;
  }

  bool start_array(std::size_t) {
    if (at_ != At::kEntry || key_ == "dtype") return refuse("an array");
    at_ = key_ == "shape" ? At::kShape : At::kOffsets;
    return true;
  }

  bool end_array() {
    if (at_ == At::kOffsets && offsets_ != 2) fail_here("has data_offsets that are not two numbers");
    at_ = At::kEntry;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const json::exception&) {
    fail(where_, fmt::format("byte {} of the header: no JSON from here on", position - std::min<size_t>(position, 1)));
  }

 private:
  enum class At { kStart, kTop, kMetadata, kEntry, kShape, kOffsets };
  static constexpr unsigned kDtype = 1, kShape = 2, kOffsets = 4;

  SafetensorsEntry& entry() { return header_.entries.back(); }

  [[noreturn]] void fail_here(const std::string& what) {
    fail(where_, fmt::format("{} {}", at_ == At::kMetadata ? "__metadata__" : "tensor " + shown(entry().name), what));
  }

  [[noreturn]] bool refuse(const std::string& found) {
    switch (at_) {
      case At::kStart:
      case At::kTop:
        fail(where_, fmt::format("key {} of the header has {} as its value, a tensor's description was expected",
                                 shown(key_), found));
      case At::kMetadata:
        fail_here(fmt::format("has {} under the key {}; texts only", found, shown(key_)));
      default:
        fail_here(fmt::format("has {} in its {}", found, key_));
    }
  }

  void charge(uint64_t bytes) {
    if (bytes > budget_) {
      fail(where_, fmt::format("describing {} tensors and {} texts takes more memory than the file's size + 16 MiB: so "
                               "many in so small a file are refused",
                               header_.entries.size(), header_.metadata.size()));
    }
    budget_ -= bytes;
  }

  const std::string& where_;
  uint64_t budget_;
  SafetensorsHeader header_;
  At at_ = At::kStart;
  std::string key_;
  unsigned fields_ = 0;
  int offsets_ = 0;
  bool has_metadata_ = false;
};

void check_names(const std::vector<SafetensorsEntry>& entries, const std::string& where) {
  std::vector<std::string_view> names;
  names.reserve(entries.size());
  for (const SafetensorsEntry& entry : entries) names.push_back(entry.name);
  std::sort(names.begin(), names.end());
  const auto twin = std::adjacent_find(names.begin(), names.end());
  if (twin != names.end()) fail(where, fmt::format("tensor {} is there twice", shown(*twin)));
}

// The bytes that the shape takes, nothing when that overflows: with empty dimensions counted as one, so that strides
// fit too.
std::optional<uint64_t> bytes_of(const SafetensorsEntry& entry) {
  int64_t bytes = static_cast<int64_t>(c10::elementSize(entry.dtype));
  bool is_empty = false;
  for (int64_t size : entry.sizes) {
    is_empty |= size == 0;
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) return std::nullopt;
  }
  return is_empty ? 0 : static_cast<uint64_t>(bytes);
}

// Data without hole, overlap or rest. Requires: sorted by place.
void check_places(const std::vector<SafetensorsEntry>& entries, uint64_t data_size, const std::string& where) {
  uint64_t free_from = 0;
  const SafetensorsEntry* before = nullptr;
  for (const SafetensorsEntry& entry : entries) {
    const std::string name = "tensor " + shown(entry.name);
    if (entry.end < entry.begin || entry.end > data_size) {
      fail(where,
           fmt::format("{} lies at bytes [{}, {}) of the data, which has {}", name, entry.begin, entry.end, data_size));
    }
    if (entry.begin < free_from) {
      fail(where, fmt::format("{} at bytes [{}, {}) of the data overlaps {}, which ends at {}", name, entry.begin,
                              entry.end, shown(before->name), free_from));
    }
    if (entry.begin > free_from) {
      fail(where,
           fmt::format("bytes [{}, {}) of the data, before {}, belong to no tensor", free_from, entry.begin, name));
    }
    const auto bytes = bytes_of(entry);
    if (!bytes || *bytes != entry.bytes()) {
      fail(where,
           fmt::format("{} of dtype {} and shape [{}] takes {} bytes, its data_offsets [{}, {}] give {}", name,
                       safetensors_dtype(entry.dtype)->name, fmt::join(entry.sizes, ", "),
                       bytes ? std::to_string(*bytes) : "more than 2^63", entry.begin, entry.end, entry.bytes()));
    }
    free_from = entry.end;
    before = &entry;
  }
  if (free_from != data_size) {
    fail(where, fmt::format("{} bytes after the last tensor belong to none", data_size - free_from));
  }
}

std::string json_text(const std::string& text, const std::string& where) try {
  return json(text).dump();
} catch (const json::exception&) {
  fail(where, fmt::format("{} is no UTF-8", shown(text)));
}

}  // namespace

std::optional<SafetensorsDtype> safetensors_dtype(ScalarType dtype) {
  for (const SafetensorsDtype& entry : kDtypes) {
    if (entry.dtype == dtype) return entry;
  }
  return std::nullopt;
}

uint64_t safetensors_header_size(std::string_view first_bytes, uint64_t file_size, const std::string& where) {
  if (first_bytes.size() < kSafetensorsLength || file_size < kSafetensorsLength) {
    fail(where, fmt::format("{} bytes are too few for a safetensors file", file_size));
  }
  uint64_t size;
  std::memcpy(&size, first_bytes.data(), sizeof size);  // little-endian, as the machine
  if (size > file_size - kSafetensorsLength) {
    fail(where, fmt::format("the header is to have {} bytes, the file has {}: truncated, or no safetensors file", size,
                            file_size));
  }
  if (size > kMaxSafetensorsHeader) {
    fail(where, fmt::format("the header has {} bytes; at most {} are read", size, kMaxSafetensorsHeader));
  }
  return size;
}

void check_json_text(std::string_view text, int max_depth, const std::string& where) {
  auto fail_at = [&](size_t byte, const std::string& what) { fail(where, fmt::format("byte {}: {}", byte, what)); };
  if (!text.starts_with('{')) fail_at(0, "does not begin with {, as JSON of this kind does");
  if (!is_utf8(text)) fail(where, "is no UTF-8");
  int depth = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const size_t from = i;
    switch (text[i]) {
      case '{':
      case '[':
        if (++depth > max_depth) fail_at(i, fmt::format("nested deeper than {} levels", max_depth));
        break;
      case '}':
      case ']':
        --depth;
        break;
      case '"':
        for (++i; i < text.size() && text[i] != '"'; ++i) i += text[i] == '\\';
        if (i - from > kLongestString) fail_at(from, fmt::format("a text of more than {} bytes", kLongestString));
        break;
      case '\0':  // the parser would take it for the end, and pass over what comes after
        fail_at(i, "a zero byte");
        break;
      case ' ':
      case '\t':
      case '\r':
      case '\n':
      case ',':
      case ':':
        break;
      default:
        while (i + 1 < text.size() && std::strchr("{}[]\", \t\r\n:", text[i + 1]) == nullptr) ++i;
        if (i - from >= kLongestWord) fail_at(from, "a number or word without an end");
    }
  }
}

SafetensorsHeader parse_safetensors_header(std::string_view text, uint64_t data_size, const std::string& where) {
  constexpr int kDepth = 3;
  check_json_text(text, kDepth, where + ": the header");
  SafetensorsHandler handler(where, data_size + kSpareMemory);  // the text is in memory too
  json::sax_parse(text.begin(), text.end(), &handler);
  SafetensorsHeader header = handler.take();
  check_names(header.entries, where);
  std::stable_sort(header.entries.begin(), header.entries.end(),
                   [](const auto& a, const auto& b) { return a.begin != b.begin ? a.begin < b.begin : a.end < b.end; });
  check_places(header.entries, data_size, where);
  return header;
}

std::string make_safetensors_header(std::vector<SafetensorsEntry>& entries,
                                    const std::map<std::string, std::string>& metadata, const std::string& where) {
  auto rank = [](const SafetensorsEntry& entry) { return safetensors_dtype(entry.dtype)->rank; };
  std::sort(entries.begin(), entries.end(),
            [&](const auto& a, const auto& b) { return rank(a) != rank(b) ? rank(a) > rank(b) : a.name < b.name; });
  check_names(entries, where);

  std::string text = "{";
  auto comma = [&] {
    if (text.size() > 1) text += ',';
  };
  if (!metadata.empty()) {
    text += fmt::format("\"{}\":{{", kMetadata);
    const char* between = "";
    for (const auto& [key, value] : metadata) {
      text += fmt::format("{}{}:{}", std::exchange(between, ","), json_text(key, where), json_text(value, where));
    }
    text += '}';
  }
  uint64_t offset = 0;
  for (SafetensorsEntry& entry : entries) {
    if (entry.name == kMetadata) fail(where, fmt::format("no tensor can have the name {}", kMetadata));
    const auto bytes = bytes_of(entry);
    if (!bytes) fail(where, fmt::format("tensor {} is larger than 2^63 bytes", shown(entry.name)));
    entry.begin = offset;
    entry.end = offset += *bytes;
    comma();
    text += fmt::format("{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}", json_text(entry.name, where),
                        safetensors_dtype(entry.dtype)->name, fmt::join(entry.sizes, ","), entry.begin, entry.end);
  }
  text += '}';
  text.resize((text.size() + kSafetensorsLength - 1) / kSafetensorsLength * kSafetensorsLength, ' ');
  if (text.size() > kMaxSafetensorsHeader) {
    fail(where, fmt::format("a header of {} bytes; at most {} can be read", text.size(), kMaxSafetensorsHeader));
  }
  const uint64_t size = text.size();
  std::string bytes(sizeof size, '\0');
  std::memcpy(bytes.data(), &size, sizeof size);
  return bytes + text;
}

}  // namespace ddp::io
