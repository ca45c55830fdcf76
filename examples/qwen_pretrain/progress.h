// What a person sees of a training run: one line that is redrawn on a terminal, plain lines in a log file.
//
//    step 120/150 | loss 2.1034 | lr 4.1e-04 | 8.1k tokens/s | 0:31 left
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "ddp/place.h"

namespace qwen {

/// Writes to stdout on rank 0, nothing elsewhere. Until it is finished, lines of `ddp::log` appear above the line that is redrawn.
class Progress {
 public:
  Progress(const ddp::Place& place, int64_t first_step, int64_t total_steps, int64_t tokens_per_step);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// `step` steps are done, `loss` is the newest one known. Redraws the line; where there is no terminal, prints one
  /// when it is a `milestone`.
  void update(int64_t step, double loss, double lr, bool milestone);
  /// A line of its own, e.g. that an epoch is complete.
  void note(const std::string& text);
  /// Leaves the line as it is; what is printed now comes below it.
  void finish();

 private:
  std::string line(int64_t step, double loss, double lr) const;

  ddp::Place place_;
  int64_t first_step_, total_steps_, tokens_per_step_;
  bool terminal_;
  std::string shown_;  // the line that is on the terminal now
  std::chrono::steady_clock::time_point start_;
};

}  // namespace qwen
