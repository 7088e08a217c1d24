// Rows times a weight matrix, for the few rows of a decode step: out[m][o] = sum over k of x[m][k] * w[o][k].
//
// The rows are transposed, so that a vector holds LANES rows at one k. The weights are read once, number by number, in their
// original layout. Six outputs times VECTORS vectors of rows stay in registers. For one to four rows, the weights are
// transposed instead, and a vector holds LANES outputs. In both cases, each output is summed over k in order, so it depends on
// its own row alone. Built by library.py against PyTorch's stable ABI.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "work_stealing.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

using torch::stable::Tensor;

// The sums of six outputs by VECTORS vectors of rows, and their operands, fit in the processor's registers.
#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 4;
#elif defined(__AVX__)
constexpr int LANES = 8, VECTORS = 2;
#else
constexpr int LANES = 4, VECTORS = 2;
#endif
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef float UnalignedLanes __attribute__((vector_size(4 * LANES), aligned(4)));

// OUTPUTS: outputs that are summed at once. AHEAD: distance of prefetching, in outputs. CHUNK: outputs that a thread takes at
// once (LANES near the end). ROWS: rows of a tile.
constexpr int OUTPUTS = 6, AHEAD = 2 * OUTPUTS, CHUNK = 48, ROWS = VECTORS * LANES;
// Maximum number of rows that are not transposed.
constexpr int FEW = 4;
// Numbers in a cache line.
constexpr int LINE = 16;
// Size in bytes from which results would leave all caches before they are read.
constexpr int64_t LARGE = 4 << 20;

inline Lanes load(const float* from) { return *reinterpret_cast<const UnalignedLanes*>(from); }

inline void store(Lanes lanes, float* to) { *reinterpret_cast<UnalignedLanes*>(to) = lanes; }

// Writes a whole cache line with a non-temporal store, so that it is not read first. These stores are complete after flush().
inline void store_streaming(Lanes lanes, float* to) {
#ifdef __AVX512F__
  _mm512_stream_ps(to, reinterpret_cast<__m512>(lanes));
#else
  store(lanes, to);
#endif
}

inline void flush() {
#ifdef __AVX512F__
  _mm_sfence();
#endif
}

// Keeps additions to a sum in program order: the compiler must not reassociate the terms.
inline void in_order(Lanes& sums) {
#if defined(__AVX512F__)
  asm("" : "+v"(sums));
#elif defined(__x86_64__)
  asm("" : "+x"(sums));
#elif defined(__aarch64__)
  asm("" : "+w"(sums));
#endif
}

// From each 2 S lanes of a and b, takes the first S of both, or the last S of both.
template <int S, int... I>
inline Lanes low_blocks(Lanes a, Lanes b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, ((I & S) ? LANES + I - S : I)...);
}

template <int S, int... I>
inline Lanes high_blocks(Lanes a, Lanes b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, ((I & S) ? LANES + I : I + S)...);
}

// Transposes LANES vectors: for every block size S, exchanges blocks of S lanes between vectors that are S apart.
template <int S = 1>
inline void transpose(Lanes* x) {
  constexpr std::make_integer_sequence<int, LANES> lanes{};
  for (int i = 0; i < LANES; ++i) {
    if (i & S) continue;
    const Lanes a = x[i], b = x[i + S];
    x[i] = low_blocks<S>(a, b, lanes);
    x[i + S] = high_blocks<S>(a, b, lanes);
  }
  if constexpr (2 * S < LANES) transpose<2 * S>(x);
}

// A matrix whose rows are contiguous, `stride` apart.
template <typename T>
struct Matrix {
  T* data;
  int64_t stride;

  T* row(int64_t r) const { return data + r * stride; }
};

// Output of the products; `streaming` writes it with non-temporal stores, where that is possible and faster.
struct Output : Matrix<float> {
  bool streaming;

  Output from(int64_t r, int64_t column) const { return {{row(r) + column, stride}, streaming}; }
};

// Packs up to ROWS rows of x, transposed, as to[k][V * LANES]; missing rows become 0.
template <int V>
void pack(const Matrix<const float>& x, int64_t rows, int64_t size, float* to) {
  for (int v = 0; v < V; ++v) {
    const int64_t first = v * LANES, present = std::min<int64_t>(LANES, rows - first);
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES) {
      Lanes block[LANES];
      for (int m = 0; m < LANES; ++m) block[m] = m < present ? load(x.row(first + m) + k) : Lanes{};
      transpose(block);
      for (int i = 0; i < LANES; ++i) store(block[i], to + ((k + i) * V + v) * LANES);
    }
    for (; k < size; ++k)
      for (int m = 0; m < LANES; ++m) to[(k * V + v) * LANES + m] = m < present ? x.row(first + m)[k] : 0.f;
  }
}

