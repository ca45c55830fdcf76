#include "blocks.h"

#include <torch/torch.h>

#include "attention.h"
#include "norm.h"

namespace qwen::fused {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// {batch, seq, hidden} as {batch * seq, hidden}.
Tensor flat(const Tensor& x) { return x.reshape({-1, x.size(-1)}).contiguous(); }

// Row r of `x` is at position r % seq.
void rotate(const Tensor& x, int64_t seq, const Tensor& cosine, const Tensor& sine) {
  const int64_t width = x.size(1), half = cosine.size(1);
  with_type(x.scalar_type(), [&]<class T>() {
    for_parts(x.size(0), width, [&](int64_t begin, int64_t end) {
      T* rows_of_x = data<T>(x) + begin * width;
      rows<T>().rotate(end - begin, width / (2 * half), half, begin, seq, data<float>(cosine), data<float>(sine), 1,
                       rows_of_x, width, rows_of_x, width);
    });
  });
}

// y = x w^T + bias, in memory of the workspace.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, Workspace& workspace) {
  auto y = workspace.take({x.size(0), weight.size(0)}, x.scalar_type());
  if (bias.defined()) {
    at::addmm_out(y, bias, x, weight.t());
  } else {
    at::mm_out(y, x, weight.t());
  }
  return y;
}

// Settings that backward needs, kept where autograd keeps numbers.
void keep(AutogradContext* ctx, const BlockSettings& settings) {
  ctx->saved_data["heads"] = settings.heads;
  ctx->saved_data["kv_heads"] = settings.kv_heads;
  ctx->saved_data["query_block"] = settings.query_block;
  ctx->saved_data["workspace"] = c10::IValue::make_capsule(settings.workspace);
}

c10::intrusive_ptr<Workspace> workspace_of(AutogradContext* ctx) {
  return c10::static_intrusive_pointer_cast<Workspace>(ctx->saved_data["workspace"].toCapsule());
}

struct AttentionBlock : torch::autograd::Function<AttentionBlock> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& norm, const Tensor& wq, const Tensor& bq,
                        const Tensor& wk, const Tensor& bk, const Tensor& wv, const Tensor& bv, const Tensor& wo,
                        const BlockSettings& settings) {
    Workspace& workspace = *settings.workspace;
    const auto type = x.scalar_type();
    const int64_t batch = x.size(0), seq = x.size(1), count = batch * seq;
    const auto in = flat(x), normed = workspace.take({count, x.size(2)}, type);
    const auto inverse = workspace.take({count}, at::kFloat);
    rms_norm(in, norm, settings.eps, normed, inverse);
    const auto q = linear(normed, wq, bq, workspace), k = linear(normed, wk, bk, workspace);
    const auto v = linear(normed, wv, bv, workspace);
    rotate(q, seq, settings.cosine, settings.sine);
    rotate(k, seq, settings.cosine, settings.sine);

    const auto out = workspace.take({count, wq.size(0)}, type);
    const auto log_sum = workspace.take({batch * settings.heads, seq}, at::kFloat);
    const AttentionShape shape = shape_of(batch, seq, settings.heads, settings.kv_heads, q, settings.query_block);
    with_type(type, [&]<class T>() {
      attention<T>(shape, data<T>(q), data<T>(k), data<T>(v), data<T>(out), data<float>(log_sum), workspace);
    });
    const auto y = workspace.take(x.sizes(), type);
    auto y_flat = y.view(in.sizes());
    at::addmm_out(y_flat, in, out, wo.t());

    ctx->save_for_backward(
        {x, norm, wq, wk, wv, wo, normed, inverse, q, k, v, out, log_sum, settings.cosine, settings.sine});
    keep(ctx, settings);
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    refuse_second_derivatives();
    const auto workspace = workspace_of(ctx);
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &norm = saved[1], &wq = saved[2], &wk = saved[3], &wv = saved[4], &wo = saved[5];
    const auto &normed = saved[6], &inverse = saved[7], &q = saved[8], &k = saved[9], &v = saved[10], &out = saved[11];
    const auto &log_sum = saved[12], &cosine = saved[13], &sine = saved[14];
    const auto type = x.scalar_type();
    const auto dy = flat(gradients[0]);

    auto dout = workspace->take(out.sizes(), type);
    at::mm_out(dout, dy, wo);
    const auto dq = workspace->take(q.sizes(), type), dk = workspace->take(k.sizes(), type);
    const auto dv = workspace->take(v.sizes(), type);
    const AttentionShape shape =
        shape_of(x.size(0), x.size(1), ctx->saved_data["heads"].toInt(), ctx->saved_data["kv_heads"].toInt(), q,
                 ctx->saved_data["query_block"].toInt());
    with_type(type, [&]<class T>() {
      attention_backward<T>(shape, {data<float>(cosine), data<float>(sine)}, data<T>(q), data<T>(k), data<T>(v),
                            data<T>(out), data<T>(dout), data<float>(log_sum), data<T>(dq), data<T>(dk), data<T>(dv),
                            *workspace);
    });

    auto dnormed = workspace->take(normed.sizes(), type);
    at::mm_out(dnormed, dq, wq);
    dnormed.addmm_(dk, wk).addmm_(dv, wv);
    const auto dx = workspace->take(x.sizes(), type);
    const auto dnorm = rms_norm_backward(flat(x), norm, inverse, dnormed, dy, dx.view(dy.sizes()), *workspace);
    return {dx,
            dnorm,
            at::mm(dq.t(), normed),
            dq.sum(0),
            at::mm(dk.t(), normed),
            dk.sum(0),
            at::mm(dv.t(), normed),
            dv.sum(0),
            at::mm(dy.t(), out),
            Tensor()};
  }

 private:
  static AttentionShape shape_of(int64_t batch, int64_t seq, int64_t heads, int64_t kv_heads, const Tensor& q,
                                 int64_t query_block) {
    return {batch, seq, heads, kv_heads, q.size(1) / heads, query_block};
  }
};

