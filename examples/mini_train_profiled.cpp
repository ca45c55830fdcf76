// Where the time of a step goes: Linear(4096, 4096), its gradients averaged while backward runs and, for comparison,
// after it.
//
//   ./mini_train_profiled                                                 1 rank, no launcher
//   torchrun --no-python --nproc-per-node 2 ./mini_train_profiled         2 ranks, over shared memory on one host
//   ... ./mini_train_profiled --backend gloo                              over sockets
//
//   Step 0
//    forward : 62.48 ms
//    backward: 336.31 ms
//    update  : 156.93 ms
//   ...
//   median of 20 steps, ms     overlap       naive            with --backend gloo:     overlap       naive
//   forward                       38.35       45.92                                     56.45       37.34
//   backward                      64.48       39.27                                    137.71       35.91
//   reduce                         0.00       33.54     (overlap: within backward)       0.00      114.95
//   update                        25.96       30.48                                     32.55       25.19
//   gradients: 67125248 bytes; per step and rank a ring moves 2(n-1)/n of that: 67125248
//   sent per step and rank through network interfaces: 0 bytes                          67212500 bytes
//
// The invariant: per rank and step, no more than 2(n-1)/n times the gradients' size travels, however many ranks there
// are; none of it through a network where ranks share memory. `--trace FILE` shows rank 0's steps on a time line (ui.perfetto.dev).
#include <torch/torch.h>

#include <cstdio>
#include <fstream>
#include <sstream>

#include "common/command_line.h"
#include "ddp/ddp.h"

namespace {

using example::option;

struct Options {
  int64_t steps = 20;
  int64_t dim = 4096;
  int64_t batch = 32;
  std::string backend = "auto";
  std::string trace;
};

Options parse(int argc, char** argv) {
  Options options;
  boost::program_options::options_description description("mini_train_profiled");
  // clang-format off
  description.add_options()
      ("steps", option(options.steps), "optimizer steps with each way of averaging")
      ("dim", option(options.dim), "the model is Linear(dim, dim)")
      ("batch", option(options.batch), "rows per rank")
      ("backend", option(options.backend), "auto, shm, gloo or nccl")
      ("trace", option(options.trace), "write rank 0's time line to this file");
  // clang-format on
  example::parse_command_line(argc, argv, description);
  return options;
}

// What all network interfaces of this host have sent. Ranks that share memory or NVLink send nothing there.
double sent_bytes() {
  std::ifstream table("/proc/self/net/dev");
  double total = 0;
  for (std::string line; std::getline(table, line);) {
    const auto colon = line.find(':');
    if (colon == std::string::npos) continue;  // one of the two lines of headings
    std::istringstream columns(line.substr(colon + 1));
    double value = 0;
    for (int column = 0; column < 9; ++column) columns >> value;  // the ninth: transmitted bytes
    total += value;
  }
  return total;
}

void train(const Options& options) {
  auto group = ddp::ProcessGroup::from_env({.backend = options.backend});
  ddp::DistributedDataParallel model(torch::nn::Linear(options.dim, options.dim), group);
  ddp::Adam optim(model->parameters());
  const auto x = torch::randn({options.batch, options.dim}).to(group.device());
  const auto y = torch::randn({options.batch, options.dim}).to(group.device());

  ddp::Profiler profiler({.device = group.device()});
  ddp::Profiler newest({.device = group.device(), .max_events = 3});  // one step only
  const auto timed = [&](std::string_view phase, const auto& work) {
    auto in_all = profiler.range(phase), in_newest = newest.range(phase);
    work();
  };
  torch::Tensor loss;
  const auto forward = [&] { loss = torch::mse_loss(model(x), y); };
  const auto backward = [&] { loss.backward(); };
  const auto update = [&] { optim.step(), model.zero_grad(); };

  const double sent_before = sent_bytes();
  for (int64_t step = 0; step < options.steps; ++step) {
    timed("forward", forward);
    timed("backward", backward);
    timed("update", update);
    profiler.step(), newest.step();
    if (!group.is_root()) continue;
    std::printf("Step %ld\n forward : %.2f ms\n backward: %.2f ms\n update  : %.2f ms\n", step,
                newest.median_ms("forward"), newest.median_ms("backward"), newest.median_ms("update"));
  }
  ddp::barrier(group);
  const double sent =
      (sent_bytes() - sent_before) / static_cast<double>(options.steps * ddp::read_env().local_world_size);

  for (int64_t step = 0; step < options.steps; ++step) {
    auto guard = model.no_sync();
    timed("naive forward", forward);
    timed("naive backward", backward);
    timed("naive reduce", [&] { model.reduce_gradients(); });
    timed("naive update", update);
    profiler.step();
  }

  if (!group.is_root()) return;
  std::printf("median of %ld steps, ms     overlap       naive\n", options.steps);
  for (const std::string phase : {"forward", "backward", "reduce", "update"}) {
    std::printf("%-22s %12.2f %11.2f\n", phase.c_str(), profiler.median_ms(phase),
                profiler.median_ms("naive " + phase));
  }
  const double gradients = static_cast<double>(x.element_size() * (options.dim * options.dim + options.dim));
  const double ring = 2.0 * (group.size() - 1) / group.size() * gradients;
  std::printf("gradients: %.0f bytes; per step and rank a ring moves 2(n-1)/n of that: %.0f\n", gradients, ring);
  std::printf("sent per step and rank through network interfaces: %.0f bytes\n", sent);
  if (!options.trace.empty()) profiler.write_chrome_trace(options.trace, group.rank());
}

}  // namespace

int main(int argc, char** argv) {
  ddp::use_caching_cpu_allocator();  // a step finds its memory mapped by the step before
  return ddp::run([&] { train(parse(argc, argv)); });
}
