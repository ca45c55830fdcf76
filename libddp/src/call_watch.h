// Finds out, for one rank of one group over sockets, whether the ranks make the same calls.
//
// The messages of each call carry a tag that depends on its signature (signature.h), so those of different calls never
// meet: no wrong value, and nothing to send, to copy or to wait for while ranks agree. Ranks that disagree wait. A call
// that has waited for a third of a second is suspicious: its rank writes to the store which call it waits in, reads
// which ones others wait in, and when the signatures of one number differ the group ends, on all ranks with the same
// words.
//
// What else was possible: to gather the signatures before each collective costs a latency of Gloo on the way of every
// gradient; to gather them beside it comes too late, because Gloo ends the process when a message is longer than the
// buffer that waits for it, and gives a wrong sum when it is shorter; in the bucket's tail they cost a copy, and sizes
// must be equal already.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddp/place.h"
#include "signature.h"

namespace ddp::detail {

/// Thread-safe.
class CallWatch {
 public:
  using Clock = std::chrono::steady_clock;

  /// A call on its way. Whoever sees it complete sets `done`.
  struct Pending {
    uint64_t number = 0;
    Clock::time_point since;
    std::atomic<bool> done = false;
    std::vector<std::function<void()>> on_verdict;  // guarded by the watch
  };

  CallWatch(c10::intrusive_ptr<c10d::Store> store, Place place);
  /// Does not wait for the network.
  ~CallWatch();
  CallWatch(const CallWatch&) = delete;
  CallWatch& operator=(const CallWatch&) = delete;

  /// Notes the begin of call `number`; numbers count from 1.
  std::shared_ptr<Pending> begin(uint64_t number, const Signature& signature);

  /// Why the group cannot go on, "" as long as nothing is known.
  std::string verdict() const;
  /// Calls `f` once there is a verdict and the call is not done; at once where there is one already.
  void on_verdict(const std::shared_ptr<Pending>& call, std::function<void()> f);

  /// The verdict, asking the store now: for a rank whose call `number` has failed. Takes up to two seconds.
  std::string ask(uint64_t number);
  /// Ends the group on all ranks that wait in it, with `why`. Takes up to a second, so that they hear of it.
  void accuse(const std::string& why);

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace ddp::detail
