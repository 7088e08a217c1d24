// Attention of one new token per row over a KV cache in slots, for CPUs.
//
// Each row reads only the columns of its own context, not the padding. Samples of one prompt read the prompt's columns from the
// slot of the first sample: once from memory, and then from the processor's cache. A row's result depends on that row alone.
// Built by library.py against PyTorch's stable ABI.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "work_stealing.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Sixteen floats; the compiler maps them to the vector registers of the processor.
constexpr int LANES = 16;
// Pairs of a row and a KV head that a thread takes at once.
constexpr int PIECE = 8;
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t WideBits __attribute__((vector_size(4 * LANES)));
typedef uint16_t NarrowBits __attribute__((vector_size(2 * LANES)));

struct BFloat16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }

inline float widen(BFloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

inline void store(float x, float& to) { to = x; }

inline void store(float x, BFloat16& to) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  to.bits = uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

inline Lanes load(const BFloat16* from) {
  NarrowBits bits;
  std::memcpy(&bits, from, sizeof bits);
  return Lanes(__builtin_convertvector(bits, WideBits) << 16);
}

// The sums of sixteen vectors, in order: each step adds neighboring lanes of two vectors, which halves the number of vectors.
inline Lanes sums_of(const Lanes* x) {
  Lanes a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i) {
    const Lanes l = x[2 * i], r = x[2 * i + 1];
    a[i] = __builtin_shufflevector(l, r, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           __builtin_shufflevector(l, r, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  }
  for (int i = 0; i < 4; ++i) {
    const Lanes l = a[2 * i], r = a[2 * i + 1];
    b[i] = __builtin_shufflevector(l, r, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(l, r, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  for (int i = 0; i < 2; ++i) {
    const Lanes l = b[2 * i], r = b[2 * i + 1];
    c[i] = __builtin_shufflevector(l, r, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           __builtin_shufflevector(l, r, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
  return __builtin_shufflevector(c[0], c[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         __builtin_shufflevector(c[0], c[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

// Addresses of the n key or value vectors of one head. The computation does not know which of them are in another slot, so the
// compiler cannot make the order of summation depend on it.
template <typename T>
struct Columns {
  const T* const* vectors;
  int64_t n, size;

  const T* at(int64_t c) const { return vectors[c]; }
};

template <typename T>
float dot(const float* q, const T* key, int64_t size) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < size; ++d) sum += q[d] * widen(key[d]);
  return sum;
}

// out[c] = q . keys[c], for vectors of SIZE numbers; SIZE 0 means any other size, known at run time only.
template <typename T, int SIZE>
void score(const float* q, const Columns<T>& keys, float* out) {
  int64_t c = 0;
  if constexpr (SIZE > 0) {
    constexpr int PARTS = SIZE / LANES;
    Lanes query[PARTS], products[LANES];
    for (int p = 0; p < PARTS; ++p) query[p] = load(q + p * LANES);
    for (; c + LANES <= keys.n; c += LANES) {
      for (int j = 0; j < LANES; ++j) {
        const T* key = keys.at(c + j);
        products[j] = query[0] * load(key);
        for (int p = 1; p < PARTS; ++p) products[j] += query[p] * load(key + p * LANES);
      }
      const Lanes sums = sums_of(products);
      std::memcpy(out + c, &sums, sizeof sums);
    }
  }
  for (; c < keys.n; ++c) out[c] = dot(q, keys.at(c), keys.size);
}

// out = sum over c of weights[c] * values[c].
template <typename T, int SIZE>
void blend(const float* weights, const Columns<T>& values, float* out) {
  if constexpr (SIZE > 0) {
    constexpr int PARTS = SIZE / LANES;
    Lanes even[PARTS] = {}, odd[PARTS] = {};  // two chains of additions overlap
    int64_t c = 0;
    for (; c + 2 <= values.n; c += 2) {
      for (int p = 0; p < PARTS; ++p) {
        even[p] += weights[c] * load(values.at(c) + p * LANES);
        odd[p] += weights[c + 1] * load(values.at(c + 1) + p * LANES);
      }
    }
    for (int p = 0; p < PARTS; ++p) {
      if (c < values.n) even[p] += weights[c] * load(values.at(c) + p * LANES);
      const Lanes sums = even[p] + odd[p];
      std::memcpy(out + p * LANES, &sums, sizeof sums);
    }
  } else {
    for (int64_t d = 0; d < values.size; ++d) out[d] = 0;
    for (int64_t c = 0; c < values.n; ++c) {
      const T* value = values.at(c);
#pragma omp simd
      for (int64_t d = 0; d < values.size; ++d) out[d] += weights[c] * widen(value[d]);
    }
  }
}

// Replaces scores with exp(scale * (score - largest score)) and returns the sum.
float exponentiate(float* scores, int64_t n, float scale) {
  float largest = scores[0];
#pragma omp simd reduction(max : largest)
  for (int64_t c = 0; c < n; ++c) largest = scores[c] > largest ? scores[c] : largest;
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t c = 0; c < n; ++c) {
    scores[c] = std::exp(scale * (scores[c] - largest));
    total += scores[c];
  }
  return total;
}

template <typename T>
using HeadKernel = void (*)(const float*, const Columns<T>&, float*);

template <typename T>
struct HeadKernels {
  HeadKernel<T> score, blend;
};

template <typename T>
HeadKernels<T> kernels_for(int64_t size) {
  switch (size) {
    case 32: return {score<T, 32>, blend<T, 32>};
    case 64: return {score<T, 64>, blend<T, 64>};
    case 96: return {score<T, 96>, blend<T, 96>};
    case 128: return {score<T, 128>, blend<T, 128>};
    case 256: return {score<T, 256>, blend<T, 256>};
    default: return {score<T, 0>, blend<T, 0>};
  }
}

template <typename T>
struct Table {
  const T* data;
  int64_t row, head, column, heads, size;

  explicit Table(const Tensor& cache)
      : data(static_cast<const T*>(cache.data_ptr())),
        row(cache.stride(0)),
        head(cache.stride(1)),
        column(cache.stride(2)),
        heads(cache.size(1)),
        size(cache.size(3)) {}

  const T* at(int64_t b, int64_t k, int64_t c) const { return data + b * row + k * head + c * column; }
};

// A row attends to its columns [first, stop); columns before `shared` are read from the leader.
struct Context {
  int64_t row, leader, shared, first, stop;

  template <typename T>
  Columns<T> of(const Table<T>& table, int64_t k, std::vector<const T*>& vectors) const {
    if (int64_t(vectors.size()) < stop - first) vectors.resize(stop - first);
    for (int64_t c = first; c < stop; ++c) vectors[c - first] = table.at(c < shared ? leader : row, k, c);
    return {vectors.data(), stop - first, table.size};
  }
};

// The columns that each row attends to.
struct Contexts {
  const int64_t *positions, *leaders, *shared;
  int64_t window;

  Context of(int64_t b) const {
    const int64_t stop = positions[b] + 1;
    return {b, leaders[b], shared[b], window > 0 && stop > window ? stop - window : 0, stop};
  }
};

// For one KV head, rows that share columns are processed one after the other, while the columns are in the processor's cache.
template <typename T>
void attend(const Tensor& q, const Tensor& keys, const Tensor& values, const Contexts& contexts, float scale,
            const Tensor& out) {
  const Table<T> key_table(keys), value_table(values);
  const int64_t rows = q.size(0), heads = q.size(1), group = heads / key_table.heads;
  const int64_t q_row = q.stride(0), q_head = q.stride(1);
  const T* queries = static_cast<const T*>(q.data_ptr());
  T* result = static_cast<T*>(out.data_ptr());
  const HeadKernel<T> score_kernel = kernels_for<T>(key_table.size).score;
  const HeadKernel<T> blend_kernel = kernels_for<T>(value_table.size).blend;
  work_stealing::for_each_piece(rows * key_table.heads, PIECE, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scores, query(key_table.size), sum(value_table.size);
    std::vector<const T*> keys_at, values_at;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i % rows, k = i / rows;
      const Context context = contexts.of(b);
      const Columns<T> key_columns = context.of(key_table, k, keys_at);
      const Columns<T> value_columns = context.of(value_table, k, values_at);
      if (int64_t(scores.size()) < key_columns.n) scores.resize(key_columns.n);
      for (int64_t h = k * group; h < (k + 1) * group; ++h) {
        for (int64_t d = 0; d < key_table.size; ++d) query[d] = widen(queries[b * q_row + h * q_head + d]);
        score_kernel(query.data(), key_columns, scores.data());
        const float total = exponentiate(scores.data(), key_columns.n, scale);
        blend_kernel(scores.data(), value_columns, sum.data());
        for (int64_t d = 0; d < value_table.size; ++d)
          store(sum[d] / total, result[(b * heads + h) * value_table.size + d]);
      }
    }
  });
}

Tensor decode_attention(Tensor q, Tensor keys, Tensor values, Tensor positions, Tensor leaders, Tensor shared,
                        double scale, int64_t window) {
  Tensor out = torch::stable::new_empty(q, {q.size(0), q.size(1), values.size(3)});
  const auto int64_data = [](const Tensor& t) { return static_cast<const int64_t*>(t.data_ptr()); };
  const Contexts contexts{int64_data(positions), int64_data(leaders), int64_data(shared), window};
  if (q.scalar_type() == ScalarType::Float)
    attend<float>(q, keys, values, contexts, float(scale), out);
  else
    attend<BFloat16>(q, keys, values, contexts, float(scale), out);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(areno, CPU, m) { m.impl("decode_attention", TORCH_BOX(&decode_attention)); }
