// B07: a signal to one rank ends the loop on all ranks after the same step.
#include "ddp/preemption.h"

#include <torch/torch.h>
#include <unistd.h>

#include <fstream>
#include <iostream>
#include <thread>

#include "ddp/collectives.h"
#include "ddp/run.h"
#include "support/catch.h"
#include "support/spawn.h"

namespace {

using namespace ddp::test;
using Clock = std::chrono::steady_clock;

// 200 steps of 20 ms with an all-reduce in each. Returns the number of steps that were made.
int train(const ddp::ProcessGroup& group, ddp::Preemption& preemption) {
  auto gradient = torch::ones({8});
  for (int step = 1; step <= 200; ++step) {
    std::this_thread::sleep_for(20ms);
    ddp::all_reduce(gradient, group, ddp::ReduceOp::kAvg);
    if (preemption.requested()) return step;
  }
  return 200;
}

void check_same_step(int steps, const ddp::ProcessGroup& group) {
  auto all = ddp::all_gather_object(std::to_string(steps), group);
  for (const auto& other : all) DDP_CHECK(other == all[0]);
}

}  // namespace

TEST_CASE("B07: a signal to rank 1 alone stops both ranks after the same step, within a second, with exit code 0") {
  for (int signal : {SIGTERM, SIGUSR1, SIGINT}) {
    for (int64_t every : {1, 7}) {
      auto results = spawn_ranks(2, [&](int rank) {
        auto group = ddp::ProcessGroup::from_env({.timeout = 8s});
        ddp::Preemption preemption(group, {.every = every});
        std::thread killer;
        Clock::time_point sent = Clock::now() + 300ms;
        if (rank == 1) {
          killer = std::thread([&] {
            std::this_thread::sleep_until(sent);
            ::kill(::getpid(), signal);
          });
        }
        int steps = train(group, preemption);
        auto late = Clock::now() - sent;
        if (killer.joinable()) killer.join();
        DDP_CHECK(steps < 100);
        DDP_CHECK(steps % every == 0);
        if (rank == 1) DDP_CHECK(late < 1s);
        check_same_step(steps, group);
        DDP_CHECK(preemption.requested());  // still, and without waiting for anyone
      });
      for (const auto& result : results) {
        INFO(result.describe());
        CHECK(result.ok());
      }
      CHECK_THAT(results[1].output, ContainsSubstring("rank 1/2") && ContainsSubstring("received SIG"));
      CHECK(results[0].output.find("received") == std::string::npos);
    }
  }
}

TEST_CASE("a stop asked for in code, on one rank, stops all") {
  run_ranks(3, [](int rank) {
    auto group = ddp::ProcessGroup::from_env({.timeout = 8s});
    ddp::Preemption preemption(group);
    for (int step = 1;; ++step) {
      DDP_CHECK(step <= 5);
      if (rank == 2 && step == 5) preemption.stop();
      if (preemption.requested()) {
        DDP_CHECK(step == 5);
        break;
      }
    }
  });
}

// The worker signals torchrun, its parent, as an operator would.
DDP_TEST_PROGRAM(stopped_by_launcher) {
  return ddp::run([&] {
    auto group = ddp::ProcessGroup::from_env({.timeout = 20s});
    ddp::Preemption preemption(group);
    ddp::barrier(group);  // both handlers are there
    if (group.rank() == 1) ::kill(::getppid(), SIGTERM);
    int steps = train(group, preemption);
    check_same_step(steps, group);
    std::ofstream(args.at(0) + "/rank" + std::to_string(group.rank())) << "left after " << steps << "\n";
  });
}

TEST_CASE("B07: SIGTERM to torchrun reaches both workers, which leave together") {
  auto launcher = torchrun(2);
  if (!launcher) DDP_SKIP("no Python with torch");
  TempDir folder;
  auto result = run_command(*launcher + program("stopped_by_launcher", {folder.path().string()}), {.deadline = 60s});
  INFO(result.describe());
  CHECK_FALSE(result.timed_out);
  std::string lines[2];
  for (int rank : {0, 1}) std::getline(std::ifstream(folder / ("rank" + std::to_string(rank))), lines[rank]);
  CHECK_THAT(lines[0], ContainsSubstring("left after "));
  CHECK(lines[0] == lines[1]);
  CHECK(lines[0] != "left after 200");
}
