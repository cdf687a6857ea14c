// Attention of new rows over a request's pages, cached ones included, in blocks (after
// FlashAttention, Dao et al. 2022): no page is gathered, no score written to memory.
//
// A task is one KV head and a block of new rows of one request; the query heads of the group are
// rows of the same product. Keys and values of a block are laid out for the dot product of pairs of
// bfloat16 once, for all rows. Needs AVX-512 with bfloat16; elsewhere the torch code serves.

#include <algorithm>
#include <vector>

#include "cpu_kernels_common.h"

#ifdef __AVX512BF16__

namespace {

constexpr int64_t KEYS = 64;          // keys of a block
constexpr int64_t KEY_VECTORS = KEYS / LANES;
constexpr int64_t FOLDED_ROWS = 256;  // about so many rows of a task: new rows times heads
constexpr int ROWS = 6;               // rows, of four vectors each, that are held in registers
constexpr float NEVER = -1e30f;       // the score of a key that a row does not see

struct ExtendShape {
  int64_t heads, kv_heads, width, value_width, key_stride, value_stride, threads, window;
  float scale, soft_cap;
};

// The new rows [begin, end) of the batch; `before` keys come ahead of them. All its keys' slots start
// at `slots` of the list.
struct Run {
  int64_t begin, end, before, slots;
};

struct Task {
  const Run* run;
  int64_t kv, first, last;  // rows of the run
};

inline __m512bh pairs(const uint32_t* packed) {
  return (__m512bh)_mm512_loadu_si512(packed);
}

inline __m512bh pair(uint32_t packed) { return (__m512bh)_mm512_set1_epi32(packed); }

// to[d][key]: the pair (2d, 2d + 1) of each key's numbers.
template <typename T>
void pack_keys(const T* base, int64_t stride, const int32_t* slots, int64_t count, int64_t width,
               uint32_t* to) {
  uint16_t row[LANES];
  for (int64_t key = 0; key < count; ++key) {
    const T* from = base + slots[key] * stride;
    for (int64_t column = 0; column < width; column += LANES) {
      store(reinterpret_cast<Bf16*>(row), load(from + column));
      for (int64_t i = 0; i < LANES / 2; ++i) {
        uint32_t both;
        std::memcpy(&both, row + 2 * i, sizeof both);
        to[(column / 2 + i) * KEYS + key] = both;
      }
    }
  }
}

// to[key / 2][column]: the pair (even key, odd key) of each column's numbers; zero after the last.
template <typename T>
void pack_values(const T* base, int64_t stride, const int32_t* slots, int64_t count, int64_t width,
                 uint32_t* to) {
  for (int64_t key = 0; key < KEYS; key += 2) {
    for (int64_t column = 0; column < width; column += LANES) {
      __m512 two[2];
      for (int i = 0; i < 2; ++i) {
        const bool there = key + i < count;
        two[i] = there ? load(base + slots[key + i] * stride + column) : _mm512_setzero_ps();
      }
      const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(two[0]), 16);
      const __m512i high = _mm512_and_si512(_mm512_castps_si512(two[1]),
                                            _mm512_set1_epi32(int(0xffff0000)));
      _mm512_storeu_si512(to + key / 2 * width + column, _mm512_or_si512(low, high));
    }
  }
}

// out[row][0..VECTORS) += left[row] . right, over `depth` pairs, for COUNT rows.
template <int COUNT, int VECTORS>
void multiply(const uint32_t* left, int64_t left_stride, const uint32_t* right,
              int64_t right_stride, int64_t depth, float* out, int64_t out_stride, bool fresh) {
  __m512 sums[COUNT][VECTORS];
  for (int r = 0; r < COUNT; ++r) {
    for (int v = 0; v < VECTORS; ++v) {
      sums[r][v] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(out + r * out_stride + v * LANES);
    }
  }
  for (int64_t d = 0; d < depth; ++d) {
    __m512bh stored[VECTORS];
    for (int v = 0; v < VECTORS; ++v) stored[v] = pairs(right + d * right_stride + v * LANES);
    for (int r = 0; r < COUNT; ++r) {
      const __m512bh same = pair(left[r * left_stride + d]);
      for (int v = 0; v < VECTORS; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], same, stored[v]);
    }
  }
  for (int r = 0; r < COUNT; ++r) {
    for (int v = 0; v < VECTORS; ++v) _mm512_storeu_ps(out + r * out_stride + v * LANES, sums[r][v]);
  }
}

