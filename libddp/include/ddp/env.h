// What a launcher tells a process: torchrun's, Slurm's or Open MPI's variables as one value.
//
//   ddp::Env env = ddp::read_env();           // a world of one where no launcher is
//   env.rank, env.world_size, env.local_rank, env.master_addr, env.master_port
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "ddp/place.h"

namespace ddp {

/// Who started this process.
enum class Launcher { kNone, kTorchrun, kSlurm, kOpenMpi };

/// "none", "torchrun", "Slurm" or "Open MPI".
std::string_view to_string(Launcher launcher);

/// One process as its launcher describes it.
struct Env {
  Launcher launcher = Launcher::kNone;
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;            ///< rank among the processes of this host
  int local_world_size = 1;      ///< processes on this host
  std::string master_addr = {};  ///< host of the rendezvous store; empty in a world of one
  uint16_t master_port = 0;
  bool agent_store = false;  ///< torchrun's agent serves the store: every rank is a client
  std::string run_id = {};   ///< the launcher's name of this job, "" where it has none
  int restart_count = 0;     ///< earlier lives of this job

  Place place() const { return {.rank = rank, .size = world_size}; }
};

/// Looks a variable up; nothing when it is unset.
using Lookup = std::function<std::optional<std::string>(const std::string& name)>;

/// Reads torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, ...), else Slurm's
/// (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_JOB_NODELIST, ...), else Open MPI's (OMPI_COMM_WORLD_*), else
/// returns a world of one. Open MPI's go before Slurm's where both are set: mpirun inside a Slurm job inherits
/// SLURM_PROCID. A Slurm batch script or salloc's shell, which srun did not start, is a world of one.
///
/// MASTER_ADDR and MASTER_PORT are honoured under each launcher. Where they are not set, ranks of Slurm or Open MPI that
/// share one host meet at 127.0.0.1, Slurm's on several hosts at the first host of their step, and the port (20000 to
/// 31999, below the ephemeral ones) follows from the job's id and step. torchrun's variables set by hand may leave out
/// LOCAL_RANK and LOCAL_WORLD_SIZE when all ranks are on one host, and MASTER_* when WORLD_SIZE is 1.
///
/// Throws ConfigError that lists every fault at once: missing names, numbers that are none, a rank outside the world,
/// a port outside 1..65535.
Env read_env(const Lookup& lookup);

/// The same from the process's environment.
Env read_env();

/// Which CUDA device a process takes: nothing means the CPU. A pure function, so that the rules can be tested.
/// `visible` devices, seen by `local_world` processes of which this is number `local_rank`. One visible device per
/// process (`one_per_task`, as Slurm binds them) is device 0. Throws ConfigError when there are fewer devices than
/// processes or `local_rank` is not one of `local_world`.
std::optional<int> pick_device(int local_rank, int local_world, int visible, bool one_per_task = false);

/// The first host of a Slurm node list: "n[03-05,9],m1" is "n03". Throws ConfigError when the list is malformed.
std::string first_slurm_host(std::string_view node_list);

}  // namespace ddp
