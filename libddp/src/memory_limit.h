// How much memory there is for this process. `root` is where /proc and /sys are looked up, "" for the real ones.
#pragma once

#include <cstdint>
#include <string>

namespace ddp::detail {

/// Bytes that a process may use by /proc/meminfo and its control groups, version 1 or 2.
uint64_t memory_limit(const std::string& root);

/// Bytes that this process may still add to its memory: what /proc/meminfo calls available, what its control groups leave,
/// with their page cache counted as free, and what RLIMIT_AS leaves.
uint64_t memory_headroom(const std::string& root);

}  // namespace ddp::detail
