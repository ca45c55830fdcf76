// The fused optimizers against those of torch::optim.
#include "ddp/fused_adam.h"

#include <torch/torch.h>

#include "ddp/error.h"
#include "support/catch.h"

using namespace ddp::test;
using torch::Tensor;

namespace {

std::vector<Tensor> parameters(torch::ScalarType dtype = torch::kFloat) {
  torch::manual_seed(5);
  std::vector<Tensor> made;
  for (const auto& shape : std::vector<std::vector<int64_t>>{{3, 5}, {7}, {}}) {
    made.push_back(torch::randn(shape).to(dtype).requires_grad_(true));
  }
  return made;
}

Tensor loss_of(const std::vector<Tensor>& parameters) {
  Tensor loss = torch::zeros({});
  for (const auto& p : parameters) loss = loss + (p.to(torch::kFloat) - 0.3).square().sum() * 1.7;
  return loss;
}

// The largest difference after `steps` steps of both.
template <class A, class B>
double difference(A& a, const std::vector<Tensor>& of_a, B& b, const std::vector<Tensor>& of_b, int steps) {
  for (int i = 0; i < steps; ++i) {
    a.zero_grad(), b.zero_grad();
    loss_of(of_a).backward(), loss_of(of_b).backward();
    a.step(), b.step();
  }
  double worst = 0;
  for (size_t i = 0; i < of_a.size(); ++i)
    worst = std::max(worst, (of_a[i] - of_b[i]).abs().max().template item<double>());
  return worst;
}

}  // namespace

TEST_CASE("fused Adam and AdamW follow torch::optim's") {
  for (const bool amsgrad : {false, true}) {
    const auto p = parameters(), q = parameters();
    ddp::Adam fused(p, {.lr = 0.05, .betas = {0.8, 0.99}, .weight_decay = 0.1, .amsgrad = amsgrad});
    torch::optim::Adam plain(q, torch::optim::AdamOptions(0.05).betas({0.8, 0.99}).weight_decay(0.1).amsgrad(amsgrad));
    CHECK(difference(fused, p, plain, q, 10) < 1e-5);
    const auto r = parameters(), s = parameters();
    ddp::AdamW fused_w(r, {.lr = 0.05, .weight_decay = 0.1, .amsgrad = amsgrad});
    torch::optim::AdamW plain_w(s, torch::optim::AdamWOptions(0.05).weight_decay(0.1).amsgrad(amsgrad));
    CHECK(difference(fused_w, r, plain_w, s, 10) < 1e-5);
    CHECK((p[0] - r[0]).abs().max().item<double>() > 1e-3);  // the two decays are not the same
  }
}

TEST_CASE("a parameter without a gradient is left alone, and groups keep their own options") {
  const auto p = parameters();
  const Tensor untouched = p[1].detach().clone();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<Tensor>{p[0]}, std::make_unique<torch::optim::AdamWOptions>(0.5));
  groups.emplace_back(std::vector<Tensor>{p[1], p[2]});
  ddp::AdamW optim(groups, {.lr = 1e-3, .weight_decay = 0});
  const Tensor before0 = p[0].detach().clone(), before2 = p[2].detach().clone();
  (p[0].sum() + p[2].sum()).backward();
  optim.step();
  CHECK(torch::equal(p[1], untouched));
  CHECK((p[0] - before0).abs().max().item<double>() > 0.4);
  CHECK((p[2] - before2).abs().max().item<double>() == Approx(1e-3).epsilon(1e-3));
}

TEST_CASE("bfloat16 parameters and gradients that are views of a bucket") {
  auto p = parameters(torch::kBFloat16);
  ddp::AdamW optim(p, {.lr = 0.1});
  loss_of(p).backward();
  const Tensor bucket = torch::ones({15}, torch::kBFloat16);
  p[0].mutable_grad() = bucket.narrow(0, 0, 15).view({3, 5});
  const Tensor before = p[0].detach().clone();
  optim.step();
  CHECK(!torch::equal(p[0], before));
  optim.zero_grad(/*set_to_none=*/false);
  CHECK(bucket.sum().item<float>() == 0);
  optim.zero_grad();
  CHECK(!p[0].grad().defined());
}

TEST_CASE("closures are evaluated with gradients, sparse gradients are refused") {
  const auto p = parameters();
  ddp::Adam optim(p, {.lr = 0.1});
  torch::NoGradGuard no_grad;
  const Tensor loss = optim.step([&] {
    optim.zero_grad();
    Tensor l = loss_of(p);
    l.backward();
    return l;
  });
  CHECK(loss.item<float>() > 0);
  CHECK(p[0].grad().defined());
  Tensor table = torch::ones({4, 2}).requires_grad_(true);
  ddp::Adam sparse({table});
  {
    torch::AutoGradMode grad(true);
    torch::embedding(table, torch::tensor({1}), -1, false, /*sparse=*/true).sum().backward();
  }
  CHECK_THROWS_AS(sparse.step(), ddp::ConfigError);
}
