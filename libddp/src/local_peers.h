// The ranks of a group that run on this rank's host, watched through the kernel: who has ended is known when no connection
// and no store is left to ask.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <vector>

#include "ddp/place.h"
#include "shm/identity.h"

namespace ddp::detail {

class LocalPeers {
 public:
  struct Peer {
    int rank;
    pid_t pid;
    shm::Fd process;
  };

  /// Nobody.
  LocalPeers() = default;
  /// Every rank says who it is. Collective. Throws c10::Error when the store fails.
  LocalPeers(c10d::Store& store, const Place& place);

  /// Those that have ended. Where it is none, waits up to `patience` for the first: a connection closes a moment before
  /// its process has ended.
  std::vector<const Peer*> ended(std::chrono::milliseconds patience) const;

 private:
  std::vector<Peer> peers_;
};

}  // namespace ddp::detail
