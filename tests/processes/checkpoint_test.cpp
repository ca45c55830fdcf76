// Checkpoints of real ranks: saves and loads that fail, random states, other numbers of ranks.
#include <torch/torch.h>

#include "ddp/checkpointer.h"
#include "ddp/collectives.h"
#include "ddp/error.h"
#include "ddp/log.h"
#include "io/torch_file.h"
#include "support/catch.h"
#include "support/spawn.h"
#include "unit/checkpoint_fixtures.h"

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using ddp::Checkpointer;
using ddp::CheckpointError;
using ddp::ProcessGroup;
using ddp::State;
using ddp::test::run_ranks;
using ddp::test::TempDir;
using ddp::test::Weights;

namespace {

void quiet() {
  ddp::log::set_sink([](ddp::log::Level, std::string_view) {});
}

}  // namespace

TEST_CASE("a save that fails is an error on both ranks, and training goes on (B23d)") {
  TempDir dir;
  run_ranks(2, [&](int rank) {
    quiet();
    auto group = ProcessGroup::from_env({.timeout = 10s});
    Weights weights(1000);
    Checkpointer checkpoints(dir / "run", group, {.every = 1});
    checkpoints.track("weights", weights);
    weights.set(1);
    DDP_CHECK(checkpoints.step());
    // Root may write anywhere, so a directory stands where the next file goes.
    const fs::path blocked = dir / "run/checkpoint_epoch0_step2.pt";
    if (rank == 0) fs::create_directory(blocked);
    ddp::barrier(group);
    weights.set(2);
    const std::string message = ddp::test::message_of<CheckpointError>([&] { checkpoints.step(); });
    DDP_CHECK(message.find(blocked.string()) != std::string::npos);
    DDP_CHECK(message.find("rank " + std::to_string(rank) + "/2") != std::string::npos);
    DDP_CHECK(checkpoints.last_saved() == dir / "run/checkpoint_epoch0_step1.pt");
    DDP_CHECK(fs::read_symlink(dir / "run/checkpoint_latest.pt") == "checkpoint_epoch0_step1.pt");
    weights.set(3);
    DDP_CHECK(checkpoints.step());
    Weights again(1000);
    Checkpointer other(dir / "run", group);
    other.track("weights", again);
    DDP_CHECK(other.resume().step == 3);
    DDP_CHECK(again.holds(3));
  });
}

TEST_CASE("an object that fails to save on rank 0 is an error on both ranks") {
  struct Broken {
    State state_dict() const { throw std::runtime_error("no state today"); }
    void load_state_dict(const State&) {}
  };
  TempDir dir;
  run_ranks(2, [&](int) {
    quiet();
    auto group = ProcessGroup::from_env({.timeout = 10s});
    Broken broken;
    Checkpointer checkpoints(dir.path(), group);
    checkpoints.track("broken", broken);
    const std::string message = ddp::test::message_of<CheckpointError>([&] { checkpoints.save(); });
    DDP_CHECK(message.find("no state today") != std::string::npos);
  });
}

TEST_CASE("ranks that have counted different steps do not save") {
  TempDir dir;
  run_ranks(2, [&](int rank) {
    quiet();
    auto group = ProcessGroup::from_env({.timeout = 10s});
    Checkpointer checkpoints(dir.path(), group, {.every = 0});
    for (int i = 0; i <= rank; ++i) checkpoints.step();
    const std::string message = ddp::test::message_of<CheckpointError>([&] { checkpoints.save(); });
    DDP_CHECK(message.find("rank 1 has taken 2 steps, rank 0 1") != std::string::npos);
  });
}

TEST_CASE("a file that one rank cannot use is loaded by none, and that rank is named") {
  TempDir dir;
  run_ranks(2, [&](int rank) {
    quiet();
    auto group = ProcessGroup::from_env({.timeout = 10s});
    torch::nn::Linear right(3, 3), odd(3, rank == 1 ? 4 : 3);
    Checkpointer(dir.path(), group, {.every = 0}).track("model", right).save();
    const auto before = odd->weight.clone();
    Checkpointer checkpoints(dir.path(), group);
    checkpoints.track("model", odd);
    const std::string message = ddp::test::message_of<CheckpointError>([&] { checkpoints.resume(); });
    DDP_CHECK(message.find("rank 1: ") != std::string::npos);
    DDP_CHECK(message.find("nothing was changed") != std::string::npos);
    DDP_CHECK(odd->weight.equal(before));
  });
}

TEST_CASE("each rank's dropout goes on where it was, and ranks differ (B27)") {
  TempDir dir;
  auto losses = [&](ProcessGroup& group, int steps, bool resume, bool save) {
    torch::nn::Linear model(4, 4);
    {
      torch::NoGradGuard no_grad;
      model->weight.fill_(0.5);
      model->bias.fill_(0.1);
    }
    torch::optim::AdamW optim(model->parameters(), torch::optim::AdamWOptions(0.1));
    Checkpointer checkpoints(dir.path(), group, {.every = save ? steps : 0});
    checkpoints.track("model", model).track("optimizer", optim);
    if (resume) DDP_CHECK(checkpoints.resume().step == 3);
    std::vector<double> all;
    for (int i = 0; i < steps; ++i) {
      auto loss = torch::dropout(model(torch::ones({64, 4})), 0.5, true).square().sum();
      model->zero_grad();
      loss.backward();
      for (auto& p : model->parameters()) ddp::all_reduce(p.mutable_grad(), group, ddp::ReduceOp::kAvg);
      optim.step();
      checkpoints.step();
      all.push_back(loss.item<double>());
    }
    return all;
  };
  run_ranks(2, [&](int rank) {
    quiet();
    auto group = ProcessGroup::from_env({.timeout = 10s});
    torch::manual_seed(40 + rank);
    const auto unbroken = losses(group, 6, false, false);
    torch::manual_seed(40 + rank);
    auto parts = losses(group, 3, false, true);
    torch::manual_seed(1);
    const auto rest = losses(group, 3, true, false);
    parts.insert(parts.end(), rest.begin(), rest.end());
    DDP_CHECK(parts == unbroken);
    for (const auto& mine : {unbroken.front(), rest.front()}) {  // before and after
      const auto both = ddp::all_gather(torch::tensor(mine, torch::kDouble).view({1}), group);
      DDP_CHECK(!both[0].equal(both[1]));
    }
  });
}

TEST_CASE("two ranks resume one rank's file: the new rank keeps its random state, with a warning, and back") {
  TempDir dir;
  auto start = [&](int rank, std::string& text) {
    ddp::log::set_sink([&text](ddp::log::Level, std::string_view line) { text += line; });
    torch::manual_seed(rank);
    return ProcessGroup::from_env({.timeout = 10s});
  };
  run_ranks(1, [&](int rank) {
    std::string text;
    auto group = start(rank + 10, text);
    Checkpointer(dir.path(), group, {.every = 0}).save();
  });
  run_ranks(2, [&](int rank) {
    std::string text;
    auto group = start(rank, text);
    Checkpointer checkpoints(dir.path(), group, {.every = 0});
    DDP_CHECK(checkpoints.resume());
    const auto drawn = torch::rand({4});
    torch::manual_seed(rank == 0 ? 10 : 1);
    DDP_CHECK(drawn.equal(torch::rand({4})));
    DDP_CHECK((text.find("keeps its own") != std::string::npos) == (rank == 1));
    checkpoints.step();
    checkpoints.save();
  });
  run_ranks(1, [&](int rank) {
    std::string text;
    auto group = start(rank, text);
    DDP_CHECK(Checkpointer(dir.path(), group).resume().step == 1);
  });
}
