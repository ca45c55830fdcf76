#include "memory_limit.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <limits>
#include <optional>
#include <sstream>

namespace ddp::detail {
namespace {

// A file that is one number; nothing for "max" or a file that is not there.
std::optional<uint64_t> number_in(const std::string& path) {
  uint64_t value = 0;
  if (std::ifstream(path) >> value) return value;
  return std::nullopt;
}

// The number after `name` in a file of lines "name number".
std::optional<uint64_t> number_after(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string first;
    uint64_t value = 0;
    if (words >> first >> value && first == name) return value;
  }
  return std::nullopt;
}

uint64_t difference(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

// Calls f(folder, whether version 1) for each control group that this process is in: a limit of any group above holds too.
void for_each_memory_group(const std::string& root, const std::function<void(const std::string& folder, bool v1)>& f) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // number:controllers:/path, version 2 without controllers
    std::istringstream fields(line);
    std::string number, controllers, path;
    if (!std::getline(fields, number, ':') || !std::getline(fields, controllers, ':')) continue;
    std::getline(fields, path);
    const bool v1 = ("," + controllers + ",").find(",memory,") != std::string::npos;
    if (!v1 && !controllers.empty()) continue;
    const std::string mount = root + (v1 ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup");
    while (true) {
      f(mount + path, v1);
      const size_t slash = path.rfind('/');
      if (slash == std::string::npos) break;
      path.resize(slash);
    }
  }
}

std::optional<uint64_t> group_limit(const std::string& folder, bool v1) {
  return number_in(folder + (v1 ? "/memory.limit_in_bytes" : "/memory.max"));
}

// What one group leaves.
uint64_t group_headroom(const std::string& folder, bool v1) {
  const auto limit = group_limit(folder, v1);
  const auto used = number_in(folder + (v1 ? "/memory.usage_in_bytes" : "/memory.current"));
  if (!limit || !used) return std::numeric_limits<uint64_t>::max();
  // Of the page cache only what has not been used of late is counted: the kernel gives that up without a fight.
  const auto cache = number_after(folder + "/memory.stat", v1 ? "total_inactive_file" : "inactive_file");
  return difference(*limit, difference(*used, cache.value_or(0)));
}

}  // namespace

uint64_t memory_limit(const std::string& root) {
  uint64_t limit = std::numeric_limits<uint64_t>::max();
  if (auto total = number_after(root + "/proc/meminfo", "MemTotal:")) limit = *total << 10;
  for_each_memory_group(root, [&](const std::string& folder, bool v1) {
    limit = std::min(limit, group_limit(folder, v1).value_or(limit));
  });
  return limit;
}

uint64_t memory_headroom(const std::string& root) {
  uint64_t room = std::numeric_limits<uint64_t>::max();
  if (auto available = number_after(root + "/proc/meminfo", "MemAvailable:")) room = *available << 10;

  for_each_memory_group(root,
                        [&](const std::string& folder, bool v1) { room = std::min(room, group_headroom(folder, v1)); });

  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    const uint64_t pages = number_in(root + "/proc/self/statm").value_or(0);
    room = std::min(room, difference(limit.rlim_cur, pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE))));
  }
  return room;
}

}  // namespace ddp::detail
