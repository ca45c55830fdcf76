#include "shm/slices.h"

#include <cstring>
#include <vector>

#include "shm/pieces.h"

namespace ddp::detail::shm {
namespace {

// A slice of fewer bytes is not worth a message of its own.
constexpr int64_t kSmallestSlice = 16 * 1024;

// Calls part(offset, bytes) for each piece of `bytes` that fits into `size`; once at least, so that ranks always meet.
template <class F>
void in_parts(int64_t bytes, int64_t size, F&& part) {
  int64_t offset = 0;
  do {
    part(offset, std::min(size, bytes - offset));
    offset += size;
  } while (offset < bytes);
}

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

}  // namespace

Strip::Strip(std::span<const Buffer> buffers) : buffers_(buffers) {
  for (const Buffer& buffer : buffers_) bytes_ += buffer.bytes();
}

void Strip::copy_out(int64_t offset, int64_t bytes, std::byte* to, double scale) const {
  in_pieces(buffers_, offset, bytes, [&](const std::byte* data, int64_t done, int64_t length) {
    shm::scale(data, to + done, length / element(), dtype(), scale);
  });
}

void Strip::copy_in(int64_t offset, int64_t bytes, const std::byte* from) const {
  in_pieces(buffers_, offset, bytes, [&](std::byte* data, int64_t done, int64_t length) {
    if (data != from + done) std::memcpy(data, from + done, length);
  });
}

Slices::Slices(int64_t begin, int64_t elements, int64_t element, int leaders)
    : begin_(begin), bytes_(elements * element), leaders_(leaders) {
  // Whole lines of 64 elements, so that the slots of all leaders begin where vector code likes it.
  const int64_t even = round_up((elements + leaders - 1) / leaders, 64) * element;
  slice_ = std::max(even, round_up(kSmallestSlice, element));
}

void reduce_to_leaders(Exchange* exchange, const Strip& strip, const Slices& slices, Op op, double scale,
                       std::byte* mine) {
  if (exchange == nullptr) return strip.copy_out(slices.begin(0), slices.size(0), mine, scale);
  const auto [me, ranks] = exchange->place();
  // A turn takes a part of each slice.
  const int64_t share = static_cast<int64_t>(kSlot) / slices.leaders() / 64 * 64;
  std::vector<const void*> inputs(ranks);
  in_parts(slices.largest(), share, [&, me = me, ranks = ranks](int64_t offset, int64_t) {
    const auto part = [&](int leader) { return std::clamp<int64_t>(slices.size(leader) - offset, 0, share); };
    for (int leader = 0; leader < slices.leaders(); ++leader) {
      strip.copy_out(slices.begin(leader) + offset, part(leader), exchange->slot(me) + leader * share, scale);
    }
    exchange->meet();
    if (me < slices.leaders() && part(me) > 0) {
      for (int rank = 0; rank < ranks; ++rank) inputs[rank] = exchange->slot(rank) + me * share;
      reduce(inputs, mine + offset, part(me) / strip.element(), strip.dtype(), op);
    }
    exchange->next_turn();
  });
}

void gather_from_leaders(Exchange* exchange, const Strip& strip, const Slices& slices, const std::byte* mine,
                         bool wanted) {
  if (exchange == nullptr) {
    if (wanted) strip.copy_in(slices.begin(0), slices.size(0), mine);
    return;
  }
  const int me = exchange->place().rank;
  in_parts(slices.largest(), kSlot, [&](int64_t offset, int64_t) {
    const auto part = [&](int leader) {
      return std::clamp<int64_t>(slices.size(leader) - offset, 0, static_cast<int64_t>(kSlot));
    };
    if (me < slices.leaders() && part(me) > 0) std::memcpy(exchange->slot(me), mine + offset, part(me));
    exchange->meet();
    for (int leader = 0; wanted && leader < slices.leaders(); ++leader) {
      const std::byte* from = leader == me ? mine + offset : exchange->slot(leader);
      strip.copy_in(slices.begin(leader) + offset, part(leader), from);
    }
    exchange->next_turn();
  });
}

void broadcast_on_host(Exchange* exchange, const Strip& strip, int root) {
  if (exchange == nullptr) return;
  const int me = exchange->place().rank;
  in_parts(strip.bytes(), kSlot, [&](int64_t offset, int64_t bytes) {
    if (me == root) strip.copy_out(offset, bytes, exchange->slot(me));
    exchange->meet();
    if (me != root) strip.copy_in(offset, bytes, exchange->slot(root));
    exchange->next_turn();
  });
}

void all_gather_on_host(Exchange* exchange, std::span<const Strip> strips, const std::byte* mine) {
  if (exchange == nullptr) return strips[0].copy_in(0, strips[0].bytes(), mine);
  const int me = exchange->place().rank;
  in_parts(strips[0].bytes(), kSlot, [&](int64_t offset, int64_t bytes) {
    if (bytes > 0) std::memcpy(exchange->slot(me), mine + offset, bytes);
    exchange->meet();
    for (size_t rank = 0; rank < strips.size(); ++rank) {
      strips[rank].copy_in(offset, bytes, exchange->slot(static_cast<int>(rank)));
    }
    exchange->next_turn();
  });
}

void meet_on_host(Exchange* exchange) {
  if (exchange == nullptr) return;
  exchange->meet();
  exchange->next_turn();
}

}  // namespace ddp::detail::shm