// The same for any number of rows, and of columns in whole vectors.
void multiply(int64_t rows, int64_t columns, const uint32_t* left, int64_t left_stride,
              const uint32_t* right, int64_t right_stride, int64_t depth, float* out,
              int64_t out_stride, bool fresh) {
  for (int64_t column = 0; column < columns;) {
    const bool wide = columns - column >= 4 * LANES;
    for (int64_t row = 0; row < rows;) {
      const bool many = rows - row >= ROWS;
      const uint32_t* l = left + row * left_stride;
      const uint32_t* r = right + column;
      float* o = out + row * out_stride + column;
      auto* tile = wide ? (many ? multiply<ROWS, 4> : multiply<1, 4>)
                        : (many ? multiply<ROWS, 1> : multiply<1, 1>);
      tile(l, left_stride, r, right_stride, depth, o, out_stride, fresh);
      row += many ? ROWS : 1;
    }
    column += wide ? 4 * LANES : LANES;
  }
}

// One thread's working memory, for `rows` folded rows at most.
struct Scratch {
  std::vector<uint32_t> query, keys, values, weights;
  std::vector<float> scores, sums, maxima, totals;

  Scratch(const ExtendShape& s, int64_t rows)
      : query(rows * s.width / 2), keys(s.width / 2 * KEYS), values(KEYS / 2 * s.value_width),
        weights(rows * KEYS / 2), scores(rows * KEYS), sums(rows * s.value_width), maxima(rows),
        totals(rows) {}
};

// Turns one row's scores of a block into weights; a row sees the keys [first, last) of the block.
void weigh(const ExtendShape& s, float* scores, int64_t first, int64_t last, uint32_t* weights,
           float* maximum, float* total, float* sums) {
  __m512 held[KEY_VECTORS];
  __m512 top = _mm512_set1_ps(*maximum);
  for (int64_t v = 0; v < KEY_VECTORS; ++v) {
    held[v] = _mm512_mul_ps(_mm512_loadu_ps(scores + v * LANES), _mm512_set1_ps(s.scale));
    if (s.soft_cap > 0) held[v] = capped(held[v], s.soft_cap);
    const int64_t from = std::clamp<int64_t>(first - v * LANES, 0, LANES);
    const int64_t to = std::clamp<int64_t>(last - v * LANES, 0, LANES);
    const __mmask16 seen = __mmask16(((1u << to) - 1) & ~((1u << from) - 1));
    held[v] = _mm512_mask_blend_ps(seen, _mm512_set1_ps(NEVER), held[v]);
    top = _mm512_max_ps(top, held[v]);
  }
  const float now = _mm512_reduce_max_ps(top);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t v = 0; v < KEY_VECTORS; ++v) {
    held[v] = exponential(_mm512_sub_ps(held[v], _mm512_set1_ps(now)));
    sum = _mm512_add_ps(sum, held[v]);
    store(reinterpret_cast<Bf16*>(weights) + v * LANES, held[v]);
  }
  const float factor = now == *maximum ? 1.0f : exponential(*maximum - now);
  *total = *total * factor + _mm512_reduce_add_ps(sum);
  *maximum = now;
  if (factor == 1.0f) return;
  for (int64_t i = 0; i < s.value_width; i += LANES) {
    _mm512_storeu_ps(sums + i, _mm512_mul_ps(_mm512_loadu_ps(sums + i), _mm512_set1_ps(factor)));
  }
}

