// Files exchanged with PyTorch, in both directions. checkpoint_peer.py is the other side; `checkpoint_peer.py
// golden` wrote checkpoint_python.pt (torch 2.15).
#include <torch/torch.h>

#include <cmath>
#include <cstring>
#include <map>
#include <random>

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

// Random values of all that a State holds.
class Generator {
 public:
  explicit Generator(uint64_t seed) : random_(seed) { torch::manual_seed(seed); }

  State value(int depth) {
    if (depth == 0) return dict(12, depth);
    const auto size = one_of<size_t>({0, 1, 2, 3, 4, 7});
    switch (below(depth < 4 ? 12 : 8)) {
      case 0:
        return {};
      case 1:
        return below(2) == 0;
      case 2:
        return one_of<int64_t>({0, 255, 256, 65535, 65536, -1, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN,
                                static_cast<int64_t>(random_() >> below(64))});
      case 3:
        return one_of<double>({0.0, -0.0, 1e300, -INFINITY, 0.1, static_cast<double>(random_())});
      case 4:
        return text();
      case 5: {
        std::string bytes;
        for (size_t i = 0; i < size * 50; ++i) bytes += static_cast<char>(below(256));
        return State::Bytes{bytes};
      }
      case 8:
        return State::Tuple{items(size, depth)};
      case 9:
        return State::List{items(size, depth)};
      case 10:
        return State::List{items(depth == 1 && below(10) == 0 ? 1200 : size, 4)};
      case 11:
        return dict(size, depth);
      default:
        return tensor();
    }
  }

 private:
  size_t below(size_t n) { return random_() % n; }
  template <class T>
  T one_of(const std::vector<T>& values) {
    return values[below(values.size())];
  }

  std::string text() {
    std::string text;
    const auto size = one_of<size_t>({0, 1, 5, 100});
    for (size_t i = 0; i < size; ++i)
      text += one_of<std::string>({"a", "_.", "é", "€", "😀", "\n", std::string(1, '\0')});
    return text;
  }

  State::Items items(size_t size, int depth) {
    State::Items items;
    for (size_t i = 0; i < size; ++i) items.push_back(value(depth + 1));
    return items;
  }

  State dict(size_t size, int depth) {
    State dict = State::dict();
    for (size_t i = 0; i < size; ++i) {
      dict.set(below(3) == 0 ? State(static_cast<int64_t>(random_())) : State(text()), value(depth + 1));
    }
    return dict;
  }

  torch::Tensor tensor() {
    torch::Tensor base;
    if (!pool_.empty() && below(3) == 0) {
      base = one_of(pool_);
    } else {
      const auto shape = one_of<std::vector<int64_t>>({{}, {0}, {3}, {2, 3}, {4, 1, 5}, {2, 0, 3}, {50}});
      const auto dtype = one_of<torch::ScalarType>({torch::kFloat,
                                                    torch::kDouble,
                                                    torch::kHalf,
                                                    torch::kBFloat16,
                                                    torch::kLong,
                                                    torch::kInt,
                                                    torch::kShort,
                                                    torch::kChar,
                                                    torch::kByte,
                                                    torch::kBool,
                                                    torch::kComplexFloat,
                                                    torch::kComplexDouble,
                                                    torch::kComplexHalf,
                                                    torch::kUInt16,
                                                    torch::kUInt32,
                                                    torch::kUInt64,
                                                    torch::kFloat8_e4m3fn,
                                                    torch::kFloat8_e5m2,
                                                    torch::kFloat8_e4m3fnuz,
                                                    torch::kFloat8_e5m2fnuz,
                                                    torch::kFloat8_e8m0fnu});
      base = (torch::rand(shape) * 20).to(dtype);
      pool_.push_back(base);
    }
    if (base.dim() == 0 || base.size(0) < 3) return base;
    switch (below(5)) {
      case 0:
        return base.slice(0, 1);
      case 1:
        return base.slice(0, 0, base.size(0), 2);
      case 2:
        return base.transpose(0, -1);
      case 3:
        return base.slice(0, 0, 1).expand(base.sizes());
      default:
        return base;
    }
  }

  std::mt19937_64 random_;
  std::vector<torch::Tensor> pool_;
};

// Types, values, dtypes, strides and shared storages; tensors bit for bit.
bool same(const State& a, const State& b, std::map<const void*, const void*>& storages) {
  if (a.type_name() != b.type_name()) return false;
  if (a.is_tensor()) {
    const auto &x = a.as_tensor(), &y = b.as_tensor();
    if (x.scalar_type() != y.scalar_type() || x.sizes() != y.sizes() || x.strides() != y.strides()) return false;
    if (x.storage().nbytes() > 0 &&
        storages.emplace(x.storage().data(), y.storage().data()).first->second != y.storage().data()) {
      return false;
    }
    const auto p = x.contiguous(), q = y.contiguous();
    return std::memcmp(p.const_data_ptr(), q.const_data_ptr(), p.nbytes()) == 0;
  }
  if (a.is_list() || a.is_tuple()) {
    const auto &x = a.is_list() ? a.as_list() : a.as_tuple(), &y = b.is_list() ? b.as_list() : b.as_tuple();
    return std::equal(x.begin(), x.end(), y.begin(), y.end(),
                      [&](const State& m, const State& n) { return same(m, n, storages); });
  }
  if (a.is_dict()) {
    const auto &x = a.as_dict(), &y = b.as_dict();
    return std::equal(x.begin(), x.end(), y.begin(), y.end(), [&](const auto& m, const auto& n) {
      return m.first == n.first && same(m.second, n.second, storages);
    });
  }
  if (a.is_double()) return std::signbit(a.as_double()) == std::signbit(b.as_double()) && a == b;
  return a == b;
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
  const int count = 150;
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

TEST_CASE("random structures go from C++ through Python back to C++") {
  if (!ddp::test::test_python()) DDP_SKIP("no Python with torch (LIBDDP_TEST_PYTHON)");
  TempDir dir;
  constexpr int kCount = 100;
  std::vector<State> states;
  for (int i = 0; i < kCount; ++i) {
    states.push_back(Generator(static_cast<uint64_t>(i)).value(0));
    save(dir / (std::to_string(i) + ".pt"), states.back());
  }
  auto saved = peer({"resave", std::to_string(kCount), dir.path().string()});
  INFO(saved.describe());
  REQUIRE(saved.ok());
  for (int i = 0; i < kCount; ++i) {
    CAPTURE(i);
    const State back = ddp::io::read_torch_file((dir / (std::to_string(i) + ".back.pt")).string(), false);
    std::map<const void*, const void*> storages;
    CHECK(same(states[static_cast<size_t>(i)], back, storages));
  }
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
