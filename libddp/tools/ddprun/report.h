// How ranks ended, which of them failed first, and the words for it.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace ddprun {

using SystemClock = std::chrono::system_clock;

/// What a rank wrote into its error file: ddp::run in C++, @record in Python.
struct ErrorReport {
  std::string message;
  bool secondary = false;  ///< by the rank's own account, another rank's failure is the cause
};

/// Nothing when there is no such file or it holds something else.
std::optional<ErrorReport> read_error_file(const std::string& path);

/// How one rank ended.
struct Ending {
  int rank = 0;
  int code = 0;                     ///< exit code, where no signal ended it
  int signal = 0;                   ///< the signal that ended it, else 0
  SystemClock::time_point at = {};  ///< when it wrote its report, else when it ended
  bool told_to_stop = false;        ///< ddprun had sent it a signal before it ended
  bool killed = false;              ///< ddprun had sent it SIGKILL
  std::optional<ErrorReport> report = {};
  std::string tail = {};  ///< the last it wrote to stderr

  bool failed() const { return code != 0 || signal != 0; }
  /// It ended because another had failed: it says so itself, or it only did what ddprun's signal asked for.
  bool secondary() const;
  /// The exit code of a shell for it: the code, or 128 + the signal.
  int exit_code() const { return signal != 0 ? 128 + signal : code; }
  /// "exit code 3", "signal 11 (SIGSEGV)".
  std::string how() const;
};

/// The failure that the others followed from, by the time of its report or end; those that are secondary come last.
/// Null when none failed.
const Ending* first_failure(const std::vector<Ending>& endings);

/// Several lines: the first failure with its message, then the others.
std::string summary(const std::vector<Ending>& endings, int world, SystemClock::time_point start);

/// "SIGTERM".
std::string signal_name(int signal);

}  // namespace ddprun
