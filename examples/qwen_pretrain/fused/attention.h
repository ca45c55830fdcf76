// Causal attention with grouped query heads, in blocks of queries: softmax(q k^T / sqrt(head_dim)) v.
//
//   attention<T>(shape, q, k, v, out, log_sum, workspace);
//   attention_backward<T>(shape, rotary, q, k, v, out, dout, log_sum, dq, dk, dv, workspace);
//
// A block of queries and the keys that it sees are three products of matrices; the probabilities of a block are all that
// is ever there of seq * seq, and backward computes them again from `log_sum` (Dao, 2022). Sums and the softmax are in
// float32; of bfloat16, products take bfloat16 factors.
#pragma once

#include <cstdint>

#include "rows.h"
#include "workspace.h"

namespace qwen::fused {

struct AttentionShape {
  int64_t batch, seq, heads, kv_heads, head_dim;
  int64_t block = 128;  ///< queries of a block

  int64_t q_stride() const { return heads * head_dim; }      ///< elements of a token in q, out and their gradients
  int64_t kv_stride() const { return kv_heads * head_dim; }  ///< elements of a token in k, v and their gradients
};

/// Cosines and sines of the rotary positions, {seq, head_dim / 2} each.
struct RotaryTables {
  const float* cosine;
  const float* sine;
};

/// `q` and `out` are {batch * seq, heads * head_dim}, `k` and `v` {batch * seq, kv_heads * head_dim}, `log_sum`
/// {batch * heads, seq}. q and k are rotated already. Threads share out batch and heads.
template <class T>
void attention(const AttentionShape& shape, const T* q, const T* k, const T* v, T* out, float* log_sum,
               Workspace& workspace);

/// The gradients; those of q and k before they were rotated.
template <class T>
void attention_backward(const AttentionShape& shape, const RotaryTables& rotary, const T* q, const T* k, const T* v,
                        const T* out, const T* dout, const float* log_sum, T* dq, T* dk, T* dv, Workspace& workspace);

}  // namespace qwen::fused
