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

TEST_CASE("scale multiplies as torch does, and copies where the scale is 1") {
  torch::manual_seed(2);
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16}) {
    for (const int64_t count : {0, 1, 15, 16, 1001}) {
      const Tensor from = random(count, dtype);
      Tensor to = torch::zeros({count + 1}, dtype);
      ddp::detail::shm::scale(from.data_ptr(), to.data_ptr(), count, dtype, 1.0 / 3);
      CHECK(torch::equal(to.narrow(0, 0, count), from * (1.0 / 3)));
      CHECK(to[count].item<double>() == 0);
      ddp::detail::shm::scale(from.data_ptr(), to.data_ptr(), count, dtype, 1);
      CHECK(torch::equal(to.narrow(0, 0, count), from));
    }
  }
  const Tensor integers = random(100, torch::kInt64);
  Tensor copied = torch::zeros_like(integers);
  ddp::detail::shm::scale(integers.data_ptr(), copied.data_ptr(), 100, torch::kInt64, 1);
  CHECK(torch::equal(copied, integers));
}

TEST_CASE("reduce_and_scale does both, whatever the two lengths") {
  torch::manual_seed(3);
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
    for (const Op op : {Op::kSum, Op::kMax}) {
      for (const auto& [count, next_count] :
           {std::pair<int64_t, int64_t>{1000, 1000}, {1000, 0}, {0, 1000}, {77, 300}}) {
        const Tensor a = random(count, dtype), b = random(count, dtype), from = random(next_count, dtype);
        Tensor out = torch::zeros({count + 1}, dtype), to = torch::zeros({next_count + 1}, dtype);
        const void* const inputs[] = {a.data_ptr(), b.data_ptr()};
        ddp::detail::shm::reduce_and_scale(inputs, out.data_ptr(), count, dtype, op,
                                           {from.data_ptr(), to.data_ptr(), next_count, 0.25});
        CHECK(torch::equal(out.narrow(0, 0, count), expected(op, {a, b})));
        CHECK(torch::equal(to.narrow(0, 0, next_count), from * 0.25));
        CHECK((out[count].item<double>() == 0 && to[next_count].item<double>() == 0));
      }
    }
  }
}

TEST_CASE("the instructions are chosen by the processor") {
  const std::string name = ddp::detail::shm::reduce_instructions();
  INFO(name);
  CHECK((name == "plain" || name == "avx2" || name == "avx512"));
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) CHECK(name != "plain");
#endif
}
