// Lives of a job: the ranks are started, and started again after a failure as often as is allowed.
#pragma once

#include "options.h"

namespace ddprun {

/// Runs the job and returns ddprun's exit code. Throws ProgramError when the program cannot be started, and
/// std::exception for what the system refuses.
int supervise(const Options& options);

}  // namespace ddprun
