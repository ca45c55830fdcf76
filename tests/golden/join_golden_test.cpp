// Gradients of uneven inputs against PyTorch's own DistributedDataParallel.join, bit for bit (make_join_golden.py). The
// rank that has run out must have them too.
#include <torch/torch.h>

#include <bit>
#include <cstdint>
#include <fstream>

#include "ddp/distributed_data_parallel.h"
#include "ddp/join.h"
#include "support/catch.h"
#include "support/models.h"
#include "support/spawn.h"

using namespace ddp::test;

TEST_CASE("gradients of uneven inputs are those of Python's Join, bit for bit") {
  for (const char* backend : {"gloo", "shm"}) {
    INFO(backend);
    run_ranks(2, [backend](int rank) {
      const auto group = ddp::ProcessGroup::from_env({.backend = backend, .timeout = 20s});
      std::ifstream golden(std::string(LIBDDP_TEST_DATA) + "/join.txt");
      DDP_CHECK(golden.good());
      for (const auto divide_by : {ddp::DivideBy::kWorld, ddp::DivideBy::kActive}) {
        torch::nn::Sequential net(torch::nn::Linear(17, 29), torch::nn::ReLU(), torch::nn::Linear(29, 5));
        {
          torch::NoGradGuard no_grad;
          int64_t salt = 0;
          for (auto& p : net->parameters()) p.copy_(pattern(p.numel(), salt++).view_as(p));
        }
        ddp::DistributedDataParallel model(net, group, {.bucket_cap_mb = 0.001, .first_bucket_mb = 0.001});
        std::vector<torch::Tensor> batches;
        for (int step = 0; step < (rank == 0 ? 5 : 3); ++step) {
          batches.push_back(pattern(7 * 17, 10 * step + rank + 5).view({7, 17}));
        }
        const std::string which = divide_by == ddp::DivideBy::kWorld ? "world" : "active";
        int step = 0;
        for (auto& turn : ddp::join(batches, model, {.divide_by = divide_by})) {
          if (turn) model(*turn).square().sum().backward();
          for (const auto& entry : net->named_parameters()) {
            std::string line;
            std::getline(golden, line);
            DDP_CHECK(line == which + " step " + std::to_string(step) + " " + entry.key());
            const auto gradient = entry.value().grad().contiguous();
            for (int64_t i = 0; i < gradient.numel(); ++i) {
              std::getline(golden, line);
              const auto expected = static_cast<uint32_t>(std::stoul(line, nullptr, 16));
              DDP_CHECK(std::bit_cast<uint32_t>(gradient.data_ptr<float>()[i]) == expected);
            }
          }
          model.zero_grad();
          ++step;
        }
        DDP_CHECK(step == 5);
      }
    });
  }
}
