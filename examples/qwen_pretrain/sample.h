// Text from a trained model, byte by byte.
#pragma once

#include <string>

#include "model.h"

namespace qwen {

struct SampleOptions {
  int64_t bytes = 400;
  int64_t context = 256;     ///< the model sees at most so many bytes back
  double temperature = 0.8;  ///< below 1: likely bytes become likelier
  int64_t top_k = 40;        ///< drawn among so many of the likeliest
  uint64_t seed = 42;
};

/// `prompt`, which is not empty, and `options.bytes` more. Leaves the model in eval mode.
std::string sample(CausalLM model, const std::string& prompt, const SampleOptions& options = {});

}  // namespace qwen
