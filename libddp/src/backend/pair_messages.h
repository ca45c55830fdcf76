// Messages between two ranks of a group on several hosts. A pair is connected, on a thread of its own, when the first
// message of the two is started, so that no rank has to wait for one that it never talks to.
//
//   PairMessages messages(store, place, group, timeout);
//   auto sending = messages.send(tensor, /*to=*/3, /*tag=*/0);     // goes on by itself
//   sending->wait();
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "ddp/place.h"

namespace ddp::detail {

/// Of one rank. Thread-safe. Messages of one pair and tag arrive in the order in which they were sent. Dense CPU tensors
/// of any dtype and strides; the receiver must know the size.
class PairMessages {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// `store`: with keys of its own.
  PairMessages(c10::intrusive_ptr<c10d::Store> store, Place place, std::string group,
               std::chrono::milliseconds timeout);
  ~PairMessages();

  /// Throws MismatchError for a tensor or peer that cannot be. The work throws TimeoutError or CommError.
  WorkPtr send(const at::Tensor& tensor, int to, int tag) { return start("send", tensor, to, tag); }
  WorkPtr receive(const at::Tensor& tensor, int from, int tag) { return start("recv", tensor, from, tag); }

 private:
  class Pair;
  class Message;

  WorkPtr start(const char* operation, const at::Tensor& tensor, int peer, int tag);

  const c10::intrusive_ptr<c10d::Store> store_;
  const Place place_;
  const std::string group_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::map<int, std::shared_ptr<Pair>> pairs_;  // by peer
};

}  // namespace ddp::detail
