// Many prefetchers at once, in loops that are left at any point. Under the preset tsan this is where races would show.
#include <torch/torch.h>

#include <atomic>
#include <random>
#include <thread>

#include "ddp/error.h"
#include "ddp/loop.h"
#include "ddp/prefetch.h"
#include "support/catch.h"
#include "support/spawn.h"

using namespace ddp::test;

namespace {

// Rows that `loops` loops over one prefetcher hand on, each checked against the sampler's own order.
void run(uint64_t seed, std::atomic<int64_t>& wrong) {
  std::mt19937_64 random(seed);
  const size_t rows = 20 + random() % 100, batch = 1 + random() % 7;
  const size_t depth = random() % 5;
  const ddp::Place place{.rank = static_cast<int>(seed % 3), .size = 3};
  ddp::DistributedSampler sampler(rows, place, {.seed = seed}), expected(rows, place, {.seed = seed});
  ddp::Prefetcher loader(sampler, batch,
                         [seed](const std::vector<size_t>& indices) {
                           if (seed % 4 == 0)
                             std::this_thread::sleep_for(std::chrono::microseconds(indices.front() % 200));
                           if (seed % 8 == 1 && indices.front() == 3) throw std::runtime_error("row 3");
                           return torch::tensor(std::vector<int64_t>(indices.begin(), indices.end()));
                         },
                         {.depth = depth});
  for (int loop = 0; loop < 12; ++loop) {
    const int64_t epoch = static_cast<int64_t>(random() % 3);
    const size_t leave_after = random() % 12;
    sampler.set_epoch(epoch), expected.set_epoch(epoch);
    expected.reset();
    size_t used = 0;
    try {
      for (const auto& tensor : loader) {
        const auto indices = expected.next(batch);
        wrong += !indices || tensor.numel() != std::ssize(*indices) ||
                 tensor[0].item<int64_t>() != static_cast<int64_t>(indices->front());
        if (seed % 4 == 1) std::this_thread::sleep_for(std::chrono::microseconds(100));
        if (++used == leave_after) break;
      }
      if (used != leave_after) wrong += expected.next(batch).has_value();
    } catch (const ddp::DataError&) {
      const auto indices = expected.next(batch);
      wrong += seed % 8 != 1 || !indices || indices->front() != 3;
    }
  }
}

}  // namespace

TEST_CASE("prefetch: many at once, slow and fast, left early and failing, never mix or lose a batch") {
  run_ranks(1,
            [](int) {
              std::atomic<int64_t> wrong{0};
              std::vector<std::jthread> threads;
              for (uint64_t thread = 0; thread < 8; ++thread) {
                threads.emplace_back([&, thread] {
                  for (uint64_t i = 0; i < 6; ++i) run(8 * i + thread, wrong);
                });
              }
              threads.clear();
              DDP_CHECK(wrong == 0);
            },
            {.deadline = 60s});
}

TEST_CASE("prefetch: handed from one thread to another, it goes on where it was") {
  run_ranks(1, [](int) {
    const ddp::DistributedSampler sampler(64, ddp::Place{}, {.shuffle = false});
    ddp::Prefetcher loader(sampler, 1, [](const std::vector<size_t>& rows) { return rows.front(); });
    auto it = loader.begin();
    for (size_t turn = 0; turn < 8; ++turn) {
      bool right = true;
      std::thread([&] {
        for (size_t i = 0; i < 8; ++i, ++it) right = right && *it == 8 * turn + i;
      }).join();
      DDP_CHECK(right);
    }
    DDP_CHECK(it == std::default_sentinel);
  });
}
