#include "checkpoint_best.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "checkpoint_directory.h"
#include "ddp/atomic_file.h"
#include "ddp/error.h"
#include "io/file_system.h"

namespace ddp::detail {
namespace {

namespace fs = std::filesystem;

constexpr size_t kLargestRecord = 1 << 16;

[[noreturn]] void fail(const fs::path& path, const std::string& reason) {
  throw CheckpointError(fmt::format("{}: {}", path.string(), reason));
}

io::Kind kind_of(const fs::path& path) {
  io::Kind kind = io::Kind::kMissing;
  if (const int result = io::file_system().kind(path.string(), kind); result < 0) {
    fail(path, fmt::format("cannot be looked up: {}", std::strerror(-result)));
  }
  return kind;
}

std::string read_small(const fs::path& path) {
  io::FileSystem& files = io::file_system();
  const int number = io::retry_interrupted([&] { return files.open(path.string(), /*follow=*/false); });
  if (number < 0) fail(path, fmt::format("cannot be opened: {}", std::strerror(-number)));
  const io::Descriptor file(files, number);
  std::string text(kLargestRecord, '\0');
  size_t size = 0;
  while (size < text.size()) {
    const int64_t got =
        io::retry_interrupted([&] { return files.read(number, text.data() + size, text.size() - size, size); });
    if (got < 0) fail(path, fmt::format("cannot be read: {}", std::strerror(static_cast<int>(-got))));
    if (got == 0) break;
    size += static_cast<size_t>(got);
  }
  text.resize(size);
  return text;
}

}  // namespace

std::optional<Best> read_best(const fs::path& directory) {
  const fs::path path = directory / kBestRecord;
  if (kind_of(path) == io::Kind::kMissing) return std::nullopt;
  const auto record = nlohmann::json::parse(read_small(path), nullptr, /*allow_exceptions=*/false);
  if (!record.is_object() || !record.contains("checkpoint") || !record["checkpoint"].is_string() ||
      !record.contains("metric") || !record["metric"].is_number()) {
    fail(path, "is no record of a best checkpoint");
  }
  const Best best{.checkpoint = record["checkpoint"], .metric = record["metric"]};
  if (!CheckpointName::parse(best.checkpoint)) fail(path, fmt::format("names {}, no checkpoint", best.checkpoint));
  if (kind_of(directory / best.checkpoint) == io::Kind::kMissing) return std::nullopt;
  return best;
}

void write_best(const fs::path& directory, const Best& best) {
  const std::string text = nlohmann::json({{"checkpoint", best.checkpoint}, {"metric", best.metric}}).dump(1) + "\n";
  write_file_atomically(
      directory / kBestRecord, [&](const Append& append) { append(text.data(), text.size()); }, kTemporaryStem);
}

std::string pin_link(const std::string& name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
           c == '.';
  };
  const std::string link = fmt::format("checkpoint_{}.pt", name);
  if (name.empty() || !std::all_of(name.begin(), name.end(), allowed) || link == kLatestName ||
      name.starts_with("epoch") || name.starts_with("tmp")) {
    throw ConfigError(
        fmt::format("[ddp::Checkpointer] a pin cannot be called \"{}\": letters, digits, '-', '_' and '.', and neither "
                    "\"latest\" nor beginning with \"epoch\" or \"tmp\"",
                    name));
  }
  return link;
}

void pin(const fs::path& directory, const std::string& name, const std::string& checkpoint) {
  const fs::path link = directory / pin_link(name);
  const io::Kind kind = kind_of(link);
  if (kind != io::Kind::kMissing && kind != io::Kind::kLink) fail(link, "is there and no link; move it away");
  swap_symlink(link, checkpoint);
}

}  // namespace ddp::detail
