// Clipped gradients against torch.nn.utils.clip_grad_norm_ in Python, bit for bit (clip.txt by make_clip_golden.py).
#include <torch/torch.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "ddp/grad.h"
#include "support/catch.h"

namespace {

using torch::Tensor;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

// The table of make_clip_golden.py.
const std::map<std::string, std::array<std::vector<float>, 2>> kGradients = {
    {"plain", {{{3, 4, -12, 84}, {1, 2, 2}}}},          {"third", {{{0, 4, 0, -3}, {0, 12, 0}}}},
    {"fractions", {{{1.5, 2, -0.0f, 6}, {0.5, 1, 1}}}}, {"tiny", {{{1e-40f, -3e-39f, 0, 0}, {2e-38f, 0, 0}}}},
    {"zero", {{{0, 0, 0, 0}, {0, -0.0f, 0}}}},          {"nan", {{{1, kNan, 2, 3}, {1, 2, 3}}}},
    {"infinite", {{{1, kInf, 2, 3}, {1, -kInf, 3}}}},   {"overflow", {{{1e20f, 3e38f, 0, 0}, {1, 2, 3}}}},
};

struct WeightAndBias : torch::nn::Module {
  explicit WeightAndBias(torch::Dtype dtype)
      : weight(register_parameter("weight", torch::zeros({2, 2}, dtype))),
        bias(register_parameter("bias", torch::zeros({3}, dtype))) {}
  Tensor weight, bias;
};

using Model = ddp::DistributedDataParallel<std::shared_ptr<WeightAndBias>>;

Model model_of(torch::Dtype dtype, const std::string& gradients) {
  auto module = std::make_shared<WeightAndBias>(dtype);
  const auto& values = kGradients.at(gradients);
  module->weight.mutable_grad() = torch::tensor(values[0]).to(dtype).view({2, 2});
  module->bias.mutable_grad() = torch::tensor(values[1]).to(dtype);
  return Model(module, ddp::ProcessGroup());
}

// One NaN is as good as another: Python hands it through a double, which may lose its sign.
std::string bits(const Tensor& tensor) {
  std::string text;
  for (const auto& one : tensor.detach().to(torch::kFloat).flatten().unbind()) {
    const auto value = one.item<float>();
    char word[9];
    std::snprintf(word, sizeof word, "%08x", std::isnan(value) ? 0x7fc00000 : std::bit_cast<uint32_t>(value));
    text += (text.empty() ? "" : " ") + std::string(word);
  }
  return text;
}

std::string with_one_nan(const std::string& line) {
  std::istringstream words(line);
  std::string text;
  for (std::string word; words >> word;) {
    const auto value = std::bit_cast<float>(static_cast<uint32_t>(std::stoul(word, nullptr, 16)));
    text += (text.empty() ? "" : " ") + (std::isnan(value) ? std::string("7fc00000") : word);
  }
  return text;
}

}  // namespace

TEST_CASE("clipped gradients and their norm are those of Python, bit for bit") {
  std::ifstream golden(std::string(LIBDDP_TEST_DATA) + "/clip.txt");
  REQUIRE(golden.good());
  int compared = 0;
  for (std::string line; std::getline(golden, line); ++compared) {
    std::istringstream words(line);
    std::string word, name, dtype;
    double max_norm = 0;
    words >> word >> name >> dtype >> max_norm;
    REQUIRE(word == "case");
    INFO(line);
    const Model model = model_of(dtype == "bfloat16" ? torch::kBFloat16 : torch::kFloat, name);
    const Tensor norm = ddp::clip_grad_norm(model, max_norm);
    std::getline(golden, line);
    CHECK("norm " + bits(norm) == "norm " + with_one_nan(line.substr(5)));
    std::getline(golden, line);
    CHECK(bits(model->weight.grad()) + " " + bits(model->bias.grad()) == with_one_nan(line));
  }
  CHECK(compared == 8 * 2 * 7);
}

TEST_CASE("gradients within the limit are not written on the CPU, NaN and infinity are never taken for within") {
  const auto written = [](const std::string& name, double max_norm) {
    const Model model = model_of(torch::kFloat, name);
    const auto before = model->weight.grad()._version();
    ddp::clip_grad_norm(model, max_norm);
    return model->weight.grad()._version() != before;
  };
  CHECK_FALSE(written("third", 13.1));
  CHECK_FALSE(written("zero", 1e-3));
  CHECK(written("third", 12.9));
  for (const std::string name : {"nan", "infinite", "overflow"}) CHECK(written(name, 1e38));
}
