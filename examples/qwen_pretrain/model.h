// Qwen2 in plain libtorch operators: RMSNorm, rotary positions, grouped-query attention with q/k/v bias, SwiGLU, tied
// embeddings. Parameter names are those of Hugging Face's Qwen2ForCausalLM, so that weights travel both ways.
//
//   qwen::CausalLM model(qwen::preset("tiny"));
//   torch::Tensor logits = model(tokens);                       // {batch, seq} int64 -> {batch, seq, vocab}
//   qwen::next_token_loss(logits, targets).backward();
//
// Header-only, because `baseline` and the tests use it too.
#pragma once

#include <torch/torch.h>

#include <utility>

#include "config.h"

namespace qwen {

/// x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 whatever x is (Zhang and Sennrich, 2019).
class RMSNormImpl : public torch::nn::Module {
 public:
  RMSNormImpl(int64_t size, double eps) : eps_(eps) { weight = register_parameter("weight", torch::ones(size)); }

  torch::Tensor forward(const torch::Tensor& x) {
    const auto wide = x.to(torch::kFloat32);
    const auto scale = torch::rsqrt(wide.square().mean(-1, /*keepdim=*/true) + eps_);
    return weight * (wide * scale).to(x.scalar_type());
  }

  torch::Tensor weight;

 private:
  double eps_;
};
TORCH_MODULE(RMSNorm);

/// Rotary positions (Su et al., 2021) in Hugging Face's layout: element i is rotated with element i + head_dim / 2, at
/// position p by the angle p / theta^(2i / head_dim).
class Rotary {
 public:
  Rotary(int64_t seq, const Config& config, const torch::TensorOptions& like) {
    const auto wide = like.dtype(torch::kFloat32);
    const auto exponent = torch::arange(0, config.head_dim(), 2, wide) / static_cast<double>(config.head_dim());
    const auto angle = torch::outer(torch::arange(seq, wide), torch::pow(config.rope_theta, exponent).reciprocal());
    const auto both = torch::cat({angle, angle}, -1);
    cos_ = both.cos().to(like), sin_ = both.sin().to(like);
  }

  /// {seq, head_dim}; the second half of a row is its first half again.
  const torch::Tensor& cosine() const { return cos_; }
  const torch::Tensor& sine() const { return sin_; }

  /// `x` is {batch, heads, seq, head_dim}.
  torch::Tensor operator()(const torch::Tensor& x) const {
    const auto halves = x.chunk(2, -1);
    return x * cos_ + torch::cat({-halves[1], halves[0]}, -1) * sin_;
  }

 private:
  torch::Tensor cos_, sin_;
};

/// Causal self-attention in which each key and value head serves several query heads.
class AttentionImpl : public torch::nn::Module {
 public:
  explicit AttentionImpl(const Config& config) : head_dim_(config.head_dim()) {
    const auto queries = config.num_attention_heads * head_dim_, keys = config.num_key_value_heads * head_dim_;
    q_proj = register_module("q_proj", torch::nn::Linear(config.hidden_size, queries));
    k_proj = register_module("k_proj", torch::nn::Linear(config.hidden_size, keys));
    v_proj = register_module("v_proj", torch::nn::Linear(config.hidden_size, keys));
    o_proj =
        register_module("o_proj", torch::nn::Linear(torch::nn::LinearOptions(queries, config.hidden_size).bias(false)));
  }

  torch::Tensor forward(const torch::Tensor& x, const Rotary& rotary) {
    const auto heads = [&](const torch::Tensor& t) { return t.unflatten(-1, {-1, head_dim_}).transpose(1, 2); };
    const auto q = rotary(heads(q_proj(x))), k = rotary(heads(k_proj(x))), v = heads(v_proj(x));
    const auto y = torch::scaled_dot_product_attention(q, k, v, /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true,
                                                       /*scale=*/std::nullopt, /*enable_gqa=*/true);
    return o_proj(y.transpose(1, 2).flatten(2));
  }

  torch::nn::Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr};

 private:
  int64_t head_dim_;
};
TORCH_MODULE(Attention);

/// SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer, 2020).
class MLPImpl : public torch::nn::Module {
 public:
  explicit MLPImpl(const Config& config) {
    const auto linear = [](int64_t in, int64_t out) {
      return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
    };
    gate_proj = register_module("gate_proj", linear(config.hidden_size, config.intermediate_size));
    up_proj = register_module("up_proj", linear(config.hidden_size, config.intermediate_size));
    down_proj = register_module("down_proj", linear(config.intermediate_size, config.hidden_size));
  }

