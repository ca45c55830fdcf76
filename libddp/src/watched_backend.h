// A c10d backend that keeps account of its calls, so that a failure says what each rank was doing, and that turns
// c10d's errors into those of this library, wherever they surface: in a wait, or in the middle of a backward. Over Gloo
// it also sees to it that ranks which make different calls hear so (call_watch.h).
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "call_watch.h"
#include "ddp/place.h"
#include "local_peers.h"

namespace ddp::detail {

/// The collectives that one rank has begun in one group. Thread-safe.
class CallLog {
 public:
  CallLog(c10::intrusive_ptr<c10d::Store> store, Place place, std::string group, std::chrono::milliseconds timeout);

  /// Notes the begin of a collective, call `number` of its backend, from 1.
  void begin(const char* operation, uint64_t number);

  /// The error of call `number` as one of this library's: MismatchError where ranks disagreed, else TimeoutError,
  /// PeerError or CommError, which names this rank, the call, and what the other ranks say of themselves. Called once
  /// the group has failed; takes up to three seconds.
  std::exception_ptr translate(const std::exception_ptr& error, uint64_t number, const char* operation);

  /// The error of a call after `watch()` has come to a verdict.
  std::exception_ptr disagreement(uint64_t number, const char* operation) const;

  CallWatch& watch() { return watch_; }

  /// Whose end `translate` can tell without asking anybody. Called while the group is made.
  void set_local_peers(LocalPeers peers) { local_peers_ = std::move(peers); }

  /// What later calls say of the backward that they belong to.
  void set_pass(Pass pass);
  Pass pass() const;

 private:
  std::string ask_peers();

  const c10::intrusive_ptr<c10d::Store> store_;
  const Place place_;
  const std::string group_;
  const std::chrono::milliseconds timeout_;
  CallWatch watch_;
  LocalPeers local_peers_;
  std::atomic<uint64_t> count_ = 0;
  std::atomic<const char*> last_ = "nothing";
  std::mutex failed_mutex_;
  std::string peers_;  // what they said, asked once
  mutable std::mutex pass_mutex_;
  Pass pass_;
};

/// Wraps `inner`. The wrapper is what the group and the reducer see.
c10::intrusive_ptr<c10d::Backend> watch(c10::intrusive_ptr<c10d::Backend> inner, std::shared_ptr<CallLog> log);

/// The log of a wrapper around Gloo, null for any other backend.
std::shared_ptr<CallLog> gloo_log(c10d::Backend& backend);

}  // namespace ddp::detail
