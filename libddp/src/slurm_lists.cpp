#include "slurm_lists.h"

#include <fmt/format.h>

#include <charconv>
#include <optional>

#include "ddp/error.h"

namespace ddp::detail {
namespace {

constexpr long kMaxHosts = 1'000'000;  // more is a malformed list, not a cluster

std::optional<long> digits(std::string_view text) {
  if (text.empty() || text.find_first_not_of("0123456789") != std::string_view::npos) return std::nullopt;
  long value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() ? std::optional(value) : std::nullopt;
}

struct Range {
  std::string_view first;
  long count = 0;
};

// "03-05" or "9"; the first keeps its zeros.
std::optional<Range> parse_range(std::string_view text) {
  const size_t dash = text.find('-');
  const std::string_view low = text.substr(0, dash);
  const auto begin = digits(low);
  const auto end = dash == std::string_view::npos ? begin : digits(text.substr(dash + 1));
  if (!begin || !end || *end < *begin || *end - *begin >= kMaxHosts) return std::nullopt;
  return Range{low, *end - *begin + 1};
}

// The inside of brackets: ranges with commas between.
std::optional<Range> parse_ranges(std::string_view text) {
  Range all;
  while (true) {
    const size_t comma = text.find(',');
    const auto range = parse_range(text.substr(0, comma));
    if (!range) return std::nullopt;
    if (all.count == 0) all.first = range->first;
    all.count += range->count;
    if (comma == std::string_view::npos) return all;
    text.remove_prefix(comma + 1);
  }
}

[[noreturn]] void refuse(std::string_view what, std::string_view list, std::string_view why) {
  throw ConfigError(fmt::format("Slurm's {} \"{}\" is malformed: {}", what, list, why));
}

}  // namespace

SlurmHosts expand_slurm_hosts(std::string_view list) {
  SlurmHosts hosts;
  long total = 0;
  size_t at = 0;
  while (true) {
    std::string name;
    long names = 1;
    for (; at < list.size() && list[at] != ','; ++at) {
      if (list[at] == ']') refuse("node list", list, "']' without '['");
      if (list[at] != '[') {
        name += list[at];
        continue;
      }
      const size_t close = list.find(']', at);
      if (close == std::string_view::npos) refuse("node list", list, "'[' without ']'");
      const auto ranges = parse_ranges(list.substr(at + 1, close - at - 1));
      if (!ranges) refuse("node list", list, "expected numbers and ranges such as 03-05 in the brackets");
      name += ranges->first;
      names *= ranges->count;
      at = close;
      if (names > kMaxHosts) refuse("node list", list, "more than a million hosts");
    }
    if (name.empty()) refuse("node list", list, "a name is empty");
    if (total == 0) hosts.first = name;
    total += names;
    if (total > kMaxHosts) refuse("node list", list, "more than a million hosts");
    if (at == list.size()) break;
    ++at;  // the comma
  }
  hosts.count = static_cast<int>(total);
  return hosts;
}

std::vector<int> expand_slurm_counts(std::string_view list) {
  std::vector<int> counts;
  std::string_view rest = list;
  while (true) {
    const size_t comma = rest.find(',');
    const std::string_view part = rest.substr(0, comma);
    const size_t open = part.find("(x");
    auto tasks = digits(part.substr(0, open));
    std::optional<long> times = 1;
    if (open != std::string_view::npos) {
      times = part.ends_with(')') ? digits(part.substr(open + 2, part.size() - open - 3)) : std::nullopt;
    }
    if (!tasks || !times || *tasks > kMaxHosts || *times < 1 || *times + static_cast<long>(counts.size()) > kMaxHosts) {
      refuse("task counts", list, "expected the form 2(x3),1");
    }
    counts.insert(counts.end(), static_cast<size_t>(*times), static_cast<int>(*tasks));
    if (comma == std::string_view::npos) return counts;
    rest.remove_prefix(comma + 1);
  }
}

}  // namespace ddp::detail
