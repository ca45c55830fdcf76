#include "options.h"

#include <getopt.h>
#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <sstream>
#include <string_view>
#include <system_error>

namespace ddprun {

const char* const kHelp =
    R"(usage: ddprun -n N [options] program [arguments]

Starts N processes of a program with torchrun's variables, passes on signals, and ends all of them when one fails.

  -n, --nproc N        processes on this host; auto: one for each GPU, without a GPU one for each core; gpu; cpu
  --max-restarts R     start all processes again after a failure, R times at most             (0; one host only)
  --grace SECONDS      from SIGTERM to SIGKILL, after a failure or a signal to ddprun                       (30)
  --prefix             "[rank] " before each line of output
  --log-dir DIR        keep each rank's stdout.log, stderr.log and error.json under DIR
  --env NAME=VALUE     one more variable for the processes; may be repeated
  --nnodes N           hosts; each runs its own ddprun, with the same -n                                     (1)
  --node-rank K        which of the hosts this is, 0 to N-1
  --master HOST:PORT   where rank 0 listens                             (127.0.0.1, a free port for each life)
  -h, --help           this text

Exit code: 0 when all processes end with 0; else that of the process that failed first, or 128 + the signal that ended
it. 2: the command line is wrong; 126, 127: the program cannot be run, does not exist. SIGTERM, SIGINT, SIGHUP, SIGQUIT,
SIGUSR1 and SIGUSR2 go to all processes; a second SIGTERM or SIGINT, half a second later or more, kills them at once.
)";

namespace {

// What ddprun says to a rank itself; --env must not contradict it.
constexpr std::string_view kOwnVariables[] = {
    "RANK",      "WORLD_SIZE",      "LOCAL_RANK",  "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "GROUP_WORLD_SIZE",
    "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"};

template <typename Number>
Number number_of(const std::string& option, std::string_view text, Number low, Number high, const char* what) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value >= low && value <= high)) {
    throw UsageError(option + " is \"" + std::string(text) + "\", expected " + what);
  }
  return value;
}

int ranks_of(const std::string& text) {
  if (text == "auto") return visible_gpus() > 0 ? visible_gpus() : usable_cores();
  if (text == "cpu") return usable_cores();
  if (text == "gpu") {
    if (visible_gpus() == 0) throw UsageError("-n gpu: no GPU is visible (CUDA_VISIBLE_DEVICES, /dev/nvidia*)");
    return visible_gpus();
  }
  return number_of<int>("-n", text, 1, 4096, "a number of processes from 1 to 4096, auto, gpu or cpu");
}

Endpoint endpoint_of(const std::string& text) {
  const auto colon = text.rfind(':');
  std::string host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);  // [::1]:29500
  } else if (host.find(':') != std::string::npos) {
    throw UsageError("--master is \"" + text + "\": write an IPv6 address in brackets, [::1]:29500");
  }
  if (colon == std::string::npos || host.empty()) {
    throw UsageError("--master is \"" + text + "\", expected HOST:PORT such as node0:29500");
  }
  return {.host = host,
          .port = number_of<uint16_t>("the port of --master", text.substr(colon + 1), 1, 65535, "1 to 65535")};
}

std::pair<std::string, std::string> variable_of(const std::string& text) {
  const auto equals = text.find('=');
  if (equals == std::string::npos || equals == 0) {
    throw UsageError("--env is \"" + text + "\", expected NAME=VALUE");
  }
  std::string name = text.substr(0, equals);
  if (std::ranges::find(kOwnVariables, name) != std::end(kOwnVariables) || name.starts_with("TORCHELASTIC_")) {
    throw UsageError("--env " + name + ": ddprun sets this variable itself");
  }
  return {std::move(name), text.substr(equals + 1)};
}

