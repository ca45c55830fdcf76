// ddp::SGD against torch::optim::SGD.
#include "ddp/fused_sgd.h"

#include <torch/torch.h>

#include "ddp/error.h"
#include "support/catch.h"

using namespace ddp::test;
using torch::Tensor;

namespace {

std::vector<Tensor> parameters() {
  torch::manual_seed(5);
  return {torch::randn({3, 5}).requires_grad_(true), torch::randn({7}).requires_grad_(true)};
}

void step(torch::optim::Optimizer& optimizer, const std::vector<Tensor>& parameters, bool first_only) {
  for (const Tensor& p : parameters) p.mutable_grad().reset();
  Tensor loss = (parameters[0] - 0.3).square().sum();
  if (!first_only) loss = loss + parameters[1].pow(4).sum();
  loss.backward();
  optimizer.step();
}

}  // namespace

TEST_CASE("fused SGD follows torch::optim's, also where a parameter gets its first gradient late") {
  const std::vector<ddp::SGDOptions> all{{.lr = 0.02},
                                         {.lr = 0.02, .momentum = 0.9},
                                         {.lr = 0.02, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.1},
                                         {.lr = 0.02, .momentum = 0.8, .weight_decay = 0.1, .nesterov = true}};
  for (const auto& options : all) {
    const auto p = parameters(), q = parameters();
    ddp::SGD fused(p, options);
    torch::optim::SGD plain(q, torch::optim::SGDOptions(options.lr)
                                   .momentum(options.momentum)
                                   .dampening(options.dampening)
                                   .weight_decay(options.weight_decay)
                                   .nesterov(options.nesterov));
    for (int i = 0; i < 8; ++i) step(fused, p, i < 3), step(plain, q, i < 3);
    for (int i : {0, 1}) CHECK(torch::allclose(p[i], q[i], 1e-5, 1e-6));
    CHECK(!torch::allclose(p[0], parameters()[0], 1e-2, 1e-2));
  }
}

TEST_CASE("fused SGD refuses sparse gradients, and clears gradients as asked") {
  auto p = parameters();
  ddp::SGD optim(p, {.lr = 0.1});
  p[0].mutable_grad() = torch::zeros({3, 5}).to_sparse();
  CHECK_THAT(message_of<ddp::ConfigError>([&] { optim.step(); }), ContainsSubstring("[ddp::SGD] a gradient is sparse"));
  p[0].mutable_grad() = torch::ones({3, 5});
  optim.zero_grad(/*set_to_none=*/false);
  CHECK(p[0].grad().abs().max().item<float>() == 0);
  optim.zero_grad();
  CHECK(!p[0].grad().defined());
}

TEST_CASE("fused SGD maximizes as Python's: the negated gradient, before weight decay") {
  const auto p = parameters(), q = parameters();
  ddp::SGD up(p, {.lr = 0.02, .momentum = 0.9, .weight_decay = 0.1, .maximize = true});
  torch::optim::SGD down(q, torch::optim::SGDOptions(0.02).momentum(0.9).weight_decay(0.1));
  for (int i = 0; i < 4; ++i) {
    for (const auto& each : {p, q}) {
      for (const Tensor& one : each) one.mutable_grad().reset();
    }
    (p[0].square().sum() + p[1].sum()).backward();
    (-(q[0].square().sum() + q[1].sum())).backward();
    up.step(), down.step();
  }
  for (int i : {0, 1}) CHECK(torch::allclose(p[i], q[i], 1e-5, 1e-6));
  CHECK(p[0].norm().item<float>() > parameters()[0].norm().item<float>());
}
