#include "shm/mailbox.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "ddp/error.h"

namespace ddp::detail::shm {
namespace {

Call describe(const Message& message, Operation operation) {
  return {.count = message.bytes / static_cast<int64_t>(c10::elementSize(message.dtype)),
          .operation = static_cast<int8_t>(operation),
          .dtype = static_cast<int8_t>(message.dtype)};
}

}  // namespace

Mailbox::Mailbox(Exchange& exchange) : exchange_(exchange), peers_(exchange.place().size) {}

void Mailbox::send(std::shared_ptr<Message> message) {
  exchange_.require_usable();
  ++pending_;
  peers_[message->peer].out.push_back(std::move(message));
  progress();
}

void Mailbox::receive(std::shared_ptr<Message> message) {
  exchange_.require_usable();
  ++pending_;
  if (!take_early(message)) peers_[message->peer].in.push_back(std::move(message));
  progress();
}

void Mailbox::progress() {
  for (int peer = 0; peer < exchange_.place().size; ++peer) {
    auto& out = peers_[peer].out;
    while (!out.empty() && push(peer, *out.front())) {
      out.pop_front();
      --pending_;
    }
    pull(peer);
  }
}

void Mailbox::wait(const Message& message, Operation operation, std::chrono::milliseconds timeout) {
  const auto done = [&] {
    progress();
    return message.done;
  };
  exchange_.wait_for_bell(done, describe(message, operation), message.peer, timeout);
}

// Writes pieces while there is room. A message of no bytes is one empty piece.
bool Mailbox::push(int to, Message& message) {
  Lane& lane = exchange_.lane(exchange_.place().rank, to);
  while (!message.done) {
    const uint32_t written = lane.written.load(std::memory_order_relaxed);
    if (written - lane.read.load(std::memory_order_acquire) == 2) return false;
    auto& piece = *reinterpret_cast<Piece*>(lane.pieces[written % 2]);
    const int64_t bytes = std::min<int64_t>(message.bytes - message.passed, kPiece);
    piece.message_bytes = message.bytes;
    piece.tag = message.tag;
    piece.bytes = static_cast<int32_t>(bytes);
    piece.dtype = static_cast<int8_t>(message.dtype);
    if (bytes > 0) std::memcpy(piece.data, message.data + message.passed, bytes);
    message.passed += bytes;
    message.done = message.passed == message.bytes;
    lane.written.store(written + 1, std::memory_order_release);
    exchange_.ring(to);
  }
  return true;
}

void Mailbox::pull(int from) {
  Lane& lane = exchange_.lane(from, exchange_.place().rank);
  for (uint32_t read = lane.read.load(std::memory_order_relaxed); read != lane.written.load(std::memory_order_acquire);
       ++read) {
    take(from, *reinterpret_cast<const Piece*>(lane.pieces[read % 2]));
    lane.read.store(read + 1, std::memory_order_release);
    exchange_.ring(from);
  }
}

void Mailbox::take(int from, const Piece& piece) {
  Peer& peer = peers_[from];
  const auto dtype = static_cast<c10::ScalarType>(piece.dtype);
  if (!peer.midway) {  // the first piece of a message
    const auto wanted =
        std::find_if(peer.in.begin(), peer.in.end(), [&](const auto& message) { return message->tag == piece.tag; });
    peer.midway = true;
    peer.arriving = nullptr;
    if (wanted != peer.in.end()) {
      require_fit(from, **wanted, piece.message_bytes, dtype);
      peer.arriving = *wanted;
      peer.in.erase(wanted);
    } else {
      peer.early.push_back({.tag = piece.tag, .dtype = dtype, .data = std::vector<std::byte>(piece.message_bytes)});
    }
  }
  std::byte* data = peer.arriving ? peer.arriving->data : peer.early.back().data.data();
  int64_t& passed = peer.arriving ? peer.arriving->passed : peer.early.back().passed;
  if (piece.bytes > 0) std::memcpy(data + passed, piece.data, piece.bytes);
  passed += piece.bytes;
  if (passed < piece.message_bytes) return;
  peer.midway = false;
  if (!peer.arriving) return;
  peer.arriving->done = true;
  --pending_;
}

bool Mailbox::take_early(const std::shared_ptr<Message>& message) {
  Peer& peer = peers_[message->peer];
  const auto early =
      std::find_if(peer.early.begin(), peer.early.end(), [&](const Early& one) { return one.tag == message->tag; });
  if (early == peer.early.end()) return false;
  require_fit(message->peer, *message, static_cast<int64_t>(early->data.size()), early->dtype);
  if (early->passed > 0) std::memcpy(message->data, early->data.data(), early->passed);
  message->passed = early->passed;
  if (peer.midway && !peer.arriving && early == std::prev(peer.early.end())) {
    peer.arriving = message;  // its other pieces are still on their way
  } else {
    message->done = true;
    --pending_;
  }
  peer.early.erase(early);
  return true;
}

void Mailbox::require_fit(int from, const Message& message, int64_t bytes, c10::ScalarType dtype) {
  if (message.bytes == bytes && message.dtype == dtype) return;
  const Call mine = describe(message, Operation::kRecv);
  Message sent = message;
  sent.bytes = bytes, sent.dtype = dtype;
  exchange_.fail<MismatchError>(
      fmt::format("{}: rank {} receives {} of {} with tag {}, rank {} sent {} of {}; give both the "
                  "same size and dtype",
                  exchange_.where(mine), exchange_.place().rank, mine.count, c10::toString(message.dtype), message.tag,
                  from, describe(sent, Operation::kSend).count, c10::toString(dtype)));
}

}  // namespace ddp::detail::shm
