// Norm, activation and rotary embedding of bfloat16 rows, each in one pass instead of a chain of
// small operators. Sums and products are float32. Needs AVX-512; elsewhere SGLang's own serve.

#include "cpu_kernels_common.h"

namespace {

constexpr int64_t SERIAL = 16'384;  // numbers below which waking other threads costs more

template <typename Work>
void for_rows(int64_t rows, int64_t width, int64_t threads, Work work) {
  if (rows * width <= SERIAL || threads == 1) {
    for (int64_t row = 0; row < rows; ++row) work(row);
    return;
  }
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; ++row) work(row);
}

template <typename T>
void rotate(Bf16* head, const T* cosines, int64_t half) {
  for (int64_t i = 0; i < half; i += LANES) {
    const __m512 cosine = load(cosines + i), sine = load(cosines + half + i);
    const __m512 first = load(head + i), second = load(head + half + i);
    store(head + i, _mm512_fmsub_ps(first, cosine, _mm512_mul_ps(second, sine)));
    store(head + half + i, _mm512_fmadd_ps(second, cosine, _mm512_mul_ps(first, sine)));
  }
}

}  // namespace

// out = rms_norm(x + residual) * weight; residual, if there is one, becomes x + residual. All rows
// are `width` numbers, a multiple of 16, without gaps.
extern "C" void rms_norm(const Bf16* x, Bf16* residual, const Bf16* weight, Bf16* out, int64_t rows,
                         int64_t width, float epsilon, int64_t threads) {
  for_rows(rows, width, threads, [=](int64_t row) {
    const Bf16* from = x + row * width;
    Bf16* kept = residual == nullptr ? nullptr : residual + row * width;
    auto sum_at = [&](int64_t i) {
      return kept == nullptr ? load(from + i) : _mm512_add_ps(load(from + i), load(kept + i));
    };
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += LANES) {
      const __m512 sum = sum_at(i);
      squares = _mm512_fmadd_ps(sum, sum, squares);
    }
    const float mean = _mm512_reduce_add_ps(squares) / float(width);
    const __m512 factor = _mm512_div_ps(_mm512_set1_ps(1.0f),
                                        _mm512_sqrt_ps(_mm512_set1_ps(mean + epsilon)));
    for (int64_t i = 0; i < width; i += LANES) {
      const __m512 sum = sum_at(i);
      if (kept != nullptr) store(kept + i, sum);
      store(out + row * width + i, _mm512_mul_ps(_mm512_mul_ps(sum, factor), load(weight + i)));
    }
  });
}

// out[row][i] = silu(x[row][i]) * x[row][width + i], for i < width, a multiple of 16.
extern "C" void silu_and_mul(const Bf16* x, Bf16* out, int64_t rows, int64_t width,
                             int64_t threads) {
  for_rows(rows, width, threads, [=](int64_t row) {
    const Bf16* gate = x + row * 2 * width;
    const __m512 one = _mm512_set1_ps(1.0f), zero = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += LANES) {
      const __m512 value = load(gate + i);
      const __m512 divisor = _mm512_add_ps(one, exponential(_mm512_sub_ps(zero, value)));
      // Below, e^-x is no longer exact, and the result is smaller than bfloat16 can tell from 0.
      const __mmask16 counts = _mm512_cmp_ps_mask(value, _mm512_set1_ps(-87.0f), _CMP_NLE_UQ);
      const __m512 activated = _mm512_maskz_div_ps(counts, value, divisor);
      store(out + row * width + i, _mm512_mul_ps(activated, load(gate + width + i)));
    }
  });
}

// Rotates, in place, each of `heads` heads of `rows` rows that lie `stride` numbers apart, by the row
// of `cosines` (cosines, then sines, of half a head each) for its position. Halves are whole vectors.
#define EXPORT(NAME, TYPE)                                                                          \
  extern "C" void rotary_##NAME(Bf16* x, int64_t rows, int64_t heads, int64_t width,                \
                                int64_t stride, const int64_t* positions, const TYPE* cosines,      \
                                int64_t threads) {                                                  \
    for_rows(rows, heads * width, threads, [=](int64_t row) {                                       \
      const TYPE* own = cosines + positions[row] * width;                                           \
      for (int64_t h = 0; h < heads; ++h) rotate(x + row * stride + h * width, own, width / 2);     \
    });                                                                                             \
  }
EXPORT(float32, float)
EXPORT(bfloat16, Bf16)
