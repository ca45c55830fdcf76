#include "ddp/stateful.h"

#include <torch/torch.h>

#include "ddp/error.h"
#include "support/catch.h"

using ddp::CheckpointError;
using ddp::State;
using ddp::test::Approx;
using ddp::test::ContainsSubstring;
using ddp::test::message_of;

namespace {

// Parameters beside children, children registered before own parameters, buffers.
struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    norm = register_module("norm", torch::nn::BatchNorm1d(2));
    gain = register_parameter("gain", torch::ones({2}));
    table = register_buffer("table", torch::zeros({3}));
  }
  torch::nn::BatchNorm1d norm{nullptr};
  torch::Tensor gain, table;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    block = register_module("block", Block());
    scale = register_parameter("scale", torch::ones({1}));
    head = register_module("head", torch::nn::Linear(2, 1));
  }
  Block block{nullptr};
  torch::Tensor scale;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

std::vector<std::string> keys(const State& dict) {
  std::vector<std::string> names;
  for (const auto& item : dict.as_dict()) names.push_back(item.first.as_string());
  return names;
}

State renamed(const State& dict, const std::function<std::string(const std::string&)>& name) {
  State::Dict out;
  for (const auto& [key, value] : dict.as_dict()) out.items.emplace_back(name(key.as_string()), value);
  return out;
}

torch::nn::Linear one_by_one() {
  torch::nn::Linear model(1, 1);
  torch::NoGradGuard no_grad;
  model->weight.fill_(1);
  model->bias.fill_(0);
  return model;
}

void step(torch::nn::Linear& model, torch::optim::Optimizer& optim) {
  model->zero_grad();
  model(torch::ones({1, 1})).sum().backward();
  optim.step();
}

State set_in(State dict, const char* key, State value) {
  dict.set(key, std::move(value));
  return dict;
}
State only_group(const State& optimizer) { return optimizer.at("param_groups").as_list().at(0); }
State with_group(const State& optimizer, State group) {
  return set_in(optimizer, "param_groups", State::list({std::move(group)}));
}

struct Meter {
  double total = 0;
  State state_dict() const { return State::dict({{"total", total}}); }
  void load_state_dict(const State& state) { total = state.at("total").as_double(); }
};

}  // namespace

TEST_CASE("names come in Python's order: own parameters, own buffers, children") {
  // Python: list(Net().state_dict()), the same registrations in the same order.
  CHECK(keys(ddp::state_dict(*Net())) ==
        std::vector<std::string>{"scale", "block.gain", "block.table", "block.norm.weight", "block.norm.bias",
                                 "block.norm.running_mean", "block.norm.running_var", "block.norm.num_batches_tracked",
                                 "head.weight", "head.bias"});
}

TEST_CASE("a module gets another's values, also under the wrapper's prefix and in another dtype") {
  Net a, b, c;
  for (auto& parameter : a->parameters()) parameter.data().normal_();
  a->block->table.fill_(3);
  const State state = ddp::state_dict(*a);
  CHECK_FALSE(ddp::state_dict(*b) == state);
  ddp::load_state_dict(*b, state);
  CHECK(ddp::state_dict(*b) == state);
  ddp::load_state_dict(*c, renamed(state, [](auto name) { return "module." + name; }));
  CHECK(ddp::state_dict(*c) == state);
  CHECK(ddp::check_state_dict(*b, state).empty());

  b->to(torch::kDouble);
  const auto remarks = ddp::check_state_dict(*b, state);
  REQUIRE(remarks.size() == 1);
  CHECK_THAT(remarks[0], ContainsSubstring("scale (Float to Double)"));
  ddp::load_state_dict(*b, state);
  CHECK(b->head->weight.scalar_type() == torch::kDouble);
  CHECK(b->head->weight.equal(a->head->weight.to(torch::kDouble)));
}

