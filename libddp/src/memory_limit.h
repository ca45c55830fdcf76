#pragma once

#include <cstddef>
#include <string>

namespace ddp::detail {

/// Bytes of memory that a process may use by /proc/meminfo and its cgroup, version 1 or 2, below the folder `root`
/// ("" for the real ones).
size_t memory_limit(const std::string& root);

}  // namespace ddp::detail
