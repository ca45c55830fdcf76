// A c10d backend that keeps account of its calls, so that a failure says what each rank was doing, and that turns
// c10d's errors into those of this library, wherever they surface: in a wait, or in the middle of a backward.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>

#include "ddp/place.h"

namespace ddp::detail {

/// The collectives that one rank has begun in one group. Thread-safe.
class CallLog {
 public:
  CallLog(c10::intrusive_ptr<c10d::Store> store, Place place, std::string group, std::chrono::milliseconds timeout);

  /// Notes the begin of a collective and returns its number, from 1.
  uint64_t begin(const char* operation);

  /// The error of call `number` as one of this library's: TimeoutError, PeerError or CommError, which names this rank,
  /// the call, and what the other ranks say of themselves. Called once the group has failed; takes up to a second.
  std::exception_ptr translate(const std::exception_ptr& error, uint64_t number, const char* operation);

 private:
  std::string ask_peers();

  const c10::intrusive_ptr<c10d::Store> store_;
  const Place place_;
  const std::string group_;
  const std::chrono::milliseconds timeout_;
  std::atomic<uint64_t> count_ = 0;
  std::atomic<const char*> last_ = "nothing";
  std::mutex failed_mutex_;
  std::string peers_;  // what they said, asked once
};

/// Wraps `inner`. The wrapper is what the group and the reducer see.
c10::intrusive_ptr<c10d::Backend> watch(c10::intrusive_ptr<c10d::Backend> inner, std::shared_ptr<CallLog> log);

}  // namespace ddp::detail
