// Qwen2 by fused kernels, on the CPU: the parameters of the plain model, another forward pass.
//
//   qwen::CausalLM model = qwen::fused::make_causal_lm(qwen::preset("tiny"));
//   model(tokens, targets).backward();                        // the loss; no logits anywhere
//   torch::Tensor logits = model(tokens);                     // as the plain model has them, to rounding
//
// A decoder layer is two steps of autograd (blocks.h), the end of the model a third (loss.h), attention is made of
// products of matrices (attention.h). Modules and parameters are those of ../model.h, so checkpoints are the same. On a
// device or with a type that the kernels do not know, it is the plain model.
#pragma once

#include <mutex>

#include "../model.h"
#include "blocks.h"
#include "loss.h"

namespace qwen::fused {

/// Sizes of blocks; the results do not depend on them beyond rounding.
struct Blocking {
  int64_t queries = 128;  ///< of attention
  int64_t loss_rows = 0;  ///< tokens of a chunk of the loss, 0: by the vocabulary
};

/// One forward pass at a time, as any module whose parameters are trained.
class CausalLMImpl : public qwen::CausalLMImpl {
 public:
  explicit CausalLMImpl(const Config& config, const Blocking& blocking = {});

  torch::Tensor forward(const torch::Tensor& tokens, const torch::Tensor& targets = {}) override;

  /// Whether the kernels are used, for parameters as they are now.
  bool is_fused() const;

  const Workspace& workspace() const { return *workspace_; }

 private:
  torch::Tensor hidden_states(const torch::Tensor& tokens);
  BlockSettings prepare(const torch::Tensor& tokens);

  Config config_;
  Blocking blocking_;
  c10::intrusive_ptr<Workspace> workspace_ = c10::make_intrusive<Workspace>();
  torch::Tensor cosine_, sine_;  // of as many positions as have been needed, float32
  at::ScalarType rotary_type_ = at::kFloat;
  std::vector<int64_t> shape_;  // of the tokens of the last pass
};

/// Ready to be used wherever a qwen::CausalLM is.
CausalLM make_causal_lm(const Config& config, const Blocking& blocking = {});

}  // namespace qwen::fused
