#include <fmt/format.h>
#include <torch/types.h>

#include <iostream>
#include <unordered_set>

#include "checkpoint/commands.h"
#include "checkpoint/contents.h"
#include "checkpoint/table.h"
#include "ddp/safetensors.h"

namespace tool {
namespace {

using nlohmann::ordered_json;

ordered_json row_of(const std::string& path, const ddp::State& value) {
  ordered_json row{{"key", path}, {"type", type_of(value)}};
  if (value.is_tensor()) {
    const auto& tensor = value.as_tensor();
    row["shape"] = tensor.sizes().vec();
    row["elements"] = tensor.numel();
  } else {
    row["value"] = to_json(value);
  }
  return row;
}

}  // namespace

int show(const std::string& path, bool json) {
  const Contents contents = read(path, Data::kSkipped);
  const ordered_json facts = summary(contents.state);
  int64_t tensors = 0, elements = 0;
  const auto all = leaves(contents.state);
  for (const auto& [key, value] : all) {
    if (!value->is_tensor()) continue;
    ++tensors;
    if (__builtin_add_overflow(elements, value->as_tensor().numel(), &elements)) elements = INT64_MAX;
  }

  if (json) {
    ordered_json report{{"file", path},
                        {"format", contents.format},
                        {"bytes", contents.file_size},
                        {"tensors", tensors},
                        {"elements", elements}};
    for (const char* key : {"step", "epoch", "loss", "world_size"}) report[key] = facts[key];
    report["libddp"] = facts["version"];
    report["keys"] = ordered_json::array();
    for (const auto& [key, value] : all) report["keys"].push_back(row_of(key, *value));
    print(report);
    return kYes;
  }

  std::cout << path << ": " << contents.format << ", " << size_text(contents.file_size) << ", " << tensors
            << " tensors of " << elements << " elements\n";
  std::string line;
  auto add = [&](const char* name, const char* key) {
    if (!facts[key].is_null()) line += fmt::format("{}{} {}", line.empty() ? "" : ", ", name, facts[key].dump());
  };
  add("step", "step"), add("epoch", "epoch"), add("loss", "loss"), add("world size", "world_size");
  if (!facts["version"].is_null())
    line += fmt::format(", by libddp {}", printable(facts["version"].get<std::string>()));
  if (!line.empty()) std::cout << line << '\n';
  std::cout << '\n';

  Table table({"key", "type", "shape or value"});
  for (const auto& [key, value] : all) {
    table.add({printable(key), type_of(*value), value->is_tensor() ? shape_of(*value) : describe(*value)});
  }
  table.print();
  return kYes;
}

}  // namespace tool
