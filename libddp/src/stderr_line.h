// One line to stderr, whole.
#pragma once

#include <string>

namespace ddp::detail {

/// Writes `line` and a newline with one write(2), so that lines of several ranks do not mix; goes on after a short
/// write and gives up without a word when stderr is closed.
void write_stderr_line(std::string line);

}  // namespace ddp::detail
