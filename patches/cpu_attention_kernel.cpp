// Decode attention that walks a request's pages in the KV pool instead of gathering them first.
//
// A task is one chunk of one request's keys, for all heads: it reads every key and every value once,
// in the order in which they lie in memory. The chunks of a request are then merged by their maxima.
// Scores, weights and sums are float32. Needs AVX-512; elsewhere the torch code serves.

#include <cmath>
#include <memory>
#include <vector>

#include "cpu_kernels_common.h"

namespace {

constexpr int64_t CHUNK = 64;  // keys of a task: few enough that they stay in the cache
constexpr int64_t TILE = 4;    // vectors of a row, and heads, that are held in registers at once

struct Shape {
  int64_t requests, heads, kv_heads, width, value_width, key_stride, value_stride, threads;
  float scale, soft_cap;
};

// One KV head's rows (or some columns of them) of the keys, or values, that a task reads.
template <typename T>
struct Rows {
  const T* base;
  const int32_t* slots;
  int64_t stride, count;

  const T* at(int64_t key) const { return base + slots[key] * stride; }
};

// Pages lie scattered, where the processor cannot guess them: asks, while one row is computed with,
// for the whole row that the next task will read in its place.
template <typename T>
struct Ahead {
  const T* base;
  const int32_t* slots;  // of the next task; null after the last
  int64_t stride;

  void ask(int64_t key) const {
    if (slots == nullptr) return;
    const char* row = reinterpret_cast<const char*>(base + slots[key] * stride);
    for (int64_t i = 0; i < stride * int64_t(sizeof(T)); i += 64) _mm_prefetch(row + i, _MM_HINT_T1);
  }
};

// The sums of four vectors, in order.
inline __m128 sum_each(const __m512* v) {
  const __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  const __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x44),
                                   _mm512_shuffle_ps(low, high, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// scores[head][key] += query . key, in the keys' units, over VECTORS vectors of columns, for HEADS heads.
template <int HEADS, int VECTORS, typename T>
void score(const float* query, int64_t width, const Rows<T>& rows, const Ahead<T>& ahead,
           float* scores) {
  __m512 held[HEADS][VECTORS];
  for (int h = 0; h < HEADS; ++h) {
    for (int i = 0; i < VECTORS; ++i) held[h][i] = load(query + h * width + i * LANES);
  }
  for (int64_t key = 0; key < rows.count; key += 4) {
    __m512 sums[HEADS][4];
    for (int k = 0; k < 4; ++k) {
      // The last keys may be fewer than four: the same one is then scored again, and not used.
      const T* row = rows.at(key + k < rows.count ? key + k : rows.count - 1);
      ahead.ask(key + k);
      for (int i = 0; i < VECTORS; ++i) {
        const __m512 stored = load_units(row + i * LANES);
        for (int h = 0; h < HEADS; ++h) {
          sums[h][k] = i == 0 ? _mm512_mul_ps(held[h][i], stored)
                              : _mm512_fmadd_ps(held[h][i], stored, sums[h][k]);
        }
      }
    }
    for (int h = 0; h < HEADS; ++h) {
      float* to = scores + h * CHUNK + key;
      _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), sum_each(sums[h])));
    }
  }
}

// sums[head] = weights . values, in their units, over VECTORS vectors of columns, for HEADS heads.
template <int HEADS, int VECTORS, typename T>
void blend(const float* weights, int64_t width, const Rows<T>& rows, const Ahead<T>& ahead,
           float* sums) {
  __m512 held[HEADS][VECTORS];
  for (int h = 0; h < HEADS; ++h) {
    for (int i = 0; i < VECTORS; ++i) held[h][i] = _mm512_setzero_ps();
  }
  for (int64_t key = 0; key < rows.count; ++key) {
    const T* row = rows.at(key);
    ahead.ask(key);
    for (int i = 0; i < VECTORS; ++i) {
      const __m512 stored = load_units(row + i * LANES);
      for (int h = 0; h < HEADS; ++h) {
        const __m512 weight = _mm512_set1_ps(weights[h * CHUNK + key]);
        held[h][i] = _mm512_fmadd_ps(weight, stored, held[h][i]);
      }
    }
  }
  for (int h = 0; h < HEADS; ++h) {
    for (int i = 0; i < VECTORS; ++i) _mm512_storeu_ps(sums + h * width + i * LANES, held[h][i]);
  }
}

