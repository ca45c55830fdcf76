#include "loss.h"

#include <torch/torch.h>

#include "blocks.h"
#include "gemm.h"
#include "norm.h"

namespace qwen::fused {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

int64_t chunk_size(const HeadSettings& settings, int64_t tokens, int64_t vocab) {
  constexpr int64_t kScores = 4 << 20;
  const int64_t chunk = settings.chunk > 0 ? settings.chunk : std::clamp<int64_t>(kScores / vocab, 128, 512);
  return std::min(chunk, tokens);
}

// The targets in one row, checked, and how many of them count.
std::pair<Tensor, int64_t> checked(const Tensor& targets, int64_t tokens, int64_t vocab) {
  TORCH_CHECK(targets.numel() == tokens && targets.scalar_type() == at::kLong, "[qwen::fused] expected ", tokens,
              " targets of int64, found ", targets.sizes(), " of ", targets.scalar_type());
  const auto row = targets.reshape({-1}).contiguous();
  int64_t count = 0;
  for (const int64_t target : at::ArrayRef<int64_t>(row.data_ptr<int64_t>(), static_cast<size_t>(tokens))) {
    if (target == kIgnored) continue;
    TORCH_CHECK_INDEX(target >= 0 && target < vocab, "[qwen::fused] target ", target, " is outside the vocabulary of ",
                      vocab);
    ++count;
  }
  return {row, count};
}

// Gradients of the loss, as they come into being.
struct HeadGradients {
  Tensor dnormed, dweight;  // of the type of the model
};

// The sum of the losses. `gradients` is null, or gets those of scale * sum.
template <class T>
double sum_of_losses(const Tensor& normed, const Tensor& weight, const Tensor& targets, float scale, int64_t chunk,
                     HeadGradients* gradients, Workspace& workspace) {
  constexpr bool kNarrow = !std::is_same_v<T, float>;
  const int64_t tokens = normed.size(0), hidden = normed.size(1), vocab = weight.size(0);
  const bool one_chunk = chunk >= tokens;
  const auto scores = workspace.take({chunk, vocab}, at::kFloat);
  Tensor dscores, dnormed_wide, dweight_wide;
  if (gradients) {
    dscores = kNarrow ? workspace.take({chunk, vocab}, normed.scalar_type()) : scores;
    if constexpr (kNarrow) {  // chunks are added in float32
      dnormed_wide = workspace.take({chunk, hidden}, at::kFloat);
      if (!one_chunk) dweight_wide = workspace.take({vocab, hidden}, at::kFloat);
    } else {
      dnormed_wide = gradients->dnormed, dweight_wide = gradients->dweight;
    }
  }

  double loss = 0;
  const Matrix<const T> w{data<T>(weight), hidden};
  for (int64_t first = 0; first < tokens; first += chunk) {
    const int64_t count = std::min(chunk, tokens - first);
    const Matrix<const T> rows_in{data<T>(normed) + first * hidden, hidden};
    gemm<T>(count, vocab, hidden, 1, rows_in, transposed(w), 0, {data<float>(scores), vocab});
    std::vector<double> losses(static_cast<size_t>(count));
    for_parts(count, vocab, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {  // one by one, so that the sum is the same on any number of threads
        losses[static_cast<size_t>(r)] = rows<T>().cross_entropy(
            1, vocab, kIgnored, scale, data<float>(scores) + r * vocab, targets.data_ptr<int64_t>() + first + r,
            gradients ? data<T>(dscores) + r * vocab : nullptr);
      }
    });
    for (const double one : losses) loss += one;
    if (!gradients) continue;

    const Matrix<const T> d{data<T>(dscores), vocab};
    float* dnormed = data<float>(dnormed_wide) + (kNarrow ? 0 : first * hidden);
    gemm<T>(count, hidden, vocab, 1, d, w, 0, {dnormed, hidden});
    if constexpr (kNarrow) {
      rows<T>().scale_rows(count, hidden, nullptr, dnormed, hidden, data<T>(gradients->dnormed) + first * hidden,
                           hidden);
    }
    if (one_chunk) {
      at::mm_out(gradients->dweight, dscores.t(), normed);  // nothing to add: no float32 copy of a large matrix
    } else {
      gemm<T>(vocab, hidden, count, 1, transposed(d), rows_in, first > 0 ? 1 : 0, {data<float>(dweight_wide), hidden});
    }
  }
  if constexpr (kNarrow) {
    if (gradients && !one_chunk) gradients->dweight.copy_(dweight_wide);
  }
  return loss;
}

struct HeadLoss : torch::autograd::Function<HeadLoss> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& norm, const Tensor& weight,
                        const Tensor& targets, const HeadSettings& settings, bool wants_gradients) {
    Workspace& workspace = *settings.workspace;
    const auto type = x.scalar_type();
    const auto in = x.reshape({-1, x.size(-1)}).contiguous();
    const int64_t tokens = in.size(0), vocab = weight.size(0), chunk = chunk_size(settings, tokens, vocab);
    const auto counted = checked(targets, tokens, vocab);
    const auto normed = workspace.take(in.sizes(), type), inverse = workspace.take({tokens}, at::kFloat);
    rms_norm(in, norm, settings.eps, normed, inverse);

    HeadGradients gradients;
    if (wants_gradients) {
      gradients.dnormed = workspace.take(in.sizes(), type);
      gradients.dweight = at::empty(weight.sizes(), type);  // becomes the parameter's gradient: not ours to keep
    }
    const double scale = 1 / static_cast<double>(counted.second);
    double loss = 0;
    with_type(type, [&]<class T>() {
      loss = sum_of_losses<T>(normed, weight.contiguous(), counted.first, static_cast<float>(scale), chunk,
                              wants_gradients ? &gradients : nullptr, workspace);
    });
    if (wants_gradients) {
      const auto dx = workspace.take(x.sizes(), type);
      ctx->saved_data["dnorm"] =
          rms_norm_backward(in, norm, inverse, gradients.dnormed, {}, dx.view(in.sizes()), workspace);
      ctx->saved_data["dx"] = dx;
      ctx->saved_data["dweight"] = gradients.dweight;
    }
    return at::scalar_tensor(loss * scale, at::kFloat);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    refuse_second_derivatives();
    TORCH_CHECK(ctx->saved_data.count("dx"),
                "[qwen::fused] a second backward of one loss: its gradients are given "
                "away; do the forward again, or take the plain model (--kernels plain)");
    // Moved out, so that autograd holds the only reference and makes them the parameters' gradients without a copy.
    Tensor dx = std::move(ctx->saved_data["dx"]).toTensor(), dnorm = std::move(ctx->saved_data["dnorm"]).toTensor();
    Tensor dweight = std::move(ctx->saved_data["dweight"]).toTensor();
    ctx->saved_data.clear();
    const double scale = gradients[0].item<double>();
    if (scale != 1) dx.mul_(scale), dnorm.mul_(scale), dweight.mul_(scale);
    return {dx, dnorm, dweight, Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

at::Tensor head_loss(const Tensor& x, const Tensor& norm, const Tensor& weight, const Tensor& targets,
                     const HeadSettings& settings) {
  const bool wants_gradients =
      at::GradMode::is_enabled() && (x.requires_grad() || norm.requires_grad() || weight.requires_grad());
  return HeadLoss::apply(x, norm, weight, targets, settings, wants_gradients);
}

}  // namespace qwen::fused
