#include "sample.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>

namespace qwen {

std::string sample(CausalLM model, const std::string& prompt, const SampleOptions& options) {
  constexpr int64_t kBytes = 256;  // a vocabulary may be larger than the tokens that occur in text
  torch::NoGradGuard no_grad;
  model->eval();
  const auto device = model->parameters().front().device();
  auto generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);

  std::string text = prompt;
  for (int64_t i = 0; i < options.bytes; ++i) {
    auto seen = std::string_view(text).substr(text.size() - std::min<size_t>(text.size(), options.context));
    const auto tokens = torch::tensor(std::vector<int64_t>(
        reinterpret_cast<const uint8_t*>(seen.data()), reinterpret_cast<const uint8_t*>(seen.data()) + seen.size()));
    const auto logits = model(tokens.unsqueeze(0).to(device)).select(0, 0).select(0, -1).narrow(0, 0, kBytes);
    const auto [scores, bytes] = logits.cpu().to(torch::kFloat32).topk(std::min(options.top_k, kBytes));
    const auto choice = torch::multinomial((scores / options.temperature).softmax(0), 1, false, generator);
    text += static_cast<char>(bytes.index_select(0, choice).item<int64_t>());
  }
  return text;
}

}  // namespace qwen
