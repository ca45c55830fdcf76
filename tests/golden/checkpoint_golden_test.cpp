// Files exchanged with PyTorch, in both directions. checkpoint_peer.py is the other side; `checkpoint_peer.py
// golden` wrote checkpoint_python.pt (torch 2.15).
#include <torch/torch.h>

#include "ddp/atomic_file.h"
#include "ddp/checkpointer.h"
#include "io/torch_file.h"
#include "support/catch.h"
#include "support/spawn.h"

namespace fs = std::filesystem;
using ddp::test::operator+;
using ddp::State;
using ddp::test::run_command;
using ddp::test::TempDir;

namespace {

ddp::test::Result peer(const std::vector<std::string>& arguments) {
  return run_command(
      std::vector<std::string>{*ddp::test::test_python(), std::string(LIBDDP_TEST_DATA) + "/checkpoint_peer.py"} +
          arguments,
      {.deadline = std::chrono::seconds(100), .env = {{"OMP_NUM_THREADS", "1"}}});
}

void save(const fs::path& path, const State& state) {
  ddp::write_file_atomically(path, [&](const ddp::Append& append) { ddp::io::write_torch_file(state, append); });
}

// The twin of the script's Net.
struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
    gain = register_parameter("gain", torch::zeros({4}));
    calls = register_buffer("calls", torch::ones({1}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return norm(x) * gain; }
  torch::nn::LayerNorm norm{nullptr};
  torch::Tensor gain, calls;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(3, 4));
    block = register_module("block", Block());
    scale = register_parameter("scale", torch::zeros({1}));
    head = register_module("head", torch::nn::Linear(4, 2));
    unused = register_module("unused", torch::nn::Linear(1, 1));
  }
  torch::Tensor forward(const torch::Tensor& x) { return head(torch::tanh(block(first(x)))) * scale; }
  torch::nn::Linear first{nullptr}, head{nullptr}, unused{nullptr};
  Block block{nullptr};
  torch::Tensor scale;
};
TORCH_MODULE(Net);

// Python's order of parameters(): own first, then the children's.
std::vector<torch::Tensor> parameters(const Net& net) {
  std::vector<torch::Tensor> all;
  const auto named = net->named_parameters();
  for (const auto& item : ddp::state_dict(*net).as_dict()) {
    if (const auto* parameter = named.find(item.first.as_string())) all.push_back(*parameter);
  }
  return all;
}

std::unique_ptr<torch::optim::Optimizer> optimizer(const std::string& name, const Net& net) {
  // Other options than the script's: the file's win.
  if (name == "adamw") return std::make_unique<torch::optim::AdamW>(parameters(net), torch::optim::AdamWOptions(9));
  if (name == "adam") return std::make_unique<torch::optim::Adam>(parameters(net), torch::optim::AdamOptions(9));
  return std::make_unique<torch::optim::SGD>(parameters(net), torch::optim::SGDOptions(9));
}

void step(Net& net, torch::optim::Optimizer& optim, int number) {
  const auto x = (torch::arange(15) % 5 - 2).view({5, 3}) * 0.3 + 0.1 * number;
  net->zero_grad();
  net->forward(x).square().sum().backward();
  optim.step();
}

double largest_difference(const State& a, const State& b) {
  double worst = 0;
  for (const auto& [key, value] : a.as_dict()) {
    const auto& other = b.at(key.as_string()).as_tensor();
    worst = std::max(worst, (value.as_tensor() - other).abs().max().item<double>());
  }
  return worst;
}

}  // namespace

