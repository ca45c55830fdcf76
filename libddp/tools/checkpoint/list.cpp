#include <fmt/format.h>

#include <filesystem>
#include <iostream>

#include "checkpoint/commands.h"
#include "checkpoint/contents.h"
#include "checkpoint/table.h"
#include "checkpoint_directory.h"
#include "ddp/atomic_file.h"
#include "ddp/error.h"

namespace tool {
namespace {

namespace fs = std::filesystem;
using ddp::detail::CheckpointName;
using nlohmann::ordered_json;

// "valid", or why not.
ordered_json examine(const fs::path& path, const CheckpointName& name, bool quick) {
  ordered_json row{
      {"file", name.text()}, {"step", name.step}, {"epoch", name.epoch}, {"bytes", nullptr}, {"world_size", nullptr}};
  std::error_code error;
  const auto size = fs::file_size(path, error);
  if (!error) row["bytes"] = size;
  try {
    const Contents contents = quick ? read(path.string(), Data::kSkipped) : verify(path.string());
    const ordered_json in_file = summary(contents.state);
    row["world_size"] = in_file["world_size"];
    if (in_file["step"] != name.step || in_file["epoch"] != name.epoch) {
      throw Failure(fmt::format("{}: its step is {} and its epoch {}", path.string(), in_file["step"].dump(),
                                in_file["epoch"].dump()));
    }
    row["valid"] = true;
    row["reason"] = nullptr;
  } catch (const Failure& failure) {
    std::string reason = failure.what();
    if (const std::string before = path.string() + ": "; reason.starts_with(before)) reason.erase(0, before.size());
    row["valid"] = false;
    row["reason"] = reason;
  }
  return row;
}

std::string text_of(const ordered_json& value) { return value.is_null() ? "-" : value.dump(); }

}  // namespace

int list(const std::string& directory, const ListOptions& options) {
  if (!fs::is_directory(directory)) throw Failure(directory + ": is no directory");
  const auto latest = ddp::detail::resolve_latest(directory);
  ordered_json report{{"directory", directory},
                      {"latest", latest.name.empty() ? ordered_json() : ordered_json(latest.name)},
                      {"latest_problem", latest.problem.empty() ? ordered_json() : ordered_json(latest.problem)},
                      {"temporaries", ordered_json::array()},
                      {"checkpoints", ordered_json::array()}};
  for (const auto& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    if (ddp::is_temporary_name(name, ddp::detail::kTemporaryStem, ".pt")) report["temporaries"].push_back(name);
  }
  for (const CheckpointName& name : ddp::detail::list_checkpoints(directory)) {
    report["checkpoints"].push_back(examine(fs::path(directory) / name.text(), name, options.quick));
  }
  if (options.json) {
    print(report);
    return kYes;
  }

  Table table({"checkpoint", "step", "epoch", "size", "ranks", options.quick ? "readable" : "valid"}, {1, 2, 3, 4});
  for (const auto& row : report["checkpoints"]) {
    table.add({row["file"].get<std::string>(), text_of(row["step"]), text_of(row["epoch"]),
               row["bytes"].is_null() ? "-" : size_text(row["bytes"].get<uint64_t>()), text_of(row["world_size"]),
               row["valid"].get<bool>() ? "yes" : fmt::format("no: {}", row["reason"].get<std::string>())});
  }
  if (table.is_empty()) {
    std::cout << "no checkpoint in " << directory << '\n';
  } else {
    table.print();
  }
  if (!latest.name.empty()) std::cout << ddp::detail::kLatestName << " -> " << latest.name << '\n';
  if (!latest.problem.empty()) std::cout << ddp::detail::kLatestName << ' ' << printable(latest.problem) << '\n';
  if (latest.name.empty() && latest.problem.empty()) std::cout << "no " << ddp::detail::kLatestName << '\n';
  for (const auto& name : report["temporaries"]) {
    std::cout << name.get<std::string>() << ": of a save in progress, or left by one that was killed\n";
  }
  return kYes;
}

}  // namespace tool
