// The fused optimizers against torch.optim's with fused=True, bit for bit (optim.txt, made by make_optim_golden.py).
#include <ATen/Version.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <fstream>
#include <map>
#include <memory>

#include "ddp/atomic_file.h"
#include "ddp/fused_adam.h"
#include "ddp/fused_sgd.h"
#include "ddp/stateful.h"
#include "io/torch_file.h"
#include "support/catch.h"
#include "support/spawn.h"

using namespace ddp::test;
using ddp::State;
using torch::Tensor;

namespace {

Tensor pattern(at::IntArrayRef shape, int64_t salt) {
  const auto i = torch::arange(c10::multiply_integers(shape), torch::kInt64);
  return (((i * 37 + salt * 101).remainder(127) - 63).to(torch::kFloat) / 64).view(shape);
}

// FNV-1a of the bytes, tensor after tensor.
class Hash {
 public:
  void add(const Tensor& tensor) {
    const Tensor whole = tensor.detach().contiguous();
    const auto* data = static_cast<const uint8_t*>(whole.const_data_ptr());
    for (size_t i = 0; i < whole.nbytes(); ++i) hash_ = (hash_ ^ data[i]) * 0x100000001b3;
  }
  std::string text() const { return fmt::format("{:016x}", hash_); }

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};

// The state's tensors in Python's order: 'step' is one of them, as float32.
void add_state(Hash& hash, const torch::optim::Optimizer& optimizer, const Tensor& parameter) {
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  if (found == optimizer.state().end()) return;
  if (const auto* sgd = dynamic_cast<const torch::optim::SGDParamState*>(found->second.get())) {
    return hash.add(sgd->momentum_buffer());
  }
  const auto add = [&](const auto& state) {
    hash.add(torch::tensor(static_cast<float>(state.step())));
    hash.add(state.exp_avg()), hash.add(state.exp_avg_sq());
    if (state.max_exp_avg_sq().defined()) hash.add(state.max_exp_avg_sq());
  };
  if (const auto* adam = dynamic_cast<const torch::optim::AdamParamState*>(found->second.get())) return add(*adam);
  add(dynamic_cast<const torch::optim::AdamWParamState&>(*found->second));
}

using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<Tensor>&)>;

std::map<std::string, Make> cases() {
  std::map<std::string, Make> made;
  const auto add_adam = [&](const std::string& name, double decay, bool amsgrad, bool maximize) {
    made["Adam" + name] = [=](const std::vector<Tensor>& parameters) {
      return std::make_unique<ddp::Adam>(
          parameters,
          ddp::AdamOptions{
              .lr = 0.05, .betas = {0.8, 0.99}, .weight_decay = decay, .amsgrad = amsgrad, .maximize = maximize});
    };
    made["AdamW" + name] = [=](const std::vector<Tensor>& parameters) {
      return std::make_unique<ddp::AdamW>(
          parameters,
          ddp::AdamWOptions{
              .lr = 0.05, .betas = {0.8, 0.99}, .weight_decay = decay, .amsgrad = amsgrad, .maximize = maximize});
    };
  };
  add_adam("", 0, false, false);
  add_adam(" decay", 0.125, false, false);
  add_adam(" amsgrad", 0, true, false);
  add_adam(" maximize", 0, false, true);
  add_adam(" decay amsgrad maximize", 0.125, true, true);
  const auto add_sgd = [&](const std::string& name, const ddp::SGDOptions& options) {
    made[name] = [=](const std::vector<Tensor>& parameters) { return std::make_unique<ddp::SGD>(parameters, options); };
  };
  add_sgd("SGD", {.lr = 0.05});
  add_sgd("SGD maximize", {.lr = 0.05, .maximize = true});
  add_sgd("SGD decay momentum", {.lr = 0.05, .momentum = 0.9, .weight_decay = 0.125});
  add_sgd("SGD nesterov", {.lr = 0.05, .momentum = 0.9, .weight_decay = 0.125, .nesterov = true});
  add_sgd("SGD dampening maximize",
          {.lr = 0.05, .momentum = 0.8, .dampening = 0.3, .weight_decay = 0.125, .maximize = true});
  return made;
}

// "6|hash of parameters|hash of state" after 1, 2 and 6 steps.
std::vector<std::string> run(const Make& make, at::ScalarType dtype) {
  const std::vector<std::vector<int64_t>> shapes{{}, {7}, {3, 5}, {67}, {11, 13}, {64}, {2, 3, 4, 5}};
  std::vector<Tensor> parameters;
  for (size_t k = 0; k < shapes.size(); ++k) {
    parameters.push_back(pattern(shapes[k], 50 + static_cast<int64_t>(k)).to(dtype).requires_grad_(true));
  }
  const auto optimizer = make(parameters);
  std::vector<std::string> found;
  for (int step = 0; step < 6; ++step) {
    for (size_t k = 0; k < shapes.size(); ++k) {
      parameters[k].mutable_grad() = pattern(shapes[k], 7 * step + static_cast<int64_t>(k)).to(dtype);
    }
    if (step == 3) parameters[2].mutable_grad().reset();
    if (step == 4) optimizer->param_groups()[0].options().set_lr(0.02);
    optimizer->step();
    if (step != 0 && step != 1 && step != 5) continue;
    Hash of_parameters, of_state;
    for (const Tensor& parameter : parameters) of_parameters.add(parameter), add_state(of_state, *optimizer, parameter);
    found.push_back(fmt::format("{}|{}|{}", step + 1, of_parameters.text(), of_state.text()));
  }
  return found;
}

}  // namespace

