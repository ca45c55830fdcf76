// The collectives of the ranks of one host, on plain memory. Each call is made by all ranks; the caller does the work.
// The order of addition is Gloo's, so the sums of float32 and float64 have the bits of PyTorch's Gloo backend, on every
// rank, run after run.
#pragma once

#include <c10/core/ScalarType.h>

#include <span>
#include <vector>

#include "shm/exchange.h"
#include "shm/reduce.h"

namespace ddp::detail::shm {

/// Contiguous elements.
struct Buffer {
  std::byte* data = nullptr;
  int64_t count = 0;
  c10::ScalarType dtype = c10::ScalarType::Byte;

  int64_t element() const { return static_cast<int64_t>(c10::elementSize(dtype)); }
  int64_t bytes() const { return count * element(); }
};

/// Of `pieces` as of one tensor that they make up, one after the other; all of one dtype. `mean`: each rank's part is
/// multiplied by 1/W before the sum, as PyTorch's reducer does; floating-point types only. Requires: one piece at least.
void all_reduce(Exchange& exchange, std::span<const Buffer> pieces, Op op, bool mean = false);
/// The result is in `buffer` of `root`; the others keep what they have.
void reduce(Exchange& exchange, const Buffer& buffer, int root, Op op);
void broadcast(Exchange& exchange, const Buffer& buffer, int root);
/// `outputs`: one of the size of `input` for each rank.
void all_gather(Exchange& exchange, const Buffer& input, std::span<const Buffer> outputs);
/// `outputs` on `root` only.
void gather(Exchange& exchange, const Buffer& input, std::span<const Buffer> outputs, int root);
/// `inputs` on `root` only.
void scatter(Exchange& exchange, const Buffer& output, std::span<const Buffer> inputs, int root);
/// `inputs`: one of the size of `output` for each rank.
void reduce_scatter(Exchange& exchange, const Buffer& output, std::span<const Buffer> inputs, Op op);
/// `inputs[r]` goes to rank r, `outputs[r]` comes from it. Sizes may differ; a pair must agree on its own.
void all_to_all(Exchange& exchange, std::span<const Buffer> outputs, std::span<const Buffer> inputs);
void barrier(Exchange& exchange);

}  // namespace ddp::detail::shm
