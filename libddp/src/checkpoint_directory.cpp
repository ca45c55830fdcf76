#include "checkpoint_directory.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "ddp/atomic_file.h"
#include "ddp/error.h"
#include "io/file_system.h"

namespace ddp::detail {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kBeforeEpoch = "checkpoint_epoch", kBeforeStep = "_step", kExtension = ".pt";

// A number as std::to_string writes it, cut from the front of `text`.
std::optional<int64_t> take_number(std::string_view& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || value < 0) return std::nullopt;
  const size_t length = static_cast<size_t>(end - text.data());
  if (text.substr(0, length) != std::to_string(value)) return std::nullopt;
  text.remove_prefix(length);
  return value;
}

bool take(std::string_view& text, std::string_view expected) {
  if (!text.starts_with(expected)) return false;
  text.remove_prefix(expected.size());
  return true;
}

std::vector<std::string> names_in(const fs::path& directory) {
  std::vector<std::string> names;
  const int result = io::file_system().list(directory.string(), names);
  if (result < 0 && result != -ENOENT) {
    throw CheckpointError(
        fmt::format("{}: the directory cannot be read: {}", directory.string(), std::strerror(-result)));
  }
  return names;
}

io::Kind kind_of(const fs::path& path) {
  io::Kind kind = io::Kind::kMissing;
  if (const int result = io::file_system().kind(path.string(), kind); result < 0) {
    throw CheckpointError(fmt::format("{}: cannot be looked up: {}", path.string(), std::strerror(-result)));
  }
  return kind;
}

// The name inside `directory` that a link's text stands for. Python scripts link to the full path: fine, as
// long as it is this directory.
std::optional<std::string> name_inside(const fs::path& directory, const std::string& target) {
  const fs::path path(target);
  const std::string name = path.filename().string();
  if (name.empty() || name == "." || name == "..") return std::nullopt;
  if (!path.has_parent_path()) return name;
  if (path.is_absolute() && path.parent_path() == fs::absolute(directory).lexically_normal()) return name;
  return std::nullopt;
}

}  // namespace

std::string CheckpointName::text() const {
  return fmt::format("{}{}{}{}{}", kBeforeEpoch, epoch, kBeforeStep, step, kExtension);
}

std::optional<CheckpointName> CheckpointName::parse(std::string_view name) {
  if (!take(name, kBeforeEpoch)) return std::nullopt;
  const auto epoch = take_number(name);
  if (!epoch || !take(name, kBeforeStep)) return std::nullopt;
  const auto step = take_number(name);
  if (!step || name != kExtension) return std::nullopt;
  return CheckpointName{*epoch, *step};
}

Latest resolve_latest(const fs::path& directory) {
  const fs::path link = directory / kLatestName;
  switch (kind_of(link)) {
    case io::Kind::kMissing:
      return {};
    case io::Kind::kFile:
      return {.name = kLatestName, .problem = ""};
    case io::Kind::kDirectory:
      return {.name = "", .problem = "is a directory"};
    case io::Kind::kOther:
      return {.name = "", .problem = "is neither a link nor a file"};
    case io::Kind::kLink:
      break;
  }
  std::string target;
  if (const int result = io::file_system().read_link(link.string(), target); result < 0) {
    return {.name = "", .problem = fmt::format("cannot be read: {}", std::strerror(-result))};
  }
  const auto name = name_inside(directory, target);
  if (!name) return {.name = "", .problem = fmt::format("-> {} leads out of the directory", target)};
  switch (kind_of(directory / *name)) {
    case io::Kind::kFile:
      return {.name = *name, .problem = ""};
    case io::Kind::kMissing:
      return {.name = "", .problem = fmt::format("-> {} does not exist", target)};
    default:
      return {.name = "", .problem = fmt::format("-> {} is no file", target)};
  }
}

std::vector<CheckpointName> list_checkpoints(const fs::path& directory) {
  std::vector<CheckpointName> found;
  for (const std::string& name : names_in(directory)) {
    if (auto parsed = CheckpointName::parse(name)) found.push_back(*parsed);
  }
  std::sort(found.rbegin(), found.rend());
  return found;
}

std::set<std::string> linked_checkpoints(const fs::path& directory) {
  std::set<std::string> linked;
  for (const std::string& name : names_in(directory)) {
    if (name == "." || name == ".." || CheckpointName::parse(name)) continue;
    const fs::path path = directory / name;
    if (kind_of(path) != io::Kind::kLink) continue;
    std::string target;
    if (const int result = io::file_system().read_link(path.string(), target); result < 0) {
      throw CheckpointError(fmt::format("{}: cannot be read: {}", path.string(), std::strerror(-result)));
    }
    if (auto inside = name_inside(directory, target)) linked.insert(*inside);
  }
  return linked;
}

std::vector<std::string> rotate(const fs::path& directory, const Retention& retention, const CheckpointName& written) {
  std::vector<std::string> problems;
  if (retention.keep <= 0) return problems;
  std::vector<CheckpointName> old;
  int64_t kept = 0;
  for (const CheckpointName& name : list_checkpoints(directory)) {
    if (written < name) continue;
    if (++kept <= retention.keep || name == written) continue;
    if (retention.keep_every > 0 && name.step % retention.keep_every == 0) continue;
    old.push_back(name);
  }
  if (old.empty()) return problems;
  const auto linked = linked_checkpoints(directory);
  for (const CheckpointName& name : old) {
    if (linked.contains(name.text())) continue;
    const std::string path = (directory / name.text()).string();
    if (const int result = io::file_system().remove(path); result < 0 && result != -ENOENT) {
      problems.push_back(fmt::format("{} cannot be deleted: {}", path, std::strerror(-result)));
    }
  }
  return problems;
}

int sweep_temporaries(const fs::path& directory) {
  int swept = 0;
  for (const std::string& name : names_in(directory)) {
    if (!is_temporary_name(name, kTemporaryStem, kExtension) && !is_temporary_name(name, kTemporaryStem, ".json")) {
      continue;
    }
    if (io::file_system().remove((directory / name).string()) == 0) ++swept;
  }
  return swept;
}

}  // namespace ddp::detail
