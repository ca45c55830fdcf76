// What does an epoch's order cost: drawing it, handing indices out, and the memory it holds?
//
//   build/bin/bench_sampler                                       one process; rank 0 of 8 is played
//   build/bin/bench_sampler --samples 1000000,100000000 --ranks 64 --json out.json
//
// Columns:
//   samples     rows of the data set
//   epoch ms    set_epoch and the reset that a loader does: the permutation of all rows is drawn here; median
//   ns/index    of handing this rank's indices out in batches, a whole epoch; median
//   MiB         resident memory added by a sampler that is in an epoch (a permutation of int32 is 4 bytes a row)
//   peak MiB    the most that the process has had so far
//   #wrong      indices that were out of range or came twice, or are missing: of this rank's, and, up to 1e7 samples,
//               over all ranks together, which must cover the data set. The exit status is 1 when one is not 0.
#include <torch/torch.h>

#include <cstdio>
#include <sstream>

#include "common/command_line.h"
#include "ddp/ddp.h"
#include "harness/measure.h"

namespace {

using bench::Clock;
using example::option;

struct Options {
  std::string samples = "1000000,100000000";
  int ranks = 8;
  size_t batch = 32;
  int64_t epochs = 3;
  std::string json;
};

Options parse(int argc, char** argv) {
  Options options;
  boost::program_options::options_description description("bench_sampler");
  // clang-format off
  description.add_options()
      ("samples", option(options.samples), "sizes of the data set, separated by commas")
      ("ranks", option(options.ranks), "the world size that is played")
      ("batch", option(options.batch), "indices at a time")
      ("epochs", option(options.epochs), "measured")
      ("json", option(options.json), "write the rows to this file");
  // clang-format on
  example::parse_command_line(argc, argv, description);
  if (options.ranks < 1 || options.batch < 1 || options.epochs < 1) {
    throw ddp::ConfigError("[bench_sampler] --ranks, --batch and --epochs are at least 1");
  }
  return options;
}

std::vector<size_t> parse_samples(const std::string& text) {
  std::vector<size_t> samples;
  std::istringstream list(text);
  for (std::string one; std::getline(list, one, ',');) {
    if (one.empty() || one.find_first_not_of("0123456789") != std::string::npos) {
      throw ddp::ConfigError("[bench_sampler] --samples holds \"" + one + "\", expected whole numbers such as 1000000");
    }
    samples.push_back(std::stoull(one));
  }
  return samples;
}

// Marks the indices of one rank's epoch; returns those that are out of range or were marked before.
size_t mark(ddp::DistributedSampler& sampler, size_t batch, std::vector<bool>& seen) {
  size_t wrong = 0;
  while (auto indices = sampler.next(batch)) {
    for (size_t index : *indices) {
      if (index >= seen.size() || seen[index]) {
        ++wrong;
      } else {
        seen[index] = true;
      }
    }
  }
  return wrong;
}

// Without padding (drop_last), so that no index may come twice.
size_t count_wrong(size_t samples, const Options& options) {
  constexpr size_t kAllRanksUpTo = 10'000'000;
  std::vector<bool> seen(samples);
  bool all = samples <= kAllRanksUpTo;
  size_t wrong = 0, handed_out = 0;
  for (int rank = 0; rank < (all ? options.ranks : 1); ++rank) {
    ddp::DistributedSampler sampler(samples, {.rank = rank, .size = options.ranks}, {.seed = 42, .drop_last = true});
    sampler.set_epoch(1), sampler.reset();
    wrong += mark(sampler, options.batch, seen);
    handed_out += samples / static_cast<size_t>(options.ranks);
  }
  auto marked = static_cast<size_t>(std::count(seen.begin(), seen.end(), true));
  return wrong + (handed_out - std::min(handed_out, marked));
}

int measure(const Options& options) {
  std::printf("# rank 0 of %d, batches of %zu, %ld epochs\n", options.ranks, options.batch, options.epochs);
  std::printf("# %10s %12s %10s %10s %10s %8s\n", "samples", "epoch ms", "ns/index", "MiB", "peak MiB", "#wrong");
  auto rows = nlohmann::json::array();
  size_t all_wrong = 0;
  for (auto samples : parse_samples(options.samples)) {
    double before = bench::status_mib("VmRSS"), added = 0;
    std::vector<double> epoch_ms, index_ns;
    size_t total = 0;  // of the indices, so that the loop is not optimised away
    {
      ddp::DistributedSampler sampler(samples, {.rank = 0, .size = options.ranks}, {.seed = 42});
      for (int64_t epoch = 0; epoch < options.epochs; ++epoch) {
        auto begin = Clock::now();
        sampler.set_epoch(epoch), sampler.reset();
        auto drawn = Clock::now();
        while (auto indices = sampler.next(options.batch)) total += indices->front();
        auto end = Clock::now();
        epoch_ms.push_back(bench::ms_between(begin, drawn));
        index_ns.push_back(bench::ms_between(drawn, end) * 1e6 / static_cast<double>(sampler.num_samples()));
        added = std::max(added, bench::status_mib("VmRSS") - before);
      }
    }
    auto wrong = count_wrong(samples, options);
    all_wrong += wrong;
    std::printf("%12zu %12.3f %10.2f %10.1f %10.1f %8zu\n", samples, bench::median(epoch_ms), bench::median(index_ns),
                added, bench::peak_rss_mib(), wrong);
    std::fflush(stdout);
    rows.push_back({{"samples", samples},
                    {"epoch_ms", bench::median(epoch_ms)},
                    {"ns_per_index", bench::median(index_ns)},
                    {"added_mib", added},
                    {"peak_rss_mib", bench::peak_rss_mib()},
                    {"wrong", wrong},
                    {"checksum", total}});
  }
  bench::write_json(options.json, {{"program", "bench_sampler"}, {"ranks", options.ranks}, {"rows", rows}});
  return all_wrong == 0 ? ddp::kExitSuccess : ddp::kExitFailure;
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run([&] { return measure(parse(argc, argv)); });
}
