// torchrun's variables for one rank.
#pragma once

#include <string>
#include <vector>

#include "options.h"

namespace ddprun {

/// What differs from rank to rank and from life to life.
struct Life {
  int attempt = 0;          ///< 0 in the first
  std::string folder = {};  ///< one folder per local rank in it
  std::string run_id = {};
  Endpoint master = {};
};

/// Where rank `local` of this host writes its error report in this life.
std::string error_file(const Life& life, int local);

/// Threads for each rank when OMP_NUM_THREADS is unset and there are several: this host's cores shared out. 0: the
/// variable is left as it is.
int threads_per_rank(const Options& options);

/// The environment of rank `local` of this host, as "NAME=VALUE": ddprun's own, --env, and the launcher's variables.
std::vector<std::string> environment(const Options& options, const Life& life, int local);

}  // namespace ddprun