  torch::Tensor forward(const torch::Tensor& x) { return down_proj(torch::silu(gate_proj(x)) * up_proj(x)); }

  torch::nn::Linear gate_proj{nullptr}, up_proj{nullptr}, down_proj{nullptr};
};
TORCH_MODULE(MLP);

class DecoderLayerImpl : public torch::nn::Module {
 public:
  explicit DecoderLayerImpl(const Config& config) {
    self_attn = register_module("self_attn", Attention(config));
    mlp = register_module("mlp", MLP(config));
    input_layernorm = register_module("input_layernorm", RMSNorm(config.hidden_size, config.rms_norm_eps));
    post_attention_layernorm =
        register_module("post_attention_layernorm", RMSNorm(config.hidden_size, config.rms_norm_eps));
  }

  torch::Tensor forward(const torch::Tensor& x, const Rotary& rotary) {
    const auto attended = x + self_attn(input_layernorm(x), rotary);
    return attended + mlp(post_attention_layernorm(attended));
  }

  Attention self_attn{nullptr};
  MLP mlp{nullptr};
  RMSNorm input_layernorm{nullptr}, post_attention_layernorm{nullptr};
};
TORCH_MODULE(DecoderLayer);

/// From tokens to hidden states.
class DecoderImpl : public torch::nn::Module {
 public:
  explicit DecoderImpl(const Config& config) : config_(config) {
    embed_tokens = register_module("embed_tokens", torch::nn::Embedding(config.vocab_size, config.hidden_size));
    layers = register_module("layers", torch::nn::ModuleList());
    for (int64_t i = 0; i < config.num_hidden_layers; ++i) layers->push_back(DecoderLayer(config));
    norm = register_module("norm", RMSNorm(config.hidden_size, config.rms_norm_eps));
  }

  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = embed_tokens(tokens);
    const Rotary rotary(tokens.size(1), config_, x.options());
    for (const auto& layer : *layers) x = layer->as<DecoderLayer>()->forward(x, rotary);
    return norm(x);
  }

  torch::nn::Embedding embed_tokens{nullptr};
  torch::nn::ModuleList layers{nullptr};
  RMSNorm norm{nullptr};

 private:
  Config config_;
};
TORCH_MODULE(Decoder);

/// The mean cross-entropy of `logits` {batch, seq, vocab} and the tokens that came next {batch, seq}, in float32.
inline torch::Tensor next_token_loss(const torch::Tensor& logits, const torch::Tensor& targets) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1).to(torch::kFloat32), targets.flatten());
}

/// From tokens {batch, seq} to logits {batch, seq, vocab}: at each position, the scores of the token after it.
class CausalLMImpl : public torch::nn::Module {
 public:
  explicit CausalLMImpl(const Config& config) {
    model = register_module("model", Decoder(config));
    if (!config.tie_word_embeddings) {
      lm_head = register_module(
          "lm_head", torch::nn::Linear(torch::nn::LinearOptions(config.hidden_size, config.vocab_size).bias(false)));
    }
    initialise(config.initializer_range);
  }

  /// With `targets` {batch, seq}, next_token_loss itself: what training asks for, because fused/ computes it without the
  /// logits.
  virtual torch::Tensor forward(const torch::Tensor& tokens, const torch::Tensor& targets = {}) {
    const auto logits = head(model(tokens));
    return targets.defined() ? next_token_loss(logits, targets) : logits;
  }

  /// The weight of the output layer. Tied by use: registering the embedding's a second time would save it twice and
  /// train it apart.
  const torch::Tensor& head_weight() const { return lm_head ? lm_head->weight : model->embed_tokens->weight; }

  Decoder model{nullptr};
  torch::nn::Linear lm_head{nullptr};

 protected:
  torch::Tensor head(const torch::Tensor& hidden) const { return torch::nn::functional::linear(hidden, head_weight()); }

 private:
  void initialise(double range) {
    torch::NoGradGuard no_grad;
    for (auto& parameter : named_parameters()) {
      if (parameter.key().ends_with("bias")) {
        parameter->zero_();
      } else if (!parameter.key().ends_with("norm.weight")) {
        parameter->normal_(0, range);
      }
    }
  }
};
TORCH_MODULE(CausalLM);

}  // namespace qwen