struct MlpBlock : torch::autograd::Function<MlpBlock> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& norm, const Tensor& wgate,
                        const Tensor& wup, const Tensor& wdown, const BlockSettings& settings) {
    Workspace& workspace = *settings.workspace;
    const auto type = x.scalar_type();
    const auto in = flat(x), normed = workspace.take(in.sizes(), type);
    const auto inverse = workspace.take({in.size(0)}, at::kFloat);
    rms_norm(in, norm, settings.eps, normed, inverse);
    const auto gate = linear(normed, wgate, {}, workspace), up = linear(normed, wup, {}, workspace);
    const auto hidden = workspace.take(gate.sizes(), type);
    with_type(type, [&]<class T>() {
      for_parts(hidden.numel(), 1, [&](int64_t begin, int64_t end) {
        rows<T>().swiglu(end - begin, data<T>(gate) + begin, data<T>(up) + begin, data<T>(hidden) + begin);
      });
    });
    const auto y = workspace.take(x.sizes(), type);
    auto y_flat = y.view(in.sizes());
    at::addmm_out(y_flat, in, hidden, wdown.t());

    ctx->save_for_backward({x, norm, wgate, wup, wdown, normed, inverse, gate, up});
    keep(ctx, settings);
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    refuse_second_derivatives();
    const auto workspace = workspace_of(ctx);
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &norm = saved[1], &wgate = saved[2], &wup = saved[3], &wdown = saved[4];
    const auto &normed = saved[5], &inverse = saved[6], &gate = saved[7], &up = saved[8];
    const auto type = x.scalar_type();
    const auto dy = flat(gradients[0]);

    auto dhidden = workspace->take(gate.sizes(), type);
    at::mm_out(dhidden, dy, wdown);
    const auto hidden = workspace->take(gate.sizes(), type), dgate = workspace->take(gate.sizes(), type);
    const auto& dup = dhidden;  // in its place
    with_type(type, [&]<class T>() {
      for_parts(hidden.numel(), 1, [&](int64_t begin, int64_t end) {
        rows<T>().swiglu_backward(end - begin, data<T>(gate) + begin, data<T>(up) + begin, data<T>(dhidden) + begin,
                                  data<T>(hidden) + begin, data<T>(dgate) + begin, data<T>(dup) + begin);
      });
    });

    auto dnormed = workspace->take(normed.sizes(), type);
    at::mm_out(dnormed, dgate, wgate);
    dnormed.addmm_(dup, wup);
    const auto dx = workspace->take(x.sizes(), type);
    const auto dnorm = rms_norm_backward(flat(x), norm, inverse, dnormed, dy, dx.view(dy.sizes()), *workspace);
    return {dx, dnorm, at::mm(dgate.t(), normed), at::mm(dup.t(), normed), at::mm(dy.t(), hidden), Tensor()};
  }
};

}  // namespace

void refuse_second_derivatives() {
  TORCH_CHECK(!at::GradMode::is_enabled(),
              "[qwen::fused] backward with create_graph: the fused kernels have no second derivatives; take the plain "
              "model (--kernels plain)");
}

at::Tensor attention_block(const Tensor& x, const AttentionWeights& weights, const BlockSettings& settings) {
  return AttentionBlock::apply(x, weights.norm, weights.wq, weights.bq, weights.wk, weights.bk, weights.wv, weights.bv,
                               weights.wo, settings);
}

at::Tensor mlp_block(const Tensor& x, const MlpWeights& weights, const BlockSettings& settings) {
  return MlpBlock::apply(x, weights.norm, weights.gate, weights.up, weights.down, settings);
}

}  // namespace qwen::fused
