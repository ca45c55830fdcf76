// How much of the communication of gradients is left exposed, for which size of buckets?
//
//   torchrun --no-python --nproc-per-node 2 build/bin/bench_overlap                       24 x (Linear(512), ReLU)
//   torchrun --no-python --nproc-per-node 2 build/bin/bench_overlap --backend gloo --buckets 1,25 --json out.json
//
// For each size, three models with the same weights take forward and backward (no update) in turns, `--rounds` times
// `--steps` steps each, so that all see the same machine: without any communication; with gradients averaged while
// backward runs; and after it.
//
// Columns (ms: the median over all steps but the warm-up, of the slowest rank):
//   bucket MiB    the size of the buckets in which gradients travel or, on shared memory, are summed
//   none          step without communication, the floor
//   overlap       step with the wrapper
//   naive         step with all averaging after backward
//   exposed       overlap - none, and what share of `none` it is
//   all           naive - none
//   hidden        the share of `all` that overlap does not show; below 0 where overlapping costs more than it hides
//   #wrong        gradients that are not the mean of the ranks' own, or not rank 0's bits, on all ranks together. The
//                 exit status is 1 when one is not 0.
#include <torch/torch.h>

#include <array>
#include <cstdio>
#include <memory>
#include <sstream>

#include "common/command_line.h"
#include "ddp/cpu_allocator.h"
#include "ddp/ddp.h"
#include "harness/measure.h"
#include "harness/trained.h"

namespace {

using bench::Clock;
using bench::Trained;
using example::option;

struct Options {
  std::string buckets = "1,5,25,100";
  int64_t dim = 512;
  int64_t layers = 24;
  int64_t batch = 32;
  int64_t steps = 10;
  int64_t rounds = 5;
  int64_t warmup = 5;
  std::string backend = "auto";
  uint64_t seed = 42;
  std::string json;
};

Options parse(int argc, char** argv) {
  Options options;
  boost::program_options::options_description description("bench_overlap");
  // clang-format off
  description.add_options()
      ("buckets", option(options.buckets), "sizes in MiB, separated by commas")
      ("dim", option(options.dim), "width")
      ("layers", option(options.layers), "Linear(dim), ReLU each")
      ("batch", option(options.batch), "rows per rank")
      ("steps", option(options.steps), "of one model, before it is another's turn")
      ("rounds", option(options.rounds), "turns of each model")
      ("warmup", option(options.warmup), "steps of each model before them, not in the medians")
      ("backend", option(options.backend), "auto, shm, gloo or nccl")
      ("seed", option(options.seed), "of the weights; rank r's batch is drawn with seed + r")
      ("json", option(options.json), "rank 0 writes the rows to this file");
  // clang-format on
  example::parse_command_line(argc, argv, description);
  if (options.layers < 1 || options.steps < 1 || options.rounds < 1 || options.warmup < 1) {
    throw ddp::ConfigError("[bench_overlap] --layers, --steps, --rounds and --warmup are at least 1");
  }
  return options;
}

std::vector<double> parse_buckets(const std::string& text) {
  std::vector<double> sizes;
  std::istringstream list(text);
  for (std::string one; std::getline(list, one, ',');) {
    size_t used = 0;
    double mib = 0;
    try {
      mib = std::stod(one, &used);
    } catch (const std::logic_error&) {
    }
    if (!(mib > 0) || used != one.size()) {
      throw ddp::ConfigError("[bench_overlap] --buckets holds \"" + one + "\", expected sizes in MiB such as 1,5,25");
    }
    sizes.push_back(mib);
  }
  return sizes;
}

constexpr std::array kModes = {"none", "overlap", "naive"};

// One model of a mode, and the milliseconds of its steps.
struct Contender {
  std::unique_ptr<Trained> model;
  std::vector<double> ms;

