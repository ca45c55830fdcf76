// The part of a collective over several hosts that happens inside one: a tensor is cut into a slice for each leader, the
// ranks of the host add up or collect slices in their memory, and the leaders carry them to other hosts.
//
//   Strip strip(buffers);
//   const Slices slices(strip.bytes() / strip.element(), strip.element(), leaders);
//   exchange->begin(call);
//   reduce_to_leaders(exchange, strip, slices, Op::kSum, 1.0, mine);    // mine: a leader's slice
//   ...                                                                 // leaders, between hosts
//   gather_from_leaders(exchange, strip, slices, mine);
//
// The functions are one part of a call that `Exchange::begin` has started; the first that meets compares the calls.
// An `exchange` of null is that of a rank that is alone on its host.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "shm/collectives.h"
#include "shm/exchange.h"

namespace ddp::detail::shm {

/// Several buffers of one dtype, seen as one tensor.
class Strip {
 public:
  /// Requires: one buffer at least. They outlive this.
  explicit Strip(std::span<const Buffer> buffers);

  c10::ScalarType dtype() const { return buffers_[0].dtype; }
  int64_t element() const { return buffers_[0].element(); }
  int64_t bytes() const { return bytes_; }

  /// Copies `bytes` from `offset` on, times `scale` (1 for other than floating-point types).
  void copy_out(int64_t offset, int64_t bytes, std::byte* to, double scale = 1.0) const;
  void copy_in(int64_t offset, int64_t bytes, const std::byte* from) const;

 private:
  std::span<const Buffer> buffers_;
  int64_t bytes_ = 0;
};

/// How a part of a strip, from byte `begin` on, is cut: slice i of leader i. Short parts have fewer slices than leaders,
/// because each costs a message; the slices that are not there are empty.
class Slices {
 public:
  Slices(int64_t begin, int64_t elements, int64_t element, int leaders);

  int leaders() const { return leaders_; }
  /// Bytes in the strip.
  int64_t begin(int leader) const { return begin_ + std::min(bytes_, leader * slice_); }
  int64_t size(int leader) const { return begin(leader + 1) - begin(leader); }
  int64_t largest() const { return size(0); }

 private:
  int64_t begin_, bytes_, slice_;
  int leaders_;
};

/// `mine` of each leader (null elsewhere) becomes the reduction over the ranks of its slice of the strip; each rank's
/// values are multiplied by `scale` first. Added up in the order of the ranks, 16-bit floats in float32.
void reduce_to_leaders(Exchange* exchange, const Strip& strip, const Slices& slices, Op op, double scale,
                       std::byte* mine);
/// Each leader's `mine` becomes its slice of the strip, on all ranks where `wanted`.
void gather_from_leaders(Exchange* exchange, const Strip& strip, const Slices& slices, const std::byte* mine,
                         bool wanted = true);
/// The strip of rank `root` of this host, on all its ranks.
void broadcast_on_host(Exchange* exchange, const Strip& strip, int root);
/// Each rank's `mine`, of the size of the strips, in the strip of that rank.
void all_gather_on_host(Exchange* exchange, std::span<const Strip> strips, const std::byte* mine);
/// All ranks of the host have come.
void meet_on_host(Exchange* exchange);

}  // namespace ddp::detail::shm
