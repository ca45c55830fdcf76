// The end of the model in one step of autograd: RMSNorm, the output layer and the cross-entropy, without ever holding
// the scores of all tokens.
//
//   at::Tensor loss = head_loss(hidden, norm_weight, head_weight, targets, {.eps = 1e-6, .workspace = workspace});
//   loss.backward();
//
// Tokens are taken a chunk at a time. Where gradients are wanted they are computed in the forward pass, while the scores
// of the chunk are there, and wait for backward, which only scales them.
#pragma once

#include <ATen/core/Tensor.h>

#include "workspace.h"

namespace qwen::fused {

/// The target of a token that does not count.
constexpr int64_t kIgnored = -100;

struct HeadSettings {
  double eps = 1e-6;
  int64_t chunk = 0;  ///< tokens whose scores are there at once; 0: as many as have 16 MiB of scores, 128 to 512
  c10::intrusive_ptr<Workspace> workspace;
};

/// The mean of the cross-entropy over the tokens that count, as next_token_loss(linear(rms_norm(x), weight), targets)
/// has it: float32, NaN where none counts. `x` is {batch, seq, hidden}, `weight` {vocab, hidden}, `targets` int64
/// {batch, seq}. Throws c10::IndexError for a target outside the vocabulary that is not kIgnored. Backward works once
/// for each forward, also with retain_graph, and gives no second derivatives: both throw c10::Error.
at::Tensor head_loss(const at::Tensor& x, const at::Tensor& norm, const at::Tensor& weight, const at::Tensor& targets,
                     const HeadSettings& settings);

}  // namespace qwen::fused
