// Writes FP8 pages: bfloat16 rows become codes, K also with error feedback (tiering/feedback.py).
// Sixteen tokens at once, one in each lane, so that a channel's turn is a chain of vector products.

#include "cpu_kernels_common.h"

#include <algorithm>

namespace {

constexpr int64_t MAX_DIM = 256;
constexpr int64_t SERIAL_BLOCKS = 8;  // blocks of 16 tokens and a head that one thread does alone

struct E4m3Format {
  static constexpr int MANTISSA = 3, LOWEST_EXPONENT = -6, SHIFT = 7;
  static constexpr float LARGEST = 448.0f, UNITS = 0x1p-8f;
};
struct E5m2Format {
  static constexpr int MANTISSA = 2, LOWEST_EXPONENT = -14, SHIFT = 8;
  static constexpr float LARGEST = 57344.0f, UNITS = 1.0f;
};

// The nearest number of the format, ties to even; what lies beyond its largest becomes that.
template <typename Format>
__m512 rounded(__m512 x) {
  const __m512 largest = _mm512_set1_ps(Format::LARGEST);
  // Of two operands of which one is NaN, the second comes out.
  x = _mm512_min_ps(largest, _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), largest), x));
  const __m512 exponent =
      _mm512_max_ps(_mm512_getexp_ps(x), _mm512_set1_ps(float(Format::LOWEST_EXPONENT)));
  const __m512 step = _mm512_sub_ps(exponent, _mm512_set1_ps(float(Format::MANTISSA)));
  const __m512 steps = _mm512_scalef_ps(x, _mm512_sub_ps(_mm512_setzero_ps(), step));
  return _mm512_scalef_ps(_mm512_roundscale_ps(steps, 0), step);
}

// The code of each number of the format, by way of float16, which holds all of them exactly; NaN has
// a code of its own.
template <typename Format>
__m128i coded(__m512 x) {
  const __m512 units = _mm512_mul_ps(x, _mm512_set1_ps(Format::UNITS));
  const __m512i half = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(units, _MM_FROUND_TO_NEAREST_INT));
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(half, 8), _mm512_set1_epi32(0x80));
  const __m512i size = _mm512_and_si512(_mm512_srli_epi32(half, Format::SHIFT),
                                        _mm512_set1_epi32(0x7f));
  const __mmask16 unordered = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i codes = _mm512_or_si512(sign, size);
  return _mm512_cvtepi32_epi8(_mm512_mask_mov_epi32(codes, unordered, _mm512_set1_epi32(0x7f)));
}

// One head's channels: `inverse` of the scale, `mean`; with feedback, `order`, and `share`, in
// whose row i lies what the i-th channel in turn gets of the errors of those before it.
struct Head {
  const float *inverse, *mean, *share;
  const int64_t* order;
  int64_t dim;
};

inline __m512 handed_on(const float (*errors)[LANES], const float* share, int64_t turn) {
  __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(),
                    _mm512_setzero_ps()};
  int64_t i = 0;
  for (; i + 4 <= turn; i += 4) {
    for (int64_t k = 0; k < 4; ++k) {
      sums[k] = _mm512_fmadd_ps(load(errors[i + k]), _mm512_set1_ps(share[i + k]), sums[k]);
    }
  }
  for (; i < turn; ++i) {
    sums[0] = _mm512_fmadd_ps(load(errors[i]), _mm512_set1_ps(share[i]), sums[0]);
  }
  return _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3]));
}

// Codes of up to 16 tokens of one head. Tokens lie `stride` numbers and `code_stride` codes apart.
template <typename Format>
void write_block(const Bf16* rows, int64_t tokens, int64_t stride, const Head& head,
                 uint8_t* codes, int64_t code_stride) {
  alignas(64) float normal[MAX_DIM][LANES] = {}, errors[MAX_DIM][LANES];
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t channel = 0; channel < head.dim; ++channel) {
      const uint32_t bits = uint32_t(rows[token * stride + channel].bits) << 16;
      float number;
      std::memcpy(&number, &bits, sizeof number);
      normal[channel][token] = (number - head.mean[channel]) * head.inverse[channel];
    }
  }
  for (int64_t turn = 0; turn < head.dim; ++turn) {
    const int64_t channel = head.order == nullptr ? turn : head.order[turn];
    __m512 wanted = load(normal[channel]);
    if (head.share != nullptr) {
      wanted = _mm512_add_ps(wanted, handed_on(errors, head.share + turn * head.dim, turn));
    }
    const __m512 done = rounded<Format>(wanted);
    _mm512_store_ps(errors[turn], _mm512_sub_ps(wanted, done));
    alignas(16) uint8_t lanes[LANES];
    _mm_store_si128(reinterpret_cast<__m128i*>(lanes), coded<Format>(done));
    for (int64_t token = 0; token < tokens; ++token) {
      codes[token * code_stride + channel] = lanes[token];
    }
  }
}

}  // namespace

// Codes [tokens, heads, dim], without gaps, of rows [tokens, heads, dim], whose tokens lie `stride`
// numbers apart. `inverse`, `mean`: [heads, dim]. `order` [heads, dim] and `share` [heads, dim, dim]
// are null without feedback. `dim` is at most 256.
#define EXPORT(NAME, FORMAT)                                                                       \
  extern "C" void fp8_write_##NAME(const Bf16* rows, uint8_t* codes, const float* inverse,         \
                                   const float* mean, const int64_t* order, const float* share,    \
                                   int64_t tokens, int64_t heads, int64_t dim, int64_t stride,     \
                                   int64_t threads) {                                              \
    const int64_t blocks = (tokens + LANES - 1) / LANES * heads;                                   \
    auto write = [=](int64_t block) {                                                              \
      const int64_t first = block / heads * LANES, h = block % heads, row = heads * dim;           \
      const Head head = {inverse + h * dim, mean + h * dim,                                        \
                         share == nullptr ? nullptr : share + h * dim * dim,                       \
                         order == nullptr ? nullptr : order + h * dim, dim};                       \
      write_block<FORMAT>(rows + first * stride + h * dim, std::min(LANES, tokens - first),        \
                          stride, head, codes + first * row + h * dim, row);                       \
    };                                                                                             \
    if (blocks <= SERIAL_BLOCKS || threads == 1) {                                                 \
      for (int64_t block = 0; block < blocks; ++block) write(block);                               \
      return;                                                                                      \
    }                                                                                              \
    _Pragma("omp parallel for num_threads(threads)")                                               \
    for (int64_t block = 0; block < blocks; ++block) write(block);                                 \
  }
EXPORT(float8_e4m3fn, E4m3Format)
EXPORT(float8_e5m2, E5m2Format)
