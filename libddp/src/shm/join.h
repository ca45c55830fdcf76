// How ranks find out that they share a host, and come to share memory.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>

#include "ddp/place.h"
#include "shm/exchange.h"

namespace ddp::detail::shm {

/// What came of it: an exchange, or why there is none. The same on all ranks.
struct Joined {
  std::unique_ptr<Exchange> exchange;
  std::string why_not;
};

/// Every rank proves that it sees the same kernel and the same processes as rank 0, and opens rank 0's memory through
/// /proc; all of them, or none. Collective. Throws c10::Error when the store fails.
Joined join(c10d::Store& store, const Place& place, const std::string& group, std::chrono::milliseconds timeout);

}  // namespace ddp::detail::shm
