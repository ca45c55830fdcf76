// How ranks find out which of them share a host, and come to share memory there.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "ddp/place.h"
#include "shm/exchange.h"
#include "shm/identity.h"

namespace ddp::detail::shm {

/// The ranks of each host, ascending; hosts in the order of their first ranks.
using Hosts = std::vector<std::vector<int>>;

/// What came of it. `hosts` and `why_not` are the same on all ranks.
struct Joined {
  /// Of the ranks of this rank's host, which it knows as 0, 1, ... in their order; its messages have the group's numbers.
  /// Null where the rank is alone on its host, and on all ranks where `why_not` says that memory cannot be shared.
  std::unique_ptr<Exchange> exchange;
  Hosts hosts;
  /// Why ranks that look as if they shared a host cannot share memory, "" where they can.
  std::string why_not;
  /// Why there is more than one host, "" where there is one: "rank 2 is on another host than rank 0".
  std::string why_apart;
};

/// Every rank proves that it sees the same kernel, processes and network interfaces as the first rank of its host, and
/// opens that one's memory through /proc; all ranks of all hosts, or none. Collective. Throws c10::Error when the store
/// fails.
Joined join(c10d::Store& store, const Place& place, const std::string& group, std::chrono::milliseconds timeout);

}  // namespace ddp::detail::shm
