// examples/qwen_pretrain: the model by its formulas. tests/golden/qwen_golden_test.cpp compares it with transformers.
#include <torch/torch.h>

#include <cmath>

#include "../../examples/qwen_pretrain/model.h"
#include "../../examples/qwen_pretrain/sample.h"
#include "support/catch.h"

namespace {

using ddp::test::Approx;

const qwen::Config kConfig = {.vocab_size = 260,
                              .hidden_size = 16,
                              .intermediate_size = 24,
                              .num_hidden_layers = 2,
                              .num_attention_heads = 4,
                              .num_key_value_heads = 2};

double largest(const torch::Tensor& t) { return t.abs().max().item<double>(); }

TEST_CASE("RMSNorm is x / sqrt(mean(x^2) + eps) * weight, in float32 for any dtype") {
  qwen::RMSNorm norm(4, 1e-6);
  norm->weight.data().copy_(torch::tensor({1.0, 2.0, 3.0, 4.0}));
  const auto y = norm(torch::tensor({{1.0, -2.0, 2.0, 4.0}}));  // mean square 6.25, root 2.5
  CHECK(largest(y - torch::tensor({{0.4, -1.6, 2.4, 6.4}})) < 1e-6);
  norm->to(torch::kBFloat16);
  const auto rounded = norm(torch::tensor({{1.0, -2.0, 2.0, 4.0}}).to(torch::kBFloat16));
  CHECK(rounded.scalar_type() == torch::kBFloat16);
  CHECK(largest(rounded.to(torch::kFloat) - y) < 6.4 / 128);
}

TEST_CASE("rotary positions turn pairs (i, i + d/2) by the position's angle") {
  qwen::Config config = kConfig;  // head_dim 4: angles p and p / sqrt(theta)
  config.rope_theta = 1e4;
  const qwen::Rotary rotary(3, config, torch::kFloat64);
  const auto x = torch::tensor({1.0, 2.0, 3.0, 4.0}, torch::kFloat64).expand({1, 1, 3, 4});
  const auto y = rotary(x);
  for (int64_t p = 0; p < 3; ++p) {
    const double a = static_cast<double>(p), b = a / 100;
    const auto expected = torch::tensor({std::cos(a) - 3 * std::sin(a), 2 * std::cos(b) - 4 * std::sin(b),
                                         3 * std::cos(a) + std::sin(a), 4 * std::cos(b) + 2 * std::sin(b)},
                                        torch::kFloat64);
    CHECK(largest(y[0][0][p] - expected) < 1e-6);
  }
}

TEST_CASE("a head's key and value serve its group of query heads") {
  torch::manual_seed(0);
  qwen::Attention attention(kConfig);
  const auto x = torch::randn({2, 5, 16});
  const qwen::Rotary rotary(5, kConfig, x.options());

  // By hand: softmax(q k^T / sqrt(d)) v, one query head after the other.
  const auto heads = [](const torch::Tensor& t) { return t.view({2, 5, -1, 4}).transpose(1, 2); };
  const auto q = rotary(heads(attention->q_proj(x))), k = rotary(heads(attention->k_proj(x))),
             v = heads(attention->v_proj(x));
  const auto hidden = torch::full({5, 5}, -INFINITY).triu(1);
  std::vector<torch::Tensor> out;
  for (int64_t head = 0; head < 4; ++head) {
    const auto scores = q.select(1, head).matmul(k.select(1, head / 2).transpose(1, 2)) / 2.0;
    out.push_back((scores + hidden).softmax(-1).matmul(v.select(1, head / 2)));
  }
  CHECK(largest(attention(x, rotary) - attention->o_proj(torch::cat(out, -1))) < 1e-5);
}

TEST_CASE("a token does not see those after it") {
  torch::manual_seed(0);
  qwen::CausalLM model(kConfig);
  const auto tokens = torch::randint(260, {1, 8}, torch::kInt64);
  auto changed = tokens.clone();
  changed[0][5] = (changed[0][5] + 1) % 260;
  const auto difference = (model(tokens) - model(changed)).abs().amax({0, 2});
  CHECK(largest(difference.slice(0, 0, 5)) == 0);
  CHECK(difference.slice(0, 5).min().item<double>() > 0);
}

TEST_CASE("tied embeddings are one parameter with both gradients, untied ones are two") {
  torch::manual_seed(0);
  qwen::CausalLM tied(kConfig);
  CHECK_FALSE(tied->named_parameters().contains("lm_head.weight"));
  const auto tokens = torch::tensor({{1, 2, 3}}, torch::kInt64);
  qwen::next_token_loss(tied(tokens), tokens).backward();
  const auto gradient = tied->model->embed_tokens->weight.grad();
  CHECK(largest(gradient[200]) > 0);  // not an input: this gradient comes from the output side

  qwen::Config config = kConfig;
  config.tie_word_embeddings = false;
  qwen::CausalLM untied(config);
  REQUIRE(untied->named_parameters().contains("lm_head.weight"));
  qwen::next_token_loss(untied(tokens), tokens).backward();
  CHECK(largest(untied->model->embed_tokens->weight.grad()[200]) == 0);
}

TEST_CASE("a fresh model predicts nothing: its loss is ln(vocabulary)") {
  torch::manual_seed(0);
  qwen::CausalLM model(qwen::preset("tiny"));
  const auto tokens = torch::randint(256, {2, 65}, torch::kInt64);
  const auto loss = qwen::next_token_loss(model(tokens.slice(1, 0, 64)), tokens.slice(1, 1));
  CHECK(loss.item<double>() == Approx(std::log(512.0)).margin(0.05));
  int64_t count = 0;
  for (const auto& parameter : model->parameters()) count += parameter.numel();
  CHECK(count == 804992);  // transformers' count for the same sizes
}

TEST_CASE("sampling repeats with its seed, keeps the prompt and writes the bytes asked for") {
  torch::manual_seed(0);
  qwen::CausalLM model(kConfig);
  const auto text = qwen::sample(model, "ab", {.bytes = 20, .context = 8});
  CHECK(text.size() == 22);
  CHECK(text.starts_with("ab"));
  CHECK(text == qwen::sample(model, "ab", {.bytes = 20, .context = 8}));
  CHECK(text != qwen::sample(model, "ab", {.bytes = 20, .context = 8, .seed = 1}));

  // Among the one likeliest byte there is no choice.
  const auto next =
      model(torch::tensor({{97, 98}}, torch::kInt64)).select(0, 0).select(0, -1).narrow(0, 0, 256).argmax();
  CHECK(static_cast<uint8_t>(qwen::sample(model, "ab", {.bytes = 1, .top_k = 1}).back()) == next.item<int64_t>());
}

}  // namespace