// Calls `work` with the number of heads and vectors as constants, tile by tile.
template <typename Work>
void tiled(int64_t heads, int64_t width, Work work) {
  for (int64_t head = 0; head < heads;) {
    const int64_t some = heads - head < TILE ? heads - head : TILE;
    for (int64_t column = 0; column < width;) {
      const bool wide = width - column >= TILE * LANES;
      work(some, wide, head, column);
      column += wide ? TILE * LANES : LANES;
    }
    head += some;
  }
}

#define DISPATCH(FUNCTION, HEADS, WIDE, ...)                                                      \
  switch (HEADS) {                                                                                \
    case 1: WIDE ? FUNCTION<1, TILE>(__VA_ARGS__) : FUNCTION<1, 1>(__VA_ARGS__); break;           \
    case 2: WIDE ? FUNCTION<2, TILE>(__VA_ARGS__) : FUNCTION<2, 1>(__VA_ARGS__); break;           \
    case 3: WIDE ? FUNCTION<3, TILE>(__VA_ARGS__) : FUNCTION<3, 1>(__VA_ARGS__); break;           \
    default: WIDE ? FUNCTION<4, TILE>(__VA_ARGS__) : FUNCTION<4, 1>(__VA_ARGS__); break;          \
  }

// Turns the scores of a chunk into unnormalised weights; returns their maximum and sum.
void weigh(const Shape& s, float* scores, int64_t count, float* maximum, float* total) {
  __m512 held[CHUNK / LANES];
  __m512 top = _mm512_set1_ps(-INFINITY);
  for (int64_t v = 0; v < CHUNK / LANES; ++v) {
    const int64_t left = count - v * LANES;
    const __mmask16 there = left >= LANES ? 0xffff : left <= 0 ? 0 : __mmask16((1 << left) - 1);
    held[v] = _mm512_mul_ps(_mm512_loadu_ps(scores + v * LANES), _mm512_set1_ps(s.scale));
    if (s.soft_cap > 0) held[v] = capped(held[v], s.soft_cap);
    held[v] = _mm512_mask_blend_ps(there, _mm512_set1_ps(-INFINITY), held[v]);
    top = _mm512_max_ps(top, held[v]);
  }
  *maximum = _mm512_reduce_max_ps(top);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t v = 0; v < CHUNK / LANES; ++v) {
    const __m512 weight = exponential(_mm512_sub_ps(held[v], _mm512_set1_ps(*maximum)));
    sum = _mm512_add_ps(sum, weight);
    _mm512_storeu_ps(scores + v * LANES, weight);
  }
  *total = _mm512_reduce_add_ps(sum);
}

// One task: all heads of one request over the `count` keys in `slots`. A lone head of a group, and
// the last columns of an odd width, go through narrower tiles.
template <typename T>
void attend(const Shape& s, const float* query, const T* keys, const T* values,
            const int32_t* slots, int64_t count, const int32_t* next, float* scores, float* maxima,
            float* totals, float* sums) {
  const int64_t group = s.heads / s.kv_heads;
  auto ahead = [&](const T* base, int64_t stride, bool first) {
    return Ahead<T>{base, first ? next : nullptr, stride};
  };
  std::memset(scores, 0, sizeof(float) * s.heads * CHUNK);
  for (int64_t kv = 0; kv < s.kv_heads; ++kv) {
    tiled(group, s.width, [&](int64_t heads, bool wide, int64_t head, int64_t column) {
      const int64_t first = kv * group + head;
      const Rows<T> rows{keys + kv * s.width + column, slots, s.key_stride, count};
      const auto next_keys = ahead(keys, s.key_stride, first == 0 && column == 0);
      DISPATCH(score, heads, wide, query + first * s.width + column, s.width, rows, next_keys,
               scores + first * CHUNK);
    });
  }
  for (int64_t h = 0; h < s.heads; ++h) {
    weigh(s, scores + h * CHUNK, count, maxima + h, totals + h);
  }
  for (int64_t kv = 0; kv < s.kv_heads; ++kv) {
    tiled(group, s.value_width, [&](int64_t heads, bool wide, int64_t head, int64_t column) {
      const int64_t first = kv * group + head;
      const Rows<T> rows{values + kv * s.value_width + column, slots, s.value_stride, count};
      const auto next_values = ahead(values, s.value_stride, first == 0 && column == 0);
      DISPATCH(blend, heads, wide, scores + first * CHUNK, s.value_width, rows,
               next_values,                sums + first * s.value_width + column);
    });
  }
}

