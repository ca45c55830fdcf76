// The commands of ddp_checkpoint. Each prints to stdout and returns the exit code.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tool {

inline constexpr int kYes = 0;       ///< done; valid; equal
inline constexpr int kNo = 1;        ///< not valid; not equal
inline constexpr int kNoAnswer = 2;  ///< wrong usage, or a file that cannot be read

struct ListOptions {
  bool quick = false;  ///< does not read the tensors
  bool json = false;
};
int list(const std::string& directory, const ListOptions& options);

int show(const std::string& path, bool json);

int verify_files(const std::vector<std::string>& paths, bool json);

struct DiffOptions {
  std::string only;      ///< paths that begin with it
  double tolerance = 0;  ///< elements that differ by no more count as equal
  bool json = false;
};
int diff(const std::string& a, const std::string& b, const DiffOptions& options);

struct ExportOptions {
  std::string key = "model_state_dict";
  bool drop_tied = true;
  bool json = false;
};
int export_weights(const std::string& from, const std::string& to, const ExportOptions& options);

/// Prints JSON for programs; what is no UTF-8 is replaced.
void print(const nlohmann::ordered_json& json);

}  // namespace tool
