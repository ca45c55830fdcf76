#include <c10/core/CPUAllocator.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "ddp/cpu_allocator.h"
#include "support/catch.h"
#include "support/spawn.h"

using namespace ddp::test;

namespace {

struct Filled {
  c10::DataPtr data;
  size_t words = 0;
  uint64_t value = 0;
};

// Every 64th word and the last: a byte of each cache line of the block would take too long.
template <class Visit>
void each_word(Filled& block, Visit visit) {
  auto* words = static_cast<uint64_t*>(block.data.get());
  for (size_t i = 0; i < block.words; i += 64) visit(words[i]);
  visit(words[block.words - 1]);
}

}  // namespace

TEST_CASE("CPU allocator: eight threads allocate, write, pass on, check and free, the counts stay exact") {
  run_ranks(
      1,
      [](int) {
        constexpr int kThreads = 8, kRounds = 1500;
        ddp::use_caching_cpu_allocator({.max_cached = size_t{8} << 20});
        std::array<std::mutex, 16> locks;
        std::array<Filled, 16> shared;  // where threads exchange blocks: most are freed by another than their maker
        std::atomic<int> wrong{0}, over{0};
        auto work = [&](int thread) {
          std::mt19937_64 random(static_cast<uint64_t>(thread));
          for (int round = 0; round < kRounds; ++round) {
            // Few classes, so that threads meet; some small, some of huge pages.
            constexpr std::array<size_t, 6> kSizes = {1000, 65536, 66000, 300'000, 1'200'000, size_t{2} << 20};
            const size_t size = kSizes[random() % kSizes.size()] / 8 * 8;
            Filled mine{.data = c10::GetCPUAllocator()->allocate(size), .words = size / 8, .value = random()};
            each_word(mine, [&](uint64_t& word) { word = mine.value; });
            {
              const size_t place = random() % shared.size();
              std::lock_guard lock(locks[place]);
              std::swap(mine, shared[place]);
            }
            if (mine.data) each_word(mine, [&](uint64_t word) { wrong += word != mine.value; });
            mine.data.clear();
            if (round % 64 == 0) {
              const auto stats = ddp::cpu_allocator_stats();
              over +=
                  stats.cached > stats.limit || stats.cached < 0 || stats.allocated < 0 || stats.peak < stats.allocated;
            }
            if (round % 256 == 255) ddp::trim_cpu_allocator(thread % 2 == 0 ? 0 : 1 << 20);
            if (round % 512 == 300) ddp::use_caching_cpu_allocator({.max_cached = size_t{8} << 20});
          }
        };
        std::vector<std::thread> threads;
        for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
        for (auto& thread : threads) thread.join();
        DDP_CHECK(wrong == 0);
        DDP_CHECK(over == 0);
        for (auto& block : shared) block.data.clear();
        const auto stats = ddp::cpu_allocator_stats();
        DDP_CHECK(stats.allocated == 0 && stats.cached > 0 && stats.cached <= stats.limit);
        // The same draws as above, to count the requests that were not small.
        int64_t requests = 0;
        for (int i = 0; i < kThreads; ++i) {
          std::mt19937_64 random(static_cast<uint64_t>(i));
          for (int round = 0; round < kRounds; ++round) requests += random() % 6 != 0, random(), random();
        }
        DDP_CHECK(stats.hits + stats.misses == requests);
        DDP_CHECK(stats.hits > requests / 2);
        DDP_CHECK(ddp::trim_cpu_allocator() == stats.cached);
      },
      {.deadline = 90s});  // ThreadSanitizer takes its time
}

TEST_CASE("CPU allocator: a block has one owner, and no count is lost, when threads do nothing else") {
  run_ranks(1, [](int) {
    constexpr int kThreads = 8, kRounds = 50'000;
    ddp::use_caching_cpu_allocator({.max_cached = size_t{4} << 16});  // half of what is in use at most
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        for (int round = 0; round < kRounds; ++round) {
          auto block = c10::GetCPUAllocator()->allocate(size_t{1} << 16);
          auto& word = *static_cast<volatile int*>(block.get());
          word = i;
          if (round % 512 == 0) std::this_thread::yield();
          wrong += word != i;
        }
      });
    }
    for (auto& thread : threads) thread.join();
    const auto stats = ddp::cpu_allocator_stats();
    DDP_CHECK(wrong == 0);
    DDP_CHECK(stats.allocated == 0 && stats.hits + stats.misses == int64_t{kThreads} * kRounds);
    DDP_CHECK(stats.peak <= int64_t{kThreads} << 16);
    DDP_CHECK(stats.cached == (stats.misses - stats.trims) << 16);
  });
}

TEST_CASE("CPU allocator: threads that opt in at the same time get one allocator") {
  run_ranks(1, [](int) {
    std::atomic<c10::Allocator*> first{nullptr};
    std::atomic<int> differ{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i) {
      threads.emplace_back([&] {
        ddp::use_caching_cpu_allocator({.max_cached = size_t{8} << 20});
        c10::Allocator *mine = c10::GetCPUAllocator(), *expected = nullptr;
        if (!first.compare_exchange_strong(expected, mine)) differ += expected != mine;
      });
    }
    for (auto& thread : threads) thread.join();
    DDP_CHECK(differ == 0 && ddp::caching_cpu_allocator_in_use());
  });
}
