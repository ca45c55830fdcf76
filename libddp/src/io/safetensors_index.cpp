// model.safetensors.index.json, as transformers writes it beside the shards of a large model:
//   {"metadata": {"total_size": 988065536}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "ddp/error.h"
#include "io/safetensors_file.h"

namespace ddp::io {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr int kDepth = 20;  // "metadata" is free

[[noreturn]] void fail(const std::string& where, const std::string& reason) {
  throw CheckpointError(fmt::format("{}: {}", where, reason));
}

// Keeps what stands in weight_map and passes over the rest.
class IndexHandler {
 public:
  IndexHandler(const std::string& where, SafetensorsShards& shards, fs::path folder)
      : where_(where), shards_(shards), folder_(std::move(folder)) {}

  bool null() { return other(); }
  bool boolean(bool) { return other(); }
  bool number_integer(json::number_integer_t) { return other(); }
  bool number_unsigned(json::number_unsigned_t) { return other(); }
  bool number_float(json::number_float_t, const std::string&) { return other(); }
  bool binary(json::binary_t&) { return other(); }
  bool string(std::string& text) {
    if (!in_map()) return other();
    if (!names_.insert(key_).second) fail(where_, fmt::format("weight_map names {} twice", key_));
    const auto [entry, is_new] = numbers_.emplace(text, shards_.files.size());
    if (is_new) {
      if (text.empty() || text == "." || text == ".." || text.find('/') != std::string::npos ||
          text.find('\0') != std::string::npos) {
        fail(where_,
             fmt::format("weight_map names the file {}; a name in the same folder was expected", json(text).dump()));
      }
      shards_.files.push_back(folder_ / text);
    }
    shards_.tensors.emplace_back(key_, entry->second);
    return true;
  }
  bool key(std::string& key) {
    key_ = key;
    if (depth_ == 1) top_ = key;
    return true;
  }
  bool start_object(std::size_t) {
    if (depth_ == 1 && top_ == "weight_map") {
      if (std::exchange(has_map_, true)) fail(where_, "weight_map is there twice");
    } else {
      other();
    }
    ++depth_;
    return true;
  }
  bool end_object() { return --depth_, true; }
  bool start_array(std::size_t) { return other(), ++depth_, true; }
  bool end_array() { return --depth_, true; }
  bool parse_error(std::size_t position, const std::string&, const json::exception&) {
    fail(where_, fmt::format("byte {}: no JSON from here on", position - std::min<size_t>(position, 1)));
  }
  void finish() const {
    if (!has_map_ || shards_.files.empty()) fail(where_, "has no weight_map that names files");
  }

 private:
  bool in_map() const { return depth_ == 2 && top_ == "weight_map"; }
  bool other() const {
    if (depth_ > 0 && top_ == "weight_map") fail(where_, "weight_map is to hold the name of a file for each tensor");
    return true;
  }

  const std::string& where_;
  SafetensorsShards& shards_;
  const fs::path folder_;
  int depth_ = 0;
  std::string top_, key_;
  bool has_map_ = false;
  std::unordered_set<std::string> names_;
  std::unordered_map<std::string, size_t> numbers_;
};

std::string text_of(FileSystem& files, const fs::path& path) {
  const std::string where = path.string();
  const int number = retry_interrupted([&] { return files.open(where, /*follow=*/true); });
  if (number < 0) fail(where, fmt::format("cannot be opened: {}", std::strerror(-number)));
  const Descriptor file(files, number);
  const int64_t size = files.size(number);
  if (size < 0) fail(where, fmt::format("cannot be read: {}", std::strerror(static_cast<int>(-size))));
  if (static_cast<uint64_t>(size) > kMaxSafetensorsHeader) {
    fail(where, fmt::format("an index of {} bytes; at most {} are read", size, kMaxSafetensorsHeader));
  }
  std::string text(static_cast<size_t>(size), '\0');
  for (size_t done = 0; done < text.size();) {
    const int64_t got =
        retry_interrupted([&] { return files.read(number, text.data() + done, text.size() - done, done); });
    if (got < 0) fail(where, fmt::format("reading it failed: {}", std::strerror(static_cast<int>(-got))));
    if (got == 0) fail(where, "ends while it is read");
    done += static_cast<size_t>(got);
  }
  return text;
}

bool exists(FileSystem& files, const fs::path& path) {
  Kind kind = Kind::kMissing;
  return files.kind(path.string(), kind) == 0 && kind != Kind::kMissing;
}

}  // namespace

SafetensorsShards find_safetensors(FileSystem& files, const fs::path& path) {
  fs::path file = path;
  std::vector<std::string> names;
  if (files.list(path.string(), names) >= 0) {  // a folder, or a link to one
    file = path / kSingle;
    if (!exists(files, file)) file = path / kIndex;
    if (!exists(files, file)) fail(path.string(), fmt::format("has neither {} nor {}", kSingle, kIndex));
  }
  if (file.extension() != ".json") return {.index = "", .files = {file}, .tensors = {}};

  SafetensorsShards shards{.index = file.string(), .files = {}, .tensors = {}};
  const std::string text = text_of(files, file);
  check_json_text(text, kDepth, shards.index);
  IndexHandler handler(shards.index, shards, file.parent_path());
  json::sax_parse(text.begin(), text.end(), &handler);
  handler.finish();
  return shards;
}

}  // namespace ddp::io
