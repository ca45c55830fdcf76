#include "attention.h"

#include <algorithm>
#include <cmath>

#include "gemm.h"
#include "types.h"

namespace qwen::fused {
namespace {

// On all threads where there are as many units as threads; otherwise one after the other, with the threads in their
// products.
template <class F>
void for_units(int64_t count, const F& f) {
  if (count >= at::get_num_threads()) {
    at::parallel_for(0, count, 1, f);
  } else {
    f(0, count);
  }
}

template <class T>
constexpr at::ScalarType kType = std::is_same_v<T, float> ? at::kFloat : at::kBFloat16;

// Where a product of float32 becomes factors of type T: a place of its own, or for float32 the same place.
template <class T>
class Probabilities {
 public:
  Probabilities(int64_t rows, int64_t columns, Workspace& workspace)
      : wide_(workspace.take({rows, columns}, at::kFloat)) {
    if constexpr (!std::is_same_v<T, float>) narrow_ = workspace.take({rows, columns}, kType<T>);
  }
  float* scores() const { return data<float>(wide_); }
  T* get() const {
    if constexpr (std::is_same_v<T, float>) {
      return scores();
    } else {
      return data<T>(narrow_);
    }
  }

 private:
  at::Tensor wide_, narrow_;
};

int64_t last_block(const AttentionShape& shape) { return (shape.seq - 1) / shape.block * shape.block; }

}  // namespace

template <class T>
void attention(const AttentionShape& shape, const T* q, const T* k, const T* v, T* out, float* log_sum,
               Workspace& workspace) {
  const int64_t seq = shape.seq, heads = shape.heads, dim = shape.head_dim, block = shape.block;
  const int64_t qs = shape.q_stride(), ks = shape.kv_stride(), group = heads / shape.kv_heads;
  const float scale = 1 / std::sqrt(static_cast<float>(dim));
  const RowKernels<T>& kernels = rows<T>();
  const int64_t largest = std::min(block, seq);

  for_units(shape.batch * heads, [&](int64_t begin, int64_t end) {
    const Probabilities<T> probabilities(largest, seq, workspace);
    const auto weighted = workspace.take({largest, dim}, at::kFloat), inverse = workspace.take({largest}, at::kFloat);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t b = unit / heads, head = unit % heads;
      const T* q_head = q + b * seq * qs + head * dim;
      const T* k_head = k + b * seq * ks + head / group * dim;
      const T* v_head = v + b * seq * ks + head / group * dim;
      T* out_head = out + b * seq * qs + head * dim;
      for (int64_t first = 0; first < seq; first += block) {
        const int64_t queries = std::min(block, seq - first), keys = first + queries;
        gemm<T>(queries, keys, dim, scale, {q_head + first * qs, qs}, transposed<T>({k_head, ks}), 0,
                {probabilities.scores(), keys});
        kernels.causal_softmax(queries, first + 1, keys, probabilities.scores(), probabilities.get(),
                               log_sum + unit * seq + first, data<float>(inverse));
        gemm<T>(queries, dim, keys, 1, {probabilities.get(), keys}, {v_head, ks}, 0, {data<float>(weighted), dim});
        kernels.scale_rows(queries, dim, data<float>(inverse), data<float>(weighted), dim, out_head + first * qs, qs);
      }
    }
  });
}

// With P the probabilities, S the scores and D the gradient of the output, o_i: dP = D v^T, dS = P (dP - D.o) / sqrt(d),
// dq = dS k, dk = dS^T q, dv = P^T D.
template <class T>
void attention_backward(const AttentionShape& shape, const RotaryTables& rotary, const T* q, const T* k, const T* v,
                        const T* out, const T* dout, const float* log_sum, T* dq, T* dk, T* dv, Workspace& workspace) {
  const int64_t seq = shape.seq, heads = shape.heads, dim = shape.head_dim, block = shape.block;
  const int64_t kv_heads = shape.kv_heads, group = heads / kv_heads, half = dim / 2;
  const int64_t qs = shape.q_stride(), ks = shape.kv_stride();
  const float scale = 1 / std::sqrt(static_cast<float>(dim));
  const RowKernels<T>& kernels = rows<T>();
  const int64_t largest = std::min(block, seq);

  // The query heads of a group add to the same gradients, so a unit is a group.
  for_units(shape.batch * kv_heads, [&](int64_t begin, int64_t end) {
    const Probabilities<T> probabilities(largest, seq, workspace), gradients(largest, seq, workspace);
    const auto delta = workspace.take({largest}, at::kFloat), dq_wide = workspace.take({largest, dim}, at::kFloat);
    const auto dk_wide = workspace.take({seq, dim}, at::kFloat), dv_wide = workspace.take({seq, dim}, at::kFloat);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t b = unit / kv_heads, kv_head = unit % kv_heads;
      const int64_t kv = b * seq * ks + kv_head * dim;
      float beta = 0;  // the first block is the last of the rows: it sees all keys, and so sets all gradients
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        for (int64_t first = last_block(shape); first >= 0; first -= block, beta = 1) {
          const int64_t queries = std::min(block, seq - first), keys = first + queries;
          const int64_t at = (b * seq + first) * qs + head * dim;
          const float* sums = log_sum + (b * heads + head) * seq + first;
          gemm<T>(queries, keys, dim, scale, {q + at, qs}, transposed<T>({k + kv, ks}), 0,
                  {probabilities.scores(), keys});
          gemm<T>(queries, keys, dim, 1, {dout + at, qs}, transposed<T>({v + kv, ks}), 0, {gradients.scores(), keys});
          kernels.row_dot(queries, dim, dout + at, qs, out + at, qs, data<float>(delta));
          kernels.causal_softmax_backward(queries, first + 1, keys, scale, probabilities.scores(), gradients.scores(),
                                          sums, data<float>(delta), probabilities.get(), gradients.get());
          gemm<T>(keys, dim, queries, 1, transposed<T>({probabilities.get(), keys}), {dout + at, qs}, beta,
                  {data<float>(dv_wide), dim});
          gemm<T>(keys, dim, queries, 1, transposed<T>({gradients.get(), keys}), {q + at, qs}, beta,
                  {data<float>(dk_wide), dim});
          gemm<T>(queries, dim, keys, 1, {gradients.get(), keys}, {k + kv, ks}, 0, {data<float>(dq_wide), dim});
          kernels.rotate_wide(queries, 1, half, first, seq, rotary.cosine, rotary.sine, -1, data<float>(dq_wide), dim,
                              dq + at, qs);
        }
      }
      kernels.rotate_wide(seq, 1, half, 0, seq, rotary.cosine, rotary.sine, -1, data<float>(dk_wide), dim, dk + kv, ks);
      kernels.scale_rows(seq, dim, nullptr, data<float>(dv_wide), dim, dv + kv, ks);
    }
  });
}

template void attention<float>(const AttentionShape&, const float*, const float*, const float*, float*, float*,
                               Workspace&);
template void attention<Bits16>(const AttentionShape&, const Bits16*, const Bits16*, const Bits16*, Bits16*, float*,
                                Workspace&);
template void attention_backward<float>(const AttentionShape&, const RotaryTables&, const float*, const float*,
                                        const float*, const float*, const float*, const float*, float*, float*, float*,
                                        Workspace&);
template void attention_backward<Bits16>(const AttentionShape&, const RotaryTables&, const Bits16*, const Bits16*,
                                         const Bits16*, const Bits16*, const Bits16*, const float*, Bits16*, Bits16*,
                                         Bits16*, Workspace&);

}  // namespace qwen::fused