// Computes N outputs of V vectors of rows. Meanwhile it prefetches the weights of the call after the next one; a prefetch
// beyond the end of the weights has no effect.
template <int V, int N>
inline void sum(const float* x, const Matrix<const float>& w, int64_t size, float* to) {
  Lanes sums[N][V] = {};
  const int64_t ahead = AHEAD * w.stride;
  for (int64_t k = 0; k < size; ++k) {
    if (k % LINE == 0)
      for (int o = 0; o < N; ++o) __builtin_prefetch(w.row(o) + k + ahead);
    Lanes rows[V];
    for (int v = 0; v < V; ++v) rows[v] = load(x + (k * V + v) * LANES);
    for (int o = 0; o < N; ++o)
      for (int v = 0; v < V; ++v) sums[o][v] += w.row(o)[k] * rows[v];
  }
  for (int o = 0; o < N; ++o)
    for (int v = 0; v < V; ++v) store(sums[o][v], to + (o * V + v) * LANES);
}

// Unpacks n outputs (at most CHUNK) of sum() into rows. The outputs of a row are written together: rows may be pages apart, so
// visiting each row for every few outputs would cost more than computing the sums.
template <int V>
void unpack(const float* sums, int64_t n, int64_t rows, const Output& out) {
  for (int v = 0; v < V; ++v) {
    Lanes blocks[CHUNK / LANES][LANES];
    for (int64_t b = 0; b * LANES < n; ++b) {
      Lanes block[LANES];  // a local copy that the compiler can keep in registers
      for (int i = 0; i < LANES; ++i)
        block[i] = b * LANES + i < n ? load(sums + ((b * LANES + i) * V + v) * LANES) : Lanes{};
      transpose(block);
      std::copy(block, block + LANES, blocks[b]);
    }
    for (int m = 0; m < LANES && v * LANES + m < rows; ++m) {
      float* const to = out.row(v * LANES + m);
      for (int b = 0; b < CHUNK / LANES; ++b) {
        const int64_t width = n - b * LANES;
        if (width >= LANES)
          out.streaming ? store_streaming(blocks[b][m], to + b * LANES) : store(blocks[b][m], to + b * LANES);
        else if (width > 0)
          std::memcpy(to + b * LANES, &blocks[b][m], sizeof(float) * width);
      }
    }
  }
}

// Computes n outputs (at most CHUNK) of a tile of rows.
template <int V>
void chunk(const float* x, const Matrix<const float>& w, int64_t size, int64_t n, int64_t rows, const Output& out) {
  alignas(64) float sums[CHUNK * V * LANES];
  for (int64_t o = 0; o < n; o += OUTPUTS) {
    const Matrix<const float> mine{w.row(o), w.stride};
    float* to = sums + o * V * LANES;
    switch (n - o) {
      case 1: sum<V, 1>(x, mine, size, to); break;
      case 2: sum<V, 2>(x, mine, size, to); break;
      case 3: sum<V, 3>(x, mine, size, to); break;
      case 4: sum<V, 4>(x, mine, size, to); break;
      case 5: sum<V, 5>(x, mine, size, to); break;
      default: sum<V, OUTPUTS>(x, mine, size, to);
    }
  }
  unpack<V>(sums, n, rows, out);
}

// Computes n outputs of M rows; weights are transposed in registers, LANES outputs by LANES numbers at a time.
template <int M, bool WHOLE>
inline void outputs_of(const Matrix<const float>& x, const Matrix<const float>& w, int64_t size, int64_t n, float* const* to) {
  Lanes sums[M] = {};
  int64_t k = 0;
  for (; k + LANES <= size; k += LANES) {
    Lanes block[LANES];
    for (int i = 0; i < LANES; ++i) {
      block[i] = WHOLE || i < n ? load(w.row(i) + k) : Lanes{};
      if (k % LINE == 0) __builtin_prefetch(w.row(i + LANES) + k);
    }
    transpose(block);
    for (int i = 0; i < LANES; ++i)
      for (int m = 0; m < M; ++m) {
        sums[m] += block[i] * x.row(m)[k + i];
        in_order(sums[m]);
      }
  }
  for (; k < size; ++k) {
    Lanes column{};
    for (int i = 0; i < LANES; ++i) column[i] = WHOLE || i < n ? w.row(i)[k] : 0.f;
    for (int m = 0; m < M; ++m) {
      sums[m] += column * x.row(m)[k];
      in_order(sums[m]);
    }
  }
  for (int m = 0; m < M; ++m) std::memcpy(to[m], &sums[m], sizeof(float) * (WHOLE ? LANES : n));
}

