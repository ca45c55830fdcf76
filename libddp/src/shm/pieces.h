// Several buffers seen as one, one after the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "shm/collectives.h"

namespace ddp::detail::shm {

/// Calls f(data, done, length) for what [offset, offset + bytes) has of each piece; `done` is what was before it in the
/// range.
template <class F>
void in_pieces(std::span<const Buffer> pieces, int64_t offset, int64_t bytes, F&& f) {
  int64_t begin = 0, done = 0;
  for (const Buffer& piece : pieces) {
    if (done == bytes) return;
    const int64_t from = offset + done - begin;
    const int64_t length = std::min(piece.bytes() - from, bytes - done);
    begin += piece.bytes();
    if (length <= 0) continue;
    f(piece.data + from, done, length);
    done += length;
  }
}

}  // namespace ddp::detail::shm
