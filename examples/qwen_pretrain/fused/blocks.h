// The two halves of a decoder layer, each one step of autograd: one node, what its backward needs and nothing else.
//
//   x = attention_block(x, {norm, wq, bq, wk, bk, wv, bv, wo}, settings);     // x + o_proj(attention(rms_norm(x)))
//   x = mlp_block(x, {norm, wgate, wup, wdown}, settings);                    // x + down(silu(gate(n)) * up(n))
//
// Gradients reach the parameters through autograd as those of any operator do, when the backward of their block ends.
// There are no second derivatives: a backward with create_graph throws c10::Error.
#pragma once

#include <ATen/core/Tensor.h>

#include "workspace.h"

namespace qwen::fused {

struct AttentionWeights {
  at::Tensor norm, wq, bq, wk, bk, wv, bv, wo;
};

struct MlpWeights {
  at::Tensor norm, gate, up, down;
};

struct BlockSettings {
  int64_t heads = 1;
  int64_t kv_heads = 1;
  double eps = 1e-6;
  at::Tensor cosine, sine;    ///< float32, {at least seq, head_dim / 2}
  int64_t query_block = 128;  ///< queries that attention takes at once
  c10::intrusive_ptr<Workspace> workspace;
};

/// `x` is {batch, seq, hidden}, float32 or bfloat16, as all weights are; so is the result.
at::Tensor attention_block(const at::Tensor& x, const AttentionWeights& weights, const BlockSettings& settings);
at::Tensor mlp_block(const at::Tensor& x, const MlpWeights& weights, const BlockSettings& settings);

/// Throws c10::Error when a backward is to be differentiated itself.
void refuse_second_derivatives();

}  // namespace qwen::fused