template <int M>
void few_rows(const Matrix<const float>& x, const Matrix<const float>& w, int64_t size, int64_t n, const Output& out) {
  for (int64_t o = 0; o < n; o += LANES) {
    const Matrix<const float> mine{w.row(o), w.stride};
    float* to[M];
    for (int m = 0; m < M; ++m) to[m] = out.row(m) + o;
    n - o >= LANES ? outputs_of<M, true>(x, mine, size, LANES, to) : outputs_of<M, false>(x, mine, size, n - o, to);
  }
}

struct Tile {
  int64_t first, rows;
  const float* packed;
  Matrix<const float> x;

  bool is_few() const { return rows <= FEW; }
};

// Computes n outputs of a tile of few rows.
void few_rows(const Tile& tile, const Matrix<const float>& w, int64_t size, int64_t n, const Output& out) {
  switch (tile.rows) {
    case 1: return few_rows<1>(tile.x, w, size, n, out);
    case 2: return few_rows<2>(tile.x, w, size, n, out);
    case 3: return few_rows<3>(tile.x, w, size, n, out);
    default: return few_rows<FEW>(tile.x, w, size, n, out);
  }
}

template <int V>
struct Steps {
  static void pack_rows(const Matrix<const float>& x, int64_t rows, int64_t size, float* to) { pack<V>(x, rows, size, to); }
  static void run(const Tile& tile, const Matrix<const float>& w, int64_t size, int64_t n, const Output& out) {
    chunk<V>(tile.packed, w, size, n, tile.rows, out);
  }
};

// Calls f with the number of vectors that hold `rows` rows.
template <typename F>
void by_vectors(int64_t rows, F f) {
  switch ((rows + LANES - 1) / LANES) {
    case 1: return f(Steps<1>{});
    case 2: return f(Steps<2>{});
    case 3: return f(Steps<std::min(3, VECTORS)>{});
    default: return f(Steps<VECTORS>{});
  }
}

// A matrix of weights, and its output for the rows.
struct Product {
  Matrix<const float> weight;
  int64_t outputs;
  Output out;
};

// Computes the units [begin, end) of a product, for all tiles.
void run(const Product& product, int64_t begin, int64_t end, int64_t size, const std::vector<Tile>& tiles) {
  const int64_t stop = std::min(end * LANES, product.outputs);
  for (int64_t first = begin * LANES; first < stop; first += CHUNK) {
    const int64_t width = std::min<int64_t>(CHUNK, stop - first);
    const Matrix<const float> weight{product.weight.row(first), product.weight.stride};
    for (const Tile& tile : tiles) {
      const Output out = product.out.from(tile.first, first);
      if (tile.is_few())
        few_rows(tile, weight, size, width, out);
      else
        by_vectors(tile.rows, [&](auto steps) { steps.run(tile, weight, size, width, out); });
    }
  }
  if (product.out.streaming) flush();
}

// The rows are transposed once; threads get equal parts of the outputs, in units of LANES outputs.
void run_all(const Matrix<const float>& x, int64_t m, int64_t size, const Product& product) {
  static thread_local std::vector<float> buffer;
  const int64_t count = (m + ROWS - 1) / ROWS;
  if (m > FEW) buffer.resize(count * ROWS * size + LINE);
  float* packed = buffer.data() + (-reinterpret_cast<uintptr_t>(buffer.data()) & 63) / sizeof(float);
  std::vector<Tile> tiles;
  for (int64_t first = 0; first < m; first += ROWS)
    tiles.push_back({first, std::min<int64_t>(ROWS, m - first), packed + first * size, {x.row(first), x.stride}});
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      if (!tiles[t].is_few())
        by_vectors(tiles[t].rows,
                   [&](auto steps) { steps.pack_rows(tiles[t].x, tiles[t].rows, size, packed + t * ROWS * size); });
  });
  work_stealing::for_each_piece((product.outputs + LANES - 1) / LANES, CHUNK / LANES, 1,
                 [&](int64_t begin, int64_t end) { run(product, begin, end, size, tiles); });
}

Tensor row_product(Tensor rows, Tensor weight) {
  const int64_t m = rows.size(0), size = rows.size(1), n = weight.size(0);
  STD_TORCH_CHECK(rows.stride(1) == 1 && weight.stride(1) == 1 && weight.size(1) == size,
                  "row_product: features must be contiguous, and equal in number");
  Tensor result = torch::stable::new_empty(rows, {m, n});
  float* const out = static_cast<float*>(result.data_ptr());
  const bool whole_lines = n % LANES == 0 && reinterpret_cast<uintptr_t>(out) % sizeof(Lanes) == 0;
  const bool streaming = whole_lines && m * n * static_cast<int64_t>(sizeof(float)) >= LARGE;
  run_all({static_cast<const float*>(rows.data_ptr()), rows.stride(0)}, m, size,
          {{static_cast<const float*>(weight.data_ptr()), weight.stride(0)}, n, {{out, n}, streaming}});
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(areno, CPU, m) { m.impl("row_product", TORCH_BOX(&row_product)); }
