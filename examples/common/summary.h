// What an example measured, as a JSON file with the keys of the PyTorch programs that it is compared with.
#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ddp/error.h"

namespace example {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + values.size() / 2;
  std::ranges::nth_element(values, middle);
  return *middle;
}

/// The most memory that this process ever had, in MiB.
inline double peak_rss_mb() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss / 1024.0;
}

/// Does nothing when `file` is empty.
inline void write_summary(const std::string& file, const nlohmann::json& summary) {
  if (file.empty()) return;
  std::ofstream out(file);
  out << summary.dump(2) << '\n';
  if (!out.flush()) throw ddp::Error(file + ": the summary cannot be written");
}

}  // namespace example
