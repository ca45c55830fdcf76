// What does a checkpoint cost: saved at once or in the background, loaded, in time and memory, against the disk itself?
//
//   build/bin/bench_checkpoint                                    256 MB, one process
//   build/bin/bench_checkpoint --mb 2000 --dir /scratch --json out.json
//
// One round is: `dd conv=fsync` of the file that the last save wrote; a save; a read of that file from the page cache,
// and a load of it; a step that saves in the background, and the wait for it. Medians over the rounds.
//   dd, save, load ...   ms, and GB/s of the file's size
//   blocked              ms that a background save keeps the step for; "first" is the one that makes its memory
//   written              ms from that step to the end of the writing
//   + MiB                the most resident memory above that before the operation, in any round and in the warm-up;
//                        of a load beside the model that it loads into, of a background save with the copy
// `ratio` is against dd for saves, against the read for the load, and for blocked against the plain save. The exit
// status is 1 when a load does not give back what was saved. peers/checkpoint.py is the same in PyTorch.
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "common/command_line.h"
#include "ddp/ddp.h"
#include "harness/measure.h"

extern char** environ;

namespace {

namespace fs = std::filesystem;
using bench::Clock;
using example::option;

constexpr int64_t kTensorBytes = int64_t{8} << 20;

struct Options {
  int64_t mb = 256;
  int64_t rounds = 5;
  std::string dir = ".";
  std::string json;
};

Options parse(int argc, char** argv) {
  Options options;
  boost::program_options::options_description description("bench_checkpoint");
  // clang-format off
  description.add_options()
      ("mb", option(options.mb), "size of the state, in 1e6 bytes")
      ("rounds", option(options.rounds), "measured")
      ("dir", option(options.dir), "on the disk in question; a folder in it is made and removed")
      ("json", option(options.json), "write the results to this file");
  // clang-format on
  example::parse_command_line(argc, argv, description);
  if (options.mb < 1 || options.rounds < 1) {
    throw ddp::ConfigError("[bench_checkpoint] --mb and --rounds are at least 1");
  }
  return options;
}

// A model of tensors of 8 MiB, and a last smaller one.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t bytes) {
    for (int i = 0; bytes > 0; ++i, bytes -= kTensorBytes) {
      weights.push_back(
          register_parameter("weight" + std::to_string(i), torch::randn({std::min(bytes, kTensorBytes) / 4})));
    }
  }
  std::vector<torch::Tensor> weights;
};
TORCH_MODULE(Net);

// The most resident memory of a piece of the program, above what it began with.
class Peak {
 public:
  Peak() {
    std::ofstream("/proc/self/clear_refs") << "5";  // VmHWM begins anew, proc(5)
    before_ = bench::status_mib("VmRSS");
  }
  double mib() const { return bench::peak_rss_mib() - before_; }

 private:
  double before_;
};

double dd_ms(const fs::path& from, const fs::path& to) {
  const std::string in = "if=" + from.string(), out = "of=" + to.string();
  const char* argv[] = {"dd", in.c_str(), out.c_str(), "bs=8M", "conv=fsync", "status=none", nullptr};
  fs::remove(to);
  const auto start = Clock::now();
  pid_t pid = 0;
  int status = -1;
  if (::posix_spawnp(&pid, "dd", nullptr, nullptr, const_cast<char**>(argv), environ) != 0 ||
      ::waitpid(pid, &status, 0) != pid || status != 0) {
    throw ddp::Error("[bench_checkpoint] dd failed; is it installed, and the disk large enough?");
  }
  return bench::ms_between(start, Clock::now());
}

double read_ms(const fs::path& path) {
  std::vector<char> buffer(8 << 20);
  const auto start = Clock::now();
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  while (::read(file, buffer.data(), buffer.size()) > 0) {
  }
  ::close(file);
  return bench::ms_between(start, Clock::now());
}

struct Series {
  std::vector<double> dd, save, read, load, blocked, written, save_mib, load_mib, background_mib;
};

template <class Action>
double timed(Action action) {
  const auto start = Clock::now();
  action();
  return bench::ms_between(start, Clock::now());
}

