#include "shm/collectives.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "ddp/error.h"
#include "shm/pieces.h"

namespace ddp::detail::shm {
namespace {

// Up to here every rank adds up everything: one meeting, but each rank reads what all have written.
constexpr int64_t kSmall = 16 * 1024;

Call call_of(Operation operation, const Buffer& buffer, int root = -1) {
  return {.count = buffer.count,
          .root = root,
          .operation = static_cast<int8_t>(operation),
          .dtype = static_cast<int8_t>(buffer.dtype)};
}

Call call_of(Operation operation, const Buffer& buffer, Op op, int root = -1) {
  Call call = call_of(operation, buffer, root);
  call.op = static_cast<int8_t>(op);
  return call;
}

void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

// Calls part(offset, bytes) for each piece of `bytes` that fits into `size`; once at least, so that ranks always meet.
template <class F>
void in_parts(int64_t bytes, int64_t size, F&& part) {
  int64_t offset = 0;
  do {
    part(offset, std::min(size, bytes - offset));
    offset += size;
  } while (offset < bytes);
}

// Bytes of one of the `world` parts of a slot.
int64_t share_of(int world) { return static_cast<int64_t>(kSlot) / world / 64 * 64; }

// The order in which Gloo's ring adds: the tensor is cut into a block per rank, of whole segments of at most 1 MiB, at
// least two for each rank; the sum of block b starts with rank b-1 and goes down to rank b (gloo/allreduce.cc, `ring`).
class RingOrder {
 public:
  RingOrder(int world, int64_t total_bytes, int64_t element) : world_(world) {
    constexpr int64_t kSegment = 1 << 20;
    const int64_t needed = std::max<int64_t>((total_bytes + kSegment - 1) / kSegment, 2 * world);
    const int64_t per_rank = (needed + world - 1) / world, segments = per_rank * world;
    const int64_t bytes = (total_bytes + segments - 1) / segments;
    block_ = std::max<int64_t>(per_rank * ((bytes + element - 1) / element * element), element);
  }

  // Adds up `bytes` bytes that begin at `offset` of the tensor and at `slot_offset` of the slots.
  void add_up(const Exchange& exchange, int64_t offset, int64_t slot_offset, int64_t bytes, std::byte* out,
              c10::ScalarType dtype, Op op) {
    inputs_.resize(world_);
    for (int64_t done = 0; done < bytes;) {
      const int64_t block = (offset + done) / block_;
      const int64_t length = std::min(bytes - done, (block + 1) * block_ - (offset + done));
      for (int i = 0; i < world_; ++i) {
        const int rank = static_cast<int>((block + 2 * world_ - 1 - i) % world_);
        inputs_[i] = exchange.slot(rank) + slot_offset + done;
      }
      reduce(inputs_, out + done, length / static_cast<int64_t>(c10::elementSize(dtype)), dtype, op);
      done += length;
    }
  }

 private:
  const int world_;
  int64_t block_ = 0;
  std::vector<const void*> inputs_;
};

// Several buffers as one tensor, which passes through the slots part by part.
class Pieces {
 public:
  Pieces(std::span<const Buffer> pieces, int world, Op op, bool mean)
      : pieces_(pieces), op_(op), scale_(mean ? 1.0 / world : 1.0), order_(world, bytes(), dtype_size()) {}

  c10::ScalarType dtype() const { return pieces_[0].dtype; }
  int64_t dtype_size() const { return pieces_[0].element(); }
  int64_t bytes() const {
    int64_t bytes = 0;
    for (const Buffer& piece : pieces_) bytes += piece.bytes();
    return bytes;
  }

  void fill(std::byte* slot, int64_t offset, int64_t bytes) const {
    in_pieces(pieces_, offset, bytes, [&](std::byte* data, int64_t done, int64_t length) {
      scale(data, slot + done, length / dtype_size(), dtype(), scale_);
    });
  }

  void read(const std::byte* slot, int64_t offset, int64_t bytes) const {
    in_pieces(pieces_, offset, bytes,
              [&](std::byte* data, int64_t done, int64_t length) { copy_bytes(data, slot + done, length); });
  }

  // Adds up a part that begins at `slot_offset` of the slots: into the pieces, or into `out`.
  void add_up(const Exchange& exchange, int64_t offset, int64_t bytes) {
    in_pieces(pieces_, offset, bytes, [&](std::byte* data, int64_t done, int64_t length) {
      order_.add_up(exchange, offset + done, done, length, data, dtype(), op_);
    });
  }
  void add_up_into(std::byte* out, const Exchange& exchange, int64_t offset, int64_t slot_offset, int64_t bytes) {
    order_.add_up(exchange, offset, slot_offset, bytes, out, dtype(), op_);
  }

