// Slurm's two compact notations: host lists, "n[03-05,9]-ib,m1", and counts per host, "2(x3),1".
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ddp::detail {

struct SlurmHosts {
  std::string first;
  int count = 0;
};

/// First name and number of names of a host list. Throws ConfigError when it is malformed; the caller names itself.
SlurmHosts expand_slurm_hosts(std::string_view list);

/// "2(x3),1" is {2, 2, 2, 1}. Throws ConfigError when it is malformed.
std::vector<int> expand_slurm_counts(std::string_view list);

}  // namespace ddp::detail
