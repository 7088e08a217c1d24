// One token per row from logits: the most likely one, or a draw from the temperature-scaled policy, each with its log-prob.
//
// A row is read twice: for its largest entry, and then, from the processor's cache, for the sums of the exponentials of its
// blocks. Only the block that the draw falls into is searched token by token. Built by library.py against PyTorch's stable ABI.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <vector>

#include "work_stealing.h"

namespace {

// Rows that a thread takes at once.
constexpr int PIECE = 4;

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

float largest_of(const float* x, int64_t n) {
  float largest = x[0];
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}

// Returns the sum of exp(x / temperature - highest).
float sum_of_exp(const float* x, int64_t n, float temperature, float highest) {
  float sum = 0;
  if (temperature == 1.f) {
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += std::exp(x[i] - highest);
  } else {
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += std::exp(x[i] / temperature - highest);
  }
  return sum;
}

// First index at which the running sum of n weights exceeds the target, else the last index. Subtracts the sum before that
// index from the target.
int64_t find_index(int64_t n, double& target, const std::vector<double>& weights) {
  double before = 0;
  int64_t i = 0;
  for (; i + 1 < n; ++i) {
    const double after = before + weights[i];
    if (after > target) break;
    before = after;
  }
  target -= before;
  return i;
}

// Buffers for the sums of all blocks, and for the weights of one block.
struct Buffers {
  std::vector<double> sums, weights;
};

struct Chosen {
  int64_t token;
  float logprob;
};

Chosen choose(const float* x, int64_t vocab, int64_t size, float temperature, bool greedy, double u,
              Buffers& buffers) {
  const float largest = largest_of(x, vocab), highest = largest / temperature;
  const int64_t blocks = (vocab + size - 1) / size;
  const auto width = [&](int64_t b) { return std::min(size, vocab - b * size); };
  double total = 0;
  for (int64_t b = 0; b < blocks; ++b) total += buffers.sums[b] = sum_of_exp(x + b * size, width(b), temperature, highest);
  int64_t token = 0;
  if (greedy) {
    while (token + 1 < vocab && x[token] != largest) ++token;
  } else {
    double target = std::min(u * total, std::nextafter(total, 0.0));
    const int64_t b = find_index(blocks, target, buffers.sums);
    const float* block = x + b * size;
    double inside = 0;
    for (int64_t i = 0; i < width(b); ++i) buffers.weights[i] = std::exp(block[i] / temperature - highest);
    for (int64_t i = 0; i < width(b); ++i) inside += buffers.weights[i];
    target = std::min(target, std::nextafter(inside, 0.0));
    token = b * size + find_index(width(b), target, buffers.weights);
  }
  return {token, x[token] / temperature - (highest + float(std::log(total)))};
}

std::tuple<Tensor, Tensor> plain_draw(Tensor logits, Tensor temperatures, Tensor greedy, Tensor u, int64_t size) {
  const int64_t rows = logits.size(0), vocab = logits.size(1), stride = logits.stride(0);
  STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float && logits.stride(1) == 1,
                  "plain_draw: logits must be fp32 with a contiguous vocabulary");
  Tensor tokens = torch::stable::new_empty(u, {rows}, ScalarType::Long);
  Tensor logprobs = torch::stable::new_empty(logits, {rows});
  const float* x = static_cast<const float*>(logits.data_ptr());
  const float* temperature = static_cast<const float*>(temperatures.data_ptr());
  const bool* is_greedy = static_cast<const bool*>(greedy.data_ptr());
  const double* uniform = static_cast<const double*>(u.data_ptr());
  int64_t* chosen_tokens = static_cast<int64_t*>(tokens.data_ptr());
  float* chosen_logprobs = static_cast<float*>(logprobs.data_ptr());
  work_stealing::for_each_piece(rows, PIECE, 1, [&](int64_t begin, int64_t end) {
    Buffers buffers{std::vector<double>((vocab + size - 1) / size), std::vector<double>(size)};
    for (int64_t r = begin; r < end; ++r) {
      const Chosen chosen = choose(x + r * stride, vocab, size, temperature[r], is_greedy[r], uniform[r], buffers);
      chosen_tokens[r] = chosen.token;
      chosen_logprobs[r] = chosen.logprob;
    }
  });
  return {tokens, logprobs};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(areno, CPU, m) { m.impl("plain_draw", TORCH_BOX(&plain_draw)); }
