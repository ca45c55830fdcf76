// Ranks describe what they have in lines; where do they differ first?
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ddp/process_group.h"

namespace ddp::detail {

struct Difference {
  int rank;              // the lowest that has something else than rank 0
  int64_t line;          // from 0
  std::string expected;  // rank 0's line, "nothing more" where it has none
  std::string found;     // that of `rank`
};

/// The same on all ranks; nothing where all have the same lines. Collective.
std::optional<Difference> first_difference(const std::vector<std::string>& lines, const ProcessGroup& group);

}  // namespace ddp::detail
