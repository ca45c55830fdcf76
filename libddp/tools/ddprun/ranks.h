// All ranks of this host through one life: started, watched, ended together.
#pragma once

#include <chrono>
#include <deque>
#include <string>
#include <vector>

#include "child.h"
#include "environment.h"
#include "options.h"
#include "output.h"
#include "report.h"
#include "signals.h"

namespace ddprun {

using Clock = std::chrono::steady_clock;

/// What lasts from life to life.
struct Host {
  const Options& options;
  const Program& program;
  Output output = {};
  Signals signals = {};
  Keeper keeper = {};
  int stop_signal = 0;  ///< the first signal that asked the job to end
  Clock::time_point stopped_at = {};
  int hard_stop_signal = 0;         ///< the second, which kills
  std::vector<int> passed_on = {};  ///< all signals that went to the ranks

  /// Takes a signal that has come down. True when the ranks shall be killed at once.
  bool note(int signal);
};

class Ranks {
 public:
  /// Starts them. Throws ProgramError, std::system_error, std::filesystem::filesystem_error; none is left running then.
  Ranks(Host& host, const Life& life);
  /// Kills what still runs, and what the ranks have left behind in their process groups.
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  /// Returns when all have ended and their output is on its way. When one fails the others get SIGTERM half a second later
  /// and, after the time of grace, SIGKILL.
  std::vector<Ending> wait();

 private:
  struct Rank {
    pid_t pid;
    std::string folder;
    LineStream out, err;
    bool ended = false;
    Ending ending = {};
  };

  void start(int local);
  bool any_alive() const;
  bool any_open() const;
  /// Waits for something to happen, at most until `kill_at_` or `stop_others_at_`, and does it.
  void turn();
  void take_signals();
  void pass_on(int signal);
  void stop_others();
  void collect_ended();
  void kill_all();
  void drain();

  Host& host_;
  const Life life_;
  std::deque<Rank> ranks_;  // a Rank stays where it is
  Clock::time_point kill_at_ = Clock::time_point::max();
  Clock::time_point stop_others_at_ = Clock::time_point::max();
  std::string why_stop_ = {};
  bool killed_ = false;
};

/// Writes what waits in `output`, as far as its readers take it. After a signal that ends the job it waits for them for
/// two seconds at most.
void flush(Host& host);

}  // namespace ddprun
