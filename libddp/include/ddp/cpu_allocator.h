// A CPU allocator that keeps a step's blocks for the next step, instead of giving them back to the kernel each time.
//
//   int main() {
//     ddp::use_caching_cpu_allocator();                    // first of all; without this call nothing changes
//     return ddp::run(train);
//   }
//   ddp::cpu_allocator_stats().cached;                     // bytes it holds for later
//   ddp::trim_cpu_allocator();                             // gives them back now
//
// Why: glibc maps every block above 32 MiB anew, whatever M_MMAP_THRESHOLD says, and the kernel then zeroes its pages
// one fault at a time, in each step again. How: a request is rounded up to a size class, 4 KiB steps up to 1 MiB and an
// eighth of a power of two above (at most an eighth too large), and served by the block of that class that was freed
// last. Blocks of 2 MiB and more are aligned to that and ask for huge pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace ddp {

/// In bytes.
struct CpuAllocatorOptions {
  /// Requests smaller than this go to the allocator that was there before. At least 4 KiB.
  size_t min_block = size_t{64} << 10;
  /// The most that is kept for later; what was freed longest ago goes first. At least `min_block`. Default: a quarter
  /// of the memory this process may use (the machine's, its cgroup's, RLIMIT_AS or RLIMIT_DATA, whichever is least),
  /// divided by the ranks that the launcher has started on this host.
  std::optional<size_t> max_cached = std::nullopt;
};

/// Of this process, since the allocator came into use; all 0 before. Bytes are those of whole blocks: what was asked
/// for, rounded up. Small requests, which go elsewhere, do not count.
struct CpuAllocatorStats {
  int64_t allocated = 0;  ///< bytes in use now
  int64_t cached = 0;     ///< bytes kept for later
  int64_t limit = 0;      ///< bytes: the most that `cached` can be
  int64_t peak = 0;       ///< bytes: the most that `allocated` was
  int64_t hits = 0;       ///< requests served by a kept block
  int64_t misses = 0;     ///< requests for which a block was mapped
  int64_t trims = 0;      ///< blocks given back to the kernel: by the limit, by a trim, or because memory ran out
};

/// Makes the allocator above c10's allocator for CPU memory, for as long as the process lives. Memory handed out before
/// is freed as before. A forked child has the allocator too, with the blocks of its parent. A second call only sets the
/// options anew, and trims to them.
///
/// A request that cannot be met empties the cache and is tried again; then c10::OutOfMemoryError, a c10::Error.
/// Reports to PyTorch's memory profiler as c10's allocator does.
///
/// Throws ConfigError for options outside their bounds, and where another allocator was set with a higher priority or
/// after the first call. Thread-safe; but c10 reads its allocator without a lock, so call it before other threads make
/// tensors.
void use_caching_cpu_allocator(CpuAllocatorOptions options = {});

/// Whether new CPU tensors of this process come from it. Thread-safe.
bool caching_cpu_allocator_in_use();

/// What it holds now. Thread-safe: a moment's consistent values.
CpuAllocatorStats cpu_allocator_stats();

/// Gives kept blocks back to the kernel until at most `keep_bytes` are kept, those freed longest ago first. Returns the
/// bytes given back, 0 when it is not in use. Blocks in use are not touched. Throws ConfigError for keep_bytes < 0.
/// Thread-safe.
int64_t trim_cpu_allocator(int64_t keep_bytes = 0);

}  // namespace ddp