void check_together(const Options& options, bool has_node_rank) {
  if (options.ranks == 0) throw UsageError("-n is missing: how many processes on this host, a number or auto");
  if (options.command.empty()) throw UsageError("the program to run is missing");
  if (options.nodes > 1) {
    if (!has_node_rank) throw UsageError("--nnodes without --node-rank: which host is this, 0 to nnodes - 1");
    if (!options.master) throw UsageError("--nnodes without --master HOST:PORT, where rank 0 listens");
    if (options.max_restarts > 0) {
      throw UsageError(
          "--max-restarts works on one host only, since hosts of ddprun do not restart together; use torchrun "
          "--nnodes --max-restarts, or let the scheduler requeue the job");
    }
  }
  if (options.node_rank >= options.nodes) {
    throw UsageError("--node-rank is " + std::to_string(options.node_rank) + " of " + std::to_string(options.nodes) +
                     " hosts (--nnodes), expected 0 to " + std::to_string(options.nodes - 1));
  }
}

}  // namespace

Options parse_options(int argc, char** argv) {
  enum { kMaxRestarts = 256, kGrace, kPrefix, kLogDir, kEnv, kNodes, kNodeRank, kMaster };
  const option known[] = {{"nproc", required_argument, nullptr, 'n'},
                          {"nproc-per-node", required_argument, nullptr, 'n'},
                          {"max-restarts", required_argument, nullptr, kMaxRestarts},
                          {"grace", required_argument, nullptr, kGrace},
                          {"prefix", no_argument, nullptr, kPrefix},
                          {"log-dir", required_argument, nullptr, kLogDir},
                          {"env", required_argument, nullptr, kEnv},
                          {"nnodes", required_argument, nullptr, kNodes},
                          {"node-rank", required_argument, nullptr, kNodeRank},
                          {"master", required_argument, nullptr, kMaster},
                          {"help", no_argument, nullptr, 'h'},
                          {nullptr, 0, nullptr, 0}};
  Options options;
  bool has_node_rank = false;
  opterr = 0;  // what is wrong is said by the exception
  for (;;) {
    const int at = optind;
    // "+": the first word that is no option is the program, and all after it is the program's; ":" tells a missing
    // argument from an unknown option.
    const int found = ::getopt_long(argc, argv, "+:n:h", known, nullptr);
    if (found < 0) break;
    const std::string argument = optarg != nullptr ? optarg : "";
    const int most = std::numeric_limits<int>::max();
    switch (found) {
      case 'n':
        options.ranks = ranks_of(argument);
        break;
      case 'h':
        options.help = true;
        return options;
      case kMaxRestarts:
        options.max_restarts = number_of<int>("--max-restarts", argument, 0, most, "0 or more");
        break;
      case kGrace:
        options.grace = std::chrono::milliseconds(
            static_cast<int64_t>(1e3 * number_of<double>("--grace", argument, 0, 1e6, "seconds, 0 or more")));
        break;
      case kPrefix:
        options.prefix = true;
        break;
      case kLogDir:
        if (argument.empty()) throw UsageError("--log-dir is empty");
        options.log_dir = argument;
        break;
      case kEnv:
        options.env.push_back(variable_of(argument));
        break;
      case kNodes:
        options.nodes = number_of<int>("--nnodes", argument, 1, 65536, "a number of hosts, 1 or more");
        break;
      case kNodeRank:
        options.node_rank = number_of<int>("--node-rank", argument, 0, most, "0 or more");
        has_node_rank = true;
        break;
      case kMaster:
        options.master = endpoint_of(argument);
        break;
      case ':':
        throw UsageError(std::string(argv[at]) + " needs a value");
      default:
        throw UsageError(std::string(argv[at]) + " is no option of ddprun");
    }
  }
  options.command.assign(argv + optind, argv + argc);
  check_together(options, has_node_rank);
  return options;
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return 1;  // more than 1024 cores: say -n
  return std::max(CPU_COUNT(&set), 1);
}

int visible_gpus() {
  if (const char* list = std::getenv("CUDA_VISIBLE_DEVICES")) {
    int count = 0;
    std::istringstream entries(list);
    for (std::string entry; std::getline(entries, entry, ',');) {
      entry.erase(std::remove(entry.begin(), entry.end(), ' '), entry.end());
      if (entry.empty() || entry.front() == '-') break;  // CUDA stops at the first that is none
      ++count;
    }
    return count;
  }
  int count = 0;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", ignored)) {
    const std::string name = entry.path().filename();
    if (name.size() > 6 && name.starts_with("nvidia") && name.find_first_not_of("0123456789", 6) == std::string::npos) {
      ++count;
    }
  }
  return count;
}

}  // namespace ddprun
