// The arithmetic of the shared-memory backend against torch's own, for every dtype, operation and number of inputs.
#include "shm/reduce.h"

#include <torch/torch.h>

#include <limits>

#include "support/catch.h"

namespace {

using ddp::detail::shm::Op;
using torch::Tensor;

Tensor combine(Op op, const Tensor& a, const Tensor& b) {
  const bool logical = a.scalar_type() == torch::kBool;
  switch (op) {
    case Op::kSum:
      return logical ? a.logical_or(b) : a + b;
    case Op::kProduct:
      return logical ? a.logical_and(b) : a * b;
    case Op::kMin:
      return torch::minimum(a, b);
    case Op::kMax:
      return torch::maximum(a, b);
    case Op::kBitAnd:
      return a.bitwise_and(b);
    case Op::kBitOr:
      return a.bitwise_or(b);
    case Op::kBitXor:
      return a.bitwise_xor(b);
  }
  throw std::logic_error("unknown operation");
}

// float16 and bfloat16 are combined in float32 and rounded at the end.
Tensor expected(Op op, const std::vector<Tensor>& inputs) {
  const auto dtype = inputs[0].scalar_type();
  const auto wide = dtype == torch::kHalf || dtype == torch::kBFloat16 ? torch::kFloat : dtype;
  Tensor total = inputs[0].to(wide);
  for (size_t i = 1; i < inputs.size(); ++i) total = combine(op, inputs[i].to(wide), total);
  return total.to(dtype);
}

Tensor random(int64_t count, torch::ScalarType dtype) {
  if (dtype == torch::kBool) return torch::randint(0, 2, {count}).to(dtype);
  if (c10::isFloatingType(dtype)) return (torch::randn({count}, torch::kDouble) * 3).to(dtype);
  return torch::randint(-100000, 100000, {count}, torch::kInt64).to(dtype);  // small types wrap around
}

}  // namespace

TEST_CASE("reduce is torch's arithmetic, element for element") {
  torch::manual_seed(1);
  int64_t compared = 0;
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16, torch::kUInt8, torch::kInt8,
                           torch::kInt16, torch::kInt32, torch::kInt64, torch::kBool}) {
    for (const Op op : {Op::kSum, Op::kProduct, Op::kMin, Op::kMax, Op::kBitAnd, Op::kBitOr, Op::kBitXor}) {
      const bool bitwise = op == Op::kBitAnd || op == Op::kBitOr || op == Op::kBitXor;
      INFO(c10::toString(dtype) << ", " << to_string(op));
      REQUIRE(can_reduce(dtype, op) == !(bitwise && c10::isFloatingType(dtype)));
      if (!can_reduce(dtype, op)) continue;
      for (const int ranks : {1, 2, 3, 5}) {
        for (const int64_t count : {0, 1, 7, 63, 1024, 2500}) {
          std::vector<Tensor> inputs;
          std::vector<const void*> pointers;
          for (int rank = 0; rank < ranks; ++rank) {
            inputs.push_back(random(count, dtype));
            pointers.push_back(inputs.back().data_ptr());
          }
          const Tensor want = expected(op, inputs);
          Tensor got = torch::zeros({count + 1}, dtype);
          ddp::detail::shm::reduce(pointers, got.data_ptr(), count, dtype, op);
          REQUIRE(torch::equal(got.narrow(0, 0, count), want));
          REQUIRE(got[count].item<double>() == 0);  // nothing behind the end is touched
          // In place of any of the inputs.
          const int place = static_cast<int>(compared % ranks);
          ddp::detail::shm::reduce(pointers, inputs[place].data_ptr(), count, dtype, op);
          REQUIRE(torch::equal(inputs[place], want));
          ++compared;
        }
      }
    }
  }
  CHECK(compared == (4 * 4 + 6 * 7) * 4 * 6);
}

TEST_CASE("reduce adds in the given order") {
  const Tensor big = torch::full({9}, 1e8f), minus = -big, small = torch::full({9}, 1.0f);
  const auto sum = [](const std::vector<Tensor>& inputs) {
    std::vector<const void*> pointers;
    for (const auto& input : inputs) pointers.push_back(input.data_ptr());
    Tensor out = torch::empty({9});
    ddp::detail::shm::reduce(pointers, out.data_ptr(), 9, torch::kFloat, Op::kSum);
    return out[8].item<float>();
  };
  CHECK(sum({big, minus, small}) == 1);
  CHECK(sum({small, big, minus}) == 0);
}

TEST_CASE("reduce rounds bfloat16 to the nearest even, and keeps NaN and infinity") {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const auto bf16 = [](std::vector<float> values) { return torch::tensor(values).to(torch::kBFloat16); };
  const Tensor a = bf16({256, 257, 258, infinity, infinity, nan, 3.38e38f, 1});
  const Tensor b = bf16({1, 2, 1, 1, -infinity, 1, 3.38e38f, 0.00390625f});
  Tensor out = torch::empty_like(a);
  const void* inputs[] = {a.data_ptr(), b.data_ptr()};
  ddp::detail::shm::reduce(inputs, out.data_ptr(), a.numel(), torch::kBFloat16, Op::kSum);
  const Tensor want = (a.to(torch::kFloat) + b.to(torch::kFloat)).to(torch::kBFloat16);
  CHECK(torch::allclose(out.to(torch::kFloat), want.to(torch::kFloat), 0, 0, /*equal_nan=*/true));
}

TEST_CASE("the instructions are chosen by the processor") {
  const std::string name = ddp::detail::shm::reduce_instructions();
  INFO(name);
  CHECK((name == "plain" || name == "avx2" || name == "avx512"));
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) CHECK(name != "plain");
#endif
}
