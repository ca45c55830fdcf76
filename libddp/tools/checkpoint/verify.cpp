#include <fmt/format.h>

#include <iostream>

#include "checkpoint/commands.h"
#include "checkpoint/contents.h"

namespace tool {

using nlohmann::ordered_json;

int verify_files(const std::vector<std::string>& paths, bool json) {
  int code = kYes;
  ordered_json report = ordered_json::array();
  for (const std::string& path : paths) {
    ordered_json row{{"file", path}, {"valid", true}, {"reason", nullptr}};
    std::string text;
    try {
      const Contents contents = verify(path);
      const ordered_json facts = summary(contents.state);
      row["bytes"] = contents.file_size;
      row["step"] = facts["step"];
      row["epoch"] = facts["epoch"];
      text = fmt::format("{}: valid, {}", path, size_text(contents.file_size));
      if (contents.records > 0) text += fmt::format(", {} records", contents.records);
      if (!facts["step"].is_null()) text += fmt::format(", step {}", facts["step"].dump());
    } catch (const Failure& failure) {
      code = kNo;
      text = failure.what();
      row["valid"] = false;
      row["reason"] = text;
    }
    if (!json) std::cout << text << '\n';
    report.push_back(std::move(row));
  }
  if (json) print(report);
  return code;
}

}  // namespace tool