TEST_CASE("what does not fit a module is listed, and nothing is changed") {
  Net a, b;
  for (auto& parameter : a->parameters()) parameter.data().normal_();
  State::Dict odd;
  for (const auto& [key, value] : ddp::state_dict(*a).as_dict()) {
    if (key == State("head.bias")) continue;
    if (key == State("block.gain")) {
      odd.items.emplace_back(key, torch::zeros({5}));
    } else {
      odd.items.emplace_back(key, value);
    }
  }
  odd.items.emplace_back("extra.weight", torch::zeros({1}));
  const State before = ddp::state_dict(*b).as_dict()[0].second.as_tensor().clone();
  const std::string message = message_of<CheckpointError>([&] { ddp::load_state_dict(*b, odd); });
  CHECK_THAT(message, ContainsSubstring("missing: head.bias"));
  CHECK_THAT(message, ContainsSubstring("unexpected: extra.weight"));
  CHECK_THAT(message, ContainsSubstring("block.gain [5] instead of [2]"));
  CHECK(ddp::state_dict(*b).at("scale") == before);
  CHECK_THROWS_AS(ddp::load_state_dict(*b, State::list({})), CheckpointError);
  CHECK_THROWS_AS(ddp::load_state_dict(*b, State::dict()), CheckpointError);
}

TEST_CASE("the optimizers' layout is Python's") {
  // The keys that torch 2.15 prints for AdamW(...).state_dict() and so on after a step.
  auto model = one_by_one();
  torch::optim::AdamW adamw(model->parameters(), torch::optim::AdamWOptions(0.1));
  step(model, adamw);
  State state = ddp::state_dict(adamw);
  CHECK(keys(state) == std::vector<std::string>{"state", "param_groups"});
  CHECK(keys(only_group(state)) == std::vector<std::string>{"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize",
                                                            "foreach", "capturable", "differentiable", "fused",
                                                            "decoupled_weight_decay", "params"});
  CHECK(only_group(state).at("params") == State::list({0, 1}));
  CHECK(only_group(state).at("decoupled_weight_decay") == State(true));
  const State entry = state.at("state").as_dict().at(1).second;
  CHECK(state.at("state").as_dict().at(1).first == State(1));
  CHECK(keys(entry) == std::vector<std::string>{"step", "exp_avg", "exp_avg_sq"});
  CHECK(entry.at("step") == State(torch::tensor(1.0f)));

  torch::optim::Adam adam(model->parameters(), torch::optim::AdamOptions(0.1).amsgrad(true));
  step(model, adam);
  CHECK(only_group(ddp::state_dict(adam)).at("decoupled_weight_decay") == State(false));
  CHECK(keys(ddp::state_dict(adam).at("state").as_dict().at(0).second) ==
        std::vector<std::string>{"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"});

  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  CHECK(ddp::state_dict(sgd).at("state").as_dict().empty());
  step(model, sgd);
  CHECK(keys(only_group(ddp::state_dict(sgd))) ==
        std::vector<std::string>{"lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "foreach",
                                 "differentiable", "fused", "params"});
  CHECK(keys(ddp::state_dict(sgd).at("state").as_dict().at(0).second) == std::vector<std::string>{"momentum_buffer"});
}

