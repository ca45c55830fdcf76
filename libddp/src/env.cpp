#include "ddp/env.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <vector>

#include "ddp/error.h"
#include "slurm_lists.h"

namespace ddp {
namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();

// Ports that are derived from a job's name lie below Linux's ephemeral range (from 32768), where a passing
// connection of anybody could hold them.
constexpr uint64_t kFirstPort = 20000;
constexpr uint64_t kPorts = 12000;

template <typename Number>
std::optional<Number> parse(std::string_view text) {
  Number value{};
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// Looks variables up and collects what is wrong with them, so that all of it is said at once.
class Variables {
 public:
  explicit Variables(const Lookup& lookup) : lookup_(lookup) {}

  bool has(const std::string& name) const { return lookup_(name).has_value(); }
  std::optional<std::string> text(const std::string& name) const { return lookup_(name); }

  // The first of these that is set.
  std::optional<std::string> first_of(std::initializer_list<const char*> names) const {
    for (const char* name : names) {
      if (auto value = lookup_(name)) return value;
    }
    return std::nullopt;
  }

  // Nothing when it is unset or, with a fault noted, when it is no whole number from `low` to `high`.
  std::optional<int> number(const std::string& name, int low, int high = kMaxInt) {
    auto text = lookup_(name);
    if (!text) return std::nullopt;
    auto value = parse<long long>(*text);
    if (!value) {
      fault(fmt::format("{}=\"{}\" is not a whole number", name, *text));
      return std::nullopt;
    }
    if (*value < low || *value > high) {
      fault(high == kMaxInt ? fmt::format("{}={} is out of range: expected {} or more", name, *text, low)
                            : fmt::format("{}={} is out of range: expected {} to {}", name, *text, low, high));
      return std::nullopt;
    }
    return static_cast<int>(*value);
  }

  std::optional<int> required(const std::string& name, int low, int high = kMaxInt) {
    if (!has(name)) missing(name);
    return number(name, low, high);
  }

  void fault(std::string text) { faults_.push_back(std::move(text)); }
  void missing(const std::string& name, const std::string& why = "") { fault(name + " is missing" + why); }

  void throw_if_faulty(Launcher launcher, std::string_view remedy) const {
    if (faults_.empty()) return;
    throw ConfigError(fmt::format("[ddp::read_env] the variables of {} have {} fault{}:\n  {}\n{}", to_string(launcher),
                                  faults_.size(), faults_.size() == 1 ? "" : "s", fmt::join(faults_, "\n  "), remedy));
  }

 private:
  const Lookup& lookup_;
  std::vector<std::string> faults_;
};

void read_place(Variables& v, Env& env, const std::string& rank_name, const std::string& size_name) {
  auto rank = v.required(rank_name, 0);
  const auto size = v.required(size_name, 1);
  if (rank && size && *rank >= *size) {
    v.fault(fmt::format("{}={} is outside a world of {}={}: expected 0 to {}", rank_name, *rank, size_name, *size,
                        *size - 1));
    rank = 0;  // one fault, not one more for all that would follow from it
  }
  env.rank = rank.value_or(0);
  env.world_size = size.value_or(0);  // 0: not known, and a fault is noted
}

void check_local(Variables& v, const Env& env, const std::string& rank_name, const std::string& size_name) {
  if (env.world_size == 0) return;
  if (env.local_world_size > env.world_size) {
    v.fault(fmt::format("{} says {} processes on this host, more than the world of {}", size_name, env.local_world_size,
                        env.world_size));
  } else if (env.local_rank >= env.local_world_size) {
    v.fault(fmt::format("{}={} is outside this host's {} processes ({}): expected 0 to {}", rank_name, env.local_rank,
                        env.local_world_size, size_name, env.local_world_size - 1));
  }
}

// Where neither is set, all ranks are taken to be on one host; torchrun and mpirun always set both.
void read_local(Variables& v, Env& env, const std::string& rank_name, const std::string& size_name) {
  auto rank = v.number(rank_name, 0);
  auto size = v.number(size_name, 1);
  const bool faulty = (v.has(rank_name) && !rank) || (v.has(size_name) && !size);
  if (faulty || env.world_size == 0) return;
  env.local_world_size = size.value_or(env.world_size);
  env.local_rank = rank.value_or(env.rank);
  if (!rank && env.local_world_size < env.world_size) {
    v.missing(rank_name, fmt::format(" ({}={} of {} processes are on this host)", size_name, env.local_world_size,
                                     env.world_size));
    return;
  }
  check_local(v, env, rank_name, size_name);
}

void read_master_addr(Variables& v, Env& env) {
  auto addr = v.text("MASTER_ADDR");
  if (!addr) return;
  if (addr->empty()) {
    v.fault("MASTER_ADDR is empty");
  } else if (addr->find_first_not_of("0123456789") == std::string::npos) {
    v.fault(fmt::format("MASTER_ADDR={} is a bare number, not a host: is it swapped with MASTER_PORT?", *addr));
  } else if (addr->find_first_of(" \t\n") != std::string::npos) {
    v.fault(fmt::format("MASTER_ADDR=\"{}\" has a blank in it", *addr));
  } else if (std::count(addr->begin(), addr->end(), ':') == 1) {
    v.fault(fmt::format("MASTER_ADDR={} holds a port, which belongs into MASTER_PORT", *addr));
  } else {
    env.master_addr = *addr;
  }
}

void read_master_port(Variables& v, Env& env) {
  env.master_port = static_cast<uint16_t>(v.number("MASTER_PORT", 1, 65535).value_or(0));
}

// For the launchers that name no meeting place: MASTER_ADDR and MASTER_PORT where they are set, else what was
// derived.
void read_master_or(Variables& v, Env& env, const std::string& addr, uint16_t port) {
  read_master_addr(v, env);
  read_master_port(v, env);
  if (!v.has("MASTER_ADDR")) env.master_addr = addr;
  if (!v.has("MASTER_PORT")) env.master_port = port;
}

Env torchrun_env(Variables& v) {
  Env env{.launcher = Launcher::kTorchrun};
  read_place(v, env, "RANK", "WORLD_SIZE");
  read_local(v, env, "LOCAL_RANK", "LOCAL_WORLD_SIZE");
  if (env.world_size != 1) {  // a world of one meets nobody
    for (const char* name : {"MASTER_ADDR", "MASTER_PORT"}) {
      if (!v.has(name)) v.missing(name);
    }
    read_master_addr(v, env);
    read_master_port(v, env);
  }
  const std::string agent_store = v.text("TORCHELASTIC_USE_AGENT_STORE").value_or("");
  env.agent_store = agent_store == "True" || agent_store == "true" || agent_store == "1";
  env.run_id = v.text("TORCHELASTIC_RUN_ID").value_or("");
  env.restart_count = v.number("TORCHELASTIC_RESTART_COUNT", 0).value_or(0);
  v.throw_if_faulty(
      env.launcher,
      "Start the program with torchrun; or set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (and LOCAL_RANK "
      "and "
      "LOCAL_WORLD_SIZE on several hosts) yourself; or unset RANK and WORLD_SIZE for a world of one.");
  return env;
}

// A batch script sees SLURM_PROCID=0 and the SLURM_NTASKS of its allocation too, but is one process: slurmd
// started it (SLURM_TASK_PID) and srun did not (no SLURM_STEP_*). In salloc's interactive step only the
// step's size is one.
bool is_slurm_task(const Variables& v) {
  if (!v.has("SLURM_PROCID")) return false;
  return v.has("SLURM_STEP_NUM_TASKS") || (v.has("SLURM_NTASKS") && !v.has("SLURM_TASK_PID"));
}

void read_slurm_local(Variables& v, Env& env, int hosts) {
  auto local = v.number("SLURM_LOCALID", 0);
  const auto node = v.number("SLURM_NODEID", 0);
  const auto per_node = v.first_of({"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"});
  if (hosts == 1) {
    env.local_world_size = env.world_size;
  } else if (per_node) {
    try {
      const auto counts = detail::expand_slurm_counts(*per_node);
      const bool uniform = std::all_of(counts.begin(), counts.end(), [&](int n) { return n == counts.front(); });
      if (node && *node < static_cast<int>(counts.size())) {
        env.local_world_size = counts[static_cast<size_t>(*node)];
      } else if (uniform) {
        env.local_world_size = counts.front();
      } else {
        v.fault(fmt::format("SLURM_NODEID does not say which host of SLURM_TASKS_PER_NODE={} this is", *per_node));
      }
    } catch (const ConfigError& e) {
      v.fault(e.what());
    }
  } else if (auto n = v.number("SLURM_NTASKS_PER_NODE", 1)) {
    env.local_world_size = std::min(*n, env.world_size);
  } else {
    env.local_world_size = (env.world_size + hosts - 1) / hosts;
  }
  if (local) {
    env.local_rank = *local;
    check_local(v, env, "SLURM_LOCALID", "SLURM_TASKS_PER_NODE");
  } else if (!v.has("SLURM_LOCALID")) {
    if (env.local_world_size == env.world_size) {
      env.local_rank = env.rank;
    } else {
      v.missing("SLURM_LOCALID");
    }
  }
}

Env slurm_env(Variables& v) {
  Env env{.launcher = Launcher::kSlurm};
  read_place(v, env, "SLURM_PROCID", v.has("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS");
  env.run_id = v.text("SLURM_JOB_ID").value_or("");
  env.restart_count = v.number("SLURM_RESTART_COUNT", 0).value_or(0);

  if (env.world_size != 1) {
    // The step's hosts before the job's: rank 0 may not be on the first host of the allocation.
    detail::SlurmHosts hosts;
    if (auto list = v.first_of({"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"})) {
      try {
        hosts = detail::expand_slurm_hosts(*list);
      } catch (const ConfigError& e) {
        v.fault(e.what());
      }
    } else if (!v.has("MASTER_ADDR")) {
      v.missing("SLURM_JOB_NODELIST", ", so the host of rank 0 is not known");
    }
    read_slurm_local(v, env, std::max(hosts.count, 1));

    uint16_t port = 0;
    if (!v.has("MASTER_PORT")) {
      // Steps of one job and jobs one after the other get different ports.
      const auto job = parse<uint64_t>(env.run_id);
      const auto step = parse<uint64_t>(v.first_of({"SLURM_STEP_ID", "SLURM_STEPID"}).value_or("0")).value_or(0);
      if (job) {
        port = static_cast<uint16_t>(kFirstPort + (*job * 257 + step) % kPorts);
      } else if (v.has("SLURM_JOB_ID")) {
        v.fault(fmt::format("SLURM_JOB_ID=\"{}\" is not a whole number", env.run_id));
      } else {
        v.missing("SLURM_JOB_ID", ", from which the port is derived");
      }
    }
    read_master_or(v, env, env.local_world_size == env.world_size ? "127.0.0.1" : hosts.first, port);
  }
  v.throw_if_faulty(env.launcher,
                    "Start the program with srun inside a job; MASTER_ADDR and MASTER_PORT replace what is "
                    "derived from the job.");
  return env;
}

uint64_t fnv1a(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (unsigned char c : text) hash = (hash ^ c) * 0x100000001b3u;
  return hash;
}

Env open_mpi_env(Variables& v) {
  Env env{.launcher = Launcher::kOpenMpi};
  read_place(v, env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  read_local(v, env, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE");
  env.run_id = v.first_of({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}).value_or("");
  if (env.world_size != 1) {
    const bool several_hosts = env.world_size > 1 && env.local_world_size < env.world_size;
    if (several_hosts && !v.has("MASTER_ADDR")) v.missing("MASTER_ADDR", ", and the ranks are on several hosts");
    if (env.run_id.empty() && !v.has("MASTER_PORT"))
      v.missing("MASTER_PORT", ", and mpirun names no job to derive it from");
    read_master_or(v, env, "127.0.0.1", static_cast<uint16_t>(kFirstPort + fnv1a(env.run_id) % kPorts));
  }
  v.throw_if_faulty(env.launcher,
                    "Start the program with mpirun; on several hosts pass the host of rank 0 and a free port there: "
                    "mpirun -x MASTER_ADDR=<host> -x MASTER_PORT=29500 ...");
  return env;
}

}  // namespace

std::string_view to_string(Launcher launcher) {
  switch (launcher) {
    case Launcher::kNone:
      return "none";
    case Launcher::kTorchrun:
      return "torchrun";
    case Launcher::kSlurm:
      return "Slurm";
    case Launcher::kOpenMpi:
      return "Open MPI";
  }
  return "unknown";
}

Env read_env(const Lookup& lookup) {
  Variables v(lookup);
  if (v.has("RANK") || v.has("WORLD_SIZE")) return torchrun_env(v);
  // mpirun inside a Slurm job inherits the SLURM_PROCID of whatever started it, so the inner launcher is
  // asked first.
  if (v.has("OMPI_COMM_WORLD_RANK") || v.has("OMPI_COMM_WORLD_SIZE")) return open_mpi_env(v);
  if (is_slurm_task(v)) return slurm_env(v);
  return {};
}

Env read_env() {
  return read_env([](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    if (value == nullptr) return std::nullopt;
    return value;
  });
}

std::optional<int> pick_device(int local_rank, int local_world, int visible, bool one_per_task) {
  if (local_world < 1 || local_rank < 0 || local_rank >= local_world) {
    throw ConfigError(
        fmt::format("[ddp::pick_device] local rank {} is outside this host's {} processes", local_rank, local_world));
  }
  if (visible <= 0) return std::nullopt;
  if (one_per_task && visible == 1) return 0;
  if (visible < local_world) {
    throw ConfigError(
        fmt::format("[ddp::pick_device] local rank {}/{}: {} CUDA device{} visible for {} processes on this "
                    "host. Start one process per "
                    "device, make more devices visible (CUDA_VISIBLE_DEVICES), hide all of them for the CPU "
                    "(CUDA_VISIBLE_DEVICES=\"\"), or "
                    "set LOCAL_WORLD_SIZE where a hand-made environment spans several hosts",
                    local_rank, local_world, visible, visible == 1 ? " is" : "s are", local_world));
  }
  return local_rank;
}

std::string first_slurm_host(std::string_view node_list) {
  try {
    return detail::expand_slurm_hosts(node_list).first;
  } catch (const ConfigError& e) {
    throw ConfigError(fmt::format("[ddp::first_slurm_host] {}", e.what()));
  }
}

}  // namespace ddp