TEST_CASE("a file of torch.save holds what Python put into it") {
  const State state = ddp::io::read_torch_file(std::string(LIBDDP_TEST_DATA) + "/checkpoint_python.pt", false);
  CHECK(state.at("epoch") == State(1));
  CHECK(state.at("loss") == State(0.5));
  CHECK(state.at("none").is_null());
  CHECK(state.at("flag") == State(true));
  CHECK(state.at("big") == State(int64_t{1} << 40));
  CHECK(state.at("small") == State(INT64_MIN));
  CHECK(state.at("text") == State("é€"));
  CHECK(state.at("bytes") == State(State::Bytes{std::string("\0\x80\xff", 3)}));
  CHECK(state.at("tuple") == State::tuple({1, 2.5, "x"}));
  CHECK(state.at("set") == State::list({3}));
  CHECK(state.at("size") == State::tuple({2, 3}));
  const auto base = torch::arange(12.0).view({3, 4});
  CHECK(state.at("model_state_dict") == State::dict({{"weight", base}, {"bias", base[0]}}));
  CHECK(state.at("transposed").as_tensor().strides() == base.t().strides());
  CHECK(state.at("transposed")
            .as_tensor()
            .storage()
            .is_alias_of(state.at("model_state_dict").at("weight").as_tensor().storage()));
  CHECK(state.at("parameter") == State(torch::tensor({1.5f, -2.0f})));
  CHECK(state.at("bfloat16") == State(torch::tensor({1.0, 2.5}).to(torch::kBFloat16)));
  CHECK(state.at("float8").as_tensor().to(torch::kFloat).equal(torch::tensor({1.0f, 2.0f})));
  CHECK(state.at("conj").as_tensor()[0].item<c10::complex<float>>() == c10::complex<float>(1, -2));
  CHECK(state.at("scalar") == State(torch::tensor(int64_t{3})));
  CHECK(state.at("empty") == State(torch::empty({2, 0})));
}

TEST_CASE("random structures go from Python through C++ back to Python") {
  if (!ddp::test::test_python()) DDP_SKIP("no Python with torch (LIBDDP_TEST_PYTHON)");
  TempDir dir;
  const int count = 60;
  auto made = peer({"structures", "1", std::to_string(count), dir.path().string()});
  INFO(made.describe());
  REQUIRE(made.ok());
  for (int i = 0; i < count; ++i) {
    CAPTURE(i);
    const fs::path from = dir / (std::to_string(i) + ".pt"), to = dir / (std::to_string(i) + ".cpp.pt");
    save(to, ddp::io::read_torch_file(from.string(), false));
  }
  auto compared = peer({"compare", std::to_string(count), dir.path().string()});
  INFO(compared.describe());
  CHECK(compared.ok());
}

TEST_CASE("Python's checkpoint resumes here, and ours goes on in Python") {
  if (!ddp::test::test_python()) DDP_SKIP("no Python with torch (LIBDDP_TEST_PYTHON)");
  for (const std::string name : {"adamw", "adam", "sgd"}) {
    CAPTURE(name);
    TempDir dir;
    auto trained = peer({"train", name, dir.path().string()});
    INFO(trained.describe());
    REQUIRE(trained.ok());

    Net net;
    auto optim = optimizer(name, net);
    ddp::Checkpointer checkpoints(dir / "run", {}, {.every = 0});
    checkpoints.track("model", net).track("optimizer", *optim);
    const auto resumed = checkpoints.resume(dir / "python.pt");
    CHECK(resumed.epoch == 2);
    CHECK(resumed.step == 3);
    step(net, *optim, 3);
    checkpoints.step();
    const double worst =
        largest_difference(ddp::state_dict(*net), ddp::io::read_torch_file((dir / "next.pt").string(), false));
    std::printf("%s: largest difference to Python's step %g\n", name.c_str(), worst);
    CHECK(worst <= 1e-6);

    checkpoints.save();
    step(net, *optim, 4);
    save(dir / "cpp_next.pt", ddp::state_dict(*net));
    auto went_on = peer({"go_on", name, (dir / "run/checkpoint_latest.pt").string(), (dir / "cpp_next.pt").string()});
    INFO(went_on.describe());
    CHECK(went_on.ok());
  }
}