TEST_CASE("a fresh optimizer with other options goes on as the first would have (B27)") {
  // Four uninterrupted steps of AdamW(lr 0.1, weight decay 0.5) from w = 1, b = 0 in stock libtorch.
  auto model = one_by_one();
  torch::optim::AdamW optim(model->parameters(), torch::optim::AdamWOptions(0.1).weight_decay(0.5));
  for (int i = 0; i < 3; ++i) step(model, optim);
  const State weights = ddp::state_dict(*model), state = ddp::state_dict(optim);

  auto fresh = one_by_one();
  torch::optim::AdamW other(fresh->parameters(), torch::optim::AdamWOptions(0.001).weight_decay(0));
  ddp::load_state_dict(*fresh, weights);
  const auto remarks = ddp::check_state_dict(other, state);
  REQUIRE(remarks.size() == 2);
  CHECK(remarks[0] == "lr 0.1 of the file replaces 0.001");
  CHECK(remarks[1] == "weight_decay 0.5 of the file replaces 0");
  ddp::load_state_dict(other, state);
  step(fresh, other);
  CHECK(fresh->weight.item<double>() == Approx(0.4435187).margin(1e-7));
  CHECK(fresh->bias.item<double>() == Approx(-0.3709875).margin(1e-7));
  step(model, optim);
  CHECK(fresh->weight.equal(model->weight));

  torch::optim::AdamW mine(fresh->parameters(), torch::optim::AdamWOptions(0.001).weight_decay(0));
  const ddp::LoadOptions keep{.optimizer_options_from_file = false};
  CHECK(ddp::check_state_dict(mine, state, keep).at(0) == "lr stays 0.001, the file has 0.1");
  ddp::load_state_dict(mine, state, keep);
  CHECK(mine.param_groups()[0].options().get_lr() == 0.001);
}

TEST_CASE("what is loaded is a copy, and references to options stay good") {
  auto model = one_by_one();
  torch::optim::AdamW optim(model->parameters(), torch::optim::AdamWOptions(0.1));
  step(model, optim);
  const State state = ddp::state_dict(optim);
  torch::optim::AdamW other(model->parameters(), torch::optim::AdamWOptions(0.2));
  auto& options = other.param_groups()[0].options();
  ddp::load_state_dict(other, state);
  CHECK(options.get_lr() == 0.1);
  const torch::Tensor before = state.at("state").as_dict().at(0).second.at("exp_avg").as_tensor().clone();
  step(model, other);
  CHECK(state.at("state").as_dict().at(0).second.at("exp_avg").as_tensor().equal(before));
}

TEST_CASE("older and other files of Python: step as a number, missing options, lr as a tensor") {
  auto model = one_by_one();
  const State state = State::dict(
      {{"state", State::dict({{7, State::dict({{"step", 3},
                                               {"exp_avg", torch::full({1, 1}, 0.5, torch::kDouble)},
                                               {"exp_avg_sq", torch::full({1, 1}, 0.25)}})}})},
       {"param_groups", State::list({State::dict({{"lr", torch::tensor(0.5)}, {"params", State::list({7, 9})}})})}});
  torch::optim::Adam optim(model->parameters(), torch::optim::AdamOptions(0.1).eps(1e-3));
  ddp::load_state_dict(optim, state);
  const State back = ddp::state_dict(optim);
  CHECK(only_group(back).at("lr") == State(0.5));
  CHECK(only_group(back).at("eps") == State(1e-3));
  REQUIRE(back.at("state").as_dict().size() == 1);
  CHECK(back.at("state").as_dict()[0].second.at("step") == State(torch::tensor(3.0f)));
  CHECK(back.at("state").as_dict()[0].second.at("exp_avg") == State(torch::full({1, 1}, 0.5f)));
  step(model, optim);  // also for the parameter without state
}

