#include "ddp/cpu_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <c10/util/Flags.h>
#include <fmt/format.h>
#include <pthread.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <string_view>

#include "cpu_blocks.h"
#include "ddp/env.h"
#include "ddp/error.h"
#include "memory_limit.h"

// c10's debugging aids, which need its own allocator.
C10_DECLARE_bool(caffe2_cpu_allocator_do_zero_fill);
C10_DECLARE_bool(caffe2_cpu_allocator_do_junk_fill);

namespace ddp {
namespace {

using namespace detail;

constexpr uint8_t kPriority = 100;  // of c10's 0 to 255; its own allocator has 0

class CachingCpuAllocator final : public c10::Allocator {
 public:
  explicit CachingCpuAllocator(c10::Allocator* before) : before_(before), before_free_(before->raw_deleter()) {}

  c10::DataPtr allocate(size_t bytes) override;
  // One deleter for all, as the raw interface asks. Without one for small blocks there is none.
  c10::DeleterFnPtr raw_deleter() const override { return before_free_ != nullptr ? &release : nullptr; }
  void copy_data(void* dest, const void* source, size_t count) const override {
    default_copy_data(dest, source, count);
  }

  void set_limits(size_t min_block, size_t max_cached);
  CpuAllocatorStats stats();
  int64_t trim(size_t keep);

  c10::Allocator* before() const { return before_; }
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  static void release(void* data);

  c10::DataPtr allocate_before(size_t bytes);
  Block& take(size_t bytes);
  void keep(Block& block);
  void remove_oldest(int64_t until, ClassLink& removed);

  c10::Allocator* const before_;
  const c10::DeleterFnPtr before_free_;
  std::atomic<size_t> min_block_{0};