// What a task leaves: per head the maximum, the sum of weights and the blended values.
struct Partials {
  std::unique_ptr<float[]> maxima, totals, sums;
};

// Output of one request, from values in units of `unit`.
void merge(const Shape& s, const Partials& p, int64_t first, int64_t last, float unit,
           float* output) {
  for (int64_t head = 0; head < s.heads; ++head) {
    float top = p.maxima[first * s.heads + head];
    for (int64_t task = first + 1; task < last; ++task) {
      const float other = p.maxima[task * s.heads + head];
      top = other > top ? other : top;
    }
    float total = 0;
    float* out = output + head * s.value_width;
    std::memset(out, 0, sizeof(float) * s.value_width);
    for (int64_t task = first; task < last; ++task) {
      const int64_t at = task * s.heads + head;
      const float factor = exponential(p.maxima[at] - top);
      total += factor * p.totals[at];
      const float* sum = p.sums.get() + at * s.value_width;
      for (int64_t i = 0; i < s.value_width; ++i) out[i] += factor * sum[i];
    }
    for (int64_t i = 0; i < s.value_width; ++i) out[i] *= unit / total;
  }
}

template <typename T>
void decode(Shape s, const float* query, const T* keys, const T* values,
            const int32_t* slots, const int64_t* starts, float* output) {
  s.scale *= UNIT<T>;
  std::vector<int64_t> owners, firsts{0};
  for (int64_t request = 0; request < s.requests; ++request) {
    const int64_t chunks = (starts[request + 1] - starts[request] + CHUNK - 1) / CHUNK;
    owners.insert(owners.end(), chunks, request);
    firsts.push_back(firsts.back() + chunks);
  }
  const int64_t tasks = owners.size();
  auto room = [&](int64_t width) { return std::unique_ptr<float[]>(new float[tasks * s.heads * width]); };
  const Partials p{room(1), room(1), room(s.value_width)};
#pragma omp parallel num_threads(s.threads)
  {
    std::vector<float> scores(s.heads * CHUNK);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t request = owners[task];
      const int64_t start = starts[request] + (task - firsts[request]) * CHUNK;
      const int64_t left = starts[request + 1] - start;
      const int64_t count = left < CHUNK ? left : CHUNK;
      const bool more = start + 2 * CHUNK <= starts[s.requests];
      const int32_t* next = more ? slots + start + count : nullptr;
      attend(s, query + request * s.heads * s.width, keys, values, slots + start, count, next,
             scores.data(), &p.maxima[task * s.heads], &p.totals[task * s.heads],
             &p.sums[task * s.heads * s.value_width]);
    }
#pragma omp for
    for (int64_t request = 0; request < s.requests; ++request) {
      float* out = output + request * s.heads * s.value_width;
      merge(s, p, firsts[request], firsts[request + 1], UNIT<T>, out);
    }
  }
}

}  // namespace

// query: float32 [requests, heads, width]. keys, values: [slots, kv_heads, ...] with the given
// strides of a slot, in elements. slots: all requests' slots in order, those of request r in
// [starts[r], starts[r + 1]), none empty. output: float32 [requests, heads, value_width].
#define EXPORT(NAME, TYPE)                                                                        \
  extern "C" void decode_##NAME(const Shape* shape, const float* query, const void* keys,         \
                                const void* values, const int32_t* slots, const int64_t* starts,  \
                                float* output) {                                                  \
    decode(*shape, query, static_cast<const TYPE*>(keys), static_cast<const TYPE*>(values),       \
           slots, starts, output);                                                                \
  }
EXPORT(float32, float)
EXPORT(bfloat16, Bf16)
EXPORT(float8_e4m3fn, E4m3)
EXPORT(float8_e5m2, E5m2)
