// Stopping in good order: a signal to any rank becomes a decision of all ranks after the same optimizer step.
//
//   ddp::Preemption preemption(group);
//   ... optim.step(), checkpoints.step();
//   if (preemption.requested()) { checkpoints.save(); return; }       // every rank, same step; ddp::run exits with 0
//
// What launchers do: torchrun forwards SIGTERM to the workers and kills them 30 s later, and returns 1 itself even when
// they return 0; SIGUSR1 to torchrun ends torchrun and tells the workers nothing. Slurm's --signal=USR1@60 and
// scancel --signal=TERM reach the tasks.
#pragma once

#include <chrono>
#include <csignal>
#include <cstdint>
#include <memory>
#include <vector>

#include "ddp/process_group.h"

namespace ddp {

/// Which signals mean stop, and how often the ranks compare.
struct PreemptionOptions {
  std::vector<int> signals = {SIGTERM, SIGINT, SIGUSR1};
  /// The ranks compare at every `every`-th call of `requested`. The same on all ranks.
  int64_t every = 1;
  /// A signal that comes at least this long after the first ends the process at once, by its default action. Sooner it
  /// is an echo: a Ctrl-C reaches a worker from the terminal and through torchrun.
  std::chrono::milliseconds again_after = std::chrono::seconds(1);
};

/// Owns the handlers of its signals while it lives; at most one at a time per process.
class Preemption {
 public:
  using Options = PreemptionOptions;

  /// Installs the handlers, which only set a flag. Throws ConfigError for a signal that cannot be caught, for
  /// every < 1, or while another Preemption lives. Not collective.
  explicit Preemption(const ProcessGroup& group, Options options = {});
  /// Restores the handlers that were there before. After a stop, signals that had their default action stay caught, so
  /// that an echo does not kill a rank which has saved; the second one, `again_after` later, still ends the process.
  ~Preemption();
  Preemption(const Preemption&) = delete;
  Preemption& operator=(const Preemption&) = delete;

  /// True on every rank from the same call on, once a rank was signalled or called `stop`. Collective: every rank calls
  /// it once per optimizer step. One small all-reduce per `every` calls, none in a world of one and none after it was
  /// true.
  bool requested();

  /// Asks all ranks to stop, as a signal to this rank does. Any thread may call it.
  void stop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ddp