  // Held for a few instructions: never over a system call or an allocation, so that a fork can take it in any order.
  std::mutex mutex_;
  std::array<ClassLink, kClasses> free_by_class_;  // each newest first
  AgeLink free_by_age_;                            // newest first
  CpuAllocatorStats stats_;
};

constinit std::atomic<CachingCpuAllocator*> g_allocator{nullptr};  // never destroyed: blocks outlive main
constinit std::mutex g_install;

c10::DataPtr CachingCpuAllocator::allocate(size_t bytes) {
  if (bytes < min_block_.load(std::memory_order_relaxed) || bytes > kLargest ||
      FLAGS_caffe2_cpu_allocator_do_zero_fill || FLAGS_caffe2_cpu_allocator_do_junk_fill) {
    return allocate_before(bytes);
  }
  void* data = take(bytes).data;
  c10::DataPtr result(data, data, &release, c10::Device(c10::DeviceType::CPU));
  c10::profiledCPUMemoryReporter().New(data, bytes);
  return result;
}

c10::DataPtr CachingCpuAllocator::allocate_before(size_t bytes) {
  auto get = [&] {
    try {
      return before_->allocate(bytes);
    } catch (const c10::Error&) {
      if (bytes > kLargest || trim(0) == 0) throw;
    }
    return before_->allocate(bytes);
  };
  c10::DataPtr data = get();
  if (before_free_ == nullptr || data.get_deleter() != before_free_ || data.get_context() != data.get()) return data;
  void* raw = data.release_context();
  return {raw, raw, &release, data.device()};
}

void CachingCpuAllocator::release(void* data) {
  if (data == nullptr) return;
  CachingCpuAllocator& self = *g_allocator.load(std::memory_order_acquire);
  if (Block* block = find_block(data)) {
    c10::profiledCPUMemoryReporter().Delete(data);
    self.keep(*block);
  } else {
    self.before_free_(data);
  }
}

Block& CachingCpuAllocator::take(size_t bytes) {
  const SizeClass size = size_class(bytes);
  auto count = [&](int64_t& served) {
    stats_.allocated += static_cast<int64_t>(size.bytes);
    stats_.peak = std::max(stats_.peak, stats_.allocated);
    ++served;
  };
  {
    std::lock_guard lock(mutex_);
    ClassLink& free_blocks = free_by_class_[size.index];
    if (!free_blocks.alone()) {
      auto& block = static_cast<Block&>(static_cast<ClassLink&>(*free_blocks.next));
      block.ClassLink::remove();
      block.AgeLink::remove();
      stats_.cached -= static_cast<int64_t>(size.bytes);
      count(stats_.hits);
      return block;
    }
  }
  Block* block = map_block(size.bytes);
  int64_t given_back = 0;
  if (block == nullptr && (given_back = trim(0)) > 0) block = map_block(size.bytes);
  if (block == nullptr) {
    const int error = errno;
    c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, false,
                     fmt::format("[ddp::CpuAllocator] can't allocate memory: {} bytes were asked for, with {} bytes in "
                                 "use and {} bytes kept, which were given back first: {}",
                                 bytes, stats().allocated, given_back, std::strerror(error)));
  }
  std::lock_guard lock(mutex_);
  count(stats_.misses);
  return *block;
}

void CachingCpuAllocator::keep(Block& block) {
  const auto bytes = static_cast<int64_t>(block.bytes);
  ClassLink removed;
  {
    std::lock_guard lock(mutex_);
    stats_.allocated -= bytes;
    if (bytes > stats_.limit) {
      ++stats_.trims;
      removed.insert_next(static_cast<ClassLink&>(block));
    } else {
      remove_oldest(stats_.limit - bytes, removed);
      free_by_class_[size_class(block.bytes).index].insert_next(static_cast<ClassLink&>(block));
      free_by_age_.insert_next(static_cast<AgeLink&>(block));
      stats_.cached += bytes;
    }
  }
  unmap_blocks(removed);
}

/// Requires: mutex_ is held.
void CachingCpuAllocator::remove_oldest(int64_t until, ClassLink& removed) {
  while (stats_.cached > until) {
    auto& block = static_cast<Block&>(static_cast<AgeLink&>(*free_by_age_.previous));
    block.AgeLink::remove();
    block.ClassLink::remove();
    stats_.cached -= static_cast<int64_t>(block.bytes);
    ++stats_.trims;
    removed.insert_next(static_cast<ClassLink&>(block));
  }
}

int64_t CachingCpuAllocator::trim(size_t keep) {
  ClassLink removed;
  int64_t before = 0, after = 0;
  {
    std::lock_guard lock(mutex_);
    before = stats_.cached;
    remove_oldest(static_cast<int64_t>(keep), removed);
    after = stats_.cached;
  }
  unmap_blocks(removed);
  return before - after;
}

void CachingCpuAllocator::set_limits(size_t min_block, size_t max_cached) {
  min_block_.store(min_block, std::memory_order_relaxed);
  {
    std::lock_guard lock(mutex_);
    stats_.limit = static_cast<int64_t>(max_cached);
  }
  trim(max_cached);
}

CpuAllocatorStats CachingCpuAllocator::stats() {
  std::lock_guard lock(mutex_);
  return stats_;
}

// --- options ---

size_t default_max_cached() {
  size_t available = detail::memory_limit("");
  for (auto resource : {RLIMIT_AS, RLIMIT_DATA}) {
    rlimit limit{};
    if (::getrlimit(resource, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
      available = std::min(available, static_cast<size_t>(limit.rlim_cur));
    }
  }
  size_t ranks = 1;
  try {
    ranks = static_cast<size_t>(std::max(1, read_env().local_world_size));
  } catch (const ConfigError&) {  // for the group to report
  }
  return available / 4 / ranks;
}

ConfigError refused(const std::string& why) {
  return ConfigError(fmt::format("[ddp::use_caching_cpu_allocator] {}", why));
}

struct Limits {
  size_t min_block, max_cached;
};

Limits check(const CpuAllocatorOptions& options) {
  const size_t min_block = options.min_block;
  if (min_block < kPage || min_block > kLargest) {
    throw refused(fmt::format("min_block is {} bytes, {} to 2^46 are possible", min_block, kPage));
  }
  if (!options.max_cached) return {min_block, std::clamp(default_max_cached(), size_class(min_block).bytes, kLargest)};
  const size_t max_cached = *options.max_cached;
  if (max_cached > kLargest) {
    throw refused(fmt::format("max_cached is {} bytes, at most 2^46 are possible; a negative number?", max_cached));
  }
  if (max_cached < size_class(min_block).bytes) {
    throw refused(
        fmt::format("max_cached is {} bytes, less than min_block, {}: no block would be kept; leave the call "
                    "out to have no cache",
                    max_cached, min_block));
  }
  return {min_block, max_cached};
}

void install_fork_handlers() {
  // Locked over the fork, so that the child finds neither mutex held by a thread that it does not have.
  const int error = ::pthread_atfork(
      [] {
        g_install.lock();
        g_allocator.load()->lock();
      },
      [] {
        g_allocator.load()->unlock();
        g_install.unlock();
      },
      [] {
        g_allocator.load()->unlock();
        g_install.unlock();
      });
  if (error != 0) {
    throw Error(fmt::format("[ddp::use_caching_cpu_allocator] pthread_atfork: {}", std::strerror(error)));
  }
}

}  // namespace

void use_caching_cpu_allocator(CpuAllocatorOptions options) {
  const Limits limits = check(options);
  std::lock_guard lock(g_install);
  c10::Allocator* current = c10::GetCPUAllocator();
  CachingCpuAllocator* ours = g_allocator.load();
  if (ours == nullptr) {
    install_fork_handlers();  // a fork waits for g_install, so they find the allocator
    g_allocator = ours = new CachingCpuAllocator(current);
  } else if (current != ours && current != ours->before()) {
    throw refused("another CPU allocator was set after the first call (c10::SetCPUAllocator); call once, after it");
  }
  ours->set_limits(limits.min_block, limits.max_cached);
  if (current != ours) c10::SetCPUAllocator(ours, kPriority);
  if (c10::GetCPUAllocator() != ours) {
    throw refused(
        fmt::format("another CPU allocator was set with a priority above {} (c10::SetCPUAllocator)", kPriority));
  }
}

bool caching_cpu_allocator_in_use() {
  CachingCpuAllocator* ours = g_allocator.load();
  return ours != nullptr && c10::GetCPUAllocator() == ours;
}

CpuAllocatorStats cpu_allocator_stats() {
  CachingCpuAllocator* ours = g_allocator.load();
  return ours != nullptr ? ours->stats() : CpuAllocatorStats{};
}

int64_t trim_cpu_allocator(int64_t keep_bytes) {
  if (keep_bytes < 0) {
    throw ConfigError(fmt::format("[ddp::trim_cpu_allocator] keep_bytes is {}, at least 0 is needed", keep_bytes));
  }
  CachingCpuAllocator* ours = g_allocator.load();
  return ours != nullptr ? ours->trim(static_cast<size_t>(keep_bytes)) : 0;
}

}  // namespace ddp
