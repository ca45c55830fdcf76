// One rank's process: started in a group of its own, ended with ddprun whatever ends ddprun.
#pragma once

#include <sys/types.h>

#include <csignal>
#include <string>
#include <vector>

#include "fd.h"

namespace ddprun {

/// A process that outlives ddprun for an instant: when ddprun is gone, by SIGKILL too, it kills the groups that were
/// still running. The ranks themselves die by PR_SET_PDEATHSIG; this is for what they have started.
class Keeper {
 public:
  Keeper();  ///< Throws std::system_error.
  ~Keeper();
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;

  /// Where a new group writes its number.
  int fd() const { return pipe_.get(); }
  void forget(pid_t group);

 private:
  Fd pipe_;
  pid_t pid_ = -1;
};

/// A program that was found and can be executed.
struct Program {
  std::string path;
  std::vector<std::string> arguments;  ///< with the name it was called by
};

/// A program that cannot be started.
struct ProgramError {
  int exit_code;  ///< 127: there is none, 126: it cannot be executed
  std::string text;
};

/// Looks `command[0]` up as a shell does. Throws ProgramError.
Program find_program(const std::vector<std::string>& command);

struct Child {
  pid_t pid = -1;  ///< and the number of its process group
  Fd out, err;     ///< what it prints, not blocking
};

/// Starts `program` with exactly this environment ("NAME=VALUE"), no input, the signal mask `mask` and no ignored
/// SIGPIPE, and in the care of `keeper`. Throws ProgramError when the system refuses to execute it, std::system_error when a process cannot be made.
Child start(const Program& program, const std::vector<std::string>& environment, const sigset_t& mask, Keeper& keeper);

}  // namespace ddprun
