// What lies where in the memory that the ranks of one group share.
//
//   Header | Rank 0 .. W-1 | slots [turn 0, 1][rank] | lanes [from][to]
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ddp::detail::shm {

/// Two lines of 64 bytes: processors fetch them in pairs.
constexpr size_t kLine = 128;
/// Bytes of a slot. A rank's slot, its peer's and the tensor's part fit in a second-level cache together.
constexpr size_t kSlot = 128 * 1024;
/// Characters of what a rank says when it gives up for a reason that lies outside.
constexpr size_t kReason = 384;
/// A message between two ranks passes in pieces of at most so many bytes, two on the way at once.
constexpr size_t kPiece = 32 * 1024;

/// What a rank is about to do, so that others can see whether they do the same.
struct Call {
  uint64_t number = 0;  // of the collective in the group, from 1
  int64_t count = 0;    // elements, 0 where ranks may differ
  int32_t root = -1;
  int8_t operation = 0;  // Operation
  int8_t dtype = -1;     // c10::ScalarType
  int8_t op = -1;        // Op

  bool operator==(const Call&) const = default;
};

enum class State : uint32_t { kHere, kLeft, kFailed };

struct Header {
  uint64_t token[2];                              // tells this memory from any other
  alignas(kLine) std::atomic<uint32_t> arrived;   // all ranks' arrivals, ever; wraps around
  alignas(kLine) std::atomic<uint32_t> sleepers;  // ranks that wait for `arrived` in the kernel
};

struct alignas(kLine) Rank {
  std::atomic<State> state;
  std::atomic<uint32_t> arrivals;             // this rank's
  std::atomic<int32_t> blamed;                // 1 + the rank over which it has failed, 0 where it is none
  Call calls[2];                              // of the present and the last turn
  char reason[kReason];                       // why it has failed, "" where its own message alone says so
  alignas(kLine) std::atomic<uint32_t> bell;  // rung when a lane of this rank has changed
  std::atomic<uint32_t> asleep;               // whether it waits for the bell in the kernel
};

struct Piece {
  int64_t message_bytes;  // of the whole message
  int32_t tag;
  int32_t bytes;  // of this piece
  int8_t dtype;
  std::byte data[];
};

struct alignas(kLine) Lane {
  alignas(kLine) std::atomic<uint32_t> written;  // pieces, ever
  alignas(kLine) std::atomic<uint32_t> read;
  alignas(kLine) std::byte pieces[2][sizeof(Piece) + kPiece];
};

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<State>::is_always_lock_free);

/// Offsets in the memory of a group of `world` ranks.
class Layout {
 public:
  explicit Layout(int world) : world_(world) {}

  size_t rank(int rank) const { return round_up(sizeof(Header)) + rank * sizeof(Rank); }
  size_t slot(int turn, int rank) const { return round_up(this->rank(world_)) + (turn * world_ + rank) * kSlot; }
  size_t lane(int from, int to) const { return slot(2, 0) + (from * world_ + to) * sizeof(Lane); }
  size_t size() const { return round_up(lane(world_, 0)); }

 private:
  static size_t round_up(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

  size_t world_;
};

}  // namespace ddp::detail::shm
