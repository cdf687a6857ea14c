// What the kernels share: stored numbers widened to float32, and e^x.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace {

constexpr int64_t LANES = 16;  // float32 numbers of a vector

// One overload for each type of page: sixteen stored numbers, widened to float32.
inline __m512 load(const float* stored) { return _mm512_loadu_ps(stored); }

struct Bf16 { uint16_t bits; };
inline __m512 load(const Bf16* stored) {
  const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(stored));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(codes), 16));
}

// FP8 numbers become float16 first, subnormal ones included. An E4M3 number has its exponent and
// mantissa seven bits further up there, where they stand for 2^-8 of what they do here; its codes of
// NaN come out finite.
struct E4m3 { uint8_t bits; };
inline __m512 load_units(const E4m3* stored) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(stored));
  const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
  return _mm512_cvtph_ps(_mm256_and_si256(moved, _mm256_set1_epi16(int16_t(0xbfff))));
}

struct E5m2 { uint8_t bits; };
inline __m512 load(const E5m2* stored) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(stored));
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8));
}

// Sixteen stored numbers, to be multiplied by UNIT of their type: cheaper than `load` in a loop.
template <typename T>
constexpr float UNIT = 1.0f;
template <>
constexpr float UNIT<E4m3> = 256.0f;

inline __m512 load(const E4m3* stored) {
  return _mm512_mul_ps(load_units(stored), _mm512_set1_ps(UNIT<E4m3>));
}
template <typename T>
__m512 load_units(const T* stored) {
  return load(stored);
}

// Rounds to the nearest bfloat16, ties to even.
inline void store(Bf16* to, __m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

// e^x for -87 < x < 87, to 2e-7 relative; beyond, the value there. NaN stays NaN.
inline __m512 exponential(__m512 x) {
  // Of two operands of which one is NaN, the second comes out.
  x = _mm512_min_ps(_mm512_set1_ps(87.0f), _mm512_max_ps(_mm512_set1_ps(-87.0f), x));
  const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
  rest = _mm512_fmadd_ps(whole, _mm512_set1_ps(2.12194440e-4f), rest);
  __m512 sum = _mm512_set1_ps(1.9875691e-4f);
  for (const float factor :
       {1.3981999e-3f, 8.3334519e-3f, 4.1665796e-2f, 1.6666666e-1f, 5.0000001e-1f}) {
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(factor));
  }
  sum = _mm512_fmadd_ps(_mm512_mul_ps(sum, rest), rest, _mm512_add_ps(rest, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(sum, whole);
}

inline float exponential(float x) {
  return _mm512_cvtss_f32(exponential(_mm512_set1_ps(x)));
}

// x, bent into (-cap, cap) by tanh.
inline __m512 capped(__m512 x, float cap) {
  const __m512 grown = exponential(_mm512_mul_ps(x, _mm512_set1_ps(2.0f / cap)));
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 part = _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(grown, one));
  return _mm512_mul_ps(_mm512_set1_ps(cap), _mm512_sub_ps(one, part));
}

}  // namespace
