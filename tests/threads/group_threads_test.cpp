// Ranks as threads of one process, several groups each, all at work at once. Under the preset tsan this is where races
// would show.
#include <torch/torch.h>

#include <thread>

#include "ddp/collectives.h"
#include "ddp/process_group.h"
#include "support/catch.h"
#include "support/spawn.h"

using namespace ddp::test;
using ddp::ProcessGroup;
using torch::Tensor;

namespace {

// Runs `body` in a thread for each rank, with a group of them.
void in_threads(int ranks, const std::string& backend, const std::function<void(const ProcessGroup&)>& body) {
  const auto port = free_port();
  std::vector<std::string> errors(ranks);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        ddp::Env env;
        env.rank = env.local_rank = rank;
        env.world_size = env.local_world_size = ranks;
        env.master_addr = "127.0.0.1";
        env.master_port = port;
        body(ProcessGroup(env, {.backend = backend, .timeout = 20s}));
      } catch (const std::exception& e) {
        errors[rank] = e.what();
      }
    });
  }
  threads.clear();
  for (const auto& error : errors) {
    if (!error.empty()) throw std::runtime_error(error);
  }
}

}  // namespace

TEST_CASE("ranks may be threads, and use several groups from several threads at once") {
  run_ranks(1, [](int) {
    for (const char* backend : {"shm", "gloo"}) {
      in_threads(3, backend, [](const ProcessGroup& world) {
        std::vector<ProcessGroup> groups{world, world.duplicate("a"), world.duplicate("b")};
        std::vector<std::string> errors(groups.size());
        std::vector<std::jthread> threads;
        for (size_t i = 0; i < groups.size(); ++i) {
          threads.emplace_back([&, i] {
            try {
              const ProcessGroup& group = groups[i];
              for (int step = 0; step < 50; ++step) {
                const int64_t count = 1 + 977 * static_cast<int64_t>((step * 31 + i) % 50);
                Tensor t = torch::full({count}, static_cast<double>(group.rank() + step + 100 * i), torch::kDouble);
                ddp::all_reduce(t, group);
                DDP_CHECK(torch::equal(t, torch::full_like(t, 3.0 + 3.0 * static_cast<double>(step + 100 * i))));
                const auto all = ddp::all_gather(torch::tensor({group.rank() * 1000 + step}), group);
                DDP_CHECK(all[2].item<int64_t>() == 2000 + step);
              }
            } catch (const std::exception& e) {
              errors[i] = e.what();
            }
          });
        }
        threads.clear();
        for (const auto& error : errors) {
          if (!error.empty()) throw std::runtime_error(error);
        }
        ddp::barrier(world);
      });
    }
  });
}
