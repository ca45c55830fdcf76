// How the ranks of one host pass data through the memory that they share: in turns. In each turn every rank may fill its
// slot, arrives, waits for all to have arrived, and reads the slots of the others. The next turn uses the other half of
// the slots, so nobody waits for the readers of the last one:
//
//   exchange.begin(call);                                        // the first meeting compares the calls of all ranks
//   for (each part of the data) {
//     write(exchange.slot(me)); exchange.meet(); read(exchange.slot(other)); exchange.next_turn();
//   }
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/place.h"
#include "shm/arena.h"
#include "shm/layout.h"

namespace ddp::detail::shm {

enum class Operation : int8_t {
  kNone,
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
  kBarrier,
  kSend,
  kRecv
};

const char* to_string(Operation operation);

/// How a group waits for its ranks, and whom it asks when they do not come.
struct Peers {
  std::vector<pid_t> pids;    // by rank
  std::vector<Fd> processes;  // pidfds by rank; none for this rank, nor where the kernel has no pidfds
  // Where these are the ranks of one host among several: what messages call them, and the size of the whole group.
  std::vector<int> names = {};
  int world = 0;
};

/// One rank's end. Not thread-safe. After an error the group cannot be used any more.
class Exchange {
 public:
  using Clock = std::chrono::steady_clock;

  Exchange(Arena arena, Peers peers, Place place, std::string group, std::chrono::milliseconds timeout);
  /// Tells the others that this rank has left, without waiting for them.
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  const Place& place() const { return place_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  /// Collectives begun so far.
  uint64_t calls() const { return calls_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  /// Starts a collective. `call.number` is filled in.
  void begin(Call call);

  std::byte* slot(int rank) const { return arena_.data() + layout_.slot(turn_, rank); }
  /// This rank's slot of the next turn, free once the ranks have met in this one.
  std::byte* next_slot() const { return arena_.data() + layout_.slot(turn_ ^ 1, place_.rank); }

  /// Arrives and waits for all ranks. Throws MismatchError when the calls of the ranks differ, PeerError when a rank has
  /// ended, TimeoutError.
  void meet();
  void next_turn() { turn_ ^= 1; }

  /// For messages between two ranks.
  Lane& lane(int from, int to) const;
  /// Rings at `rank`: a lane of it has changed.
  void ring(int rank) const;
  /// Waits until `done()`, called again whenever the bell of this rank rings. `from`: who is waited for.
  void wait_for_bell(const std::function<bool()>& done, const Call& call, int from, std::chrono::milliseconds timeout);
  /// Called while a collective waits, because its peers may wait for a message of this rank.
  void set_idle(std::function<void()> idle) { idle_ = std::move(idle); }

  /// The beginning of a message about `call`: operation, rank, number, group.
  std::string where(const Call& call) const;
  static std::string describe(const Call& call);
  /// Marks this rank as failed, over rank `blamed` where it is one's fault, and throws.
  template <class E>
  [[noreturn]] void fail(const std::string& message, int blamed = -1) {
    announce(State::kFailed, blamed);
    failure_ = message;
    throw E(message);
  }
  void require_usable() const;

  /// Marks this rank as failed for a reason outside of this memory, a connection to another host: ranks that wait for it
  /// stop at once, with the reason. The first failure counts.
  void give_up(const std::string& reason) noexcept;
  /// For a rank that waits outside, and that all others will have to meet again: throws PeerError when one never will.
  void look_for_the_dead();

 private:
  Header& header() const;
  Rank& rank(int rank) const;
  bool all_arrived() const;
  void wait_for_all();
  void compare_calls();
  void announce(State state, int blamed = -1) noexcept;
  bool has_arrived(int rank) const;
  /// Throws when a rank that has not arrived never will.
  void look_for_the_dead(const Call& call, const std::function<bool(int)>& needed);
  bool has_ended(int rank) const;
  /// How a rank went, "" while it is here.
  std::string how_it_went(int rank) const;
  const Call& last_call(int rank) const;
  void set_reason(std::string_view reason) noexcept;
  /// Of a rank that has given up; "" where there is none.
  std::string_view reason_of(int rank) const;
  int name_of(int rank) const { return peers_.names.empty() ? rank : peers_.names[rank]; }
  int first(const std::function<bool(int)>& needed) const;
  std::string missing(const std::function<bool(int)>& needed) const;

  Arena arena_;
  const Peers peers_;
  const Place place_;
  const Place shown_;  // in messages
  const std::string group_;
  std::chrono::milliseconds timeout_;
  const Layout layout_;
  const int spins_;

  int turn_ = 0;
  uint32_t meetings_ = 0;
  bool comparing_ = false;
  uint64_t calls_ = 0;
  Call call_;
  std::function<void()> idle_;
  std::string failure_;
};

}  // namespace ddp::detail::shm
