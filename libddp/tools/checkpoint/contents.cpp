#include "checkpoint/contents.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/types.h>

#include <cctype>
#include <cmath>
#include <filesystem>

#include "ddp/error.h"
#include "ddp/safetensors.h"
#include "error_text.h"
#include "io/file_system.h"
#include "io/pickle.h"
#include "io/torch_file.h"
#include "io/zip_reader.h"

namespace tool {
namespace {

namespace fs = std::filesystem;
using ddp::State;
using nlohmann::ordered_json;

constexpr size_t kShown = 60;

bool is_safetensors(const std::string& path) {
  const auto extension = fs::path(path).extension();
  return extension == ".safetensors" || extension == ".json" || fs::is_directory(path);
}

// A storage of the right size without memory: for shapes only.
c10::Storage hollow(uint64_t bytes) {
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, torch::kCPU), nullptr,
                      /*resizable=*/false);
}

Contents read_hollow(const std::string& path, bool check_all) {
  const ddp::io::ZipReader zip(ddp::io::file_system(), path, /*follow=*/true);
  auto find = [&](const std::string& name) {
    const auto* record = zip.find(name);
    if (!record) zip.fail(fmt::format("record {} is missing", name));
    return record;
  };
  const auto* pickle = find("data.pkl");
  std::string text(pickle->size, '\0');
  zip.read(*pickle, text.data());
  if (check_all) {
    for (const auto& record : zip.records()) zip.verify(record);
  }
  Contents contents{.file_size = zip.file_size(), .records = zip.records().size()};
  contents.state = ddp::io::unpickle(
      text, [&](const std::string& key) { return hollow(find("data/" + key)->size); }, path + ": data.pkl");
  return contents;
}

uint64_t size_on_disk(const fs::path& path) {
  if (!fs::is_directory(path)) return fs::file_size(path);
  uint64_t sum = 0;
  for (const auto& entry : fs::directory_iterator(path)) {
    if (entry.path().extension() == ".safetensors") sum += fs::file_size(entry.path());
  }
  return sum;
}

Contents read_safetensors(const std::string& path) {
  State::Dict dict;
  for (const auto& item : ddp::load_safetensors(path)) dict.items.emplace_back(item.key(), item.value());
  return {.state = std::move(dict), .file_size = size_on_disk(path), .records = 0, .format = "safetensors"};
}

// Every error as one line that begins with the path.
template <class Action>
Contents as_failure(const std::string& path, Action action) try {
  return action();
} catch (const std::exception& error) {
  std::string text = ddp::detail::error_text(error);
  if (const auto end = text.find('\n'); end != std::string::npos) text.resize(end);
  throw Failure(printable(text.find(path) == std::string::npos ? path + ": " + text : text));
}

void collect(const State& state, const std::string& path, std::vector<std::pair<std::string, const State*>>& into) {
  auto below = [&](const std::string& name) { return path.empty() ? name : path + "/" + name; };
  if (state.is_dict() && !state.as_dict().empty()) {
    for (const auto& [key, value] : state.as_dict()) {
      collect(value, below(key.is_string() ? key.as_string() : std::to_string(key.as_int())), into);
    }
  } else if ((state.is_list() && !state.as_list().empty()) || (state.is_tuple() && !state.as_tuple().empty())) {
    const auto& items = state.is_list() ? state.as_list() : state.as_tuple();
    for (size_t i = 0; i < items.size(); ++i) collect(items[i], below(std::to_string(i)), into);
  } else {
    into.emplace_back(path, &state);
  }
}

std::string shortened(std::string text) {
  if (text.size() <= kShown) return text;
  size_t cut = kShown - 3;
  while (cut > 0 && (text[cut] & '\xc0') == '\x80') --cut;  // not inside a character
  return text.substr(0, cut) + "...";
}

}  // namespace

Contents read(const std::string& path, Data data) {
  return as_failure(path, [&]() -> Contents {
    if (is_safetensors(path)) return read_safetensors(path);
    if (data == Data::kSkipped) return read_hollow(path, /*check_all=*/false);
    return {.state = ddp::io::read_torch_file(path, /*follow=*/true), .file_size = fs::file_size(path)};
  });
}

Contents verify(const std::string& path) {
  return as_failure(path, [&] { return is_safetensors(path) ? read_safetensors(path) : read_hollow(path, true); });
}

std::vector<std::pair<std::string, const State*>> leaves(const State& state) {
  std::vector<std::pair<std::string, const State*>> all;
  collect(state, "", all);
  return all;
}

std::string type_of(const State& value) {
  if (!value.is_tensor()) return std::string(value.type_name());
  return std::string(c10::getDtypeNames(value.as_tensor().scalar_type()).first);
}

std::string shape_of(const State& value) {
  if (!value.is_tensor()) return "";
  const auto sizes = value.as_tensor().sizes();
  return fmt::format("[{}]", fmt::join(sizes.begin(), sizes.end(), ", "));
}

std::string describe(const State& value) {
  if (value.is_tensor()) return fmt::format("{} {}", type_of(value), shape_of(value));
  if (value.is_null()) return "None";
  if (value.is_bool()) return value.as_bool() ? "True" : "False";
  if (value.is_int()) return std::to_string(value.as_int());
  if (value.is_double()) return fmt::format("{}", value.as_double());
  if (value.is_string()) return shortened(fmt::format("\"{}\"", printable(value.as_string())));
  if (value.is_bytes()) return fmt::format("{} bytes", value.as_bytes().size());
  const size_t size = value.is_dict()   ? value.as_dict().size()
                      : value.is_list() ? value.as_list().size()
                                        : value.as_tuple().size();
  return fmt::format("{} of {}", value.type_name(), size);
}

ordered_json to_json(const State& value) {
  if (value.is_bool()) return value.as_bool();
  if (value.is_int()) return value.as_int();
  if (value.is_double() && std::isfinite(value.as_double())) return value.as_double();
  if (value.is_string()) return value.as_string();
  if (value.is_null()) return nullptr;
  return describe(value);
}

std::string printable(const std::string& text) {
  std::string out;
  for (char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    out += byte < 0x20 || byte == 0x7f ? fmt::format("\\x{:02x}", byte) : std::string(1, c);
  }
  return out;
}

std::string size_text(uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double size = static_cast<double>(bytes);
  size_t unit = 0;
  for (; size >= 1024 && unit + 1 < std::size(kUnits); ++unit) size /= 1024;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", size, kUnits[unit]);
}

ordered_json summary(const State& state) {
  ordered_json all;
  auto get = [](const State* from, const char* key) -> ordered_json {
    const State* value = from && from->is_dict() ? from->find(key) : nullptr;
    return value && !value->is_tensor() ? to_json(*value) : ordered_json();
  };
  for (const char* key : {"step", "epoch", "loss"}) all[key] = get(&state, key);
  const State* libddp = state.is_dict() ? state.find("libddp") : nullptr;
  for (const char* key : {"world_size", "version", "format"}) all[key] = get(libddp, key);
  return all;
}

}  // namespace tool