  void step(const torch::Tensor& x, const torch::Tensor& y, const ddp::ProcessGroup& group) {
    auto begin = Clock::now();
    auto loss = torch::mse_loss(model->forward(x), y);
    model->zero_grad();
    model->backward(loss);
    bench::synchronize(group.device());
    ms.push_back(bench::ms_between(begin, Clock::now()));
  }
};

// Elements of `averaged` that are not the mean of the ranks' `own` gradients, or differ from rank 0's; over all ranks.
int64_t count_wrong(const Trained& own, const Trained& averaged, const ddp::ProcessGroup& group) {
  auto wrong = torch::zeros({}, torch::TensorOptions(torch::kInt64).device(group.device()));
  const auto of_own = own.parameters(), of_averaged = averaged.parameters();
  for (size_t i = 0; i < of_own.size(); ++i) {
    auto mean = torch::zeros_like(of_own[i], torch::kFloat64);
    for (const auto& one : ddp::all_gather(of_own[i].grad(), group)) mean += one.to(torch::kFloat64) / group.size();
    const auto& gradient = of_averaged[i].grad();
    const auto limit = 1e-5 * mean.abs().max();
    const auto first = ddp::all_gather(gradient, group)[0];
    wrong += (((gradient.to(torch::kFloat64) - mean).abs() <= limit) & (gradient == first)).logical_not().sum();
  }
  ddp::all_reduce(wrong, group);
  return wrong.item<int64_t>();
}

nlohmann::json measure_bucket(double bucket_mib, const Options& options, const ddp::ProcessGroup& group) {
  std::array<Contender, kModes.size()> contenders;
  for (size_t i = 0; i < kModes.size(); ++i) {
    torch::manual_seed(options.seed);  // the same weights in all models on all ranks
    contenders[i].model = std::make_unique<Trained>(bench::TrainedOptions{.dim = options.dim,
                                                                          .layers = options.layers,
                                                                          .relu = true,
                                                                          .reducer = kModes[i],
                                                                          .bucket_cap_mb = bucket_mib},
                                                    group);
  }
  ddp::seed_all(options.seed, group);
  const auto x = torch::randn({options.batch, options.dim}).to(group.device());
  const auto y = torch::randn({options.batch, options.dim}).to(group.device());

  for (auto& contender : contenders) {
    for (int64_t step = 0; step < options.warmup; ++step) contender.step(x, y, group);
    contender.ms.clear();
  }
  for (int64_t round = 0; round < options.rounds; ++round) {
    for (size_t i = 0; i < contenders.size(); ++i) {
      auto& contender = contenders[round % 2 == 0 ? i : contenders.size() - 1 - i];
      ddp::barrier(group);
      for (int64_t step = 0; step < options.steps; ++step) contender.step(x, y, group);
    }
  }

  const auto [none, overlap, naive] = [&] {
    std::vector<double> ms;
    for (const auto& contender : contenders) ms.push_back(bench::median(contender.ms));
    ms = bench::worst_rank(ms, group);
    return std::array{ms[0], ms[1], ms[2]};
  }();
  const int64_t wrong = count_wrong(*contenders[0].model, *contenders[1].model, group) +
                        count_wrong(*contenders[0].model, *contenders[2].model, group);
  return {{"bucket_mib", bucket_mib},     {"none_ms", none},        {"overlap_ms", overlap}, {"naive_ms", naive},
          {"exposed_ms", overlap - none}, {"all_ms", naive - none}, {"wrong", wrong}};
}

int measure(const Options& options) {
  const auto buckets = parse_buckets(options.buckets);
  ddp::use_caching_cpu_allocator();  // as the examples do
  const auto group = ddp::ProcessGroup::from_env({.backend = options.backend});
  const double parameters_mib =
      static_cast<double>(options.layers * (options.dim + 1) * options.dim * 4) / (1024.0 * 1024.0);
  if (group.is_root()) {
    std::printf("# %ld x (Linear(%ld), ReLU), %.1f MiB of gradients, batch %ld, %d ranks, %s, %d threads a rank\n",
                options.layers, options.dim, parameters_mib, options.batch, group.size(), group.backend().c_str(),
                at::get_num_threads());
    std::printf("# %10s %9s %9s %9s %9s %7s %9s %8s %8s\n", "bucket MiB", "none", "overlap", "naive", "exposed",
                "share", "all", "hidden", "#wrong");
  }
  auto rows = nlohmann::json::array();
  int64_t wrong = 0;
  for (const double bucket : buckets) {
    const auto& row = rows.emplace_back(measure_bucket(bucket, options, group));
    wrong += row["wrong"].get<int64_t>();
    if (!group.is_root()) continue;
    const auto ms = [&](const char* key) { return row[std::string(key) + "_ms"].get<double>(); };
    std::printf("%12g %9.3f %9.3f %9.3f %9.3f %6.1f%% %9.3f %7.0f%% %8ld\n", bucket, ms("none"), ms("overlap"),
                ms("naive"), ms("exposed"), 100 * ms("exposed") / ms("none"), ms("all"),
                100 * (1 - ms("exposed") / ms("all")), row["wrong"].get<int64_t>());
    std::fflush(stdout);
  }
  if (group.is_root()) {
    bench::write_json(options.json, {{"program", "bench_overlap"},
                                     {"layers", options.layers},
                                     {"dim", options.dim},
                                     {"batch", options.batch},
                                     {"ranks", group.size()},
                                     {"backend", group.backend()},
                                     {"threads", at::get_num_threads()},
                                     {"parameters_mib", parameters_mib},
                                     {"rows", rows}});
  }
  ddp::barrier(group);
  return wrong == 0 ? ddp::kExitSuccess : ddp::kExitFailure;
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run([&] { return measure(parse(argc, argv)); });
}