TEST_CASE("what does not fit an optimizer is an error, and nothing is changed") {
  auto model = one_by_one();
  torch::optim::Adam optim(model->parameters(), torch::optim::AdamOptions(0.1));
  step(model, optim);
  const State good = ddp::state_dict(optim);
  torch::optim::Adam other(model->parameters(), torch::optim::AdamOptions(0.7));
  auto refused = [&](const State& state) {
    const std::string message = message_of<CheckpointError>([&] { ddp::load_state_dict(other, state); });
    CHECK(other.state().empty());
    CHECK(other.param_groups()[0].options().get_lr() == 0.7);
    return message;
  };
  auto entry = [&](const char* key, State value) {
    State::Dict entries = State::Dict{good.at("state").as_dict()};
    entries.items[0].second.set(key, std::move(value));
    return set_in(good, "state", entries);
  };
  CHECK_THAT(refused(entry("exp_avg", torch::zeros({2, 2}))), ContainsSubstring("parameter 0"));
  CHECK_THAT(refused(entry("exp_avg", torch::zeros({2, 2}))),
             ContainsSubstring("exp_avg is [2, 2], the parameter [1, 1]"));
  CHECK_THAT(refused(entry("exp_avg_sq", State())), ContainsSubstring("exp_avg_sq is missing"));
  CHECK_THAT(refused(entry("step", -1)), ContainsSubstring("step is -1"));
  CHECK_THAT(refused(entry("step", "x")), ContainsSubstring("expected a number"));
  CHECK_THAT(refused(with_group(good, set_in(only_group(good), "params", State::list({0})))),
             ContainsSubstring("1 parameters, here are 2"));
  CHECK_THAT(refused(with_group(good, set_in(only_group(good), "params", State::list({0, 0})))),
             ContainsSubstring("distinct"));
  CHECK_THAT(refused(with_group(good, set_in(only_group(good), "params", State::list({0, 5})))),
             ContainsSubstring("entry 1 that no group names"));
  CHECK_THAT(refused(with_group(good, set_in(only_group(good), "maximize", true))), ContainsSubstring("maximizes"));
  CHECK_THAT(refused(with_group(good, set_in(only_group(good), "amsgrad", true))),
             ContainsSubstring("max_exp_avg_sq is missing"));
  CHECK_THAT(refused(with_group(good, set_in(only_group(good), "betas", 0.9))), ContainsSubstring("betas"));
  CHECK_THAT(refused(set_in(good, "param_groups", State::list({}))), ContainsSubstring("0 param_groups"));
  CHECK_THAT(refused(State::dict()), ContainsSubstring("'state'"));
  CHECK_THAT(refused(State()), ContainsSubstring("'state'"));
}

TEST_CASE("two groups number their parameters through") {
  auto model = one_by_one();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<torch::Tensor>{model->weight});
  groups.emplace_back(std::vector<torch::Tensor>{model->bias}, std::make_unique<torch::optim::SGDOptions>(0.5));
  torch::optim::SGD optim(groups, torch::optim::SGDOptions(0.1).momentum(0.9));
  step(model, optim);
  const State state = ddp::state_dict(optim);
  CHECK(state.at("param_groups").as_list()[1].at("params") == State::list({1}));
  torch::optim::SGD other(groups, torch::optim::SGDOptions(0.1).momentum(0.9));
  ddp::load_state_dict(other, state);
  CHECK(ddp::state_dict(other) == state);
}

TEST_CASE("everything that can be tracked becomes a Stateful, the rest is refused") {
  Meter meter{3};
  const auto any = ddp::stateful(meter);
  const State saved = any.save();
  meter.total = 0;
  any.load(saved);
  CHECK(meter.total == 3);
  CHECK((any.module() == nullptr && any.optimizer() == nullptr));

  Net holder;
  auto pointer = std::make_shared<NetImpl>();
  torch::nn::LinearImpl value(1, 1);
  struct Wrapper {
    std::shared_ptr<torch::nn::Module> shared_module() const { return module; }
    std::shared_ptr<torch::nn::Module> module;
  } wrapper{pointer};
  CHECK(ddp::stateful(holder).module() == holder.get());
  CHECK(ddp::stateful(pointer).module() == pointer.get());
  CHECK(ddp::stateful(value).module() == &value);
  CHECK(ddp::stateful(wrapper).module() == pointer.get());

  torch::optim::Adagrad adagrad(holder->parameters());
  CHECK_THAT(message_of<ddp::ConfigError>([&] { ddp::stateful(adagrad); }), ContainsSubstring("state_dict"));
  Net empty(nullptr);
  CHECK_THROWS_AS(ddp::stateful(empty), ddp::ConfigError);
}