template <typename T>
void attend(const ExtendShape& s, const Task& task, const Bf16* query, const T* keys,
            const T* values, const int32_t* all_slots, Scratch& scratch, Bf16* output) {
  const int64_t group = s.heads / s.kv_heads;
  const int64_t rows = (task.last - task.first) * group;
  const int64_t start = task.run->begin + task.first;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = (start + row / group) * s.heads + task.kv * group + row % group;
    std::memcpy(&scratch.query[row * s.width / 2], query + at * s.width, s.width * sizeof(Bf16));
  }
  std::fill(scratch.maxima.begin(), scratch.maxima.end(), NEVER);
  std::fill(scratch.totals.begin(), scratch.totals.end(), 0.0f);
  std::fill(scratch.sums.begin(), scratch.sums.end(), 0.0f);
  const int64_t position = task.run->before + task.first;  // of the first row
  const int64_t end = task.run->before + task.last;
  const int64_t begin = s.window < 0 ? 0 : std::max<int64_t>(0, position - s.window);
  for (int64_t block = begin; block < end; block += KEYS) {
    const int64_t count = std::min(KEYS, end - block);
    const int32_t* slots = all_slots + task.run->slots + block;
    pack_keys(keys + task.kv * s.width, s.key_stride, slots, count, s.width, scratch.keys.data());
    pack_values(values + task.kv * s.value_width, s.value_stride, slots, count, s.value_width,
                scratch.values.data());
    multiply(rows, KEYS, scratch.query.data(), s.width / 2, scratch.keys.data(), KEYS, s.width / 2,
             scratch.scores.data(), KEYS, true);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t own = position + row / group;  // the last key that the row sees
      const int64_t first = s.window < 0 ? 0 : own - s.window - block;
      weigh(s, &scratch.scores[row * KEYS], first, std::min(count, own + 1 - block),
            &scratch.weights[row * KEYS / 2], &scratch.maxima[row], &scratch.totals[row],
            &scratch.sums[row * s.value_width]);
    }
    multiply(rows, s.value_width, scratch.weights.data(), KEYS / 2, scratch.values.data(),
             s.value_width, KEYS / 2, scratch.sums.data(), s.value_width, false);
  }
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = (start + row / group) * s.heads + task.kv * group + row % group;
    const __m512 share = _mm512_set1_ps(1.0f / scratch.totals[row]);
    for (int64_t i = 0; i < s.value_width; i += LANES) {
      const __m512 sum = _mm512_loadu_ps(&scratch.sums[row * s.value_width + i]);
      store(output + at * s.value_width + i, _mm512_mul_ps(sum, share));
    }
  }
}

template <typename T>
void extend(const ExtendShape& s, const Run* runs, int64_t count, const Bf16* query,
            const T* keys, const T* values, const int32_t* slots, Bf16* output) {
  const int64_t block = std::max<int64_t>(1, FOLDED_ROWS * s.kv_heads / s.heads);
  std::vector<Task> tasks;
  for (const Run* run = runs; run < runs + count; ++run) {
    const int64_t rows = run->end - run->begin;
    // The last rows see the most keys: they go first, so that no thread ends long after the others.
    for (int64_t last = rows; last > 0; last -= block) {
      for (int64_t kv = 0; kv < s.kv_heads; ++kv) {
        tasks.push_back({run, kv, std::max<int64_t>(0, last - block), last});
      }
    }
  }
#pragma omp parallel num_threads(s.threads)
  {
    Scratch scratch(s, block * s.heads / s.kv_heads);
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < tasks.size(); ++i) {
      attend(s, tasks[i], query, keys, values, slots, scratch, output);
    }
  }
}

}  // namespace

// query: bfloat16 [rows, heads, width]; output: the same with value_width. keys, values: as for
// decode. A run's slots hold its keys in order, `before` cached ones and then those of its rows.
#define EXPORT(NAME, TYPE)                                                                         \
  extern "C" void extend_##NAME(const ExtendShape* shape, const Bf16* query, const void* keys,     \
                                const void* values, const int32_t* slots, const Run* runs,         \
                                int64_t count, Bf16* output) {                                     \
    extend(*shape, runs, count, query, static_cast<const TYPE*>(keys),                             \
           static_cast<const TYPE*>(values), slots, output);                                       \
  }
EXPORT(bfloat16, Bf16)
EXPORT(float8_e4m3fn, E4m3)
EXPORT(float8_e5m2, E5m2)

#endif