TEST_CASE("fused Adam, AdamW and SGD have the bits of Python's fused=True") {
  const std::string kind = at::get_cpu_capability();
  std::ifstream file(LIBDDP_TEST_DATA "/optim.txt");
  REQUIRE(file);
  std::map<std::string, std::vector<std::string>> golden;  // by "name|dtype"
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(kind + "|")) continue;
    line.erase(0, kind.size() + 1);
    const size_t cut = line.find('|', line.find('|') + 1);
    golden[line.substr(0, cut)].push_back(line.substr(cut + 1));
  }
  if (golden.empty()) DDP_SKIP("optim.txt has no bits of this kind of CPU: " + kind);

  const auto all = cases();
  REQUIRE(golden.size() == all.size() * 3);
  for (const auto& [name, make] : all) {
    for (const auto& [dtype, text] :
         {std::pair(torch::kFloat, "float32"), {torch::kBFloat16, "bfloat16"}, {torch::kHalf, "float16"}}) {
      INFO(name << ", " << text << ", " << kind);
      CHECK(run(make, dtype) == golden[name + "|" + text]);
    }
  }
}

TEST_CASE("Python goes on where a maximizing optimizer, with or without masters, has stopped, and back") {
  if (!test_python()) DDP_SKIP("no Python with torch (LIBDDP_TEST_PYTHON)");
  const TempDir dir;
  const auto in = (dir / "in.pt").string(), out = (dir / "out.pt").string();
  for (const bool masters : {false, true}) {
    const auto dtype = masters ? torch::kBFloat16 : torch::kFloat;
    const ddp::AdamWOptions options{.lr = 0.05, .amsgrad = true, .maximize = true, .master_weights = masters};
    std::vector<Tensor> p{pattern({11, 13}, 1).to(dtype).requires_grad_(true),
                          pattern({67}, 2).to(dtype).requires_grad_(true)};
    ddp::AdamW optim(p, options);
    const auto step = [&](ddp::AdamW& one, const std::vector<Tensor>& of, int salt) {
      for (const Tensor& parameter : of) parameter.mutable_grad() = pattern(parameter.sizes(), salt).to(dtype);
      one.step();
    };
    step(optim, p, 3), step(optim, p, 4);
    const State saved = State::dict({{"parameters", State::list({p[0], p[1]})}, {"optimizer", ddp::state_dict(optim)}});
    ddp::write_file_atomically(in, [&](const ddp::Append& append) { ddp::io::write_torch_file(saved, append); });

    const auto peer = run_command({*test_python(), std::string(LIBDDP_TEST_DATA) + "/optim_peer.py", in, out},
                                  {.deadline = 60s, .env = {{"OMP_NUM_THREADS", "1"}}});
    INFO(peer.describe());
    REQUIRE(peer.ok());
    CHECK_THAT(peer.output, ContainsSubstring("maximize [True]"));
    CHECK_THAT(peer.output, ContainsSubstring(masters ? "master [True, True]" : "master [False, False]"));

    // Python's step is the fused one on the parameters themselves, so without masters the bits are ours.
    const State theirs = ddp::io::read_torch_file(out, /*follow=*/false);
    ddp::AdamW back(p, {.lr = 9, .master_weights = masters});
    ddp::load_state_dict(back, theirs.at("optimizer"));
    CHECK(back.maximizes());
    for (const Tensor& parameter : p) parameter.mutable_grad() = torch::ones_like(parameter).detach();
    if (masters) {
      // In Python the parameters left their masters behind: they win where both are met again.
      torch::NoGradGuard no_grad;
      for (size_t i = 0; i < p.size(); ++i) p[i].copy_(theirs.at("parameters").as_list()[i].as_tensor());
      const Tensor before = p[0].detach().clone();
      back.param_groups()[0].options().set_lr(1e-9);
      back.step();
      CHECK(torch::allclose(p[0], before, /*rtol=*/0, /*atol=*/1e-6));
    } else {
      optim.step();
      for (size_t i = 0; i < p.size(); ++i) CHECK(torch::equal(p[i], theirs.at("parameters").as_list()[i].as_tensor()));
      CHECK(ddp::state_dict(optim).at("state") == ddp::state_dict(back).at("state"));
    }
  }
}
