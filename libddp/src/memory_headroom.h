#pragma once

#include <cstdint>
#include <string>

namespace ddp::detail {

/// Bytes that this process may still add to its memory: what /proc/meminfo calls available, what its cgroups (version 1
/// or 2) leave, with their page cache counted as free, and what RLIMIT_AS leaves. `root` is where /proc and /sys are
/// looked up, "" for the real ones.
uint64_t memory_headroom(const std::string& root);

}  // namespace ddp::detail
