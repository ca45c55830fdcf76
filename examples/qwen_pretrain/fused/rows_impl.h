// The kernels of rows.h, for the file of one instruction set, which defines
//   QWEN_ROWS_NAME    plain, avx2 or avx512
//   QWEN_ROWS_WIDTH   floats of a vector
// Everything is in an unnamed namespace, so that no other file can come to use it.
#pragma once

#include <math.h>  // of C: functions, no inline ones
#include <stddef.h>

#include "rows.h"
#include "vectors.h"

namespace qwen::fused {
namespace {

template <class T>
void rms_norm(int64_t rows, int64_t size, float eps, const T* x, const T* weight, T* y, float* inverse) {
  for (int64_t r = 0; r < rows; ++r, x += size, y += size) {
    Floats squares{};
    for_vectors(size, [&](int64_t i, auto part) QWEN_LAMBDA {
      const Floats v = load(x + i, part);
      squares += v * v;
    });
    const float scale = 1 / sqrtf(sum_of(squares) / static_cast<float>(size) + eps);
    inverse[r] = scale;
    for_vectors(size, [&](int64_t i, auto part) QWEN_LAMBDA {
      store(y + i, part, rounded<T>(load(x + i, part) * scale) * load(weight + i, part));
    });
  }
}

// y_i = w_i x_i s with s = (mean(x^2) + eps)^(-1/2), so dx_i = s w_i dy_i - x_i s^3 / size * sum_j(dy_j w_j x_j).
template <class T>
void rms_norm_backward(int64_t rows, int64_t size, const T* x, const T* weight, const float* inverse, const T* dy,
                       const T* residual, T* dx, float* dweight) {
  for (int64_t r = 0; r < rows; ++r, x += size, dy += size, dx += size) {
    const float scale = inverse[r];
    Floats products{};
    for_vectors(size, [&](int64_t i, auto part) QWEN_LAMBDA {
      const Floats both = load(dy + i, part) * load(x + i, part);
      products += both * load(weight + i, part);
      store(dweight + i, part, load(dweight + i, part) + both * scale);
    });
    const float along = sum_of(products) * scale * scale * scale / static_cast<float>(size);
    const auto gradient = [&](int64_t i, auto part) QWEN_LAMBDA {
      return load(dy + i, part) * load(weight + i, part) * scale - load(x + i, part) * along;
    };
    if (residual) {
      for_vectors(size, [&](int64_t i, auto part)
                            QWEN_LAMBDA { store(dx + i, part, gradient(i, part) + load(residual + i, part)); });
      residual += size;
    } else {
      for_vectors(size, [&](int64_t i, auto part) QWEN_LAMBDA { store(dx + i, part, gradient(i, part)); });
    }
  }
}

QWEN_INLINE Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(-x)); }

template <class T>
void swiglu(int64_t count, const T* gate, const T* up, T* y) {
  for_vectors(count, [&](int64_t i, auto part) QWEN_LAMBDA {
    const Floats g = load(gate + i, part);
    store(y + i, part, rounded<T>(g * sigmoid(g)) * load(up + i, part));
  });
}

// silu'(g) = s + g s (1 - s) with s = sigmoid(g).
template <class T>
void swiglu_backward(int64_t count, const T* gate, const T* up, const T* dy, T* y, T* dgate, T* dup) {
  for_vectors(count, [&](int64_t i, auto part) QWEN_LAMBDA {
    const Floats g = load(gate + i, part), u = load(up + i, part), d = load(dy + i, part);
    const Floats s = sigmoid(g), silu = g * s;
    store(y + i, part, rounded<T>(silu) * u);
    store(dgate + i, part, d * u * (s + silu * (1.0f - s)));
    store(dup + i, part, d * silu);
  });
}

template <class In, class T>
void rotate(int64_t rows, int64_t heads, int64_t half, int64_t first, int64_t seq, const float* cosine,
            const float* sine, float direction, const In* x, int64_t x_stride, T* y, int64_t y_stride) {
  for (int64_t r = 0; r < rows; ++r, x += x_stride, y += y_stride) {
    const int64_t position = (first + r) % seq;
    const float *c = cosine + position * half, *s = sine + position * half;
    for (int64_t head = 0; head < heads; ++head) {
      const In* in = x + head * 2 * half;
      T* out = y + head * 2 * half;
      for_vectors(half, [&](int64_t i, auto part) QWEN_LAMBDA {
        const Floats a = load(in + i, part), b = load(in + half + i, part);
        const Floats cos_i = load(c + i, part), sin_i = load(s + i, part) * direction;
        store(out + i, part, a * cos_i - b * sin_i);
        store(out + half + i, part, b * cos_i + a * sin_i);
      });
    }
  }
}

template <class T>
QWEN_INLINE void clear(T* row, int64_t begin, int64_t end) {
  __builtin_memset(row + begin, 0, static_cast<size_t>(end - begin) * sizeof(T));
}

