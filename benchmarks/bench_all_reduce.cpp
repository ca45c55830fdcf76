// How long does a collective take, against the size of what it moves? All-reduce, or another one by --op.
//
//   torchrun --no-python --nproc-per-node 2 build/bin/bench_all_reduce --backend shm
//   torchrun --no-python --nproc-per-node 2 build/bin/bench_all_reduce --op all_gather --sizes 4K,1M,25M --json a.json
//
// Columns are nccl-tests':
//   bytes    of the buffer; for operations with one part per rank, of all parts together
//   ms       the median, min and p99 beside it. Each iteration begins behind a barrier and is that of its slowest rank
//   algbw    bytes / ms, in GB/s (1e9)
//   busbw    algbw * 2(n-1)/n for all_reduce, (n-1)/n for operations in parts, 1 for broadcast and reduce
//   memcpy   GB/s of a memcpy of as many bytes between private buffers, on all ranks at once, measured in the same way
//   /memcpy  algbw / memcpy. An all-reduce has to read N bytes and write N bytes on each rank, as a memcpy of N bytes
//            does: that is the bound, 1.0. One of w ranks that copies through shared memory touches at least 5N - 2N/w
//            bytes a rank (copies in what others reduce, reduces its part, copies the others' results out), at w = 2
//            twice as many as memcpy, and comes near 1.0 only when the shared chunks stay in cache.
//   #wrong   elements of the last iteration's result, on all ranks, that are not exactly what they must be
//
// The buffer is filled again before each iteration, so it is as warm as a gradient that backward has just written. The
// exit status is 1 when any #wrong is not 0.
#include <torch/torch.h>

#include <cstdio>
#include <cstring>
#include <sstream>

#include "common/command_line.h"
#include "ddp/ddp.h"
#include "harness/collective_case.h"
#include "harness/measure.h"

