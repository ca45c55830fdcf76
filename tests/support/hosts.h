// Two hosts on one machine, for tests: network namespaces that are joined by a cable, each with its own loopback.
//
//   if (const auto why = TwoHosts::why_not(); !why.empty()) DDP_SKIP(why);
//   TwoHosts hosts;
//   spawn_ranks(4, [&](int rank) { hosts.enter(rank / 2); ... }, {.env = hosts.environment()});
#pragma once

#include <string>

#include "support/spawn.h"

namespace ddp::test {

class TwoHosts {
 public:
  /// Why there can be none here: no root, no `ip`, namespaces not allowed. "" where there can.
  static std::string why_not();

  /// Throws std::runtime_error. Requires: why_not() is "".
  TwoHosts();
  /// Removes them; processes that are still there stay without a network.
  ~TwoHosts();
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;

  /// Moves the calling process to `host`, 0 or 1: in a rank, before it starts threads.
  void enter(int host) const;
  /// Plugs the cable of host 1 in or out.
  void plug(bool in) const;
  /// For ranks: the store on host 0, and the interface that Gloo shall use.
  Environment environment() const;

 private:
  std::string name(int host) const;

  std::string prefix_;
};

}  // namespace ddp::test
