// Where a process stands among its peers. All that a sampler, a learning-rate rule or a logger has to know, so that
// these are tested without processes.
//
//   ddp::Place place{.rank = 1, .size = 4};
#pragma once

#include <string>

namespace ddp {

/// Rank `rank` of `size`; the default is a world of one. Requires: 0 <= rank < size.
struct Place {
  int rank = 0;
  int size = 1;

  /// True on the one rank that writes files and prints.
  bool is_root() const { return rank == 0; }

  /// "rank 1/4", as every message of the library begins.
  std::string name() const { return "rank " + std::to_string(rank) + "/" + std::to_string(size); }

  friend bool operator==(const Place&, const Place&) = default;
};

}  // namespace ddp
