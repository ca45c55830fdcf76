// Lines for people: information once, from rank 0; warnings from every rank, tagged. A line is written whole.
//
//   ddp::log::info(group, "epoch 3 begins");          // rank 0 only:  [ddp] epoch 3 begins
//   ddp::log::warn(group, "no space for a copy");     // each rank:    [ddp] rank 2/4: warning: no space for a copy
#pragma once

#include <functional>
#include <string_view>

#include "ddp/place.h"

namespace ddp::log {

enum class Level { kInfo, kWarning, kError };

/// Written by rank 0 only.
void info(const Place& place, std::string_view message);

/// Written by every rank that calls it, with its rank.
void warn(const Place& place, std::string_view message);
void error(const Place& place, std::string_view message);

/// Where lines go, one at a time and without their newline; by default to stderr, each in one write. An empty function
/// restores the default. Thread-safe. Requires: the sink does not log or set the sink itself.
using Sink = std::function<void(Level level, std::string_view line)>;
void set_sink(Sink sink);

}  // namespace ddp::log
