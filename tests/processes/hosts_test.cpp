// Two network namespaces as two hosts: loopback addresses do not meet, and the cable can be pulled. They need root.
#include <torch/torch.h>

#include <functional>
#include <thread>

#include "ddp/collectives.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/error.h"
#include "ddp/fused_adam.h"
#include "ddp/grad.h"
#include "ddp/process_group.h"
#include "support/catch.h"
#include "support/hosts.h"
#include "support/spawn.h"

using namespace ddp::test;
using ddp::ProcessGroup;
using torch::Tensor;

namespace {

std::vector<Result> on_two_hosts(const TwoHosts& hosts, int ranks, int on_first,
                                 const std::function<void(const ProcessGroup&)>& body,
                                 std::chrono::milliseconds timeout = 20s) {
  return spawn_ranks(ranks,
                     [&](int rank) {
                       hosts.enter(rank < on_first ? 0 : 1);
                       body(ProcessGroup::from_env({.timeout = timeout}));
                     },
                     {.deadline = 60s, .env = hosts.environment()});
}

}  // namespace

TEST_CASE("network namespaces: ranks of two hosts use memory inside each and sockets between") {
  if (const auto why = TwoHosts::why_not(); !why.empty()) DDP_SKIP(why);
  const TwoHosts hosts;
  for (const auto& [ranks, on_first] : {std::pair{4, 2}, std::pair{3, 2}, std::pair{3, 1}, std::pair{2, 1}}) {
    const auto results = on_two_hosts(hosts, ranks, on_first, [ranks = ranks, on_first = on_first](const auto& group) {
      DDP_CHECK(group.backend() == (ranks == 2 ? "gloo" : "shm+gloo"));
      for (const int64_t count : {1, 1000, 3000001}) {
        Tensor t = torch::full({count}, group.rank() + 1);
        ddp::all_reduce(t, group);
        DDP_CHECK(torch::equal(t, torch::full({count}, ranks * (ranks + 1) / 2)));
      }
      const auto host = group.split(group.rank() < on_first ? 0 : 1);
      DDP_CHECK(host.size() == 1 || host.backend() == "shm");
      DDP_CHECK(ddp::all_gather_object(std::to_string(group.rank()), group)[ranks - 1] == std::to_string(ranks - 1));

      torch::manual_seed(1);
      ddp::DistributedDataParallel model(torch::nn::Linear(100, 300), group);
      ddp::AdamW optim(model->parameters(), {.lr = 0.01});
      for (int step = 0; step < 3; ++step) {
        model(torch::full({4, 100}, group.rank() + 1.0)).square().mean().backward();
        optim.step(), model.zero_grad();
      }
      DDP_CHECK(ddp::replicas_equal(model));
    });
    for (const auto& result : results) {
      INFO(result.describe());
      CHECK(result.ok());
      if (&result == &results[0]) {
        CHECK_THAT(result.output, ContainsSubstring(ranks == 2 ? "backend gloo (rank 1 is in another network namespace"
                                                    : ranks == 4 ? "backend shm+gloo (2 hosts of 2 ranks"
                                                                 : "backend shm+gloo (2 hosts of "));
      }
    }
  }
}

TEST_CASE("network namespaces: a cable pulled out is an error on both hosts within the timeout") {
  if (const auto why = TwoHosts::why_not(); !why.empty()) DDP_SKIP(why);
  const TwoHosts hosts;
  const TempDir dir;
  std::vector<Result> results;
  std::thread job([&] {
    results = on_two_hosts(
        hosts, 4, 2,
        [&](const ProcessGroup& group) {
          const auto begin = std::chrono::steady_clock::now();
          Tensor t = torch::zeros({100000});
          for (auto last = begin;; last = std::chrono::steady_clock::now()) {
            try {
              ddp::all_reduce(t, group);
            } catch (const ddp::CommError& e) {
              DDP_CHECK(std::chrono::steady_clock::now() - last < 4s);
              throw;
            }
            DDP_CHECK(last - begin < 20s);
          }
        },
        2s);
  });
  std::this_thread::sleep_for(1s);
  hosts.plug(false);
  job.join();
  for (int rank = 0; rank < 4; ++rank) {
    INFO(results[rank].describe());
    CHECK(results[rank].exit_code == 1);
    CHECK_THAT(results[rank].error, ContainsSubstring("[ddp::all_reduce]") && !ContainsSubstring("DDP_CHECK"));
  }
}