  // The same for two ranks, while the next part is filled in.
  void add_up_and_fill(const Exchange& exchange, int64_t offset, int64_t bytes, int64_t next_bytes) {
    std::byte* out = within_one(offset, bytes);
    std::byte* from = within_one(offset + bytes, next_bytes);
    if (out == nullptr || from == nullptr) {
      add_up(exchange, offset, bytes);
      fill(exchange.next_slot(), offset + bytes, next_bytes);
      return;
    }
    const void* const inputs[] = {exchange.slot(1), exchange.slot(0)};
    const Next next{from, exchange.next_slot(), next_bytes / dtype_size(), scale_};
    reduce_and_scale(inputs, out, bytes / dtype_size(), dtype(), op_, next);
  }

 private:
  std::byte* within_one(int64_t offset, int64_t bytes) const {
    std::byte* found = nullptr;
    in_pieces(pieces_, offset, bytes,
              [&](std::byte* data, int64_t, int64_t length) { found = length == bytes ? data : nullptr; });
    return found;
  }

  const std::span<const Buffer> pieces_;
  const Op op_;
  const double scale_;
  RingOrder order_;
};

// Each rank adds up its share of the part, in its own slot, and then all read all shares.
void reduce_in_shares(Exchange& exchange, Pieces& pieces, int64_t offset, int64_t bytes) {
  const auto [me, world] = exchange.place();
  const int64_t share = (bytes / world + 63) / 64 * 64;
  const auto begin = [&](int rank) { return std::min(bytes, rank * share); };
  const auto length = [&](int rank) { return std::min(bytes, begin(rank) + share) - begin(rank); };
  std::byte* const mine = exchange.slot(me);
  pieces.fill(mine, offset, bytes);
  exchange.meet();
  pieces.add_up_into(mine + begin(me), exchange, offset + begin(me), begin(me), length(me));
  exchange.meet();
  for (int rank = 0; rank < world; ++rank) {
    pieces.read(exchange.slot(rank) + begin(rank), offset + begin(rank), length(rank));
  }
  exchange.next_turn();
}

// While a part is added up, the next one is filled in.
void reduce_of_two(Exchange& exchange, Pieces& pieces) {
  const int64_t total = pieces.bytes();
  const auto part_at = [&](int64_t offset) { return std::min<int64_t>(kSlot, total - offset); };
  pieces.fill(exchange.slot(exchange.place().rank), 0, part_at(0));
  int64_t offset = 0;
  do {
    const int64_t bytes = part_at(offset);
    exchange.meet();
    pieces.add_up_and_fill(exchange, offset, bytes, part_at(offset + bytes));
    exchange.next_turn();
    offset += bytes;
  } while (offset < total);
}

}  // namespace

void all_reduce(Exchange& exchange, std::span<const Buffer> buffers, Op op, bool mean) {
  const auto [me, world] = exchange.place();
  Pieces pieces(buffers, world, op, mean);
  const Buffer whole{.count = pieces.bytes() / pieces.dtype_size(), .dtype = pieces.dtype()};
  exchange.begin(call_of(Operation::kAllReduce, whole, op));
  if (world == 2) return reduce_of_two(exchange, pieces);
  in_parts(pieces.bytes(), kSlot, [&, me = me](int64_t offset, int64_t bytes) {
    if (bytes > kSmall) return reduce_in_shares(exchange, pieces, offset, bytes);
    pieces.fill(exchange.slot(me), offset, bytes);
    exchange.meet();
    pieces.add_up(exchange, offset, bytes);
    exchange.next_turn();
  });
}

void reduce(Exchange& exchange, const Buffer& buffer, int root, Op op) {
  exchange.begin(call_of(Operation::kReduce, buffer, op, root));
  const auto [me, world] = exchange.place();
  RingOrder order(world, buffer.bytes(), buffer.element());
  in_parts(buffer.bytes(), kSlot, [&, me = me](int64_t offset, int64_t bytes) {
    copy_bytes(exchange.slot(me), buffer.data + offset, bytes);
    exchange.meet();
    if (me == root) order.add_up(exchange, offset, 0, bytes, buffer.data + offset, buffer.dtype, op);
    exchange.next_turn();
  });
}

void broadcast(Exchange& exchange, const Buffer& buffer, int root) {
  exchange.begin(call_of(Operation::kBroadcast, buffer, root));
  const int me = exchange.place().rank;
  in_parts(buffer.bytes(), kSlot, [&](int64_t offset, int64_t bytes) {
    if (me == root) copy_bytes(exchange.slot(me), buffer.data + offset, bytes);
    exchange.meet();
    if (me != root) copy_bytes(buffer.data + offset, exchange.slot(root), bytes);
    exchange.next_turn();
  });
}

namespace {

void gather_all(Exchange& exchange, const Buffer& input, std::span<const Buffer> outputs) {
  const int me = exchange.place().rank;
  in_parts(input.bytes(), kSlot, [&](int64_t offset, int64_t bytes) {
    copy_bytes(exchange.slot(me), input.data + offset, bytes);
    exchange.meet();
    for (size_t rank = 0; rank < outputs.size(); ++rank) {
      copy_bytes(outputs[rank].data + offset, exchange.slot(static_cast<int>(rank)), bytes);
    }
    exchange.next_turn();
  });
}

}  // namespace

void all_gather(Exchange& exchange, const Buffer& input, std::span<const Buffer> outputs) {
  exchange.begin(call_of(Operation::kAllGather, input));
  gather_all(exchange, input, outputs);
}

void gather(Exchange& exchange, const Buffer& input, std::span<const Buffer> outputs, int root) {
  exchange.begin(call_of(Operation::kGather, input, root));
  gather_all(exchange, input, outputs);
}

void scatter(Exchange& exchange, const Buffer& output, std::span<const Buffer> inputs, int root) {
  exchange.begin(call_of(Operation::kScatter, output, root));
  const auto [me, world] = exchange.place();
  const int64_t share = share_of(world);
  in_parts(output.bytes(), share, [&](int64_t offset, int64_t bytes) {
    for (size_t rank = 0; rank < inputs.size(); ++rank) {
      copy_bytes(exchange.slot(root) + rank * share, inputs[rank].data + offset, bytes);
    }
    exchange.meet();
    copy_bytes(output.data + offset, exchange.slot(root) + me * share, bytes);
    exchange.next_turn();
  });
}

void reduce_scatter(Exchange& exchange, const Buffer& output, std::span<const Buffer> inputs, Op op) {
  exchange.begin(call_of(Operation::kReduceScatter, output, op));
  const auto [me, world] = exchange.place();
  const int64_t share = share_of(world);
  RingOrder order(world, output.bytes() * world, output.element());
  in_parts(output.bytes(), share, [&](int64_t offset, int64_t bytes) {
    for (int rank = 0; rank < world; ++rank) {
      copy_bytes(exchange.slot(me) + rank * share, inputs[rank].data + offset, bytes);
    }
    exchange.meet();
    order.add_up(exchange, me * output.bytes() + offset, me * share, bytes, output.data + offset, output.dtype, op);
    exchange.next_turn();
  });
}

void all_to_all(Exchange& exchange, std::span<const Buffer> outputs, std::span<const Buffer> inputs) {
  const auto [me, world] = exchange.place();
  exchange.begin(
      {.operation = static_cast<int8_t>(Operation::kAllToAll), .dtype = static_cast<int8_t>(inputs[0].dtype)});

  // First the sizes: who sends how much to whom, and how many turns the largest takes.
  const auto sizes = [&](int rank) { return reinterpret_cast<int64_t*>(exchange.slot(rank)); };
  for (int rank = 0; rank < world; ++rank) sizes(me)[rank] = inputs[rank].bytes();
  exchange.meet();
  int64_t largest = 0;
  for (int from = 0; from < world; ++from) {
    largest = std::max(largest, *std::max_element(sizes(from), sizes(from) + world));
    if (sizes(from)[me] == outputs[from].bytes()) continue;
    exchange.fail<MismatchError>(fmt::format(
        "[ddp::all_to_all] rank {}/{}: rank {} sends {} bytes, this rank expects {}; give both the same size", me,
        world, from, sizes(from)[me], outputs[from].bytes()));
  }
  exchange.next_turn();

  const int64_t share = share_of(world);
  const auto part_of = [share](const Buffer& buffer, int64_t offset) {
    return std::clamp<int64_t>(buffer.bytes() - offset, 0, share);
  };
  in_parts(largest, share, [&](int64_t offset, int64_t) {
    for (int to = 0; to < world; ++to) {
      copy_bytes(exchange.slot(me) + to * share, inputs[to].data + offset, part_of(inputs[to], offset));
    }
    exchange.meet();
    for (int from = 0; from < world; ++from) {
      copy_bytes(outputs[from].data + offset, exchange.slot(from) + me * share, part_of(outputs[from], offset));
    }
    exchange.next_turn();
  });
}

void barrier(Exchange& exchange) {
  exchange.begin({.operation = static_cast<int8_t>(Operation::kBarrier)});
  exchange.meet();
  exchange.next_turn();
}

}  // namespace ddp::detail::shm
