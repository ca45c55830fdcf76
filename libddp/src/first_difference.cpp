#include "first_difference.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sstream>

#include "ddp/collectives.h"

namespace ddp::detail {

std::optional<Difference> first_difference(const std::vector<std::string>& lines, const ProcessGroup& group) {
  const auto everyone = all_gather_object(fmt::format("{}", fmt::join(lines, "\n")), group);
  for (int rank = 1; rank < group.size(); ++rank) {
    if (everyone[rank] == everyone[0]) continue;
    std::istringstream first(everyone[0]), other(everyone[rank]);
    Difference difference{.rank = rank, .line = -1, .expected = "", .found = ""};
    do {
      if (!std::getline(first, difference.expected)) difference.expected = "nothing more";
      if (!std::getline(other, difference.found)) difference.found = "nothing more";
      ++difference.line;
    } while (difference.expected == difference.found);
    return difference;
  }
  return std::nullopt;
}

}  // namespace ddp::detail
