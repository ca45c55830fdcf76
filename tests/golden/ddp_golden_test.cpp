// Averaged gradients against PyTorch's Python DDP on Gloo, bit for bit (golden files by make_ddp_golden.py).
#include <torch/torch.h>

#include <bit>
#include <cstdint>
#include <fstream>

#include "ddp/distributed_data_parallel.h"
#include "support/catch.h"
#include "support/models.h"
#include "support/spawn.h"

using namespace ddp::test;

TEST_CASE("averaged gradients are those of Python's DDP, bit for bit") {
  for (const auto& [ranks, backend] : {std::pair(2, "gloo"), {3, "gloo"}, {2, "shm"}, {3, "shm"}}) {
    INFO(ranks << " ranks, " << backend);
    run_ranks(ranks, [ranks = ranks, backend = backend](int rank) {
      const auto group = ddp::ProcessGroup::from_env({.backend = backend, .timeout = 20s});
      torch::nn::Sequential net(torch::nn::Linear(17, 29), torch::nn::ReLU(), torch::nn::Linear(29, 5));
      {
        torch::NoGradGuard no_grad;
        int64_t salt = 0;
        for (auto& p : net->parameters()) p.copy_(pattern(p.numel(), salt++).view_as(p));
      }
      ddp::DistributedDataParallel model(net, group, {.bucket_cap_mb = 0.001, .first_bucket_mb = 0.001});

      std::ifstream golden(std::string(LIBDDP_TEST_DATA) + "/ddp_" + std::to_string(ranks) + ".txt");
      DDP_CHECK(golden.good());
      std::string line;
      int64_t compared = 0;
      for (int step = 0; step < 3; ++step) {
        model(pattern(7 * 17, 10 * step + rank + 5).view({7, 17})).square().sum().backward();
        for (const auto& entry : net->named_parameters()) {
          std::getline(golden, line);
          DDP_CHECK(line == "step " + std::to_string(step) + " " + entry.key());
          const auto gradient = entry.value().grad().contiguous();
          for (int64_t i = 0; i < gradient.numel(); ++i) {
            std::getline(golden, line);
            const auto expected = static_cast<uint32_t>(std::stoul(line, nullptr, 16));
            DDP_CHECK(std::bit_cast<uint32_t>(gradient.data_ptr<float>()[i]) == expected);
            ++compared;
          }
        }
        model.zero_grad();
      }
      DDP_CHECK(compared == 3 * (17 * 29 + 29 + 29 * 5 + 5));
    });
  }
}