int measure(const Options& options) {
  const fs::path folder = fs::path(options.dir) / ("bench_checkpoint." + std::to_string(::getpid()));
  torch::NoGradGuard no_grad;
  Net net(options.mb * 1'000'000), other(options.mb * 1'000'000);
  ddp::log::set_sink([](ddp::log::Level level, std::string_view line) {
    if (level != ddp::log::Level::kInfo) std::fprintf(stderr, "%.*s\n", static_cast<int>(line.size()), line.data());
  });

  Series all;
  double first_blocked = 0;
  int64_t wrong = 0;
  uintmax_t bytes = 0;
  {
    ddp::Checkpointer plain(folder / "plain", {}, {.every = 0, .keep = 1});
    ddp::Checkpointer background(folder / "background", {}, {.every = 1, .keep = 1, .async = true});
    ddp::Checkpointer reader(folder / "reader", {}, {.every = 0});
    plain.track("model", net);
    background.track("model", net);
    reader.track("model", other);
    // The first of each kind: memory counts, time does not.
    {
      const Peak peak;
      plain.save();
      all.save_mib.push_back(peak.mib());
    }
    {
      const Peak peak;
      first_blocked = timed([&] { background.step(); });
      background.wait();
      all.background_mib.push_back(peak.mib());
    }
    {
      const Peak peak;
      reader.resume(*plain.last_saved());
      all.load_mib.push_back(peak.mib());
    }
    const auto copy = folder / "dd.bin";
    bytes = fs::file_size(*plain.last_saved());
    dd_ms(*plain.last_saved(), copy);

    for (int64_t round = 0; round < options.rounds; ++round) {
      for (auto& weight : net->weights) weight.add_(1);
      all.dd.push_back(dd_ms(*plain.last_saved(), copy));
      {
        const Peak peak;
        plain.step();
        all.save.push_back(timed([&] { plain.save(); }));
        all.save_mib.push_back(peak.mib());
      }
      all.read.push_back(read_ms(*plain.last_saved()));
      {
        const Peak peak;
        all.load.push_back(timed([&] { reader.resume(*plain.last_saved()); }));
        all.load_mib.push_back(peak.mib());
      }
      for (size_t i = 0; i < net->weights.size(); ++i) wrong += !net->weights[i].equal(other->weights[i]);
      {
        const Peak peak;
        const auto start = Clock::now();
        all.blocked.push_back(timed([&] { background.step(); }));
        background.wait();
        all.written.push_back(bench::ms_between(start, Clock::now()));
        all.background_mib.push_back(peak.mib());
      }
    }
  }
  fs::remove_all(folder);

  auto result = nlohmann::json{{"program", "bench_checkpoint"},
                               {"bytes", bytes},
                               {"rounds", options.rounds},
                               {"first_blocked_ms", first_blocked},
                               {"wrong", wrong}};
  std::printf("# %.3f GB, %ld rounds\n# %-28s %10s %8s %8s %8s\n", static_cast<double>(bytes) / 1e9,
              static_cast<long>(options.rounds), "operation", "ms", "GB/s", "ratio", "+ MiB");
  auto row = [&](const char* name, const char* key, const std::vector<double>& ms, double against,
                 const std::vector<double>* mib) {
    const double median = bench::median(ms);
    result[std::string(key) + "_ms"] = median;
    const double most = mib ? *std::ranges::max_element(*mib) : 0;
    if (mib) result[std::string(key) + "_mib"] = most;
    std::printf("%-30s %10.1f %8.2f %8.2f %8.1f\n", name, median, static_cast<double>(bytes) / median / 1e6,
                median / against, most);
  };
  const double dd = bench::median(all.dd), read = bench::median(all.read), save = bench::median(all.save);
  row("dd conv=fsync", "dd", all.dd, dd, nullptr);
  row("save", "save", all.save, dd, &all.save_mib);
  row("read from the page cache", "read", all.read, read, nullptr);
  row("load", "load", all.load, read, &all.load_mib);
  row("background: step blocked", "blocked", all.blocked, save, nullptr);
  row("background: written", "written", all.written, dd, &all.background_mib);
  std::printf("%-30s %10.1f\n%-30s %10ld\n", "background: first blocked", first_blocked, "#wrong",
              static_cast<long>(wrong));
  bench::write_json(options.json, result);
  return wrong == 0 ? ddp::kExitSuccess : ddp::kExitFailure;
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run([&] { return measure(parse(argc, argv)); });
}
