// examples/qwen_pretrain/fused: the row kernels of every instruction set that this CPU has, and the products of matrices,
// against their formulas in float64.
#include <torch/torch.h>

#include "../../examples/qwen_pretrain/fused/gemm.h"
#include "../../examples/qwen_pretrain/fused/types.h"
#include "support/catch.h"

namespace {

using namespace qwen::fused;
using torch::Tensor;

template <class T>
constexpr auto kType = std::is_same_v<T, float> ? torch::kFloat32 : torch::kBFloat16;
// Of one rounding, or of float32 sums of a few hundred numbers.
template <class T>
constexpr double kTolerance = std::is_same_v<T, float> ? 3e-6 : 1.0 / 128;

const std::vector<int64_t> kSizes = {1, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 257};
constexpr int64_t kRows = 5;

template <class T>
Tensor random(at::IntArrayRef sizes, double scale = 1) {
  return (torch::randn(sizes) * scale).to(kType<T>);
}

// Functions, because what depends on T cannot say x.item<double>() in a lambda.
double number(const Tensor& x) { return x.item<double>(); }
double largest(const Tensor& x) { return number(x.abs().max()); }

Tensor wide(const Tensor& x) { return x.to(torch::kFloat64); }

// The largest difference, relative to the largest number expected.
double error(const Tensor& found, const Tensor& expected) {
  const double scale = std::max(1e-30, largest(wide(expected)));
  return largest(wide(found) - wide(expected)) / scale;
}

// Calls f(kernels) with T = float and Bits16, for every instruction set.
template <class F>
void for_all_kernels(F&& f) {
  for (const RowSet& set : row_sets()) {
    INFO(set.name);
    f(*set.wide);
    f(*set.narrow);
  }
}

TEST_CASE("fused rows: RMSNorm and its gradient") {
  torch::manual_seed(0);
  for_all_kernels([]<class T>(const RowKernels<T>& kernels) {
    for (const int64_t size : kSizes) {
      INFO(size);
      const auto x = random<T>({kRows, size}), weight = random<T>({size}), dy = random<T>({kRows, size});
      const auto residual = random<T>({kRows, size}), y = torch::empty_like(x), dx = torch::empty_like(x);
      const auto inverse = torch::empty({kRows}), dweight = torch::ones({size});
      kernels.rms_norm(kRows, size, 1e-3f, data<T>(x), data<T>(weight), data<T>(y), data<float>(inverse));

      const auto x64 = wide(x).requires_grad_(), w64 = wide(weight).requires_grad_();
      const auto scale = (x64.square().mean(-1, true) + 1e-3).rsqrt();
      const auto expected = x64 * scale * w64;
      CHECK(error(y, expected.detach()) < kTolerance<T>);
      CHECK(error(inverse, scale.detach().squeeze(-1)) < 1e-6);

      expected.backward(wide(dy));
      const auto terms = (wide(dy) * w64 * scale).detach();  // of a row of one element hardly anything is left
      for (const bool with_residual : {true, false}) {
        dweight.fill_(1);  // it is added to
        kernels.rms_norm_backward(kRows, size, data<T>(x), data<T>(weight), data<float>(inverse), data<T>(dy),
                                  with_residual ? data<T>(residual) : nullptr, data<T>(dx), data<float>(dweight));
        const auto wanted = with_residual ? x64.grad() + wide(residual) : x64.grad();
        CHECK(largest(wide(dx) - wanted) < kTolerance<T> * (largest(terms) + largest(wanted)));
        CHECK(error(dweight, w64.grad() + 1) < 3e-6);
      }
    }
  });
}

TEST_CASE("fused rows: SwiGLU and its gradients, also far out") {
  torch::manual_seed(1);
  for_all_kernels([]<class T>(const RowKernels<T>& kernels) {
    for (const int64_t size : kSizes) {
      INFO(size);
      auto gate = random<T>({size}, 4), up = random<T>({size}), dy = random<T>({size});
      if (size > 8) gate[0] = 200, gate[1] = -200, gate[2] = -88.5, gate[3] = 0;
      const auto y = torch::empty_like(gate), again = torch::empty_like(gate), dgate = torch::empty_like(gate);
      kernels.swiglu(size, data<T>(gate), data<T>(up), data<T>(y));
      const auto g64 = wide(gate).requires_grad_(), u64 = wide(up).requires_grad_();
      const auto expected = torch::silu(g64) * u64;
      CHECK(error(y, expected.detach()) < kTolerance<T>);
      expected.backward(wide(dy));
      auto dup = dy.clone();  // in place
      kernels.swiglu_backward(size, data<T>(gate), data<T>(up), data<T>(dup), data<T>(again), data<T>(dgate),
                              data<T>(dup));
      CHECK(torch::equal(again, y));
      CHECK(error(dgate, g64.grad()) < kTolerance<T>);
      CHECK(error(dup, u64.grad()) < kTolerance<T>);
    }
  });
}

TEST_CASE("fused rows: rotation by the position's angle and back") {
  torch::manual_seed(2);
  for_all_kernels([]<class T>(const RowKernels<T>& kernels) {
    for (const int64_t half : {1, 2, 5, 8, 16, 20, 33}) {
      INFO(half);
      constexpr int64_t kHeads = 3, kSeq = 4, kCount = 6, kFirst = 3;
      const auto angle = torch::rand({kSeq, half}) * 6;
      const auto cosine = angle.cos(), sine = angle.sin();
      const auto x = random<T>({kCount, kHeads, 2 * half}), y = torch::empty_like(x);
      const int64_t stride = kHeads * 2 * half;
      kernels.rotate(kCount, kHeads, half, kFirst, kSeq, data<float>(cosine), data<float>(sine), 1, data<T>(x), stride,
                     data<T>(y), stride);
      const auto position = (torch::arange(kCount, torch::kInt64) + kFirst).remainder(kSeq);
      const auto c = wide(cosine).index_select(0, position).unsqueeze(1),
                 s = wide(sine).index_select(0, position).unsqueeze(1);
      const auto a = wide(x).narrow(-1, 0, half), b = wide(x).narrow(-1, half, half);
      const auto expected = torch::cat({a * c - b * s, b * c + a * s}, -1);
      CHECK(error(y, expected) < kTolerance<T>);

      const auto turned = expected.to(torch::kFloat32), back = torch::empty_like(x);
      kernels.rotate_wide(kCount, kHeads, half, kFirst, kSeq, data<float>(cosine), data<float>(sine), -1,
                          data<float>(turned), stride, data<T>(back), stride);
      CHECK(error(back, x) < kTolerance<T>);
      kernels.rotate(kCount, kHeads, half, kFirst, kSeq, data<float>(cosine), data<float>(sine), 1, data<T>(x), stride,
                     data<T>(x), stride);
      CHECK(torch::equal(x, y));  // in place
    }
  });
}

TEST_CASE("fused rows: the causal softmax sees what came before, and has the softmax's gradient") {
  torch::manual_seed(3);
  for_all_kernels([]<class T>(const RowKernels<T>& kernels) {
    for (const int64_t seen : {1, 2, 14, 16, 30, 100}) {
      INFO(seen);
      const int64_t width = seen + kRows - 1;
      const auto scores = torch::randn({kRows, width}) * 5;
      const auto p = torch::full({kRows, width}, NAN, kType<T>), dscores = torch::full({kRows, width}, NAN, kType<T>);
      const auto log_sum = torch::empty({kRows}), inverse = torch::empty({kRows}), delta = torch::empty({kRows});
      kernels.causal_softmax(kRows, seen, width, data<float>(scores), data<T>(p), data<float>(log_sum),
                             data<float>(inverse));
      const auto hidden = torch::full({kRows, width}, -INFINITY, torch::kFloat64).triu(seen);
      const auto s64 = wide(scores).requires_grad_();
      const auto expected = (s64 + hidden).softmax(-1);
      CHECK(error(wide(p) * wide(inverse).unsqueeze(-1), expected.detach()) < kTolerance<T>);
      CHECK(error(log_sum, (s64 + hidden).detach().logsumexp(-1)) < 1e-6);

      const auto dp = torch::randn({kRows, width});
      (expected * 0.5).backward(wide(dp));
      const auto along = (expected.detach() * wide(dp)).sum(-1).to(torch::kFloat32);
      kernels.causal_softmax_backward(kRows, seen, width, 0.5f, data<float>(scores), data<float>(dp),
                                      data<float>(log_sum), data<float>(along), data<T>(p), data<T>(dscores));
      CHECK(error(p, expected.detach()) < kTolerance<T>);
      CHECK(error(dscores, s64.grad()) < kTolerance<T>);
    }
  });
}

TEST_CASE("fused rows: cross-entropy, its gradient, and rows that do not count") {
  torch::manual_seed(4);
  for_all_kernels([]<class T>(const RowKernels<T>& kernels) {
    for (const int64_t vocab : kSizes) {
      INFO(vocab);
      const auto logits = torch::randn({kRows, vocab}) * 5;
      auto targets = torch::randint(vocab, {kRows}, torch::kInt64);
      targets[1] = -100, targets[4] = vocab - 1;
      const auto x64 = wide(logits).requires_grad_();
      const auto expected = torch::nn::functional::cross_entropy(
          x64, targets, torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
      (expected * 0.25).backward();
      const auto gradient = torch::full({kRows, vocab}, NAN, kType<T>);
      const double without = kernels.cross_entropy(kRows, vocab, -100, 0.25f, data<float>(logits.clone()),
                                                   targets.data_ptr<int64_t>(), nullptr);
      const double loss = kernels.cross_entropy(kRows, vocab, -100, 0.25f, data<float>(logits),
                                                targets.data_ptr<int64_t>(), data<T>(gradient));
      CHECK(loss == without);
      CHECK(std::abs(loss - number(expected)) < 1e-5);
      CHECK(largest(wide(gradient) - x64.grad()) < 0.25 * kTolerance<T>);
    }
  });
}

TEST_CASE("fused rows: scaled rows and sums of products, within wider matrices") {
  torch::manual_seed(5);
  for_all_kernels([]<class T>(const RowKernels<T>& kernels) {
    for (const int64_t size : kSizes) {
      INFO(size);
      const auto x = torch::randn({kRows, size + 2}), factors = torch::randn({kRows});
      const auto y = torch::zeros({kRows, size + 3}, kType<T>), sums = torch::empty({kRows});
      kernels.scale_rows(kRows, size, data<float>(factors), data<float>(x), size + 2, data<T>(y), size + 3);
      CHECK(error(y.narrow(1, 0, size), wide(x.narrow(1, 0, size)) * wide(factors).unsqueeze(1)) < kTolerance<T>);
      CHECK(largest(y.narrow(1, size, 3)) == 0);  // untouched
      kernels.scale_rows(kRows, size, nullptr, data<float>(x), size + 2, data<T>(y), size + 3);
      CHECK(torch::equal(y.narrow(1, 0, size), x.narrow(1, 0, size).to(kType<T>)));  // rounds as torch does
      const auto a = random<T>({kRows, size + 1});
      kernels.row_dot(kRows, size, data<T>(a), size + 1, data<T>(y), size + 3, data<float>(sums));
      const auto products = wide(a.narrow(1, 0, size)) * wide(y.narrow(1, 0, size));
      CHECK(largest(wide(sums) - products.sum(1)) < 3e-6 * largest(products.abs().sum(1)));
    }
  });
}

TEST_CASE("fused rows: NaN and infinity stay what they are") {
  const std::vector<float> odd = {NAN, INFINITY, -INFINITY, 3e38f, 1e-42f, -0.0f, 1.00390625f, 1.01171875f};
  for_all_kernels([&]<class T>(const RowKernels<T>& kernels) {
    const auto x = torch::tensor(odd).repeat({3});
    const auto y = torch::empty({x.numel()}, kType<T>);
    kernels.scale_rows(1, x.numel(), nullptr, data<float>(x), 0, data<T>(y), 0);
    CHECK(torch::equal(y.isnan(), x.isnan()));
    CHECK(torch::equal(y.nan_to_num(0.0), x.to(kType<T>).nan_to_num(0.0)));
    auto scores = torch::zeros({1, 20});
    scores[0][17] = NAN;
    const auto p = torch::empty({1, 20}, kType<T>), log_sum = torch::empty({1}), inverse = torch::empty({1});
    kernels.causal_softmax(1, 20, 20, data<float>(scores), data<T>(p), data<float>(log_sum), data<float>(inverse));
    CHECK(std::isnan(number(log_sum)));
  });
}

template <class T>
void check_products() {
  for (const auto& [m, n, k] : std::vector<std::tuple<int64_t, int64_t, int64_t>>{{1, 1, 1}, {3, 5, 2}, {33, 17, 64}}) {
    for (const bool ta : {false, true}) {
      for (const bool tb : {false, true}) {
        INFO(m << ' ' << n << ' ' << k << ' ' << ta << ' ' << tb);
        const auto a = random<T>({ta ? k : m, (ta ? m : k) + 3}), b = random<T>({tb ? n : k, (tb ? k : n) + 1});
        const auto c = torch::full({m, n + 2}, NAN);
        const auto a64 = wide(a).narrow(1, 0, ta ? m : k), b64 = wide(b).narrow(1, 0, tb ? k : n);
        const auto product = torch::mm(ta ? a64.t() : a64, tb ? b64.t() : b64);
        const Matrix<const T> left{data<T>(a), a.size(1), ta}, right{data<T>(b), b.size(1), tb};
        gemm<T>(m, n, k, 1, left, right, 0, {data<float>(c), n + 2});
        CHECK(error(c.narrow(1, 0, n), product) < 3e-6);
        gemm<T>(m, n, k, 0.5f, left, right, 2, {data<float>(c), n + 2});
        CHECK(error(c.narrow(1, 0, n), 2.5 * product) < 3e-6);
        CHECK(number(c.narrow(1, n, 2).isnan().all()) == 1);
      }
    }
  }
}

TEST_CASE("fused products: strides, transpositions and sums, not rounded to bfloat16") {
  torch::manual_seed(6);
  check_products<float>();
  check_products<Bits16>();
}

}  // namespace
