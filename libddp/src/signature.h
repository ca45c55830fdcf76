// What a rank says of a collective that it begins, so that the ranks can see whether they all began the same one.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstdint>
#include <string>

namespace ddp::detail {

/// Which backward a gradient collective belongs to: the same numbers on all ranks of a correct program.
struct Pass {
  int64_t forwards = 0;  // synchronised forwards so far
  int64_t dropped = 0;   // how often gradients of no_sync passes were dropped before they were averaged

  bool operator==(const Pass&) const = default;
};

struct Signature {
  const char* operation = "nothing";
  int64_t count = 0;  // elements, 0 where ranks may differ
  int16_t op = -1;    // c10d::ReduceOp::RedOpType
  int16_t dtype = -1;
  int32_t root = -1;
  Pass pass;
};

/// Of call `number` in its group. Equal signatures have equal hashes, on every rank.
uint64_t hash_of(const Signature& signature, uint64_t number);

/// A tag for the messages of call `number`, so that those of different calls do not meet. Twelve bits tell apart 4096
/// calls in a row; the other twenty are of the signature: one in a million of different signatures has the same.
uint32_t tag_of(const Signature& signature, uint64_t number);

/// "after 3 synchronised forward(s)", "" before the first.
std::string describe(const Pass& pass);

/// "#3 all_reduce sum of 1000 Float root 0", with its pass where it has one.
std::string describe(const Signature& signature, uint64_t number);

/// While it lives, backend calls of this thread are described by what the caller asked for: on its way to Gloo a tensor
/// may become bytes, a mean a sum, and one operation another.
class Intent {
 public:
  Intent(const char* operation, const at::Tensor& tensor, int op = -1);
  ~Intent();
  Intent(const Intent&) = delete;
  Intent& operator=(const Intent&) = delete;

  /// The innermost one of this thread, null where there is none.
  static const Intent* current();
  void describe(Signature& signature) const;

 private:
  const char* const operation_;
  const int64_t count_;
  const int16_t dtype_;
  const int16_t op_;
  const Intent* const outer_;
};

}  // namespace ddp::detail
