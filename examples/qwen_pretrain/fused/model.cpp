#include "model.h"

#include "types.h"

namespace qwen::fused {
namespace {

bool is_usable(const torch::Tensor& parameter) {
  return parameter.is_cpu() && is_supported(parameter.scalar_type()) && parameter.is_contiguous();
}

}  // namespace

CausalLMImpl::CausalLMImpl(const Config& config, const Blocking& blocking)
    : qwen::CausalLMImpl(config), config_(config), blocking_(blocking) {}

bool CausalLMImpl::is_fused() const {
  const auto type = model->embed_tokens->weight.scalar_type();
  for (const auto& parameter : parameters()) {
    if (!is_usable(parameter) || parameter.scalar_type() != type) return false;
  }
  return true;
}

BlockSettings CausalLMImpl::prepare(const torch::Tensor& tokens) {
  if (shape_ != tokens.sizes()) {  // buffers of another shape are of no use
    workspace_->trim();
    shape_ = tokens.sizes().vec();
  }
  const auto type = model->embed_tokens->weight.scalar_type();
  const int64_t seq = tokens.size(1), half = config_.head_dim() / 2;
  if (!cosine_.defined() || cosine_.size(0) < seq || rotary_type_ != type) {
    const torch::NoGradGuard no_grad;
    const c10::InferenceMode normal(false);
    // Rounded to the type of the model, as its plain form has them.
    const Rotary rotary(seq, config_, torch::TensorOptions().dtype(type));
    const auto table = [&](const torch::Tensor& both) {
      return both.narrow(-1, 0, half).to(torch::kFloat32).contiguous();
    };
    cosine_ = table(rotary.cosine()), sine_ = table(rotary.sine()), rotary_type_ = type;
  }
  return {.heads = config_.num_attention_heads,
          .kv_heads = config_.num_key_value_heads,
          .eps = config_.rms_norm_eps,
          .cosine = cosine_,
          .sine = sine_,
          .query_block = blocking_.queries,
          .workspace = workspace_};
}

torch::Tensor CausalLMImpl::hidden_states(const torch::Tensor& tokens) {
  const BlockSettings settings = prepare(tokens);
  auto x = model->embed_tokens(tokens);
  for (const auto& module : *model->layers) {
    const auto& layer = *module->as<DecoderLayer>();
    const auto& attention = *layer.self_attn;
    const auto& mlp = *layer.mlp;
    x = attention_block(x,
                        {.norm = layer.input_layernorm->weight,
                         .wq = attention.q_proj->weight,
                         .bq = attention.q_proj->bias,
                         .wk = attention.k_proj->weight,
                         .bk = attention.k_proj->bias,
                         .wv = attention.v_proj->weight,
                         .bv = attention.v_proj->bias,
                         .wo = attention.o_proj->weight},
                        settings);
    x = mlp_block(x,
                  {.norm = layer.post_attention_layernorm->weight,
                   .gate = mlp.gate_proj->weight,
                   .up = mlp.up_proj->weight,
                   .down = mlp.down_proj->weight},
                  settings);
  }
  return x;
}

torch::Tensor CausalLMImpl::forward(const torch::Tensor& tokens, const torch::Tensor& targets) {
  if (tokens.numel() == 0 || !is_fused()) return qwen::CausalLMImpl::forward(tokens, targets);
  const auto hidden = hidden_states(tokens);
  if (!targets.defined()) return head(model->norm(hidden));
  return head_loss(hidden, model->norm->weight, head_weight(), targets,
                   {.eps = config_.rms_norm_eps, .chunk = blocking_.loss_rows, .workspace = workspace_});
}

CausalLM make_causal_lm(const Config& config, const Blocking& blocking) {
  return CausalLM(std::static_pointer_cast<qwen::CausalLMImpl>(std::make_shared<CausalLMImpl>(config, blocking)));
}

}  // namespace qwen::fused
