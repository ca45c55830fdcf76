// examples/qwen_pretrain/fused against the plain model of examples/qwen_pretrain/model.h: loss, logits, gradients.
#include <torch/torch.h>

#include <cmath>

#include "../../examples/qwen_pretrain/fused/model.h"
#include "../../examples/qwen_pretrain/options.h"
#include "support/catch.h"

namespace {

using ddp::test::ContainsSubstring;
using ddp::test::message_of;
using qwen::CausalLM;
using qwen::Config;
using torch::Tensor;

struct Pair {
  mutable CausalLM plain{nullptr}, fused{nullptr};  // handles, whose calls are not const
};

// The same weights in both. Biases and norms are off their initial 0 and 1, so that an error in them shows.
Pair make_pair(const Config& config, const qwen::fused::Blocking& blocking = {}, torch::Dtype type = torch::kFloat32) {
  Pair pair{CausalLM(config), qwen::fused::make_causal_lm(config, blocking)};
  const torch::NoGradGuard no_grad;
  const auto others = pair.fused->named_parameters();
  for (auto& parameter : pair.plain->named_parameters()) {
    if (parameter.key().ends_with("bias") || parameter.key().ends_with("norm.weight")) {
      parameter->add_(torch::randn_like(*parameter), 0.2);
    }
    parameter->copy_(parameter->to(torch::kBFloat16));  // so that bfloat16 has the same weights
    others[parameter.key()].copy_(*parameter);
  }
  pair.plain->to(type), pair.fused->to(type);
  return pair;
}

Config make_config(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t vocab, bool tied) {
  return {.vocab_size = vocab,
          .hidden_size = heads * head_dim,
          .intermediate_size = 3 * heads * head_dim + 5,
          .num_hidden_layers = 2,
          .num_attention_heads = heads,
          .num_key_value_heads = kv_heads,
          .rope_theta = 1e4,
          .initializer_range = 1 / std::sqrt(static_cast<double>(heads * head_dim)),
          .tie_word_embeddings = tied};
}

struct Batch {
  Tensor tokens, targets;
};

Batch make_batch(int64_t batch, int64_t seq, int64_t vocab, double masked = 0) {
  Batch made{torch::randint(vocab, {batch, seq}, torch::kInt64), torch::randint(vocab, {batch, seq}, torch::kInt64)};
  if (masked > 0) {
    made.targets.masked_fill_(torch::rand({batch, seq}) < masked, -100);
    made.targets.view(-1)[0] = 1;  // at least one counts
  }
  return made;
}

double norm_of(const Tensor& x) { return x.to(torch::kFloat64).norm().item<double>(); }

double difference(const Tensor& a, const Tensor& b) {
  return norm_of(a.to(torch::kFloat64) - b.to(torch::kFloat64)) / std::max(norm_of(b), 1e-30);
}

// The largest difference of two gradients, relative to the largest gradient of the model. Each must agree by itself, but
// for what rounding leaves of gradients that are small by cancellation: that of k's bias is almost 0.
double gradient_difference(const CausalLM& a, const CausalLM& b) {
  double largest = 0, off = 0;
  const auto others = b->named_parameters();
  for (const auto& parameter : b->named_parameters()) largest = std::max(largest, norm_of(parameter.value().grad()));
  for (const auto& parameter : a->named_parameters()) {
    const auto &mine = parameter.value().grad(), &other = others[parameter.key()].grad();
    INFO(parameter.key());
    REQUIRE(mine.defined());
    REQUIRE(mine.sizes() == other.sizes());
    const double gap = norm_of(mine.to(torch::kFloat64) - other.to(torch::kFloat64));
    CHECK(gap <= 1e-5 * norm_of(other) + 1e-6 * largest);
    off = std::max(off, gap);
  }
  return off / largest;
}

void zero_grad(const Pair& pair) { pair.plain->zero_grad(), pair.fused->zero_grad(); }

void check_equal(const Pair& pair, const Batch& batch) {
  zero_grad(pair);
  {
    const torch::NoGradGuard no_grad;
    const auto logits = pair.fused(batch.tokens);
    CHECK(difference(logits, pair.plain(batch.tokens)) < 1e-5);
    const auto loss = pair.fused(batch.tokens, batch.targets);
    CHECK_FALSE(loss.requires_grad());
    CHECK(difference(loss, pair.plain(batch.tokens, batch.targets)) < 1e-5);
  }
  const auto loss = pair.fused(batch.tokens, batch.targets), expected = pair.plain(batch.tokens, batch.targets);
  CHECK(loss.scalar_type() == torch::kFloat32);
  CHECK(difference(loss.detach(), expected.detach()) < 1e-5);
  loss.backward(), expected.backward();
  CHECK(gradient_difference(pair.fused, pair.plain) < 1e-5);
}

TEST_CASE("fused Qwen2 in float32: logits, loss and all gradients are the plain model's") {
  torch::manual_seed(0);
  struct Shape {
    int64_t heads, kv_heads, head_dim, vocab, batch, seq;
    bool tied;
    double masked;
  };
  for (const Shape& s : std::vector<Shape>{{1, 1, 2, 3, 1, 1, true, 0},
                                           {2, 1, 4, 17, 3, 7, true, 0.3},
                                           {4, 2, 6, 101, 2, 33, false, 0},
                                           {8, 8, 8, 64, 1, 33, true, 0.5},
                                           {8, 1, 4, 300, 2, 7, false, 0.9},
                                           {6, 3, 10, 129, 3, 33, true, 0},
                                           {5, 5, 16, 33, 2, 256, true, 0.1},
                                           {4, 2, 32, 515, 3, 256, false, 0},
                                           {8, 4, 16, 1000, 1, 130, true, 0},
                                           {14, 2, 64, 257, 1, 65, true, 0.2}}) {
    INFO("heads " << s.heads << '/' << s.kv_heads << " of " << s.head_dim << ", vocab " << s.vocab << ", batch "
                  << s.batch << ", seq " << s.seq << ", tied " << s.tied << ", masked " << s.masked);
    const auto pair = make_pair(make_config(s.heads, s.kv_heads, s.head_dim, s.vocab, s.tied));
    check_equal(pair, make_batch(s.batch, s.seq, s.vocab, s.masked));
  }
}

TEST_CASE("fused Qwen2: blocks of any size, that divide nothing") {
  torch::manual_seed(1);
  for (const qwen::fused::Blocking& blocking :
       std::vector<qwen::fused::Blocking>{{1, 1}, {7, 10}, {16, 33}, {33, 99}}) {
    INFO(blocking.queries << " queries, " << blocking.loss_rows << " rows of the loss");
    check_equal(make_pair(make_config(4, 2, 6, 101, true), blocking), make_batch(3, 33, 101, 0.2));
  }
}

TEST_CASE("fused Qwen2 in bfloat16 is as near to float32 as the plain model in bfloat16") {
  torch::manual_seed(2);
  for (const bool tied : {true, false}) {
    for (const int64_t loss_rows : {0, 50}) {
      INFO("tied " << tied << ", loss rows " << loss_rows);
      const auto config = make_config(4, 2, 16, 301, tied);
      const auto narrow = make_pair(config, {.loss_rows = loss_rows}, torch::kBFloat16);
      CausalLM exact(config);
      const auto weights = narrow.plain->named_parameters();
      {
        const torch::NoGradGuard no_grad;
        for (auto& parameter : exact->named_parameters()) parameter->copy_(weights[parameter.key()]);
      }
      const auto batch = make_batch(2, 130, 301, 0.1);
      const auto expected = exact(batch.tokens, batch.targets);
      expected.backward();
      const auto loss = narrow.fused(batch.tokens, batch.targets), plain = narrow.plain(batch.tokens, batch.targets);
      loss.backward(), plain.backward();
      CHECK(difference(loss.detach(), expected.detach()) < 2e-3);
      CHECK(difference(plain.detach(), expected.detach()) < 2e-3);
      {
        const torch::NoGradGuard no_grad;
        CHECK(difference(narrow.fused(batch.tokens, batch.targets), loss) < 1e-6);
        const auto logits = exact(batch.tokens);
        CHECK(difference(narrow.fused(batch.tokens), logits) < 1.1 * difference(narrow.plain(batch.tokens), logits));
      }
      const auto mine = narrow.fused->named_parameters(), theirs = narrow.plain->named_parameters();
      double sum = 0, plain_sum = 0;
      for (const auto& parameter : exact->named_parameters()) {
        INFO(parameter.key());
        CHECK(mine[parameter.key()].grad().scalar_type() == torch::kBFloat16);
        if (parameter.key().ends_with("k_proj.bias")) continue;
        const double off = difference(mine[parameter.key()].grad(), parameter.value().grad());
        const double plain_off = difference(theirs[parameter.key()].grad(), parameter.value().grad());
        CHECK(off < 1.5 * plain_off + 1e-3);
        sum += off, plain_sum += plain_off;
      }
      CHECK(sum < 1.1 * plain_sum);
    }
  }
}

TEST_CASE("fused Qwen2: several forward passes before their backward passes, in any order, two models at once") {
  torch::manual_seed(3);
  const auto config = make_config(4, 2, 8, 77, true);
  const auto one = make_pair(config), two = make_pair(config);
  const std::vector<Batch> batches{make_batch(2, 33, 77), make_batch(2, 33, 77, 0.4), make_batch(1, 9, 77)};
  for (const bool backwards : {false, true}) {
    zero_grad(one), zero_grad(two);
    std::vector<Tensor> losses, expected;
    for (const auto& batch : batches) {
      for (const Pair* pair : {&one, &two}) {
        losses.push_back(pair->fused(batch.tokens, batch.targets));
        const auto dropped = pair->fused(batch.tokens, batch.targets);  // a graph that nobody uses
        (pair->plain(batch.tokens, batch.targets) / 3).backward();
        const torch::NoGradGuard no_grad;
        pair->fused(batch.tokens);
      }
    }
    if (backwards) std::reverse(losses.begin(), losses.end());
    for (const auto& loss : losses) (loss / 3).backward();
    CHECK(gradient_difference(one.fused, one.plain) < 1e-5);
    CHECK(gradient_difference(two.fused, two.plain) < 1e-5);
  }
}

TEST_CASE("fused Qwen2: gradients pass through logits too, and reach frozen models' inputs only") {
  torch::manual_seed(4);
  const auto pair = make_pair(make_config(4, 4, 8, 50, false));
  const auto batch = make_batch(2, 10, 50);
  for (CausalLM model : {pair.plain, pair.fused}) {
    qwen::next_token_loss(model(batch.tokens), batch.targets).backward();
  }
  CHECK(gradient_difference(pair.fused, pair.plain) < 1e-5);

  zero_grad(pair);
  for (CausalLM model : {pair.plain, pair.fused}) {
    for (auto& parameter : model->named_parameters()) {
      parameter->set_requires_grad(parameter.key().find("q_proj") != std::string::npos);
    }
    model(batch.tokens, batch.targets).backward();
  }
  const auto others = pair.plain->named_parameters();
  for (const auto& parameter : pair.fused->named_parameters()) {
    INFO(parameter.key());
    const auto& expected = others[parameter.key()].grad();
    REQUIRE(parameter.value().grad().defined() == expected.defined());
    if (expected.defined()) CHECK(difference(parameter.value().grad(), expected) < 1e-4);
  }
}

TEST_CASE("fused Qwen2: memory is that of one step, and follows the shape") {
  torch::manual_seed(5);
  const auto model = std::make_shared<qwen::fused::CausalLMImpl>(make_config(4, 2, 8, 77, true));
  const auto step = [&](int64_t batch, int64_t seq) {
    const auto made = make_batch(batch, seq, 77);
    model->forward(made.tokens, made.targets).backward();
    return model->workspace().bytes();
  };
  step(2, 64);
  const int64_t first = step(2, 64);
  for (int i = 0; i < 5; ++i) CHECK(step(2, 64) == first);
  const int64_t small = step(1, 8);
  CHECK(small < first / 8);
  const auto kept = model->forward(torch::zeros({1, 8}, torch::kInt64), torch::zeros({1, 8}, torch::kInt64));
  const auto before = kept.item<float>();
  step(2, 64), step(1, 8);
  CHECK(step(1, 8) <= 2 * small + 4096);  // `kept` still holds what its backward needs
  CHECK(kept.item<float>() == before);
  CHECK_NOTHROW(kept.backward());
  {
    const c10::InferenceMode inference;
    model->forward(torch::zeros({1, 5}, torch::kInt64));
  }
  CHECK(std::isfinite(static_cast<double>(step(1, 5))));
}

TEST_CASE("fused Qwen2: what cannot be done is said") {
  torch::manual_seed(6);
  const auto pair = make_pair(make_config(4, 2, 8, 50, true));
  auto batch = make_batch(2, 10, 50);
  const auto loss = pair.fused(batch.tokens, batch.targets);
  loss.backward({}, /*retain_graph=*/true);
  CHECK_THAT(message_of<c10::Error>([&] { loss.backward(); }), ContainsSubstring("second backward"));
  CHECK_THAT(message_of<c10::Error>([&] {
               const auto again = pair.fused(batch.tokens, batch.targets);
               torch::autograd::grad({again}, {pair.fused->parameters().front()}, {}, std::nullopt,
                                     /*create_graph=*/true);
             }),
             ContainsSubstring("second derivatives"));
  batch.targets[1][3] = 50;
  CHECK_THAT(message_of<c10::Error>([&] { pair.fused(batch.tokens, batch.targets); }),
             ContainsSubstring("target 50 is outside the vocabulary of 50"));
  batch.targets[1][3] = -1;
  CHECK_THROWS_AS(pair.fused(batch.tokens, batch.targets), c10::Error);

  // Nothing counts: no mean, and no gradient. As in torch.
  batch.targets.fill_(-100);
  zero_grad(pair);
  for (CausalLM model : {pair.plain, pair.fused}) {
    const auto none = model(batch.tokens, batch.targets);
    CHECK(std::isnan(none.item<float>()));
  }

  std::vector<std::string> arguments{"qwen_pretrain", "--random-data", "--kernels", "fast"};
  std::vector<char*> argv;
  for (auto& argument : arguments) argv.push_back(argument.data());
  CHECK_THAT(message_of<ddp::ConfigError>([&] { qwen::parse_options(4, argv.data()); }),
             ContainsSubstring("auto or fused or plain"));
}

TEST_CASE("fused Qwen2: the same names and parameters, and any other type takes the plain path") {
  torch::manual_seed(7);
  const auto config = make_config(4, 2, 8, 50, true);
  auto pair = make_pair(config);
  const auto names = pair.plain->named_parameters().keys();
  CHECK(pair.fused->named_parameters().keys() == names);
  const auto batch = make_batch(2, 10, 50);
  auto* fused = dynamic_cast<qwen::fused::CausalLMImpl*>(pair.fused.get());
  REQUIRE(fused);
  CHECK(fused->is_fused());
  pair.plain->to(torch::kFloat64), pair.fused->to(torch::kFloat64);
  CHECK_FALSE(fused->is_fused());
  CHECK(torch::equal(pair.fused(batch.tokens, batch.targets), pair.plain(batch.tokens, batch.targets)));
  pair.plain->to(torch::kFloat32), pair.fused->to(torch::kFloat32);
  check_equal(pair, batch);
}

TEST_CASE("fused Qwen2: more threads, the same numbers") {
  torch::manual_seed(8);
  const auto config = make_config(4, 2, 16, 301, true);
  const auto pair = make_pair(config);
  const auto batch = make_batch(2, 256, 301, 0.2);
  struct Restore {
    int before = at::get_num_threads();
    ~Restore() { at::set_num_threads(before); }
  } restore;
  for (const int threads : {3, 16}) {  // fewer than there are groups of heads, and more
    at::set_num_threads(threads);
    check_equal(pair, batch);
  }
}

TEST_CASE("fused Qwen2: 30 steps of training have the plain model's losses") {
  torch::manual_seed(9);
  const auto pair = make_pair(make_config(4, 2, 16, 256, true));
  std::vector<Batch> batches;
  for (int i = 0; i < 8; ++i) batches.push_back(make_batch(2, 32, 256, 0.1));
  const auto losses = [&](CausalLM model) {
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3).weight_decay(0.01));
    std::vector<double> found;
    for (size_t step = 0; step < 30; ++step) {
      model->zero_grad();
      double sum = 0;
      for (size_t micro = 0; micro < 2; ++micro) {
        const auto& batch = batches[(2 * step + micro) % batches.size()];
        const auto loss = model(batch.tokens, batch.targets) / 2;
        loss.backward();
        sum += loss.item<double>();
      }
      torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
      optimizer.step();
      found.push_back(sum);
    }
    return found;
  };
  const auto plain = losses(pair.plain), fused = losses(pair.fused);
  CHECK(plain.back() < plain.front() - 0.5);
  for (size_t step = 0; step < plain.size(); ++step) {
    INFO(step);
    CHECK(std::abs(fused[step] - plain[step]) < 1e-4);
  }
}

}  // namespace
