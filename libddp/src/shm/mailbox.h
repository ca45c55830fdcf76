// Messages between two ranks of one host. A message passes through the lane of the two in pieces; whoever waits, for
// whatever, moves all messages of its rank on, so sends and receives may be started in any order and size.
#pragma once

#include <c10/core/ScalarType.h>

#include <chrono>
#include <deque>
#include <list>
#include <memory>
#include <vector>

#include "shm/exchange.h"

namespace ddp::detail::shm {

/// A message on its way.
struct Message {
  int peer = 0;
  int tag = 0;
  std::byte* data = nullptr;
  int64_t bytes = 0;
  c10::ScalarType dtype = c10::ScalarType::Byte;
  std::shared_ptr<void> memory = nullptr;  // what keeps `data` alive
  int64_t passed = 0;                      // bytes
  bool done = false;
};

/// Of one rank. Not thread-safe.
class Mailbox {
 public:
  explicit Mailbox(Exchange& exchange);

  /// Starts a message; it is moved on by `progress` and `wait`.
  void send(std::shared_ptr<Message> message);
  void receive(std::shared_ptr<Message> message);

  /// Moves what can be moved, without waiting. Throws MismatchError for a message of another size or dtype.
  void progress();
  void wait(const Message& message, Operation operation, std::chrono::milliseconds timeout);
  bool idle() const { return pending_ == 0; }

 private:
  // A message that arrived before it was asked for.
  struct Early {
    int tag;
    c10::ScalarType dtype;
    std::vector<std::byte> data;
    int64_t passed = 0;
  };
  struct Peer {
    std::deque<std::shared_ptr<Message>> out, in;
    std::list<Early> early;
    std::shared_ptr<Message> arriving;  // the message whose pieces come now; none: it goes to early.back()
    bool midway = false;
  };

  bool push(int to, Message& message);
  void pull(int from);
  void take(int from, const Piece& piece);
  bool take_early(const std::shared_ptr<Message>& message);
  void require_fit(int from, const Message& message, int64_t bytes, c10::ScalarType dtype);

  Exchange& exchange_;
  std::vector<Peer> peers_;
  int pending_ = 0;
};

}  // namespace ddp::detail::shm
