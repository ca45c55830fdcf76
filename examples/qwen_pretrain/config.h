// The shape of a Qwen2 model: one of three presets, or a config.json of Hugging Face.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

#include "ddp/error.h"

namespace qwen {

/// Names and meanings are those of Hugging Face's Qwen2Config; the values are those of Qwen2.5-0.5B.
struct Config {
  int64_t vocab_size = 151936;
  int64_t hidden_size = 896;
  int64_t intermediate_size = 4864;
  int64_t num_hidden_layers = 24;
  int64_t num_attention_heads = 14;
  int64_t num_key_value_heads = 2;
  int64_t max_position_embeddings = 32768;
  double rms_norm_eps = 1e-6;
  double rope_theta = 1e6;
  double initializer_range = 0.02;
  bool tie_word_embeddings = true;

  int64_t head_dim() const { return hidden_size / num_attention_heads; }
};

/// "tiny", "small" or "qwen2.5-0.5b". Throws ddp::ConfigError for another name.
inline Config preset(std::string_view name) {
  if (name == "tiny") {
    return {.vocab_size = 512,
            .hidden_size = 128,
            .intermediate_size = 352,
            .num_hidden_layers = 4,
            .num_attention_heads = 4,
            .rope_theta = 1e4};
  }
  if (name == "small") {
    return {.vocab_size = 8192,
            .hidden_size = 256,
            .intermediate_size = 704,
            .num_hidden_layers = 4,
            .num_attention_heads = 4,
            .rope_theta = 1e4};
  }
  if (name == "qwen2.5-0.5b") return {};
  throw ddp::ConfigError("preset \"" + std::string(name) + "\" is not known: tiny, small or qwen2.5-0.5b");
}

/// Reads a config.json of model type "qwen2". Throws ddp::ConfigError, naming the key, for a value this model does not
/// implement (sliding windows, scaled rotary positions, another activation) and for a key it does not know.
Config read_config(const std::filesystem::path& file);

}  // namespace qwen
