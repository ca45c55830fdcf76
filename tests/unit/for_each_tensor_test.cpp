#include "ddp/for_each_tensor.h"

#include <array>
#include <map>
#include <optional>
#include <vector>

#include "support/catch.h"

using torch::Tensor;

namespace other {

struct Output {
  Tensor logits, loss;
  int note = 0;
};

template <class F>
void for_each_tensor(Output& output, F&& f) {
  f(output.logits), f(output.loss);
}

}  // namespace other

namespace {

template <class T>
int count(T value) {
  int n = 0;
  ddp::visit_tensors(value, [&](Tensor&) { ++n; });
  return n;
}

}  // namespace

TEST_CASE("tensors are found in what modules return") {
  const Tensor t = torch::ones({1});
  CHECK(count(t) == 1);
  CHECK(count(3.0) == 0);
  CHECK(count(std::string("text")) == 0);
  CHECK(count(std::pair(t, 1)) == 1);
  CHECK(count(std::tuple(t, std::vector<Tensor>{t, t}, std::string("x"))) == 3);
  CHECK(count(std::array<Tensor, 2>{t, t}) == 2);
  CHECK(count(std::optional<Tensor>()) == 0);
  CHECK(count(std::optional<Tensor>(t)) == 1);
  CHECK(count(std::map<std::string, std::vector<Tensor>>{{"a", {t}}, {"b", {t, t}}}) == 3);
  CHECK(count(std::make_shared<std::pair<Tensor, Tensor>>(t, t)) == 2);
  CHECK(count(other::Output{t, t}) == 2);
  CHECK(count(std::vector<other::Output>{{t, t}, {t, t}}) == 4);
}

TEST_CASE("tensors can be replaced where they are found") {
  std::pair<Tensor, std::vector<Tensor>> value(torch::ones({1}), {torch::ones({1})});
  ddp::visit_tensors(value, [](Tensor& t) { t = t * 2; });
  CHECK(value.first.item<float>() == 2.0f);
  CHECK(value.second[0].item<float>() == 2.0f);
}
