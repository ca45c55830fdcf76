// How long does training stand still for its data, with torch's data loader and with ddp::Prefetcher?
//
//   build/bin/bench_loader                                                one process
//   build/bin/bench_loader --make-ms 2 --json out.json                    batches that take 2 ms more to make
//   torchrun --no-python --nproc-per-node 2 build/bin/bench_loader        ranks that share the machine
//
// The data are windows of tokens, cut out and widened to int64; the step is matrix products of about --compute-ms. Each
// loader has an epoch of --steps batches with the step and one without, and that --rounds times, in turns.
//
// Columns:
//   loader       torch's with so many workers (0: the loop makes its batches), the prefetcher with so many ahead
//   batches/s    with the step, the median over rounds; of the slowest rank, as are the other numbers
//   alone/s      without it: as fast as the loader goes
//   wait us      of the loop for a batch, median over steps
//   p99 us       99th percentile
//   of step      the share of an epoch's time that the loop waited, after its begin
//   begin us     the begin: the epoch's order and its first batch, median over rounds
//   #wrong       windows that are not the sampler's, in its order. The exit status is 1 when one is not 0.
#include <torch/torch.h>

#include <cstdio>
#include <functional>

#include "common/command_line.h"
#include "ddp/ddp.h"
#include "ddp/prefetch.h"
#include "harness/measure.h"

namespace {

using bench::Clock;
using example::option;

struct Options {
  int64_t seq = 256;
  int64_t batch = 8;
  int64_t steps = 200;
  int64_t rounds = 3;
  double compute_ms = 5;
  double make_ms = 0;
  uint64_t seed = 42;
  std::string json;
};

Options parse(int argc, char** argv) {
  Options options;
  boost::program_options::options_description description("bench_loader");
  // clang-format off
  description.add_options()
      ("seq", option(options.seq), "tokens of a window")
      ("batch", option(options.batch), "windows of a batch")
      ("steps", option(options.steps), "batches of an epoch on one rank")
      ("rounds", option(options.rounds), "epochs of each loader")
      ("compute-ms", option(options.compute_ms), "about the time of a step")
      ("make-ms", option(options.make_ms), "what making a batch costs beyond cutting its windows")
      ("seed", option(options.seed), "of the order")
      ("json", option(options.json), "rank 0 writes the rows to this file");
  // clang-format on
  example::parse_command_line(argc, argv, description);
  if (options.seq < 1 || options.batch < 1 || options.steps < 2 || options.rounds < 1) {
    throw ddp::ConfigError("[bench_loader] --seq, --batch and --rounds are at least 1, --steps at least 2");
  }
  if (!(options.compute_ms >= 0) || !(options.make_ms >= 0)) {
    throw ddp::ConfigError("[bench_loader] --compute-ms and --make-ms are at least 0");
  }
  return options;
}

// Token i is the number i, so a window's first token says which window it is.
class Windows : public torch::data::datasets::BatchDataset<Windows, torch::data::Example<>> {
 public:
  Windows(int64_t count, int64_t seq, double make_ms)
      : count_(count), seq_(seq), make_ms_(make_ms), tokens_(torch::arange(count * seq + 1, torch::kInt32)) {}

  torch::data::Example<> get_batch(c10::ArrayRef<size_t> rows) override {
    const auto begin = Clock::now();
    std::vector<torch::Tensor> windows;
    for (const size_t row : rows) windows.push_back(tokens_.narrow(0, static_cast<int64_t>(row) * seq_, seq_ + 1));
    const auto batch = torch::stack(windows).to(torch::kInt64);
    while (make_ms_ > 0 && bench::ms_between(begin, Clock::now()) < make_ms_) {
    }
    return {batch.narrow(1, 0, seq_), batch.narrow(1, 1, seq_)};
  }
  std::optional<size_t> size() const override { return static_cast<size_t>(count_); }

