// The fused optimizers against those of torch::optim.
#include "ddp/fused_adam.h"

#include <torch/torch.h>

#include "ddp/error.h"
#include "ddp/stateful.h"
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

TEST_CASE("maximize climbs: the steps of a minimisation of the negated loss") {
  for (const double decay : {0.0, 0.1}) {
    const auto p = parameters(), q = parameters(), r = parameters(), s = parameters();
    ddp::Adam up(p, {.lr = 0.05, .weight_decay = decay, .amsgrad = true, .maximize = true});
    torch::optim::Adam down(q, torch::optim::AdamOptions(0.05).weight_decay(decay).amsgrad(true));
    ddp::AdamW up_w(r, {.lr = 0.05, .weight_decay = decay, .maximize = true});
    torch::optim::AdamW down_w(s, torch::optim::AdamWOptions(0.05).weight_decay(decay));
    const double before = loss_of(p).item<double>();
    for (int i = 0; i < 5; ++i) {
      for (const auto& each : {p, q, r, s}) {
        for (const auto& one : each) one.mutable_grad().reset();
      }
      loss_of(p).backward(), loss_of(r).backward();
      (-loss_of(q)).backward(), (-loss_of(s)).backward();
      up.step(), down.step(), up_w.step(), down_w.step();
    }
    CHECK(loss_of(p).item<double>() > before);
    for (size_t i = 0; i < p.size(); ++i) {
      CHECK(torch::allclose(p[i], q[i], 1e-5, 1e-6));
      CHECK(torch::allclose(r[i], s[i], 1e-5, 1e-6));
    }
  }
}

TEST_CASE("maximize is kept in checkpoints, and never silently dropped") {
  const auto p = parameters();
  ddp::AdamW up(p, {.lr = 0.1, .maximize = true});
  const ddp::State saved = ddp::state_dict(up);
  CHECK(saved.at("param_groups").as_list()[0].at("maximize") == ddp::State(true));
  CHECK(up.maximizes(0));

  ddp::AdamW fresh(p, {.lr = 0.1});
  CHECK(ddp::state_dict(fresh).at("param_groups").as_list()[0].at("maximize") == ddp::State(false));
  const auto remarks = ddp::check_state_dict(fresh, saved);
  CHECK(remarks == ddp::Remarks{"maximize true of the file replaces false"});
  CHECK(!fresh.maximizes(0));  // only checked
  const ddp::LoadOptions keep{.optimizer_options_from_file = false};
  CHECK_THAT(
      message_of<ddp::CheckpointError>([&] { ddp::load_state_dict(fresh, saved, keep); }),
      ContainsSubstring("param_groups[0] maximizes and the optimizer minimizes; make it with {.maximize = true}"));
  ddp::load_state_dict(fresh, saved);
  CHECK(fresh.maximizes(0));
  const double before = loss_of(p).item<double>();
  loss_of(p).backward();
  fresh.step();
  CHECK(loss_of(p).item<double>() > before);

  torch::optim::AdamW plain(p);
  CHECK_THAT(message_of<ddp::CheckpointError>([&] { ddp::load_state_dict(plain, saved); }),
             ContainsSubstring("param_groups[0] maximizes"));
  // A file without the key, as older versions of PyTorch wrote: the program's value stays.
  ddp::State::Dict group;
  for (const auto& [key, value] : saved.at("param_groups").as_list()[0].as_dict()) {
    if (!(key == ddp::State("maximize"))) group.items.emplace_back(key, value);
  }
  ddp::State older = saved;
  older.set("param_groups", ddp::State::list({group}));
  ddp::load_state_dict(up, older);
  CHECK(up.maximizes(0));
}

TEST_CASE("groups can be told apart in what they maximize") {
  const auto p = parameters();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<Tensor>{p[0]});
  groups.emplace_back(std::vector<Tensor>{p[1]});
  ddp::Adam optim(groups, {.lr = 0.1});
  optim.set_maximize(1, true);
  CHECK(!optim.maximizes(0));
  const Tensor before0 = p[0].detach().clone(), before1 = p[1].detach().clone();
  (p[0].sum() + p[1].sum()).backward();
  optim.step();
  CHECK((p[0] < before0).all().item<bool>());
  CHECK((p[1] > before1).all().item<bool>());
}

TEST_CASE("a gradient laid out in another way than its parameter gives the same update") {
  for (const bool channels_last : {false, true}) {
    torch::manual_seed(3);
    Tensor p = torch::randn({2, 3, 4, 5}), gradient = torch::randn({2, 3, 4, 5});
    if (channels_last) p = p.contiguous(torch::MemoryFormat::ChannelsLast);
    Tensor q = p.clone();
    p.requires_grad_(true), q.requires_grad_(true);
    p.mutable_grad() = gradient.transpose(0, 3).contiguous().transpose(0, 3);
    q.mutable_grad() = torch::empty_like(q, torch::MemoryFormat::Preserve).copy_(gradient);
    REQUIRE(p.grad().strides() != q.grad().strides());
    ddp::AdamW a(std::vector<Tensor>{p}, {.lr = 0.1}), b(std::vector<Tensor>{q}, {.lr = 0.1});
    a.step(), b.step();
    CHECK(torch::equal(p, q));
    CHECK(p.strides() == q.strides());
  }
}

