// The training run itself.
#pragma once

#include <chrono>

#include "options.h"

namespace qwen {

/// Trains as `options` say, on the ranks of the launcher, each of which calls it. Returns when all steps are done, or
/// after the step in which a signal came; the newest checkpoint then holds exactly the steps taken. `process_start`
/// counts into the time of the first step.
void train(const Options& options, std::chrono::steady_clock::time_point process_start);

}  // namespace qwen