template <class T>
void causal_softmax(int64_t rows, int64_t seen, int64_t width, const float* scores, T* p, float* log_sum,
                    float* inverse_sum) {
  for (int64_t r = 0; r < rows; ++r, scores += width, p += width) {
    const int64_t n = seen + r;
    Floats top = splat(-INFINITY);
    for_vectors_within(width, n, [&](int64_t i, auto part) QWEN_LAMBDA {
      top = max(top, fill(load(scores + i, part), part, -INFINITY));
    });
    const float largest = max_of(top);
    Floats sums{};
    for_vectors_within(width, n, [&](int64_t i, auto part) QWEN_LAMBDA {
      const Floats e = fill(exp(load(scores + i, part) - largest), part, 0);
      sums += e;
      store(p + i, part, e);
    });
    clear(p, n, width);
    const float sum = sum_of(sums);
    log_sum[r] = largest + logf(sum);
    inverse_sum[r] = 1 / sum;
  }
}

template <class T>
void causal_softmax_backward(int64_t rows, int64_t seen, int64_t width, float scale, const float* scores,
                             const float* dp, const float* log_sum, const float* delta, T* p, T* dscores) {
  for (int64_t r = 0; r < rows; ++r, scores += width, dp += width, p += width, dscores += width) {
    const int64_t n = seen + r;
    for_vectors_within(width, n, [&](int64_t i, auto part) QWEN_LAMBDA {
      const Floats e = exp(load(scores + i, part) - log_sum[r]);
      const Floats d = e * (load(dp + i, part) - delta[r]) * scale;
      store(p + i, part, e);
      store(dscores + i, part, d);
    });
    clear(p, n, width);
    clear(dscores, n, width);
  }
}

template <class T>
void row_dot(int64_t rows, int64_t size, const T* a, int64_t a_stride, const T* b, int64_t b_stride, float* sums) {
  for (int64_t r = 0; r < rows; ++r, a += a_stride, b += b_stride) {
    Floats products{};
    for_vectors(size, [&](int64_t i, auto part) QWEN_LAMBDA { products += load(a + i, part) * load(b + i, part); });
    sums[r] = sum_of(products);
  }
}

template <class T>
void scale_rows(int64_t rows, int64_t size, const float* factors, const float* x, int64_t x_stride, T* y,
                int64_t y_stride) {
  for (int64_t r = 0; r < rows; ++r, x += x_stride, y += y_stride) {
    const float factor = factors ? factors[r] : 1;
    for_vectors(size, [&](int64_t i, auto part) QWEN_LAMBDA { store(y + i, part, load(x + i, part) * factor); });
  }
}

template <class T>
double cross_entropy(int64_t rows, int64_t size, int64_t ignored, float scale, float* logits, const int64_t* targets,
                     T* gradient) {
  double loss = 0;
  for (int64_t r = 0; r < rows; ++r, logits += size) {
    T* out = gradient ? gradient + r * size : nullptr;
    const int64_t target = targets[r];
    if (target == ignored) {
      if (out) clear(out, 0, size);
      continue;
    }
    const float wanted = logits[target];
    Floats top = splat(-INFINITY);
    for_vectors(
        size, [&](int64_t i, auto part) QWEN_LAMBDA { top = max(top, fill(load(logits + i, part), part, -INFINITY)); });
    const float largest = max_of(top);
    Floats sums{};
    for_vectors(size, [&](int64_t i, auto part) QWEN_LAMBDA {
      const Floats e = fill(exp(load(logits + i, part) - largest), part, 0);
      sums += e;
      store(logits + i, part, e);
    });
    const float sum = sum_of(sums);
    loss += static_cast<double>(largest) + log(static_cast<double>(sum)) - static_cast<double>(wanted);
    if (!out) continue;
    const float factor = scale / sum, at_target = logits[target] * factor - scale;
    for_vectors(size, [&](int64_t i, auto part) QWEN_LAMBDA { store(out + i, part, load(logits + i, part) * factor); });
    store(out + target, Tail{1}, splat(at_target));
  }
  return loss;
}

template <class T>
constexpr RowKernels<T> kKernels = {
    .rms_norm = rms_norm<T>,
    .rms_norm_backward = rms_norm_backward<T>,
    .swiglu = swiglu<T>,
    .swiglu_backward = swiglu_backward<T>,
    .rotate = rotate<T, T>,
    .rotate_wide = rotate<float, T>,
    .causal_softmax = causal_softmax<T>,
    .causal_softmax_backward = causal_softmax_backward<T>,
    .row_dot = row_dot<T>,
    .scale_rows = scale_rows<T>,
    .cross_entropy = cross_entropy<T>,
};

}  // namespace

#define QWEN_JOIN(a, b) a##b
#define QWEN_FUNCTION(name) QWEN_JOIN(rows_, name)
#define QWEN_TEXT(name) #name
#define QWEN_STRING(name) QWEN_TEXT(name)

RowSet QWEN_FUNCTION(QWEN_ROWS_NAME)();
RowSet QWEN_FUNCTION(QWEN_ROWS_NAME)() { return {QWEN_STRING(QWEN_ROWS_NAME), &kKernels<float>, &kKernels<Bits16>}; }

}  // namespace qwen::fused
