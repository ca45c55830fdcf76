#include "ddp/lr_schedule.h"

#include <torch/torch.h>

#include "ddp/error.h"
#include "ddp/log.h"
#include "support/catch.h"

using namespace ddp;
using ddp::test::Approx;
using ddp::test::ContainsSubstring;

namespace {

torch::optim::SGD sgd(double lr) { return torch::optim::SGD({torch::zeros({1})}, torch::optim::SGDOptions(lr)); }
double lr_of(torch::optim::Optimizer& optimizer, size_t group = 0) {
  return optimizer.param_groups()[group].options().get_lr();
}

struct Lines {
  Lines() {
    log::set_sink([this](auto, std::string_view line) { text += line; });
  }
  ~Lines() { log::set_sink({}); }
  std::string text;
};

}  // namespace

TEST_CASE("curves by hand, clamped past their end") {
  CHECK(lr::warmup(4)(0) == 0.25);
  CHECK(lr::warmup(4)(3) == 1.0);
  CHECK(lr::warmup(4)(1'000'000) == 1.0);
  CHECK(lr::warmup(0)(0) == 1.0);
  CHECK(lr::constant()(7) == 1.0);
  CHECK(lr::cosine(10)(0) == 1.0);
  CHECK(lr::cosine(10)(5) == Approx(0.5));
  CHECK(lr::cosine(10)(10) == 0.0);
  CHECK(lr::cosine(10, 0.1)(11) == 0.1);
  CHECK(lr::cosine(10, 0.1)(5) == Approx(0.55));
  CHECK(lr::linear_decay(10)(5) == Approx(0.5));
  CHECK(lr::linear_decay(10, 0.2)(99) == Approx(0.2));
  CHECK(lr::step_decay(3)(2) == 1.0);
  CHECK(lr::step_decay(3)(6) == Approx(0.01));
  CHECK((lr::warmup(4) * lr::step_decay(2, 0.5))(2) == Approx(0.375));
  CHECK((lr::warmup(100) * lr::cosine(10'000)).name() == "warmup(100) * cosine(10000, 0)");
}

TEST_CASE("curves refuse what makes no sense") {
  CHECK_THROWS_AS(lr::warmup(-1), ConfigError);
  CHECK_THROWS_AS(lr::cosine(0), ConfigError);
  CHECK_THROWS_AS(lr::linear_decay(0), ConfigError);
  CHECK_THROWS_AS(lr::step_decay(0), ConfigError);
  CHECK_THROWS_AS(lr::constant()(-1), ConfigError);
}

TEST_CASE("a schedule sets every parameter group from construction on") {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{torch::zeros({1})}, std::make_unique<torch::optim::SGDOptions>(1.0));
  groups.emplace_back(std::vector{torch::zeros({1})}, std::make_unique<torch::optim::SGDOptions>(0.1));
  torch::optim::SGD optimizer(groups, torch::optim::SGDOptions(1.0));
  lr::Schedule schedule(optimizer, lr::warmup(4));
  CHECK(lr_of(optimizer, 0) == Approx(0.25));
  CHECK(lr_of(optimizer, 1) == Approx(0.025));
  schedule.step();
  CHECK(schedule.last_step() == 1);
  CHECK(schedule.lr() == Approx(0.5));
  CHECK(lr_of(optimizer, 1) == Approx(0.05));
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({torch::zeros({1})}));
  CHECK_THROWS_AS(schedule.step(), ConfigError);
}

// B18: cosine over 10 steps, saved at 5, resumed with 20 (0.8536 would be the curve silently rebuilt).
TEST_CASE("a resume keeps the learning rate and refuses another length") {
  auto before = sgd(1.0);
  lr::Schedule saved(before, lr::cosine(10));
  for (int i = 0; i < 5; ++i) saved.step();
  CHECK(lr_of(before) == Approx(0.5));
  State state = saved.state_dict();

  auto same = sgd(1.0);
  lr::Schedule resumed(same, lr::cosine(10));
  resumed.load_state_dict(state);
  CHECK(resumed.last_step() == 5);
  CHECK(lr_of(same) == lr_of(before));
  for (int i = 0; i < 6; ++i) resumed.step();
  CHECK(lr_of(same) == 0.0);  // step 11 of 10

  auto other = sgd(1.0);
  lr::Schedule longer(other, lr::cosine(20));
  CHECK_THAT(test::message_of<DataError>([&] { longer.load_state_dict(state); }),
             ContainsSubstring("cosine(10, 0)") && ContainsSubstring("cosine(20, 0)"));
  CHECK(longer.last_step() == 0);

  Lines lines;
  lr::Schedule allowed(other, lr::cosine(20), {.allow_change = true});
  allowed.load_state_dict(state);
  CHECK(lr_of(other) == Approx(0.8536).epsilon(1e-4));
  CHECK_THAT(lines.text, ContainsSubstring("was cosine(10, 0) and is cosine(20, 0) now"));
}

// B18: W=2 -> 1 with linear scaling.
TEST_CASE("another effective batch and base learning rate are reported, the checkpoint's rate is kept unless allowed") {
  lr::BatchPlan two{.micro_batch = 256, .accumulation = 2, .world_size = 2, .base_batch = 256}, one = two;
  one.world_size = 1;
  auto before = sgd(lr::linear(0.1, two));
  State state = lr::Schedule(before, lr::constant(), {.plan = two}).state_dict();

  for (bool allow : {false, true}) {
    Lines lines;
    auto after = sgd(lr::linear(0.1, one));
    lr::Schedule schedule(after, lr::constant(), {.allow_change = allow, .plan = one});
    schedule.load_state_dict(state);
    CHECK(lr_of(after) == Approx(allow ? 0.2 : 0.4));
    CHECK_THAT(lines.text, ContainsSubstring("2 ranks = 1024 rows") && ContainsSubstring("1 rank = 512 rows") &&
                               ContainsSubstring("was 0.4 and is 0.2"));
  }
}

TEST_CASE("a state of another optimizer is refused") {
  auto a = sgd(1.0);
  lr::Schedule schedule(a, lr::constant());
  State state = schedule.state_dict();
  state.set("base_lrs", State::list({1.0, 2.0}));
  CHECK_THAT(test::message_of<DataError>([&] { schedule.load_state_dict(state); }),
             ContainsSubstring("2 parameter groups, the optimizer 1"));
  state = schedule.state_dict();
  state.set("step", -1);
  CHECK_THROWS_AS(schedule.load_state_dict(state), DataError);
}
