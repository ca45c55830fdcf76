// How long does a training step take, what does averaging gradients add to it, and how soon is the first one done?
//
//   torchrun --no-python --nproc-per-node 2 build/bin/bench_step                                  the mini-train
//   torchrun --no-python --nproc-per-node 2 build/bin/bench_step --model stack --dim 512 --reducer none --json out.json
//
// --reducer overlap averages while backward runs, naive after it, none not at all: the same program without any
// communication, the floor. step(overlap) - step(none) is exposed communication, step(naive) - step(none) all of it.
// --update sharded: ranks of one host hold parameters and optimizer state once, and each updates its part (shard_over).
//
// Lines: the loss of the first five steps on rank 0 (Python DDP's for the same options: peers/step.py), then
//   step, forward, backward, update   ms: median, p10 and p90 over the steps after the warm-up, of the slowest rank
//   first step                        seconds from the start of the process to the end of its first step
//   peak RSS                          MiB (VmHWM), of the fullest rank
// The exit status is 1 when the ranks' weights differ at the end, or a loss is not finite.
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <functional>
#include <optional>

#include "common/command_line.h"
#include "ddp/cpu_allocator.h"
#include "ddp/ddp.h"
#include "harness/measure.h"
#include "harness/trained.h"

namespace {

using bench::Clock;
using example::option;

struct Options {
  std::string model = "linear";
  int64_t dim = 1024;
  int64_t layers = 24;
  int64_t batch = 32;
  int64_t steps = 200;
  int64_t warmup = 20;
  std::string reducer = "overlap";
  std::string optimizer = "adam";
  std::string update = "whole";
  std::string allocator = "caching";
  std::string backend = "auto";
  double bucket_cap_mb = 25;
  double lr = 1e-3;
  uint64_t seed = 42;
  bool series = false;
  std::string json;
};

void require_one_of(const std::string& name, const std::string& value, const std::vector<std::string>& allowed) {
  std::string list;
  for (const auto& one : allowed) {
    if (value == one) return;
    list += (list.empty() ? "" : ", ") + one;
  }
  throw ddp::ConfigError("[bench_step] --" + name + " is \"" + value + "\", expected one of " + list);
}

Options parse(int argc, char** argv) {
  Options options;
  boost::program_options::options_description description("bench_step");
  // clang-format off
  description.add_options()
      ("model", option(options.model), "linear: Linear(dim); stack: layers x (Linear(dim), ReLU)")
      ("dim", option(options.dim), "width")
      ("layers", option(options.layers), "of the stack")
      ("batch", option(options.batch), "rows per rank")
      ("steps", option(options.steps), "measured")
      ("warmup", option(options.warmup), "before them, not in the medians")
      ("reducer", option(options.reducer), "overlap, naive or none")
      ("optimizer", option(options.optimizer), "adam (fused) or none")
      ("update", option(options.update), "whole: each rank updates all; sharded: each its part (Adam's shard_over)")
      ("allocator", option(options.allocator), "caching: ddp::use_caching_cpu_allocator; default: c10's own")
      ("backend", option(options.backend), "auto, shm, gloo or nccl")
      ("bucket-cap-mb", option(options.bucket_cap_mb), "size of the gradient buckets")
      ("lr", option(options.lr), "learning rate of Adam")
      ("seed", option(options.seed), "rank r draws with seed + r")
      ("series", boost::program_options::bool_switch(&options.series), "write each step's time of rank 0 too (JSON)")
      ("json", option(options.json), "rank 0 writes the results to this file");
  // clang-format on
  example::parse_command_line(argc, argv, description);
  require_one_of("model", options.model, {"linear", "stack"});
  require_one_of("reducer", options.reducer, {"overlap", "naive", "none"});
  require_one_of("optimizer", options.optimizer, {"adam", "none"});
  require_one_of("update", options.update, {"whole", "sharded"});
  require_one_of("allocator", options.allocator, {"caching", "default"});
  if (options.update == "sharded" && options.reducer == "none") {
    throw ddp::ConfigError(
        "[bench_step] --update sharded needs averaged gradients: each rank would update its part by gradients of its "
        "own; choose --reducer overlap or naive");
  }
  if (options.steps < 1 || options.warmup < 0 || options.layers < 1) {
    throw ddp::ConfigError("[bench_step] --steps and --layers are at least 1, --warmup at least 0");
  }
  return options;
}

// Milliseconds of every measured step of this rank.
struct Times {
  std::vector<double> step, forward, backward, update;
};

nlohmann::json summary_of(const Times& times, double first_step_s, const ddp::ProcessGroup& group) {
  std::vector<std::string> names;
  std::vector<double> values;
  auto add = [&](const std::string& name, double value) { names.push_back(name), values.push_back(value); };
  auto add_phase = [&](const std::string& name, const std::vector<double>& ms) {
    add(name + "_ms", bench::median(ms));
    add(name + "_p10_ms", bench::percentile(ms, 0.1));
    add(name + "_p90_ms", bench::percentile(ms, 0.9));
  };
  add_phase("step", times.step);
  add_phase("forward", times.forward);
  add_phase("backward", times.backward);
  add_phase("update", times.update);
  add("first_step_s", first_step_s);
  add("peak_rss_mib", bench::peak_rss_mib());
  values = bench::worst_rank(values, group);
  nlohmann::json summary;
  for (size_t i = 0; i < names.size(); ++i) summary[names[i]] = values[i];
  return summary;
}

void print(const nlohmann::json& summary) {
  for (const std::string phase : {"step", "forward", "backward", "update"}) {
    std::printf("%-9s %9.3f ms  (p10 %.3f, p90 %.3f)\n", phase.c_str(), summary[phase + "_ms"].get<double>(),
                summary[phase + "_p10_ms"].get<double>(), summary[phase + "_p90_ms"].get<double>());
  }
  std::printf("first step %.3f s after the start of the process, peak RSS %.1f MiB, replicas equal: %s\n",
              summary["first_step_s"].get<double>(), summary["peak_rss_mib"].get<double>(),
              summary["replicas_equal"].get<bool>() ? "yes" : "NO");
}

int measure(const Options& options) {
  if (options.allocator == "caching") ddp::use_caching_cpu_allocator();  // as the examples do
  auto group = ddp::ProcessGroup::from_env({.backend = options.backend});
  ddp::seed_all(options.seed, group);
  const bool stack = options.model == "stack";
  bench::Trained model({.dim = options.dim,
                        .layers = stack ? options.layers : 1,
                        .relu = stack,
                        .reducer = options.reducer,
                        .bucket_cap_mb = options.bucket_cap_mb},
                       group);
  std::optional<ddp::Adam> optim;
  if (options.optimizer == "adam") {
    ddp::AdamOptions of_adam{.lr = options.lr};
    if (options.update == "sharded") of_adam.shard_over = group;
    optim.emplace(model.parameters(), of_adam);
  }
  auto x = torch::randn({options.batch, options.dim}).to(group.device());
  auto y = torch::randn({options.batch, options.dim}).to(group.device());

  Times times;
  double first_step_s = 0;
  std::vector<double> losses;
  bool finite = true;
  for (int64_t step = 0; step < options.warmup + options.steps; ++step) {
    auto begin = Clock::now();
    auto loss = torch::mse_loss(model.forward(x), y);
    model.zero_grad();
    bench::synchronize(group.device());

    auto backward = Clock::now();
    model.backward(loss);
    bench::synchronize(group.device());

    auto update = Clock::now();
    if (optim) optim->step();
    bench::synchronize(group.device());
    auto end = Clock::now();

    if (step == 0) first_step_s = bench::seconds_since_process_start();
    if (step < 5) {
      losses.push_back(loss.item<double>());
      finite = finite && std::isfinite(losses.back());
      if (group.is_root()) std::printf("Step %ld, Loss %.6f\n", step, losses.back());
    }
    if (step < options.warmup) continue;
    times.step.push_back(bench::ms_between(begin, end));
    times.forward.push_back(bench::ms_between(begin, backward));
    times.backward.push_back(bench::ms_between(backward, update));
    times.update.push_back(bench::ms_between(update, end));
  }

  auto summary = summary_of(times, first_step_s, group);
  bool good = model.replicas_equal() && finite;
  if (group.is_root()) {
    auto parameter_bytes = nlohmann::json::array();  // in order of registration, for scaling_model.py's bucket plan
    for (const auto& parameter : model.parameters()) parameter_bytes.push_back(parameter.nbytes());
    summary.update({{"program", "bench_step"},
                    {"model", options.model},
                    {"dim", options.dim},
                    {"batch", options.batch},
                    {"steps", options.steps},
                    {"reducer", options.reducer},
                    {"ranks", group.size()},
                    {"backend", group.backend()},
                    {"threads", at::get_num_threads()},
                    {"update", optim && optim->is_sharded() ? "sharded" : "whole"},
                    {"allocator", options.allocator},
                    {"bucket_cap_mb", options.bucket_cap_mb},
                    {"parameter_bytes", parameter_bytes},
                    {"losses", losses},
                    {"replicas_equal", good}});
    if (options.series) summary["series_ms"] = times.step;
    print(summary);
    bench::write_json(options.json, summary);
  }
  ddp::barrier(group);
  return good ? ddp::kExitSuccess : ddp::kExitFailure;
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run([&] { return measure(parse(argc, argv)); });
}