TEST_CASE("a parameter that is a view with gaps is refused: the kernels would write into the gaps") {
  const Tensor base = torch::ones({4, 6});
  Tensor p = base.narrow(1, 0, 3).detach().requires_grad_(true);
  p.mutable_grad() = torch::ones({4, 3});
  ddp::Adam optim(std::vector<Tensor>{p});
  CHECK_THAT(message_of<ddp::ConfigError>([&] { optim.step(); }), ContainsSubstring("view with gaps"));
  CHECK(torch::equal(base, torch::ones({4, 6})));
}

TEST_CASE("master weights: the steps of float32, rounded into the parameters") {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    const auto p = parameters(dtype);
    std::vector<Tensor> wide;
    for (const Tensor& one : p) wide.push_back(one.detach().to(torch::kFloat).requires_grad_(true));
    ddp::AdamW with(p, {.lr = 1e-4, .amsgrad = true, .master_weights = true}),
        of_wide(wide, {.lr = 1e-4, .amsgrad = true});
    CHECK(!with.master(p[0]).defined());
    const Tensor first = p[0].detach().clone();
    for (int step = 0; step < 20; ++step) {
      for (size_t i = 0; i < p.size(); ++i) {
        p[i].mutable_grad() = torch::full_like(p[i], 0.1 * (step % 3 + 1)).detach();
        wide[i].mutable_grad() = p[i].grad().to(torch::kFloat);
      }
      with.step(), of_wide.step();
      for (size_t i = 0; i < p.size(); ++i) {
        CHECK(torch::equal(with.master(p[i]), wide[i]));
        CHECK(torch::equal(p[i], wide[i].to(dtype)));
      }
    }
    CHECK(!torch::equal(p[0], first));  // each step alone is lost in the rounding of most elements
  }
  const auto p = parameters();
  ddp::AdamW unused(p, {.master_weights = true});
  loss_of(p).backward();
  unused.step();
  CHECK(!unused.master(p[0]).defined());  // float32 already
}

TEST_CASE("master weights are saved, restored, and follow a parameter that was written to") {
  const auto step = [](ddp::Adam& optim, const std::vector<Tensor>& of, int salt) {
    for (const Tensor& one : of) one.mutable_grad() = torch::full_like(one, 0.01 * (salt + 1)).detach();
    optim.step();
  };
  const auto p = parameters(torch::kBFloat16), q = parameters(torch::kBFloat16);
  ddp::Adam unbroken(p, {.lr = 1e-3, .master_weights = true});
  ddp::State saved;
  for (int i = 0; i < 6; ++i) {
    if (i == 3) {
      ddp::Adam copy(p, {.lr = 1e-3, .master_weights = true});
      ddp::load_state_dict(copy, ddp::state_dict(unbroken));  // state_dict's tensors are live
      saved = ddp::state_dict(copy);
      torch::NoGradGuard no_grad;
      for (size_t k = 0; k < p.size(); ++k) q[k].copy_(p[k]);
    }
    step(unbroken, p, i);
  }
  const ddp::State entry = saved.at("state").as_dict().at(0).second;
  CHECK(entry.at("master").as_tensor().scalar_type() == torch::kFloat);
  CHECK(entry.at("exp_avg").as_tensor().scalar_type() == torch::kFloat);
  ddp::Adam resumed(q, {.lr = 1e-3, .master_weights = true});
  ddp::load_state_dict(resumed, saved);
  for (int i = 3; i < 6; ++i) step(resumed, q, i);
  for (size_t k = 0; k < p.size(); ++k) {
    CHECK(torch::equal(q[k], p[k]));
    CHECK(torch::equal(resumed.master(q[k]), unbroken.master(p[k])));
  }

  ddp::Adam without(q, {.lr = 1e-3});
  CHECK(ddp::check_state_dict(without, saved) ==
        ddp::Remarks{"the float32 masters of the file are not used: the optimizer has no master_weights"});
  ddp::load_state_dict(without, saved);
  step(without, q, 7);
  CHECK(ddp::state_dict(without).at("state").as_dict().at(0).second.find("master") == nullptr);

  {
    torch::NoGradGuard no_grad;
    p[0].fill_(100);
  }
  step(unbroken, p, 8);
  CHECK((p[0] > 90).all().item<bool>());
  CHECK((unbroken.master(p[0]) > 90).all().item<bool>());
}
