// Batches that are copied to a GPU beside its work. Without one this reports skipped.
#include <torch/torch.h>

#include <filesystem>

#include "ddp/ddp.h"
#include "ddp/prefetch.h"
#include "support/catch.h"
#include "support/spawn.h"

using namespace ddp::test;

TEST_CASE("prefetch: batches are on the device, whole, also when the loop's stream is busy and memory is reused") {
  if (!std::filesystem::exists("/dev/nvidiactl")) DDP_SKIP("no NVIDIA GPU on this machine");
  run_ranks(1, [](int) {
    const auto group = ddp::ProcessGroup::from_env();
    DDP_CHECK(group.device().is_cuda());
    constexpr int64_t kBytes = 4 << 20;
    for (const bool pin : {true, false}) {
      for (const size_t depth : {0, 3}) {
        ddp::DistributedSampler sampler(200, group, {.shuffle = false});
        ddp::Prefetcher loader(sampler, 2,
                               [](const std::vector<size_t>& rows) {
                                 const auto value = static_cast<double>(rows.front());
                                 return torch::data::Example<>(torch::full({kBytes / 4}, value),
                                                               torch::full({1}, value));
                               },
                               {.depth = depth, .device = group.device(), .pin_memory = pin});
        auto busy = torch::ones({2048, 2048}, torch::TensorOptions(group.device()));
        auto wrong = torch::zeros({}, torch::TensorOptions(group.device()));
        double expected = 0;
        for (auto epoch : ddp::epochs(sampler, 1)) {
          for (auto& batch : epoch.batches(loader)) {
            DDP_CHECK(batch.data.device() == group.device() && batch.target.device() == group.device());
            busy = busy.mm(busy).clamp_max(1);  // the sums below run long after this loop has gone on
            wrong += (batch.data != expected).sum() + (batch.target != expected).sum();
            expected += 2;
          }
        }
        DDP_CHECK(expected == 200);
        DDP_CHECK(wrong.item<double>() == 0);
      }
    }
  });
}
