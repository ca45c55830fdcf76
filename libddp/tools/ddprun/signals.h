// The signals that ddprun passes on, read in its one loop.
#pragma once

#include <csignal>
#include <optional>

#include "fd.h"

namespace ddprun {

/// Blocks SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP and SIGCHLD, and hands them out one by one. One that
/// is ignored at the start (nohup, a shell's background job) stays ignored, here and in the ranks. SIGPIPE is ignored.
class Signals {
 public:
  Signals();  ///< Throws std::system_error.

  int fd() const { return fd_.get(); }
  /// The mask that was there before: the ranks'.
  const sigset_t& old_mask() const { return old_mask_; }
  /// The next one that has come, nothing when there is none.
  std::optional<int> next();

 private:
  Fd fd_;
  sigset_t old_mask_{};
};

/// SIGTERM, SIGINT, SIGHUP, SIGQUIT: it asks the job to end.
bool ends_the_job(int signal);

}  // namespace ddprun
