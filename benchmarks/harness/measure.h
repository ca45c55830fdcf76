// What the benchmarks measure with: clocks, percentiles, memory, the worst rank, and the JSON that compare.py reads.
#pragma once

#include <torch/cuda.h>
#include <torch/types.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "ddp/collectives.h"
#include "ddp/error.h"

namespace bench {

using Clock = std::chrono::steady_clock;

inline double ms_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double, std::milli>(end - begin).count();
}

/// The nearest-rank percentile, `fraction` in 0..1; 0 of nothing.
inline double percentile(std::vector<double> values, double fraction) {
  if (values.empty()) return 0;
  auto at = values.begin() + static_cast<ptrdiff_t>(std::lround(fraction * static_cast<double>(values.size() - 1)));
  std::ranges::nth_element(values, at);
  return *at;
}

inline double median(std::vector<double> values) { return percentile(std::move(values), 0.5); }

/// The number after `key` in /proc/self/status, in MiB. VmHWM is the peak of this program; getrusage's ru_maxrss is not
/// used because it keeps the peak of the process that started it.
inline double status_mib(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(key + ":")) return std::stod(line.substr(key.size() + 1)) / 1024;
  }
  throw ddp::Error("[benchmark] /proc/self/status has no " + key + "; this needs Linux with /proc mounted");
}

inline double peak_rss_mib() { return status_mib("VmHWM"); }

/// Seconds since this process was started, to 10 ms: loading of shared libraries and static constructors count, as
/// `import torch` counts in Python. The start is rounded down by the kernel, so the result is never too small.
inline double seconds_since_process_start() {
  std::ifstream file("/proc/self/stat");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  std::istringstream fields(text.substr(text.rfind(')') + 1));  // after the name, which may hold spaces
  std::string skipped;
  for (int field = 3; field < 22; ++field) fields >> skipped;
  double start_ticks = 0;  // field 22 of proc(5)
  fields >> start_ticks;
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9 -
         start_ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

/// Waits for the device, so that a clock read afterwards counts its work; nothing on the CPU.
inline void synchronize(torch::Device device) {
  if (device.is_cuda()) torch::cuda::synchronize(device.index());
}

/// Each number's largest value over the ranks: a job is as slow, and a host as full, as its worst rank.
inline std::vector<double> worst_rank(const std::vector<double>& values, const ddp::ProcessGroup& group) {
  auto all = torch::tensor(values, torch::kFloat64).to(group.device());
  ddp::all_reduce(all, group, ddp::ReduceOp::kMax);
  all = all.cpu();
  return {all.data_ptr<double>(), all.data_ptr<double>() + all.numel()};
}

/// Does nothing when `file` is empty.
inline void write_json(const std::string& file, const nlohmann::json& result) {
  if (file.empty()) return;
  std::ofstream out(file);
  out << result.dump(1) << '\n';
  if (!out.flush()) throw ddp::Error("[benchmark] " + file + ": cannot be written; does the folder exist?");
}

}  // namespace bench
