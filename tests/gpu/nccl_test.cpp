// The parts that need a GPU. Without one they report skipped: nothing of them has been seen to work then.
#include <torch/torch.h>

#include <filesystem>

#include "ddp/ddp.h"
#include "support/catch.h"
#include "support/spawn.h"

using namespace ddp::test;

namespace {

bool has_gpu() { return std::filesystem::exists("/dev/nvidiactl"); }

}  // namespace

TEST_CASE("a CUDA rank chooses nccl, and reduces on its device") {
  if (!has_gpu()) DDP_SKIP("no NVIDIA GPU on this machine");
  const auto results = spawn_ranks(2, [](int rank) {
    const auto group = ddp::ProcessGroup::from_env({.timeout = 60s});
    DDP_CHECK(group.backend() == "nccl" && group.device().is_cuda() && group.device().index() == rank);
    auto t = torch::full({1000}, rank + 1.0f, torch::TensorOptions(group.device()));
    ddp::all_reduce(t, group);
    DDP_CHECK(torch::equal(t.cpu(), torch::full({1000}, 3.0f)));
    DDP_CHECK(ddp::broadcast_object("plan", group) == "plan");  // strings go through gloo
  });
  if (results[0].error.find("fewer") != std::string::npos) DDP_SKIP("two GPUs are needed");
  for (const auto& result : results) {
    INFO(result.describe());
    CHECK(result.ok());
  }
}

TEST_CASE("one CUDA rank trains") {
  if (!has_gpu()) DDP_SKIP("no NVIDIA GPU on this machine");
  run_ranks(1, [](int) {
    const auto group = ddp::ProcessGroup::from_env();
    DDP_CHECK(group.device().is_cuda());
    ddp::DistributedDataParallel model(torch::nn::Linear(8, 8), group);
    ddp::AdamW optim(model->parameters(), {.lr = 0.01});
    const auto x = torch::ones({4, 8}, torch::TensorOptions(group.device()));
    const auto loss = [&] { return model(x).square().mean(); };
    const double before = loss().item<double>();
    for (int step = 0; step < 5; ++step) {
      loss().backward();
      ddp::clip_grad_norm(model, 1.0);
      optim.step(), model.zero_grad();
    }
    DDP_CHECK(loss().item<double>() < before);
  });
}
