// The smallest distributed training: one Linear layer, five steps, every gradient averaged over the ranks.
//
//   ./mini_train                                                      1 rank, no launcher
//   torchrun --no-python --nproc-per-node 2 ./mini_train              2 ranks
//
//   Step 0, Loss 1.327328          1 rank: 1.327328 1.018064 0.753843 0.534343 0.358386
//   Step 1, Loss 1.102471
//   Step 2, Loss 0.901366          these are Python DDP's losses for the same seed, to all digits
//   Step 3, Loss 0.723889
//   Step 4, Loss 0.569610
//   replicas equal: yes
//
// The invariant: ranks draw different data and different initial weights, yet hold the same weights, bit for bit, after
// every step. `--reducer naive` computes all gradients first and communicates then: same losses, more time.
#include <torch/torch.h>

#include <cstdio>

#include "common/command_line.h"
#include "common/summary.h"
#include "ddp/ddp.h"

namespace {

using example::Clock;
using example::option;

struct Options {
  int64_t steps = 5;
  int64_t dim = 1024;
  int64_t batch = 32;
  double lr = 1e-3;
  std::string reducer = "overlap";
  std::string backend = "auto";
  uint64_t seed = 42;
  std::string summary;
};

Options parse(int argc, char** argv) {
  Options options;
  boost::program_options::options_description description("mini_train");
  // clang-format off
  description.add_options()
      ("steps", option(options.steps), "optimizer steps")
      ("dim", option(options.dim), "the model is Linear(dim, dim)")
      ("batch", option(options.batch), "rows per rank")
      ("lr", option(options.lr), "learning rate of Adam")
      ("reducer", option(options.reducer), "overlap: average while backward runs; naive: afterwards")
      ("backend", option(options.backend), "auto, shm, gloo or nccl")
      ("seed", option(options.seed), "rank r draws with seed + r")
      ("summary", option(options.summary), "write times and losses to this JSON file");
  // clang-format on
  example::parse_command_line(argc, argv, description);
  if (options.reducer != "overlap" && options.reducer != "naive") {
    throw ddp::ConfigError("--reducer is \"" + options.reducer + "\", expected overlap or naive");
  }
  return options;
}

void train(const Options& options, Clock::time_point start) {
  auto group = ddp::ProcessGroup::from_env({.backend = options.backend});
  ddp::seed_all(options.seed, group);

  ddp::DistributedDataParallel model(torch::nn::Linear(options.dim, options.dim), group);
  ddp::Adam optim(model->parameters(), {.lr = options.lr});
  const auto x = torch::randn({options.batch, options.dim}).to(group.device());
  const auto y = torch::randn({options.batch, options.dim}).to(group.device());

  const bool naive = options.reducer == "naive";
  double first_step_s = 0;
  std::vector<double> losses, step_ms, backward_ms, update_ms;
  for (int64_t step = 0; step < options.steps; ++step) {
    const auto begin = Clock::now();
    auto guard = model.no_sync(naive);
    const auto loss = torch::mse_loss(model(x), y);
    model.zero_grad();

    const auto backward = Clock::now();
    loss.backward();
    if (naive) model.reduce_gradients();

    const auto update = Clock::now();
    optim.step();

    step_ms.push_back(example::seconds_since(begin) * 1e3);
    backward_ms.push_back(std::chrono::duration<double, std::milli>(update - backward).count());
    update_ms.push_back(example::seconds_since(update) * 1e3);
    if (step == 0) first_step_s = example::seconds_since(start);
    losses.push_back(loss.item<double>());
    if (group.is_root()) std::printf("Step %ld, Loss %.6f\n", step, losses.back());
  }

  const bool equal = ddp::replicas_equal(model);
  if (!group.is_root()) return;
  std::printf("replicas equal: %s\n", equal ? "yes" : "no");
  example::write_summary(options.summary, {{"step_ms", example::median(step_ms)},
                                           {"backward_ms", example::median(backward_ms)},
                                           {"update_ms", example::median(update_ms)},
                                           {"first_step_s", first_step_s},
                                           {"losses", losses}});
}

}  // namespace

int main(int argc, char** argv) {
  const auto start = Clock::now();
  ddp::use_caching_cpu_allocator();  // a step finds its memory mapped by the step before
  return ddp::run([&] { train(parse(argc, argv), start); });
}
