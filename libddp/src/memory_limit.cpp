#include "memory_limit.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

namespace ddp::detail {

size_t memory_limit(const std::string& root) {
  size_t limit = std::numeric_limits<size_t>::max();
  {
    std::ifstream file(root + "/proc/meminfo");
    std::string name;
    size_t kib = 0;
    if (file >> name >> kib && name == "MemTotal:") limit = kib << 10;
  }
  auto consider = [&](const std::string& name) {
    size_t bytes = 0;
    if (std::ifstream(name) >> bytes) limit = std::min(limit, bytes);  // "max" is no number
  };
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // number:controllers:/path, version 2 without controllers
    std::istringstream fields(line);
    std::string number, controllers, path;
    if (!std::getline(fields, number, ':') || !std::getline(fields, controllers, ':')) continue;
    std::getline(fields, path);
    const bool v1 = ("," + controllers + ",").find(",memory,") != std::string::npos;
    if (!v1 && !controllers.empty()) continue;
    const std::string mount = root + (v1 ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup");
    while (true) {  // a limit of any group above holds too
      consider(mount + path + (v1 ? "/memory.limit_in_bytes" : "/memory.max"));
      const size_t slash = path.rfind('/');
      if (slash == std::string::npos) break;
      path.resize(slash);
    }
  }
  return limit;
}

}  // namespace ddp::detail
