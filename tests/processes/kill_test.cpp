// Row D1: a rank is killed while a bucket of gradients is on its way, at each bucket, on each backend. The survivors'
// backward throws in time and names the rank; no optimizer steps with half a sum. LIBDDP_LONG=1 kills ten times as often.
// In time: within two seconds on shared memory. Gloo now and then misses that a connection was closed, and then it is the
// timeout that ends the wait.
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>

#include "ddp/distributed_data_parallel.h"
#include "ddp/error.h"
#include "support/catch.h"
#include "support/spawn.h"

using namespace ddp::test;
using ddp::ProcessGroup;

namespace {

constexpr int kLayers = 5;
constexpr auto kTimeout = 4s;
constexpr int kWidth = 512;  // a layer is a MiB, a bucket of its own

int64_t nanoseconds_now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

struct Death {
  std::string backend;
  int ranks;
  int layer;  // the gradient of this layer is the last thing that the rank computes
  int step;
};

void train_and_die(const Death& death, int rank, const std::filesystem::path& time_of_death) {
  const auto group = ProcessGroup::from_env({.backend = death.backend, .timeout = kTimeout});
  torch::nn::Sequential net;
  for (int i = 0; i < kLayers; ++i) net->push_back(torch::nn::Linear(kWidth, kWidth));
  ddp::DistributedDataParallel model(net, group, {.bucket_cap_mb = 1, .first_bucket_mb = 1});
  int step = 0;
  if (rank == death.ranks - 1) {
    net[death.layer]->as<torch::nn::Linear>()->weight.register_hook([&](const torch::Tensor&) {
      if (step < death.step) return;
      std::ofstream(time_of_death) << nanoseconds_now();
      ::kill(::getpid(), SIGKILL);
    });
  }
  try {
    for (;; ++step) {
      model(torch::ones({2, kWidth})).sum().backward();
      model.zero_grad();
    }
  } catch (const ddp::CommError&) {
    int64_t then = 0;
    std::ifstream(time_of_death) >> then;
    const double late_s = static_cast<double>(nanoseconds_now() - then) * 1e-9;
    const double limit_s = death.backend == "shm" ? 2 : std::chrono::duration<double>(kTimeout).count() + 2;
    if (then == 0 || late_s > limit_s) throw std::runtime_error("seen after " + std::to_string(late_s) + " s");
    throw;
  }
}

}  // namespace

TEST_CASE("kill -9 of a rank in each bucket of backward: the others throw in time, naming it") {
  const int repeats = std::getenv("LIBDDP_LONG") != nullptr ? 10 : 1;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    for (const std::string backend : {"shm", "gloo"}) {
      for (const int ranks : {2, 3}) {
        for (int layer = 0; layer < kLayers; ++layer) {
          const Death death{.backend = backend, .ranks = ranks, .layer = layer, .step = layer % 3};
          const TempDir dir;
          const auto results =
              spawn_ranks(ranks, [&](int rank) { train_and_die(death, rank, dir / "time"); }, {.deadline = 40s});
          CAPTURE(backend, ranks, layer);
          CHECK(results[ranks - 1].signal == SIGKILL);
          for (int rank = 0; rank < ranks - 1; ++rank) {
            INFO(results[rank].describe());
            CHECK(results[rank].exit_code == 1);
            CHECK_THAT(results[rank].error, ContainsSubstring("rank " + std::to_string(ranks - 1)));
          }
        }
      }
    }
  }
}