 private:
  int64_t count_, seq_;
  double make_ms_;
  torch::Tensor tokens_;
};

// The same work in each step, whatever else the machine does.
class Compute {
 public:
  explicit Compute(double ms) {
    if (ms <= 0) return;
    products_ = 20;
    (*this)();
    std::vector<double> trials;
    for (int i = 0; i < 7; ++i) {
      const auto begin = Clock::now();
      (*this)();
      trials.push_back(bench::ms_between(begin, Clock::now()));
    }
    products_ = std::max<int64_t>(1, std::llround(ms / bench::median(trials) * static_cast<double>(products_)));
  }
  void operator()() {
    torch::NoGradGuard no_grad;
    for (int64_t i = 0; i < products_; ++i) torch::mm_out(out_, in_, in_);
  }

 private:
  torch::Tensor in_ = torch::ones({192, 192}), out_ = torch::empty({192, 192});
  int64_t products_ = 0;
};

struct Times {
  std::vector<double> batches_per_s, alone_per_s, wait_us, begin_us, share;
  int64_t wrong = 0;
};

int64_t count_wrong(const torch::data::Example<>& batch, const std::optional<std::vector<size_t>>& rows, int64_t seq) {
  if (!rows) return batch.data.size(0);
  const auto data = batch.data.accessor<int64_t, 2>(), target = batch.target.accessor<int64_t, 2>();
  int64_t wrong = std::abs(data.size(0) - std::ssize(*rows));
  for (int64_t i = 0; i < std::min<int64_t>(data.size(0), std::ssize(*rows)); ++i) {
    const auto first = static_cast<int64_t>((*rows)[static_cast<size_t>(i)]) * seq;
    wrong += data[i][0] != first || data[i][seq - 1] != first + seq - 1 || target[i][seq - 1] != first + seq;
  }
  return wrong;
}

// One epoch. `compute` may be null.
template <class Loader>
void run_epoch(Loader& loader, ddp::DistributedSampler expected, const Options& options, Compute* compute,
               Times& times) {
  expected.reset();
  double waited = 0;
  int64_t batches = 0;
  const auto start = Clock::now();
  const auto end = loader.end();
  auto it = loader.begin();
  bool more = !(it == end);  // torch's makes its first batch here
  const auto begun = Clock::now();
  while (more) {
    times.wrong += count_wrong(*it, expected.next(static_cast<size_t>(options.batch)), options.seq);
    if (compute != nullptr) (*compute)();
    ++batches;
    const auto before = Clock::now();
    ++it;
    more = !(it == end);
    const double ms = bench::ms_between(before, Clock::now());
    waited += ms;
    if (compute != nullptr && more) times.wait_us.push_back(1e3 * ms);
  }
  const auto done = Clock::now();
  times.wrong += expected.next(1).has_value();
  const double seconds = bench::ms_between(start, done) / 1e3;
  const double per_s = static_cast<double>(batches) / seconds;
  if (compute == nullptr) {
    times.alone_per_s.push_back(per_s);
    return;
  }
  times.batches_per_s.push_back(per_s);
  times.begin_us.push_back(1e3 * bench::ms_between(start, begun));
  times.share.push_back(waited / bench::ms_between(begun, done));
}

struct Contender {
  std::string name;
  std::function<void(const ddp::DistributedSampler& sampler, const ddp::DistributedSampler& expected, Compute* compute,
                     Times& times)>
      epoch;
  Times times = {};
};

std::vector<Contender> make_contenders(const Windows& data, const Options& options) {
  const auto batch = static_cast<size_t>(options.batch);
  std::vector<Contender> contenders;
  for (const size_t workers : {0, 2}) {
    contenders.push_back({"torch, " + std::to_string(workers) + " workers",
                          [=](const auto& sampler, const auto& expected, Compute* compute, Times& times) {
                            const auto of_torch = torch::data::DataLoaderOptions(batch).workers(workers);
                            auto loader = torch::data::make_data_loader(data, sampler, of_torch);
                            run_epoch(*loader, expected, options, compute, times);
                          }});
  }
  for (const size_t depth : {0, 2}) {
    contenders.push_back({"Prefetcher, depth " + std::to_string(depth),
                          [=](const auto& sampler, const auto& expected, Compute* compute, Times& times) {
                            ddp::Prefetcher loader(sampler, batch, data, {.depth = depth});
                            run_epoch(loader, expected, options, compute, times);
                          }});
  }
  return contenders;
}

nlohmann::json row_of(const Contender& contender, const ddp::ProcessGroup& group) {
  const Times& t = contender.times;
  // Rates with a minus, so that the worst is the largest here too.
  const auto worst =
      bench::worst_rank({-bench::median(t.batches_per_s), -bench::median(t.alone_per_s), bench::median(t.wait_us),
                         bench::percentile(t.wait_us, 0.99), bench::median(t.share), bench::median(t.begin_us),
                         static_cast<double>(t.wrong)},
                        group);
  return {{"loader", contender.name}, {"batches_per_s", -worst[0]},
          {"alone_per_s", -worst[1]}, {"wait_us", worst[2]},
          {"wait_p99_us", worst[3]},  {"wait_share", worst[4]},
          {"begin_us", worst[5]},     {"wrong", static_cast<int64_t>(worst[6])}};
}

int measure(const Options& options) {
  const auto group = ddp::ProcessGroup::from_env();
  const int64_t windows = options.steps * options.batch * group.size();
  auto contenders = make_contenders(Windows(windows, options.seq, options.make_ms), options);
  Compute compute(options.compute_ms);
  for (int64_t round = 0; round < options.rounds; ++round) {
    for (size_t i = 0; i < contenders.size(); ++i) {
      auto& contender = contenders[round % 2 == 0 ? i : contenders.size() - 1 - i];
      for (const bool with_compute : {true, false}) {
        const auto sampler = [&] {
          return ddp::DistributedSampler(static_cast<size_t>(windows), group.place(), {.seed = options.seed});
        };
        ddp::barrier(group);
        contender.epoch(sampler(), sampler(), with_compute ? &compute : nullptr, contender.times);
      }
    }
  }

  auto rows = nlohmann::json::array();
  int64_t wrong = 0;
  if (group.is_root()) {
    std::printf(
        "# %ld batches of %ld windows of %ld tokens, a step of about %g ms, %g ms to make a batch beyond cutting it,"
        " %d ranks, %d threads a rank\n",
        options.steps, options.batch, options.seq, options.compute_ms, options.make_ms, group.size(),
        at::get_num_threads());
    std::printf("# %-19s %10s %10s %9s %9s %9s %9s %8s\n", "loader", "batches/s", "alone/s", "wait us", "p99 us",
                "of step", "begin us", "#wrong");
  }
  for (const auto& contender : contenders) {
    const auto& row = rows.emplace_back(row_of(contender, group));
    wrong += row["wrong"].get<int64_t>();
    if (!group.is_root()) continue;
    const auto number = [&](const char* key) { return row[key].get<double>(); };
    std::printf("%-21s %10.1f %10.1f %9.1f %9.1f %8.3f%% %9.1f %8ld\n", contender.name.c_str(), number("batches_per_s"),
                number("alone_per_s"), number("wait_us"), number("wait_p99_us"), 100 * number("wait_share"),
                number("begin_us"), row["wrong"].get<int64_t>());
  }
  if (group.is_root()) {
    bench::write_json(options.json, {{"program", "bench_loader"},
                                     {"seq", options.seq},
                                     {"batch", options.batch},
                                     {"steps", options.steps},
                                     {"compute_ms", options.compute_ms},
                                     {"make_ms", options.make_ms},
                                     {"ranks", group.size()},
                                     {"threads", at::get_num_threads()},
                                     {"rows", rows}});
  }
  ddp::barrier(group);
  return wrong == 0 ? ddp::kExitSuccess : ddp::kExitFailure;
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run([&] { return measure(parse(argc, argv)); });
}