namespace {

using bench::Clock;
using example::option;

struct Options {
  std::string op = "all_reduce";
  std::string backend = "auto";
  std::string dtype = "float32";
  std::string sizes;
  std::string min_bytes = "4K";
  std::string max_bytes = "64M";
  int64_t factor = 4;
  int64_t iterations = 50;
  int64_t warmup = 5;
  std::string json;
};

Options parse(int argc, char** argv) {
  Options options;
  boost::program_options::options_description description("bench_all_reduce");
  // clang-format off
  description.add_options()
      ("op", option(options.op), "all_reduce, all_gather, ...: a wrong one is answered with the list")
      ("backend", option(options.backend), "auto, shm, gloo or nccl")
      ("dtype", option(options.dtype), "float32, float64, float16, bfloat16, int32, int64 or uint8")
      ("sizes", option(options.sizes), "bytes (4096, 64K, 25M), separated by commas; else the next three")
      ("min-bytes", option(options.min_bytes), "the first size")
      ("max-bytes", option(options.max_bytes), "the last size")
      ("factor", option(options.factor), "from one size to the next")
      ("iterations", option(options.iterations), "timed, per size")
      ("warmup", option(options.warmup), "before them, not timed")
      ("json", option(options.json), "rank 0 writes the rows to this file");
  // clang-format on
  example::parse_command_line(argc, argv, description);
  if (options.factor < 2 || options.iterations < 1 || options.warmup < 0) {
    throw ddp::ConfigError("[bench_all_reduce] --factor is at least 2, --iterations at least 1, --warmup at least 0");
  }
  return options;
}

int64_t parse_bytes(const std::string& text) {
  size_t end = 0;
  int64_t bytes = 0;
  try {
    bytes = std::stoll(text, &end);
  } catch (const std::exception&) {
    end = 0;
  }
  auto unit = std::string("KMG").find(text.substr(end));
  if (end == 0 || bytes < 0 || text.size() > end + 1 || unit == std::string::npos) {
    throw ddp::ConfigError("[bench_all_reduce] a size is \"" + text +
                           "\", expected a number of bytes such as 4096, 64K or 25M");
  }
  return end == text.size() ? bytes : bytes << (10 * (unit + 1));
}

std::vector<int64_t> sizes_of(const Options& options) {
  std::vector<int64_t> sizes;
  if (options.op == "barrier") return {0};
  std::istringstream list(options.sizes);
  for (std::string size; std::getline(list, size, ',');) sizes.push_back(parse_bytes(size));
  if (!sizes.empty()) return sizes;
  auto last = parse_bytes(options.max_bytes);
  for (auto size = std::max<int64_t>(1, parse_bytes(options.min_bytes)); size <= last; size *= options.factor) {
    sizes.push_back(size);
  }
  return sizes;
}

struct Repeat {
  int64_t warmup;
  int64_t iterations;
};

// Milliseconds of each iteration, of its slowest rank. `prepare` is not timed.
template <class Prepare, class Call>
std::vector<double> timed(const ddp::ProcessGroup& group, Repeat repeat, const Prepare& prepare, const Call& call) {
  std::vector<double> ms;
  for (int64_t i = -repeat.warmup; i < repeat.iterations; ++i) {
    prepare();
    bench::synchronize(group.device());
    ddp::barrier(group);
    auto begin = Clock::now();
    call();
    bench::synchronize(group.device());
    if (i >= 0) ms.push_back(bench::ms_between(begin, Clock::now()));
  }
  return bench::worst_rank(ms, group);
}

// GB/s of a memcpy between two private buffers, on all ranks at once.
double memcpy_gbs(int64_t bytes, Repeat repeat, const ddp::ProcessGroup& group) {
  auto from = torch::empty(bytes, torch::TensorOptions().dtype(torch::kUInt8).device(group.device()));
  auto to = torch::zeros_like(from);
  auto copy = [&] {
    if (group.device().is_cpu()) {
      std::memcpy(to.data_ptr(), from.data_ptr(), static_cast<size_t>(bytes));
    } else {
      to.copy_(from);
    }
  };
  auto ms = timed(
      group, repeat, [&] { from.fill_(1); }, copy);
  return static_cast<double>(bytes) / bench::median(ms) / 1e6;
}

int measure(const Options& options) {
  auto dtype = bench::parse_dtype(options.dtype);
  auto sizes = sizes_of(options);
  auto group = ddp::ProcessGroup::from_env({.backend = options.backend});
  Repeat repeat{.warmup = options.warmup, .iterations = options.iterations};
  if (group.is_root()) {
    std::printf("# %s, %s, %d ranks, backend %s, %ld iterations after %ld\n", options.op.c_str(), options.dtype.c_str(),
                group.size(), group.backend().c_str(), repeat.iterations, repeat.warmup);
    std::printf("# %10s %10s %10s %10s %8s %8s %8s %8s %8s\n", "bytes", "ms", "min", "p99", "algbw", "busbw", "memcpy",
                "/memcpy", "#wrong");
  }

  auto rows = nlohmann::json::array();
  double all_wrong = 0;
  for (auto size : sizes) {
    auto test = bench::make_case(options.op, {.bytes = size, .dtype = dtype}, group);
    auto ms = timed(group, repeat, test.refill, test.call);
    // Through all_gather, not through the operation that may be the broken one.
    double wrong = 0;
    for (const auto& count : ddp::all_gather_object(std::to_string(test.count_wrong()), group))
      wrong += std::stod(count);
    all_wrong += wrong;

    double p50 = bench::median(ms), p99 = bench::percentile(ms, 0.99), least = bench::percentile(ms, 0);
    double algbw = static_cast<double>(test.bytes) / p50 / 1e6;
    double copy =
        test.bytes > 0
            ? memcpy_gbs(test.bytes, {.warmup = 2, .iterations = std::min<int64_t>(20, repeat.iterations)}, group)
            : 0;
    double of_memcpy = copy > 0 ? algbw / copy : 0;
    rows.push_back({{"bytes", test.bytes},
                    {"count", test.count},
                    {"ms", p50},
                    {"p50_ms", p50},
                    {"p99_ms", p99},
                    {"min_ms", least},
                    {"algbw_gbs", algbw},
                    {"busbw_gbs", algbw * test.bus_factor},
                    {"memcpy_gbs", copy},
                    {"of_memcpy", of_memcpy},
                    {"wrong", wrong}});
    if (!group.is_root()) continue;
    std::printf("%12ld %10.4f %10.4f %10.4f %8.2f %8.2f %8.2f %8.2f %8.0f\n", test.bytes, p50, least, p99, algbw,
                algbw * test.bus_factor, copy, of_memcpy, wrong);
    std::fflush(stdout);
  }
  if (group.is_root()) {
    bench::write_json(options.json, {{"program", "bench_all_reduce"},
                                     {"op", options.op},
                                     {"dtype", options.dtype},
                                     {"ranks", group.size()},
                                     {"backend", group.backend()},
                                     {"iterations", options.iterations},
                                     {"rows", rows}});
  }
  ddp::barrier(group);
  return all_wrong == 0 ? ddp::kExitSuccess : ddp::kExitFailure;
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run([&] { return measure(parse(argc, argv)); });
}
